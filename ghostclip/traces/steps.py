"""What every n-th step of an engine looked like before its noise: norms, clipping, noise. Written down, never used.

A traced step has one more first pass and one more sum over the graph of each physical batch, before the two passes that
clip it. Clipped sums are read where the noise is about to be drawn. Nothing flows back into training.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip.clipping import Composed, Groupwise, Thresholds
from ghostclip.traces.folder import PRIVATE, TracedStep, TraceFolder
from ghostclip.validate import positive_int

if TYPE_CHECKING:
    from ghostclip.clipper import ClippingResult
    from ghostclip.clipper.second_pass import TwoPasses

__all__ = ["ALL", "StepTrace", "noise_scale"]

# The group of all trained parameters.
ALL = "all"

log = logging.getLogger("ghostclip")


class StepTrace:
    """Records every n-th step of an engine in a folder, which `ghostclip.traces.read` reads; see `PrivacyEngine.trace`.

    Groups are those of a group-wise clipping policy, else the layers. The last one is "all", the whole gradient. If a
    file can't be written, the trace ends with a warning and training goes on.

    Args:
        path: of the folder to make, whose suffix is ".parquet" (needs pyarrow) or ".npz".
        every: n, >= 1. The next logical batch is traced, and each n-th step after it. If a batch had no step, the one
            after it is traced in its place.
        passes: the engine's own.
        steps: () -> the number of steps the engine was charged.

    Attributes:
        path: of the folder.

    Raises:
        ValueError, TypeError: an argument is out of range, or one of several groups is called "all".
        FileExistsError, ModuleNotFoundError, OSError: as `TraceFolder`.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, passes: TwoPasses, steps: Callable[[], int]) -> None:
        self._every, self._passes, self._steps = positive_int(every=every), passes, steps
        self._group_of = groups_of(passes)
        self._names = list(dict.fromkeys(self._group_of.values()))
        if ALL in self._names and len(self._names) > 1:
            raise ValueError(f"trace: a group of parameters is called {ALL!r}, as the whole is; rename it")
        self._folder: TraceFolder | None = TraceFolder(path)
        self.path = self._folder.path
        self._due, self._taken = False, 0
        self._clear()
        log.warning("tracing every %d steps to %s: %s", self._every, self.path, PRIVATE)

    def close(self) -> None:
        """Ends the trace; its files stay."""
        self._folder, self._due = None, False
        self._clear()

    def begin(self) -> None:
        """To be called when a logical batch starts or is left; drops what was recorded of the one before."""
        self._due = self._folder is not None and self._taken % self._every == 0
        self._clear()

    def _clear(self) -> None:
        # Of the current physical batch, and of the logical one.
        self._seen: tuple[dict[str, Tensor], dict[int, Tensor]] | None = None
        self._norms: list[dict[str, Tensor]] = []
        self._below_one: list[dict[str, Tensor]] = []
        self._counted: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}
        self._step: tuple[dict[str, np.ndarray], dict[str, float]] | None = None

    def observe(self, losses: Tensor) -> None:
        """To be called with the losses [B] of a physical batch, or a piece of one, before it is clipped."""
        self._seen = self._passes.unclipped(losses, self._group_of) if self._due else None

    def saw(self, result: ClippingResult) -> None:
        """To be called when that batch's clipped sum is gathered."""
        if self._seen is None:
            return
        (norms, sums), self._seen = self._seen, None
        weights: Any = result.weights
        if isinstance(weights, dict):
            whole = torch.stack(list(result.norms.values())).norm(dim=0)
            below = {group: each < 1.0 for group, each in weights.items()}
            below[ALL] = torch.stack(list(below.values())).any(0)
        else:
            whole, below = result.norms, dict.fromkeys([*self._names, ALL], weights < 1.0)
        self._norms.append({**norms, ALL: whole})
        assert result.losses is not None
        # An example with such a loss is left out of sums, whatever its norm.
        self._counted.append(whole.where(result.losses.isfinite(), math.nan))
        self._below_one.append(below)
        for owner, total in sums.items():
            self._sums[owner] = self._sums[owner].add_(total) if owner in self._sums else total

    @torch.no_grad()
    def released(self, parameters: Sequence[nn.Parameter], sums: Sequence[Tensor], stds: Sequence[float]) -> None:
        """To be called with clipped sums and the standard deviations of their noise, before it is drawn."""
        if not self._due:
            return
        products = {}
        for parameter, total in zip(parameters, sums, strict=True):
            other = self._sums.get(id(parameter))
            one = total.double().flatten()
            two = torch.zeros_like(one) if other is None else other.double().flatten()
            products[id(parameter)] = torch.stack([one @ one, two @ two, one @ two])
        found = {owner: each.tolist() for owner, each in products.items()}
        noise = {id(p): p.numel() * std**2 for p, std in zip(parameters, stds, strict=True)}
        unclipped = math.fsum(float(each.double().square().sum()) for each in self._sums.values())
        self._step = self._by_group(found, noise), noise_scale(_joined(self._counted), unclipped)

    def _by_group(self, products: dict[int, list[float]], noise: dict[int, float]) -> dict[str, np.ndarray]:
        """{name of BY_GROUP: [G]} from each parameter's |clipped|^2, |unclipped|^2, their product, and |noise|^2."""
        rows = []
        thresholds = thresholds_of(self._passes.clipping, self._names)
        for group in self._groups:
            inside = [owner for owner in products if group in (ALL, self._group_of.get(owner))]
            clipped, unclipped, product = (math.fsum(products[owner][part] for owner in inside) for part in range(3))
            size = math.sqrt(clipped)
            lengths, expected = size * math.sqrt(unclipped), math.sqrt(math.fsum(noise[owner] for owner in inside))
            below = _joined([each[group] for each in self._below_one])
            rows.append(
                {
                    "threshold": thresholds[group] * self._passes.threshold_factor,
                    "fraction_clipped": below.mean() if len(below) else math.nan,
                    "cosine": product / lengths if lengths else math.nan,
                    "clipped_norm": size,
                    "noise_norm": expected,
                    "snr": size / expected if expected else (math.inf if size else math.nan),
                }
            )
        return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}

    @property
    def _groups(self) -> list[str]:
        return [*(name for name in self._names if name != ALL), ALL]

    def stepped(self) -> None:
        """To be called after the update: the step is written. Where that can't be, the trace ends and training goes on.

        The disk may be full: that is no reason to stop a run that goes well.
        """
        self._taken += 1
        if self._step is None or self._folder is None:
            return
        norms = [_joined([each[group] for each in self._norms]) for group in self._groups]
        by_group, by_step = self._step
        try:
            self._folder.write(TracedStep(self._steps(), tuple(self._groups), np.stack(norms), by_group, by_step))
        except OSError as error:
            log.warning("the trace to %s ends here, since it can't be written: %s", self.path, error)
            self.close()
        self._clear()
        self._due = False


