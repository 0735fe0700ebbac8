"""The state of correlated noise: z_t = s_t u_t with T u = w, from step to step, in place.

With C = T D as in `ghostclip.noise.correlation` and T's diagonals c, u_t = (w_t - sum_{j >= 1} c_j u_{t - j}) / c_0.
What is kept of u is up to `Correlation.recurrence`. It is noise that was released within sums: whoever knows it can
take it off, so it is private.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import PrivacyError
from ghostclip.noise.correlation import Correlation
from ghostclip.noise.release import Noise, NoiseRecurrence
from ghostclip.norms.precision import full_precision

__all__ = ["NoiseHistory", "history_of"]


class NoiseHistory:
    """The noise of one mechanism: ``steps`` releases, each of which depends on those before.

    Args:
        correlation: the matrix.
        steps: how many steps are planned.

    Attributes:
        step: how many steps had their noise.
        whole: False while a step's noise is made: where that was interrupted, the mechanism can't go on.
    """

    def __init__(self, correlation: Correlation, steps: int) -> None:
        self._correlation = correlation
        self._series, self._norms = correlation.series(steps), correlation.column_norms(steps)
        self.steps, self.step, self.whole = steps, 0, True
        self._growth = correlation.growth(steps)
        self._state: list[Tensor] = []
        self._std = 0.0

    def growth(self, step: int) -> float:
        """`Correlation.growth` of a step, from 1."""
        return float(self._growth[min(step, self.steps) - 1])

    def _check(self, sums: Sequence[Tensor]) -> None:
        """Raises PrivacyError unless the next step's noise can be made for these sums."""
        if self.step >= self.steps or not self.whole:
            raise PrivacyError(
                f"correlated noise was planned for {self.steps} steps; got step {self.step + 1}, the last one "
                f"{'' if self.whole else 'not '}completed"
            )
        kept = [(state.shape[1:], state.dtype, state.device) for state in self._state]
        if self._state and kept != [(tensor.shape, tensor.dtype, tensor.device) for tensor in sums]:
            raise PrivacyError(
                "the trained parameters are not those of the steps before (others have requires_grad, or they moved to "
                "another device or type), and correlated noise continues the noise of these; build a new engine with "
                "the same ledger=... for the rest of the training"
            )

    def release(self, noise: Noise, sums: Sequence[Tensor], std: float, divisor: float) -> list[Tensor]:
        """(sum + row t of C^-1 w) / divisor for each of ``sums``, with w of standard deviation ``std``.

        Args:
            noise: the source of w.
            sums: float32 or float64, of the same shapes at each step; overwritten.
            std: where it falls from a step to the next, it counts as unchanged: noise must cover earlier steps, too.
            divisor: what the noisy sums are divided by.

        Raises:
            PrivacyError: all planned steps were taken, the last one was interrupted, or what is trained changed.
        """
        self._check(sums)
        with torch.no_grad():
            recurrence = self._begin(sums, std)
            if not noise.release_correlated(sums, recurrence, self._std, divisor):
                for total, each in zip(sums, _advance(noise, recurrence, self._std), strict=True):
                    total.add_(each, alpha=recurrence.scale).div_(divisor)
        self._end()
        return list(sums)

    def skip(self, noise: Noise, std: float) -> None:
        """A step that was charged and released nothing: its noise is drawn all the same, where any was before."""
        if self._state:
            with torch.no_grad():
                _advance(noise, self._begin([], std), self._std)
        self._end()

    def _begin(self, like: Sequence[Tensor], std: float) -> NoiseRecurrence:
        """How the next step's noise follows; until `_end` the mechanism isn't whole."""
        self._std = max(std, self._std)
        self.whole = False
        factors = self._correlation.recurrence(self._series, self.step)
        if not self._state:
            self._state = [tensor.new_zeros(len(factors[0]), *tensor.shape) for tensor in like]
        return NoiseRecurrence(self._state, *factors, float(self._series[0]), float(self._norms[self.step]))

    def _end(self) -> None:
        self.step, self.whole = self.step + 1, True

    def state_dict(self) -> dict[str, Any]:
        """For the private part of a checkpoint."""
        return {"step": self.step, "std": self._std, "kept": list(self._state)}

    def load_state_dict(self, state: Mapping[str, Any], like: Sequence[Tensor]) -> None:
        """Takes back what `state_dict` gave; ``like`` are tensors on the devices where sums will be."""
        self.step, self._std, self.whole = state["step"], state["std"], True
        self._state = [kept.to(each.device, copy=True) for kept, each in zip(state["kept"], like, strict=False)]


def _advance(noise: Noise, recurrence: NoiseRecurrence, std: float) -> list[Tensor]:
    """u of the next step, by tensor operations; what is kept is brought up to date."""
    weights, pulled = dict[Any, Tensor](), []
    for kept in recurrence.kept:
        if (kind := (kept.dtype, kept.device)) not in weights:
            weights[kind] = torch.from_numpy(recurrence.weights).to(kept)
        with full_precision(kept.device):
            pulled.append(torch.tensordot(weights[kind], kept, 1))
    fresh = noise.release(pulled, std, recurrence.first)
    for kept, each in zip(recurrence.kept, fresh, strict=True):
        for place, (share, gain) in enumerate(zip(recurrence.shares, recurrence.gains, strict=True)):
            if gain:
                kept[place].mul_(share).add_(each, alpha=gain)
    return fresh


def history_of(correlation: Correlation, steps: int) -> NoiseHistory | None:
    """The state of a new mechanism; None where steps are independent."""
    independent = correlation.bands is not None and min(correlation.bands, steps) == 1
    return None if independent else NoiseHistory(correlation, steps)
