"""A boundary: an output of an operation that was given shared tensors and examples, and has rows of one example each.

For h = x * q with x [2, 5] and q shared by both examples, it is h, of which each example has one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.nodes import ACCUMULATE, Edge, shape_of, signed
from ghostclip.graph.rows import Rows
from ghostclip.norms.ragged import RowIndex, regrouped
from ghostclip.norms.term import Dense, PerExampleGrads, split_examples, to_float32

__all__ = ["BroadcastBoundary", "Target", "matrix_of", "untransposed"]

# Operations that leave numbers in their order.
COPIES = {
    f"{name}Backward0" for name in ("Alias", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
}
COPIES |= {"SqueezeBackward1", "SqueezeBackward2"}
# A tensor of the graph, and the (start, stop) of its first axis; None for all of it.
Target = tuple[Edge, tuple[int, int] | None]


@dataclass
class BroadcastBoundary:
    """An output of an operation that brings shared tensors and examples together.

    Attributes:
        node: of the graph.
        number: of the output among the node's.
        rows: how its rows belong to the examples.
        examples: B.
        shared: slots of the node's inputs that it was given for all examples.
    """

    node: Any
    number: int
    rows: Rows
    examples: int
    shared: Sequence[int]

    @property
    def edge(self) -> Edge:
        """The output."""
        return self.node, self.number

    @property
    def dim(self) -> int:
        """The output's dimension that holds the examples."""
        return self.rows.dim

    @property
    def count(self) -> int:
        """Entries of that dimension for each example; an index says by itself."""
        return self.rows.count((*shape_of(self.edge), 1)[self.dim], self.examples)

    def input(self, slot: int) -> Edge:
        """What the operation was given there."""
        return self.node.next_functions[slot]

    def is_product(self, slot: int) -> bool:
        """Whether it is a product x @ P, or P @ x.T, of rows of examples' with the matrix at a slot.

        einsum makes it one of a batch of one, [1, B, d] @ [1, d, p]. Looks at no saved tensor.
        """
        name, shape = self.node.name(), shape_of(self.edge)
        if name == "AddmmBackward0":
            return self.dim == 0 and slot == 2 and self.node._saved_alpha == 1
        alone = name == "MmBackward0" or (name == "BmmBackward0" and shape[0] == 1)
        return alone and self.dim == len(shape) - (2 if slot else 1)

    def targets(self, slot: int) -> list[Target]:
        """Where the per-example gradients of an input arrive: at it, or at the matrices that it is made of."""
        if self.node.name() == "GroupedMmBackward0" and slot == 1:
            below, _ = untransposed(self.input(slot))
            if type(below[0]) is ACCUMULATE:
                return [(below, (expert, expert + 1)) for expert in range(shape_of(below)[0])]
        return [matrix_of(self.input(slot))[0] if self.is_product(slot) else (self.input(slot), None)]

    def entries(self, grad: Tensor) -> Sequence[Tensor]:
        """For each example, which entries along ``dim`` of a tensor of the output's shape are its own."""
        order, used = self.rows.order, self.rows.used
        if isinstance(order, RowIndex):
            found, used = order.entries(), order.used
        else:
            numbers = torch.arange((*grad.shape, 1)[self.dim], device=grad.device)
            found = split_examples(numbers, self.count, order).unbind()
        return found if used is None else [each[used[each]] for each in found]

    def regrouped(self, term: PerExampleGrads) -> PerExampleGrads:
        """The term of the examples from that of the entries along ``dim``."""
        return regrouped(term, self.count, self.rows.order, self.rows.used)

    def sums(self, tensor: Tensor) -> Tensor:
        """[B, *the other dimensions] of a tensor of the output's shape."""
        return self.regrouped(Dense(to_float32(tensor).movedim(self.dim, 0))).per_example()

    def summed(self, grad: Tensor, shape: torch.Size) -> Dense:
        """A gradient of the output's shape summed to [B, *shape], for an input broadcast to the output."""
        found = self.sums(grad).unsqueeze(self.dim + 1)
        padded = (1,) * (grad.dim() - len(shape)) + tuple(shape)
        repeated = [1 + dim for dim, size in enumerate(padded) if size == 1 and found.shape[1 + dim] != 1]
        found = found.sum(repeated, keepdim=True) if repeated else found
        return Dense(found.reshape(found.shape[0], *shape))

    def repeats(self, shape: torch.Size) -> bool:
        """Whether an input of ``shape``, made as large as the output by broadcasting, is repeated along ``dim``."""
        whole = shape_of(self.edge)
        place = self.dim - (len(whole) - len(shape))
        return place < 0 or (bool(whole) and shape[place] == 1 and whole[self.dim] != 1)