def groups_of(passes: TwoPasses) -> dict[int, str]:
    """{id of a trained parameter: its group}: the policy's where it is group-wise, else the name of its layer."""
    names = {id(parameter): name.rpartition(".")[0] for name, parameter in passes.index.trained()}
    return passes.group_of() if isinstance(passes.clipping, Groupwise) else names


def thresholds_of(policy: Any, groups: Sequence[str]) -> dict[str, float]:
    """To which norm the policy clips each group, as it is now; nan where it has none of its own; ALL: sensitivity."""
    found: Mapping[str, float] = {}
    if isinstance(policy, Composed):
        found = policy.thresholds
    elif isinstance(policy, Thresholds):
        found = policy.bounds(groups)
    return {group: found.get(group, math.nan) for group in groups} | {ALL: policy.sensitivity}


def noise_scale(norms: np.ndarray, squared_sum: float) -> dict[str, float]:
    """The simple noise scale tr(Sigma) / |G|^2 (McCandlish et al. 2018, equation 2.9) of a step, with its two parts.

    For B independent examples with gradients g_i of mean G and covariance Sigma, let m = sum_i |g_i|^2 / B and s =
    |sum_i g_i / B|^2. Unbiased are (m - s) B / (B - 1) for tr(Sigma), and (B s - m) / (B - 1) for |G|^2: appendix A.1
    there with batches of 1 and B. Their quotient is not unbiased, and the second may be negative; average both over
    steps before dividing.

    Args:
        norms: [B], ||g_i||; those that aren't finite are left out, as they are of the sum.
        squared_sum: |sum_i g_i|^2.

    Returns:
        "squared_gradient", "gradient_variance" and "noise_scale"; nan for fewer than two examples.
    """
    finite = norms[np.isfinite(norms)].astype(float)
    size, mean = len(finite), float(np.square(finite).sum()) / max(len(finite), 1)
    if size < 2:
        return dict.fromkeys(("squared_gradient", "gradient_variance", "noise_scale"), math.nan)
    of_mean = squared_sum / size**2
    squared = (size * of_mean - mean) / (size - 1)
    variance = (mean - of_mean) * size / (size - 1)
    return {
        "squared_gradient": squared,
        "gradient_variance": variance,
        "noise_scale": variance / squared if squared else math.nan,
    }


def _joined(parts: list[Tensor]) -> np.ndarray:
    """The physical batches' values one after another, [B]."""
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, dtype=np.float32)
