"""How rows belong to examples, and what marks showed of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.graph.nodes import Edge
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["Owned", "Rows", "Subject", "rows_in_order", "same_order"]

# A layer's use, by the gradient at its pre-activation; or a tensor of the graph.
Subject = LayerCall | Edge


@dataclass(frozen=True)
class Rows:
    """How the rows of a gradient along one dimension belong to the examples.

    Attributes:
        dim: the dimension.
        order: "example" where the rows of one example lie together, "row" where every B-th row is one of the same
            example, and an index for any other order.
    """

    dim: int
    order: RowOrder

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
        crossed: they fit another dimension as well.
        whole: every row was shown.
        disputed: in such another order, rows that aren't finite would be those of other examples.
        used: which rows were shown, [rows] bool, where others may be multiplied with numbers that are large or not
            finite: 0 * inf is NaN. None: these matter for nobody's gradient.
    """

    rows: Rows | None
    examples: int = 0
    zero: bool = False
    loose: bool = False
    ambiguous: bool = False
    crossed: bool = False
    whole: bool = False
    disputed: bool = False
    used: Tensor | None = None

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

    def shown_rows(self, size: int, examples: int) -> Rows | None:
        """``rows``, of which those that were not shown belong to nobody, where they matter."""
        if self.used is None or self.rows is None:
            return self.rows
        owners = self.rows.owners(size, examples, self.used.device)
        return Rows(self.rows.dim, RowIndex(owners, examples, self.used))

    @property
    def is_shared(self) -> bool:
        """Whether several examples have a part in the rows, whichever dimension they are taken along."""
        return self.rows is None and not self.zero


def rows_in_order(size: int, examples: int) -> list[str]:
    """In which orders so many rows may be those of the examples, as many of each."""
    if not examples or size % examples or not size:
        return []
    return ["example", "row"] if size > examples else ["example"]


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
