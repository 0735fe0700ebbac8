"""Clipping group by group inside a first pass: a group is weighted, summed and let go as soon as its norms are known.

Nothing is held longer than its group, and no second backward is needed (He et al. 2023, per-layer clipping; Bu et al.
2023, group-wise book-keeping).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.nn.base import Call
from ghostclip.norms.affine import Affine
from ghostclip.norms.term import Term

__all__ = ["GroupSums", "Part", "root"]

# A trained parameter, or the (start, stop) of its first axis: what one term is about.
Part = tuple[int, tuple[int, int] | None]


def root(squared: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms [B] in ``dtype`` from the squared norms [B] of at least one part."""
    if any(part.dtype != dtype for part in squared):
        squared = [part.to(dtype) for part in squared]
    return torch.stack(list(squared)).sum(0).sqrt_()


class GroupSums:
    """Takes terms as a first pass answers for them, and turns each group that is complete into its clipped sums.

    Args:
        group_of: {id of a trained parameter: its group}.
        weigh: (group, norms [B]) -> weights [B].
        finite: [B] bool, False for examples that are left out; None when nobody is.
        dtype: of the norms.

    Attributes:
        norms, weights: {group: [B]} of the groups that took part.
        sums: the clipped sums of their parts.
        calls: the uses of layers behind the losses.
    """

    def __init__(
        self,
        group_of: Mapping[int, str],
        weigh: Callable[[str, Tensor], Tensor],
        finite: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.norms: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.sums: list[tuple[Part, Tensor]] = []
        self.calls: list[Call] = []
        self._group_of, self._weigh, self._finite, self._dtype = group_of, weigh, finite, dtype
        self._left: Counter[str] = Counter()
        self._open: dict[str, list[tuple[list[Part], list[Tensor], Term | Affine]]] = {}

    def expect(self, parts: Iterable[Part]) -> None:
        """Says which parts will be answered for, so that it is known when a group is complete."""
        self._left = Counter(self._group_of[owner] for owner, _ in parts)

    def are_one_group(self, parts: Sequence[Part]) -> bool:
        """Whether the parts can be answered for together."""
        return len({self._group_of[owner] for owner, _ in parts}) == 1

    def take(self, parts: list[Part], squared: list[Tensor], held: Term | Affine) -> None:
        """Squared norms [B] of parts of one group, and what their sums are made of, in the same order."""
        group = self._group_of[parts[0][0]]
        self._open.setdefault(group, []).append((parts, squared, held))
        self._left[group] -= len(parts)
        if self._left[group] == 0:
            self._close(group)

    def taken(self) -> Iterator[tuple[Part, Tensor]]:
        """The clipped sums, which are let go of one after another."""
        while self.sums:
            yield self.sums.pop()

    @torch.no_grad()
    def _close(self, group: str) -> None:
        taken = self._open.pop(group)
        norms = root([part for _, squared, _ in taken for part in squared], self._dtype)
        weights = self._weigh(group, norms)
        if self._finite is not None:
            weights = torch.where(self._finite, weights, torch.zeros_like(weights))
        self.norms[group], self.weights[group] = norms, weights
        while taken:
            parts, _, held = taken.pop()
            if self._finite is not None:
                held = held.keep_only(self._finite)
            amounts = held.weighted_sums(weights).values() if isinstance(held, Affine) else [held.weighted_sum(weights)]
            self.sums += zip(parts, amounts, strict=True)
