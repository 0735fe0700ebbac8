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
from ghostclip.norms.affine import Affine, weighted_sums_of
from ghostclip.norms.rounding import rounding_margin
from ghostclip.norms.term import Clipped, Term, Weigh
from ghostclip.norms.whole import all_finite, bounded_weight, bounded_weights, group_norms
from ghostclip.planner import Planner

__all__ = ["POSTPONED_BYTES", "GroupSums", "Part"]

# Parts of a group, their squared norms ([B], or [parts, B] for several), what their rounding margin follows from
# (`Term.absolute` [B], or None), and what their sums are made of.
Taken = tuple[list["Part"], Tensor, Tensor | None, Term | Affine]
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
        losses: [B].
        planner: chooses the way to each sum.

    Attributes:
        norms, weights: {group: [B]} of the groups that took part.
        sums: the clipped sums of their parts.
        calls: the uses of layers behind the losses.
        finite: [B] bool, or None, as given or as found while all groups waited.
        waits: no group is closed before the last one is complete, and so all norms are known; to be set beforehand,
            for terms that are small together.
        nbytes: of all terms that were taken.
    """

    def __init__(
        self,
        group_of: Mapping[int, str],
        bounds: Mapping[str, float],
        given: Mapping[str, Tensor] | None,
        finite: Tensor | None,
        dtype: torch.dtype,
        losses: Tensor,
        planner: Planner,
    ) -> None:
        self.norms: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.sums: list[tuple[Part, Tensor]] = []
        self.calls: list[Call] = []
        self.finite, self.waits, self.nbytes = finite, False, 0
        self._group_of, self._dtype, self._losses = group_of, dtype, losses.detach()
        self._bounds, self._given, self._planner = bounds, given, planner
        self._left: Counter[str] = Counter()
        self._open: dict[str, list[Taken]] = {}
        self._complete: list[str] = []
        self._joined: dict[Part, Tensor] = {}
        self._complete_bytes = 0

    def expect(self, parts: Iterable[Part]) -> None:
        """Begins (anew): says which parts will be answered for, so that it is known when a group is complete."""
        for taken in (self.norms, self.weights, self.sums, self._open, self._complete, self._joined):
            taken.clear()
        self._complete_bytes = self.nbytes = 0
        self._left = Counter(self._group_of[owner] for owner, _ in parts)

    def are_one_group(self, parts: Sequence[Part]) -> bool:
        """Whether the parts can be answered for together."""
        return len({self._group_of[owner] for owner, _ in parts}) == 1

    def take(self, parts: list[Part], squared: Tensor, absolute: Tensor | None, held: Term | Affine) -> None:
        """Takes parts of one group, in one order.

        Args:
            parts: of a group.
            squared: their squared norms, [B] or [parts, B].
            absolute: `Term.absolute` [B], or None.
            held: what their sums are made of.
        """
        group = self._group_of[parts[0][0]]
        self._open.setdefault(group, []).append((parts, squared, absolute, held))
        self._left[group] -= len(parts)
        if self._left[group] == 0:
            self._complete.append(group)
            nbytes = sum([term.nbytes for *_, term in self._open[group]])
            self._complete_bytes += nbytes
            self.nbytes += nbytes
            if self._complete_bytes > POSTPONED_BYTES and not self.waits:
                self.close()

    def weigher(self, part: Part) -> Weigh | None:
        """Weighs examples by their squared norms of ``part``, the last that its group waits for; None of another."""
        group = self._group_of[part[0]]
        if self.waits or self._left[group] != 1 or self._given is not None or self.finite is not None:
            return None
        bound, dtype = self._bounds[group], self._dtype
        before = self._open.get(group, [])
        others: list[float] = []
        margins: list[float] = []

        def weigh(example: int, squared: float) -> float:
            if before and not others:
                rows = torch.cat([torch.atleast_2d(found) for _, found, *_ in before])
                others.extend(rows.sum(0, dtype=torch.float64).tolist())
                margin = _margin_of(before)
                margins.extend([0.0] * len(others) if margin is None else margin.tolist())
            if not before:
                return bounded_weight(squared, bound, dtype)
            return bounded_weight(squared + others[example], bound, dtype, margins[example])

        return weigh

    def take_clipped(self, part: Part, found: Clipped) -> None:
        """Takes what was clipped by the `weigher` of that part, which completes its group."""
        group = self._group_of[part[0]]
        self._left[group] -= 1
        others = self._open.pop(group, [])
        last = torch.tensor(found.squared_norms, dtype=self._dtype, device=found.total.device)
        self.norms[group] = group_norms([[*(squared for _, squared, *_ in others), last]], self._dtype)[0]
        self.weights[group] = torch.tensor(found.weights, dtype=self._dtype, device=found.total.device)
        self.sums.append((part, found.total))
        self.nbytes += len(found.weights) * found.total.nbytes
        self._add_up([group], [others])

    def of_part(self, part: slice) -> GroupSums:
        """What takes terms of some of the examples, to `join` this."""
        given = None if self._given is None else {group: weights[part] for group, weights in self._given.items()}
        finite = None if self.finite is None else self.finite[part]
        return GroupSums(self._group_of, self._bounds, given, finite, self._dtype, self._losses[part], self._planner)

    def join(self, part: GroupSums) -> None:
        """Takes the groups of the next examples, which are complete there, and come from such parts alone."""
        for mine, its in ((self.norms, part.norms), (self.weights, part.weights)):
            for group, values in its.items():
                mine[group] = torch.cat([mine[group], values]) if group in mine else values
        self.nbytes += part.nbytes
        for of, amount in part.taken():
            if of in self._joined:
                self._joined[of] += amount
            else:
                self._joined[of] = amount
                self.sums.append((of, amount))

    @property
    def empty(self) -> bool:
        """Whether nothing is held for a group that is not closed."""
        return not self._open and not self._complete

    def taken(self) -> Iterator[tuple[Part, Tensor]]:
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
    def close(self, measure: Callable[[Term | Affine], tuple[Tensor, Tensor | None]] | None = None) -> None:
        """Turns the groups that are complete into their clipped sums; to be called once more when all terms came.

        Args:
            measure: squared norms of a term and its `Term.absolute`, where those that came may be NaN for want of a
                look; None where not.
        """
        if not self._complete:
            return
        groups, self._complete, self._complete_bytes = self._complete, [], 0
        taken = [self._open.pop(group) for group in groups]
        norms, weights = self._weigh(groups, taken)
        if self.waits and self.finite is None and not all_finite(norms, self._losses):
            if measure is not None:
                taken = [[(each, *measure(held), held) for each, *_, held in parts] for parts in taken]
                norms, weights = self._weigh(groups, taken)
            self.finite = torch.isfinite(norms).all(0) & torch.isfinite(self._losses)
        if self.finite is not None:
            # Where squares overflow, a norm may be finite by the kernel of the pass before, and not by this one's.
            weights = torch.where(self.finite & torch.isfinite(norms), weights, torch.zeros_like(weights))
        self.norms.update(zip(groups, norms.unbind(), strict=True))
        self.weights.update(zip(groups, weights.unbind(), strict=True))
        self._add_up(groups, taken)

    def _add_up(self, groups: list[str], taken: list[list[Taken]]) -> None:
        """The clipped sums of the groups' parts; those of linear layers all at once."""
        together: list[tuple[list[Part], Affine, Tensor]] = []
        for group, terms in zip(groups, taken, strict=True):
            while terms:
                parts, *_, held = terms.pop()
                if self.finite is not None:
                    held = held.keep_only(self.finite)
                if isinstance(held, Affine):
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
