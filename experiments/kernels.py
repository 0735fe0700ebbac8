"""What each C kernel saves of a private step: steps with it and with its twin in tensor operations, taken in turn.

For the twin's steps the kernel's binding reports that it isn't there. Each of the two has a model and a clipper of its
own, which chooses its strategies among those it has. Timed are the workloads that spend most on what the kernel does;
the table has for each kernel the one that gains most. A kernel that saves less than a tenth there isn't worth its C.

    python experiments/kernels.py [--kernels NAME ...] [--workloads NAME ...] [--seconds S] [--out FOLDER]

writes kernels.json and kernels.md. One thread.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ghostclip import native
from ghostclip.bench import CONTENDERS, WORKLOADS
from ghostclip.bench.machine import busy_warning, describe, in_words
from ghostclip.bench.measure import keep_freed_memory, take_turns, timed
from ghostclip.noise import noise_source

# The least share of a step that a kernel has to save.
WORTH = 0.1
CONTENDER = "cached"


class Kernel(NamedTuple):
    """Functions of a C file that are used together.

    Attributes:
        name: what they do.
        file: the C file, of ghostclip/native.
        functions: as they are called there.
        workloads: those that may gain most.
        module: the Python module that calls them, and asks whether they are there.
        noise: the mode of noise that a step has.
    """

    name: str
    file: str
    functions: tuple[str, ...]
    workloads: tuple[str, ...]
    module: str = ""
    noise: str = "standard"

    @property
    def binding(self) -> Any:
        """The module."""
        return importlib.import_module(f"ghostclip.{self.module or f'native.{self.file}'}")

    @property
    def lines(self) -> int:
        """Of the C file, headers apart."""
        return len(Path(native.__file__).with_name(f"{self.file}.c").read_text().splitlines())


KERNELS = (
    Kernel("Gram norms", "gram", ("gram", "ragged_gram"), ("transformer", "rnn", "lstm", "gpt-128")),
    Kernel("gradients of convolutions", "shifts", ("shifts",), ("cifar-cnn", "vgg11", "cnn", "resnet18-64px")),
    Kernel("rows of tables", "rows", ("rows_squared", "rows_added"), ("embedding", "lstm-imdb", "gpt-128")),
    Kernel("LSTM", "time_loop", ("lstm_gates", "lstm_back"), ("lstm", "lstm-imdb")),
    Kernel("GRU", "time_loop", ("gru_gates", "gru_back"), ("gru",)),
    Kernel("RNN", "time_loop", ("rnn_back",), ("rnn",)),
    Kernel("noise", "normal", ("ghostclip_release", "ghostclip_normal", "ghostclip_words"),
           ("embedding", "mlp", "fcnn-adult"), "noise.gaussian"),
    Kernel("hardened noise", "lattice", ("ghostclip_lattice",), ("embedding", "mlp", "fcnn-adult"), "noise.hardened",
           "hardened"),
)  # fmt: skip
# Files that a step on one thread doesn't gain from, and what they are for.
OTHERS = {"share": "shares a kernel's examples among threads", "allocated": "counts memory for the benchmark"}


class GRUClassifier(nn.Module):
    """The paper's recurrent network over the rows of an image, with a GRU of 128 units."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.output = nn.GRU(28, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 1, 28, 28]."""
        return self.output(self.recurrent(images.flatten(1, 2))[0][:, -1])


ABOUT_GRU = "one GRU layer of 128 units over the 28 rows; random 28 x 28 images"
TIMED = WORKLOADS | {"gru": replace(WORKLOADS["lstm"], name="gru", about=ABOUT_GRU, model=GRUClassifier)}


@contextmanager
def without(kernel: Kernel) -> Iterator[None]:
    """The kernel's binding reports that it isn't there."""
    binding = kernel.binding
    library = binding.library
    with mock.patch.object(
        binding, "library", lambda name, *rest: None if name == kernel.file else library(name, *rest)
    ):
        yield


