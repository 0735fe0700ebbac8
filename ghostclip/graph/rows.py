"""How rows belong to examples, and what marks showed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["Owned", "Rows", "Subject", "crossed_error", "rows_in_order", "same_order", "shows_all"]

# A layer's use, by the gradient at its pre-activation; or a tensor of the graph.
Subject = LayerCall | Edge


@dataclass(frozen=True)
class Rows:
    """How the rows of a gradient along one dimension belong to the examples.

    Attributes:
        dim: the dimension.
        order: "example" where the rows of one example lie together, "row" where every B-th row is one of the same
            example, and an index for any other order.
        used: [rows] bool, False for those that are nobody's, whatever they hold; None where all are somebody's.
        crossed: dimensions, several, that may as well be the one with the examples; () where none but ``dim`` may.
        of_one: whether all rows that were shown are one example's, along any of these.
    """

    dim: int
    order: RowOrder
    used: Tensor | None = field(default=None, compare=False)
    crossed: tuple[int, ...] = ()
    of_one: bool = False

    def count(self, size: int, examples: int) -> int:
        """Rows of each example; an index says by itself."""
        return 1 if isinstance(self.order, RowIndex) or not examples else size // examples

    def owners(self, size: int, examples: int, device: torch.device) -> Tensor:
        """The example of each of so many rows, [size]."""
        if isinstance(self.order, RowIndex):
            return self.order.index
        return RowIndex.in_order(size, examples, self.order, device)


@dataclass(frozen=True)
class Owned:
    """What marks showed of one subject.

    Attributes:
        rows: how its rows belong to the examples; None where rows of every dimension belong to several.
        examples: how many examples own a row that could be read (one that isn't zero, tiny or infinite).
        zero: all of its gradient is zero, so that nothing was shown.
        loose: some row fits to within `MarkScheme.tolerance` only, so that small examples may have a part in it.
        ambiguous: the rows fit another order or dimension as well, as where only a diagonal isn't zero.
        crossed: the dimensions that they fit, where these are several.
        whole: every row was shown.
        shown_rows: which rows were, [rows] bool; None where all were, or none since all are zero.
        too_small: others are small beside the largest gradient of the batch, not zero (in float16).
        odd: others aren't finite.
        blank: others are zero or tiny.
    """

    rows: Rows | None
    examples: int = 0
    zero: bool = False
    loose: bool = False
    ambiguous: bool = False
    crossed: tuple[int, ...] = ()
    whole: bool = False
    shown_rows: Tensor | None = None
    too_small: bool = False
    odd: bool = False
    blank: bool = False

    @property
    def dim(self) -> int | None:
        """The dimension that has the examples; None where none has, or several fit."""
        return None if self.rows is None or self.crossed else self.rows.dim

    @property
    def shown(self) -> bool:
        """Whether rows of at least two examples were shown."""
        return self.examples > 1

    @property
    def unread(self) -> bool:
        """Whether no row could be compared, each being tiny or not finite; ``rows`` are only those that it may have."""
        return self.rows is not None and not self.zero and not self.examples

    @property
    def uncertain(self) -> bool:
        """Whether the rows fit, but mixing isn't ruled out."""
        return self.rows is not None and not self.zero and (self.loose or not self.shown)

    @property
    def is_of_one(self) -> bool:
        """Whether all rows that were shown belong to one example, and to no other, however small."""
        return self.rows is not None and self.examples == 1 and not self.loose

    @property
    def is_regular(self) -> bool:
        """Whether every example has as many rows, in order."""
        return self.rows is not None and not isinstance(self.rows.order, RowIndex)

    @property
    def is_partly_shown(self) -> bool:
        """Whether some row was not shown, and is no zero of a gradient of zeros."""
        return self.shown_rows is not None

    @property
    def surely(self) -> Rows:
        """``rows``, which must be there, without those that were not shown: these are nobody's."""
        assert self.rows is not None
        used = self.shown_rows if self.is_regular else None  # an index has them
        return replace(self.rows, used=used, crossed=self.crossed, of_one=self.is_of_one)

    @property
    def is_shared(self) -> bool:
        """Whether several examples have a part in the rows, whichever dimension they are taken along."""
        return self.rows is None and not self.zero


def rows_in_order(size: int, examples: int) -> list[str]:
    """In which orders so many rows may be those of the examples, as many of each."""
    if not examples or size % examples or not size:
        return []
    return ["example", "row"] if size > examples else ["example"]


def shows_all(grad: Tensor, rows: Rows, inputs: Sequence[Tensor] = ()) -> bool:
    """Whether all of a gradient but zeros shows in its ``crossed`` rows, and no zero meets inputs that aren't finite.

    Rows of [T, B, d] may fit dimension 0 and dimension 1 where each example has a gradient at one of the times. Such an
    entry is of the same example either way. Another one, below 2 ** -20 of its row, may be another's.
    """
    if not all(bool(each.isfinite().all()) for each in inputs):
        return False
    if rows.of_one:
        return True
    dims = rows.crossed
    rest = [dim for dim in range(grad.dim()) if dim not in dims]
    size = grad.abs().amax(rest, keepdim=True) if rest else grad.abs()
    shown = torch.ones_like(size, dtype=torch.bool)
    for dim in dims:
        largest = size.nan_to_num(0, 0).amax([each for each in range(grad.dim()) if each != dim], keepdim=True)
        shown &= size > 2.0**-20 * largest
    return bool((shown | (size == 0)).all())


def crossed_error(place: Any, name: str) -> UnsupportedModelError:
    """The error about numbers in positions of which it can't be told whose they are."""
    return UnsupportedModelError(
        f"{name}: this batch doesn't show which of several dimensions has the examples, nor whose the numbers are "
        "that are not finite, or far below others; nothing was clipped. Look for such numbers, or take larger batches",
        name=name if isinstance(place, LayerCall) else "", place=place,
    )  # fmt: skip


def same_order(one: RowOrder, other: RowOrder) -> bool:
    """Whether rows belong to the same examples; of rows in no regular order, those that were seen of both."""
    if not isinstance(one, RowIndex) or not isinstance(other, RowIndex):
        return one == other
    if len(one) != len(other):
        return False
    fits = one.index == other.index
    for each in (one, other):
        fits = fits if each.used is None else fits | ~each.used
    return bool(fits.all())