def matrix_of(edge: Edge) -> tuple[Target, bool]:
    """The matrix that a tensor is a copy or a transpose of, and whether it is the latter.

    Of a parameter [E, p, d] it may be one of the E matrices.
    """
    if len(shape_of(edge)) == 3:
        return _without_ones(edge)
    edge, transposed = untransposed(edge)
    node = edge[0]
    if node.name() == "SelectBackward0" and node._saved_dim == 0:
        below, swapped = untransposed(node.next_functions[0])
        if type(below[0]) is ACCUMULATE and len(shape_of(below)) == 3:
            number = node._saved_index % shape_of(below)[0]
            return (below, (number, number + 1)), transposed != swapped
    return (edge, None), transposed


def _without_ones(edge: Edge) -> tuple[Target, bool]:
    """The matrix [p, d] that a tensor [1, p, d] holds, and whether transposed; or the tensor itself.

    einsum puts dimensions of size one into a matrix, and moves them.
    """
    found, transposed, swapped = edge, False, False
    while (order := _order_without_ones(edge)) is not None:
        edge, swapped = edge[0].next_functions[0], swapped != (order == [1, 0])
        if len(shape_of(edge)) == 2:
            found, transposed = edge, swapped
    return (found, None), transposed


def _order_without_ones(edge: Edge) -> list[int] | None:
    """How an operation orders the two dimensions of its input that aren't of size one; None for any other operation."""
    node = edge[0]
    below = shape_of(node.next_functions[0]) if len(node.next_functions) == 1 else torch.Size()
    sizes = [size for size in below if size != 1]
    if len(sizes) != 2 or node.next_functions[0][0] is None:
        return None
    name, dims = node.name(), list(range(len(below)))
    if name == "PermuteBackward0":
        dims = [signed(dim) % len(below) for dim in node._saved_dims]
    elif name in ("TransposeBackward0", "TBackward0"):
        one, other = (node._saved_dim0, node._saved_dim1) if name == "TransposeBackward0" else (0, 1)
        one, other = signed(one) % len(below), signed(other) % len(below)
        dims[one], dims[other] = other, one
    elif name not in COPIES or [size for size in shape_of(edge) if size != 1] != sizes:
        return None
    kept = [dim for dim in dims if below[dim] != 1]
    return [sorted(kept).index(dim) for dim in kept]


def untransposed(edge: Edge) -> tuple[Edge, bool]:
    """What a tensor is a copy of, with its matrices as they are or transposed; and whether they are transposed."""
    transposed = False
    while (swaps := _swaps(edge[0])) is not None:
        transposed, edge = transposed != swaps, edge[0].next_functions[0]
    return edge, transposed


def _swaps(node: Any) -> bool | None:
    """Whether an operation transposes each matrix; None for one that does more than copy."""
    dims, moved = len(shape_of((node, 0))), None
    if node.name() == "TransposeBackward0":
        moved = {signed(dim) % dims for dim in (node._saved_dim0, node._saved_dim1)}
    elif node.name() == "PermuteBackward0":
        moved = {place for place, dim in enumerate(node._saved_dims) if signed(dim) % dims != place}
    if moved is not None:
        return True if moved == {dims - 1, dims - 2} else None
    return {"TBackward0": True, "ToCopyBackward0": False}.get(node.name())