def turn_of(
    kernel: Kernel, there: bool, model: nn.Module, workload: Any, batch: Sequence[Tensor]
) -> Callable[[], float]:
    """A turn that takes a step with the kernel or without it and returns its seconds."""
    condition = nullcontext if there else partial(without, kernel)
    noise = mock.patch("ghostclip.bench.contenders.noise_source", partial(noise_source, kernel.noise))
    with condition(), noise:
        step = CONTENDERS[CONTENDER].prepare(model, workload.losses, 1.0).step

    def turn() -> float:
        with condition():
            return timed(lambda: step(*batch))()

    return turn


def measure(kernel: Kernel, name: str, seconds: float, size: int | None) -> dict[str, Any]:
    """Milliseconds of steps with the kernel and with its twin, and the ratio of both in a round."""
    torch.manual_seed(0)
    workload = TIMED[name]
    size = size or workload.batch_size
    model, batch = workload.model(), workload.batch(size)
    turns = {way: turn_of(kernel, way == "kernel", copy.deepcopy(model), workload, batch) for way in ("kernel", "twin")}
    timings = take_turns(turns, seconds, baseline="kernel")
    return {
        "kernel": kernel.name,
        "file": f"native/{kernel.file}.c",
        "functions": kernel.functions,
        "lines": kernel.lines,
        "workload": name,
        "batch_size": size,
        "ms": {way: asdict(timings.milliseconds(way)) for way in turns},
        "ratio": asdict(timings.ratio("kernel", "twin")),
    }


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kernel the row of the workload that gains most."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = found.setdefault(row["kernel"], row)
        if row["ratio"]["median"] < known["ratio"]["median"]:
            found[row["kernel"]] = row
    return list(found.values())


def markdown(results: dict[str, Any]) -> str:
    """The table, and what was measured how."""
    lines = [
        "| kernel | file | lines of C | workload, batch | step with it / with its twin | saves a tenth |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in best(results["rows"]):
        ratio = row["ratio"]
        spread = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        worth = "yes" if ratio["median"] <= 1 - WORTH else "no"
        place = f"{row['workload']}, {row['batch_size']}"
        lines.append(f"| {row['kernel']} | `{row['file']}` | {row['lines']} | {place} | {spread} | {worth} |")
    others = "; ".join(f"`native/{file}.c` {what}" for file, what in OTHERS.items())
    return "\n".join([
        *lines,
        "",
        f'Median (quartiles) of the ratios of "{CONTENDER}" steps that took turns, one thread. Lines are those of the '
        "file, which some kernels share; the workload is the one that gains most of those timed.",
        "",
        f"Not timed: {others}.",
        "",
        f"Machine: {in_words(results['machine'])}.",
        "",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; returns the exit status."""
    names = [kernel.name for kernel in KERNELS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--workloads", nargs="+", choices=tuple(TIMED), help="default: the kernel's own")
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time a workload (default: 20)")
    parser.add_argument("--batch-size", type=int, help="default: the workload's own")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    rows = []
    for kernel in KERNELS:
        if kernel.name not in options.kernels:
            continue
        if kernel.noise == "hardened" and find_spec("cryptography") is None:
            print(f"{kernel.name}: not timed, cryptography isn't installed", file=sys.stderr)
            continue
        if native.library(kernel.file) is None:
            sys.exit(f"native/{kernel.file}.c can't be compiled here: there is nothing to compare")
        for name in options.workloads or kernel.workloads:
            rows.append(measure(kernel, name, options.seconds, options.batch_size))
            print(f"{kernel.name:32} {name:16} {rows[-1]['ratio']['median']:.3f}", flush=True)
    results = {"machine": describe(), "contender": CONTENDER, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "kernels.md").write_text(markdown(results))
    print(f"wrote kernels.json and kernels.md to {options.out}; {in_words(results['machine'])}")
    return 0


if __name__ == "__main__":
    keep_freed_memory()  # page faults would come and go by what the other way's steps freed
    sys.exit(main())
