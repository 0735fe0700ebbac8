"""Clipping group by group inside a first pass: a group is weighted, summed and let go as soon as its norms are known.

Nothing is held longer than its group, and no second backward is needed (He et al. 2023, per-layer clipping; Bu et al.
2023, group-wise book-keeping).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.nn.base import LayerCall
from ghostclip.norms.affine import LinearPair, weighted_sums_of
from ghostclip.norms.reduce import bounded_weights, group_norms, rounding_margin
from ghostclip.norms.term import PerExampleGrads
from ghostclip.planner import Planner

__all__ = ["POSTPONED_BYTES", "GroupSums", "Part"]

# Parts of a group, their squared norms ([B], or [parts, B] for several), what their rounding margin follows from
# (`PerExampleGrads.absolute` [B], or None), and what their sums are made of.
Taken = tuple[list["Part"], Tensor, Tensor | None, PerExampleGrads | LinearPair]
# A trained parameter, or the (start, stop) of its first axis: what one term is about.
Part = tuple[int, tuple[int, int] | None]


# Groups that are complete wait for each other until their terms take so many bytes: small operations cost what it
# takes to call them, and one serves all.
POSTPONED_BYTES = 1 << 20


class GroupSums:
    """Takes terms as a first pass answers for them, and turns each group that is complete into its clipped sums.

    Args:
        group_of: {id of a trained parameter: its group}.
        bounds: {group: what its norms are clipped to}.
        given: {group: weights [B]}, whatever the norms; None for ``min(1, bound / norm)``.
        finite: [B] bool, False for examples that are left out; None when nobody is known to be.
        dtype: of the norms.
        planner: chooses the way to each sum.

    Attributes:
        norms, weights: {group: [B]} of the groups that took part.
        sums: the clipped sums of their parts.
        calls: the uses of layers behind the losses.
        finite: [B] bool, or None, as given.
    """

    def __init__(
        self,
        group_of: Mapping[int, str],
        bounds: Mapping[str, float],
        given: Mapping[str, Tensor] | None,
        finite: Tensor | None,
        dtype: torch.dtype,
        planner: Planner,
    ) -> None:
        self.norms: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.sums: list[tuple[Part, Tensor]] = []
        self.calls: list[LayerCall] = []
        self.finite = finite
        self._group_of, self._dtype = group_of, dtype
        self._bounds, self._given, self._planner = bounds, given, planner
        self._left: Counter[str] = Counter()
        self._open: dict[str, list[Taken]] = {}
        self._complete: list[str] = []
        self._complete_bytes = 0

    def expect(self, parts: Iterable[Part]) -> None:
        """Begins (anew): says which parts will be answered for, so that it is known when a group is complete."""
        for taken in (self.norms, self.weights, self.sums, self._open, self._complete):
            taken.clear()
        self._complete_bytes = 0
        self._left = Counter(self._group_of[owner] for owner, _ in parts)

    def are_one_group(self, parts: Sequence[Part]) -> bool:
        """Whether the parts can be answered for together."""
        return len({self._group_of[owner] for owner, _ in parts}) == 1

    def add(
        self, parts: list[Part], squared: Tensor, absolute: Tensor | None, held: PerExampleGrads | LinearPair
    ) -> None:
        """Takes parts of one group, in one order.

        Args:
            parts: of a group.
            squared: their squared norms, [B] or [parts, B].
            absolute: `PerExampleGrads.absolute` [B], or None.
            held: what their sums are made of.
        """
        group = self._group_of[parts[0][0]]
        self._open.setdefault(group, []).append((parts, squared, absolute, held))
        self._left[group] -= len(parts)
        if self._left[group] == 0:
            self._complete.append(group)
            self._complete_bytes += sum([term.nbytes for *_, term in self._open[group]])
            if self._complete_bytes > POSTPONED_BYTES:
                self.finalize()

    def pop(self) -> Iterator[tuple[Part, Tensor]]:
        """The clipped sums, which are let go of one after another."""
        while self.sums:
            yield self.sums.pop()

    def _weigh(self, groups: list[str], taken: list[list[Taken]]) -> tuple[Tensor, Tensor]:
        """Norms [groups, B] of groups as measured, and the weights that follow from them and their rounding margins.

        Where a margin is not finite, neither is the norm.
        """
        norms = group_norms([[squared for _, squared, *_ in parts] for parts in taken], self._dtype)
        bounds, margins = norms, [_margin_of(parts) for parts in taken]
        if any(margin is not None for margin in margins):
            margin = torch.stack([norms.new_zeros(norms.shape[1]) if each is None else each for each in margins])
            norms, bounds = norms + 0.0 * margin, norms + margin
        if self._given is not None:
            return norms, torch.stack([self._given[group] for group in groups])
        return norms, bounded_weights(bounds, [self._bounds[group] for group in groups])

    @torch.no_grad()
    def finalize(self) -> None:
        """Turns the groups that are complete into their clipped sums; to be called once more when all terms came."""
        if not self._complete:
            return
        groups, self._complete, self._complete_bytes = self._complete, [], 0
        taken = [self._open.pop(group) for group in groups]
        norms, weights = self._weigh(groups, taken)
        if self.finite is not None:
            # Where squares overflow, a norm may be finite by the kernel of the pass before, and not by this one's.
            weights = torch.where(self.finite & torch.isfinite(norms), weights, torch.zeros_like(weights))
        self.norms.update(zip(groups, norms.unbind(), strict=True))
        self.weights.update(zip(groups, weights.unbind(), strict=True))
        self._add_up(groups, taken)

    def _add_up(self, groups: list[str], taken: list[list[Taken]]) -> None:
        """The clipped sums of the groups' parts; those of linear layers all at once."""
        together: list[tuple[list[Part], LinearPair, Tensor]] = []
        for group, terms in zip(groups, taken, strict=True):
            while terms:
                parts, *_, held = terms.pop()
                if self.finite is not None:
                    held = held.keep_only(self.finite)
                if isinstance(held, LinearPair):
                    together.append((parts, held, self.weights[group]))
                else:
                    self.sums.append((parts[0], self._planner.weighted_sum(held, self.weights[group])))
        if together:
            amounts = weighted_sums_of([affine for _, affine, _ in together], [weights for *_, weights in together])
            for (parts, *_), each in zip(together, amounts, strict=True):
                self.sums += zip(parts, each, strict=True)


def _margin_of(taken: Sequence[Taken]) -> Tensor | None:
    """The rounding margin [B] of a group's norm; None where each of its gradients is summed as it was measured."""
    absolute = [each for _, _, each, _ in taken if each is not None]
    return rounding_margin(absolute) if absolute else None
