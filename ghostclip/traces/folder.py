"""Files of a trace: what `PrivacyEngine.trace` wrote of a run's steps, and how it is read back. All of it is private.

A trace is a folder with one file for each traced step, Parquet or npz as the folder's suffix says. A file is written
beside its place and renamed, so that an interrupted run leaves whole files only, and each costs the same however many
there are. pyarrow, pandas and others read a folder of Parquet files as one table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ghostclip.validate import a_path

__all__ = ["BY_GROUP", "BY_STEP", "PRIVATE", "TraceFolder", "TracedStep", "read"]

PRIVATE = (
    "raw data: contains norms of single examples without noise; not covered by the guarantee; don't publish"
)  # fmt: skip
# One number for each group and step, and for each step.
BY_GROUP = ("threshold", "fraction_clipped", "cosine", "clipped_norm", "noise_norm", "snr")
BY_STEP = ("squared_gradient", "gradient_variance", "noise_scale")
# Readers of Parquet folders leave out files whose names begin with an underscore or a dot.
NOTICE_FILE, BEGUN = "_PRIVATE.txt", "."


@dataclass(frozen=True)
class TracedStep:
    """The record of one traced step, for B examples and G groups of parameters. It is private data.

    Attributes:
        step: its number, from 1.
        groups: names of the groups; the last is "all", the whole gradient.
        norms: [G, B], norm of each example's gradient in each group before clipping; inf or nan for an example that was
            left out.
        by_group: {"threshold", "fraction_clipped", "cosine", "clipped_norm", "noise_norm", "snr": [G]}.
        by_step: {"squared_gradient", "gradient_variance", "noise_scale": number}.
    """

    step: int
    groups: tuple[str, ...]
    norms: np.ndarray
    by_group: Mapping[str, np.ndarray]
    by_step: Mapping[str, float]

    def __repr__(self) -> str:
        return f"TracedStep(step={self.step}, groups={self.groups}; norms, by_group, by_step: private data)"


class TraceFolder:
    """A new folder with one file per traced step, and a notice that the files are private data.

    Args:
        path: of the folder, whose suffix is ".parquet" (needs pyarrow) or ".npz".

    Raises:
        ValueError: the suffix is another one.
        FileExistsError: the path exists.
        ModuleNotFoundError: pyarrow is not installed, and the suffix is ".parquet".
        OSError: the folder can't be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = a_path(path=path)
        self._write = _writers(self.path)
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists; give the path of a trace that is to be made, or remove it")
        self.path.mkdir(mode=0o700, parents=True)
        (self.path / NOTICE_FILE).write_text(f"{PRIVATE}\n", encoding="utf-8")

    def write(self, traced: TracedStep) -> None:
        """Writes the file of one step, or raises OSError and leaves the other files as they are."""
        name = f"step-{traced.step:010d}{self.path.suffix}"
        begun = self.path / f"{BEGUN}{name}"
        self._write(traced, begun)
        begun.replace(self.path / name)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a trace as numpy arrays, for S traced steps and G groups of parameters. It is private data.

    Args:
        path: the folder that was given to `PrivacyEngine.trace`. The run may still go on or may have been interrupted.

    Returns:
        A dictionary with these entries, which docs/observation.md defines

        - "privacy": the files' notice that they are private data
        - "groups": list of G names; the last is "all", the whole gradient
        - "step": [S], numbers of the traced steps, from 1
        - "examples": [S], number of examples in each
        - "norms": list of S arrays [G, B], norms before clipping of that step's B examples
        - "threshold", "fraction_clipped", "cosine", "clipped_norm", "noise_norm", "snr": [S, G]
        - "squared_gradient", "gradient_variance", "noise_scale": [S] (McCandlish et al. 2018, appendix A.1)

    Raises:
        ValueError: the folder is no trace, or has no step yet.
        ModuleNotFoundError: pyarrow is not installed, and the files are Parquet files.
    """
    folder = a_path(path=path)
    _suffix(folder)
    files = sorted(folder.glob(f"step-*{folder.suffix}"))
    if not files:
        raise ValueError(f"{folder} holds no traced step; give the path that engine.trace(path) was called with")
    parts = [_read_npz(file) if folder.suffix == ".npz" else _read_parquet(file) for file in files]
    first = parts[0]
    found: dict[str, Any] = {"privacy": first["privacy"], "groups": first["groups"]}
    found["step"] = np.array([part["step"] for part in parts])
    found["norms"] = [part["norms"] for part in parts]
    found["examples"] = np.array([norms.shape[1] for norms in found["norms"]])
    return found | {name: np.array([part[name] for part in parts], dtype=float) for name in (*BY_GROUP, *BY_STEP)}


def _suffix(path: Path) -> str:
    if path.suffix not in (".parquet", ".npz"):
        raise ValueError(f"path must end in .parquet or .npz, which says what kind of files a trace has; got {path}")
    return path.suffix


def _writers(path: Path) -> Callable[[TracedStep, Path], None]:
    """What writes files of the kind that the suffix says."""
    if _suffix(path) == ".npz":
        return _write_npz
    _pyarrow()
    return _write_parquet


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a trace of Parquet files needs pyarrow: pip install pyarrow; .npz needs nothing but numpy"
        ) from error
    return pyarrow


def _write_npz(traced: TracedStep, file: Path) -> None:
    """One array for each name, the first of which says that they are private."""
    arrays: dict[str, Any] = {"privacy": PRIVATE, "step": traced.step, "groups": np.array(traced.groups)}
    arrays |= {"norms": traced.norms, **traced.by_group, **traced.by_step}
    with open(file, "wb") as opened:
        np.savez(opened, **arrays)


def _read_npz(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as arrays:
        part: dict[str, Any] = dict(arrays)
    return part | {"privacy": str(part["privacy"]), "step": int(part["step"]), "groups": part["groups"].tolist()}


def _write_parquet(traced: TracedStep, file: Path) -> None:
    """One row for each group, with a list of the examples' norms."""
    arrow, groups = _pyarrow(), len(traced.groups)
    columns = {"step": np.full(groups, traced.step), "group": list(traced.groups), "norms": list(traced.norms)}
    kind = arrow.from_numpy_dtype(traced.norms.dtype)
    columns["norms"] = arrow.array(columns["norms"], type=arrow.list_(kind))
    columns |= traced.by_group
    columns |= {name: np.full(groups, value, dtype=float) for name, value in traced.by_step.items()}
    table = arrow.table(columns).replace_schema_metadata({"privacy": PRIVATE})
    arrow.parquet.write_table(table, file)


def _read_parquet(file: Path) -> dict[str, Any]:
    table = _pyarrow().parquet.read_table(file)
    part = {name: table[name].to_numpy() for name in ("step", *BY_GROUP, *BY_STEP)}
    first: dict[str, Any] = {name: part[name][0] if len(part["step"]) else math.nan for name in ("step", *BY_STEP)}
    norms = np.stack(table["norms"].to_numpy())
    privacy = table.schema.metadata[b"privacy"].decode()
    return part | first | {"privacy": privacy, "groups": table["group"].to_pylist(), "norms": norms}
