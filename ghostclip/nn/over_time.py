"""Sums of outer products over time steps, with one more way to their norms: Gram matrices by compiled C.

``native/gram.c`` forms the half of each Gram matrix that is needed, four steps by four, and nothing of it ever leaves
the registers; for the short, wide factors of recurrent layers torch's batched products take two to three times as long.
"""

from __future__ import annotations

from torch import Tensor

from ghostclip.native import library
from ghostclip.norms.memory import Memory
from ghostclip.norms.outer import Outer, direct, reliable
from ghostclip.norms.term import Answer, Candidate, wide

from .calls import run_examples

__all__ = ["OverTime", "compiled_gram"]


def compiled_gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """As `ghostclip.norms.outer.gram`, for left [B, T, p] and right [B, T, d] on the CPU."""
    left, right = (side if side.stride(2) == 1 else side.contiguous() for side in (left, right))
    batch, positions, outputs = left.shape
    inputs = right.shape[2]
    squared, scale = left.new_empty(batch), left.new_empty(batch)
    sides = (left, *left.stride()[:2], right, *right.stride()[:2])
    work = batch * positions**2 * (outputs + inputs) // 2
    arguments = (*sides, squared, scale, positions, outputs, inputs)
    run_examples("gram", "gram", left.dtype, batch, work, arguments)
    return squared, scale


class OverTime(Outer):
    """An `Outer` whose positions are time steps, left [B, T, p] and right [B, T, d]; one group."""

    @property
    def key(self) -> tuple:
        return ("over time", *super().key[1:])

    def candidates(self, memory: Memory | None = None) -> dict[str, Candidate]:
        found = super().candidates(memory)
        if self.device.type == "cpu" and library("gram") is not None:
            flops = found["gram"].flops / 2
            found["half gram"] = Candidate("gram", self._by_half_gram, flops, traces=False)
        return found

    def head(self, count: int) -> OverTime:
        return OverTime(self.left[:count], self.right[:count], self.shape)

    def _by_half_gram(self, keep: bool) -> Answer:
        left, right = wide(self.left), wide(self.right)
        squared, scale = compiled_gram(left, right)
        return Answer(reliable(squared, scale, lambda: direct(left, right)))
