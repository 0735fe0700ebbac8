"""Where a tensor that all examples share meets them: the gradient of each example there, before it is summed.

Autograd adds up over the batch on the way from such an operation down to what it was given by all examples in common.
Here that step is taken example by example. A few kinds of operation need one look at the whole batch; for any other,
the operation's own backward runs once for every example, on a gradient that is zero for the others, which is exact
whatever the operation is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge, shape_of
from ghostclip.graph.shared.computed import untransposed
from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.ragged import RowIndex, RowOrder, regrouped
from ghostclip.norms.rows import LookupGrads
from ghostclip.norms.term import Dense, PerExampleGrads, split_examples, to_float32

__all__ = ["ELEMENTWISE", "EXPAND", "GROUPED_PRODUCT", "REPEAT", "BroadcastBoundary", "broadcasts"]


# Their backward gives a gradient of the output's shape to an input that was broadcast, and leaves summing to autograd.
ELEMENTWISE = {
    f"{name}Backward{variant}"
    for name in ("Add", "Addcdiv", "Addcmul", "Atan2", "Complex", "Div", "Fmax", "Fmin", "Hypot", "Lerp", "Logaddexp",
                 "Maximum", "Minimum", "Mul", "Polar", "Pow", "Rsub", "Sub", "Where", "Xlogy")
    for variant in (0, 1)
}  # fmt: skip
EXPAND, REPEAT = "ExpandBackward0", "RepeatBackward0"
# Products x @ P: name, place of P, dimension of the rows of x in the result.
PRODUCTS = {("AddmmBackward0", 2, 0), ("MmBackward0", 1, 0)}
GROUPED_PRODUCT = "GroupedMmBackward0"
GROUP_NORM, LAYER_NORM = "NativeGroupNormBackward0", "NativeLayerNormBackward0"


def broadcasts(shape: torch.Size, whole: torch.Size, dim: int) -> bool:
    """Whether a tensor of ``shape``, made to be ``whole`` by broadcasting, is repeated along ``dim``."""
    place = dim - (len(whole) - len(shape))
    return place < 0 or (shape[place] == 1 and whole[dim] != 1)


@dataclass
class BroadcastBoundary:
    """An output of an operation that brings shared tensors and examples together.

    Attributes:
        node: of the graph.
        number: of the output among the node's.
        dim: the output's dimension that holds examples.
        count: entries of that dimension for each example.
        row_order: "example" or "row", as `ghostclip.graph.owners.Rows` has it, or whose the entries are.
        shared: (place among the node's inputs, tensor) of what it was given for all examples.
    """

    node: Any
    number: int
    dim: int
    count: int
    row_order: RowOrder
    shared: list[tuple[int, Edge]]

    @property
    def edge(self) -> Edge:
        """The output."""
        return self.node, self.number

    def is_product(self, place: int) -> bool:
        """Whether it is a product of rows of examples' with the matrix at ``place``; looks at no saved tensor."""
        return (self.node.name(), place, self.dim) in PRODUCTS and getattr(self.node, "_saved_alpha", 1) == 1

    def factor(self) -> Tensor:
        """The x [R, d] of such a product x @ P."""
        return self.node._saved_mat1 if self.node.name() == "AddmmBackward0" else self.node._saved_self

    def experts(self, expert: int | None) -> list[tuple[int, int]]:
        """(expert, how many rows) of a product with one expert's matrix, or with those of all, one after another."""
        if expert is not None:
            return [(expert, shape_of(self.edge)[0])]
        stops = self.node._saved_offs.tolist()
        if stops[-1:] != [shape_of(self.edge)[0]]:
            raise UnsupportedModelError(
                f"only {stops[-1]} of {shape_of(self.edge)[0]} rows in a grouped product belong to an expert, by its "
                "offs; leave out the rows that meet no expert, or, where devices share experts, keep all on each"
            )
        return [(number, stop - start) for number, (start, stop) in enumerate(pairwise([0, *stops]))]

    def rows(self, examples: int) -> RowIndex:
        """Whose the entries along ``dim`` are."""
        if isinstance(self.row_order, RowIndex):
            return self.row_order
        whole = self.node._input_metadata[self.number]
        return RowIndex(RowIndex.in_order(whole.shape[self.dim], examples, self.row_order, whole.device), examples)

    def terms(self, grad: Tensor, places: Sequence[tuple[int, Edge]]) -> Iterator[tuple[Edge, PerExampleGrads]]:
        """The per-example gradients of some of ``shared``, each at the tensor or at what it is the transpose of.

        Args:
            grad: of the summed losses at the output.
            places: some of ``shared``.
        """
        if self.number and self.node.name() in (LAYER_NORM, GROUP_NORM):
            return  # mean and deviation, which second derivatives use, depend on no scale and no shift
        unsummed, left = self._unsummed(grad), []
        for place, edge in places:
            if place in unsummed and broadcasts(shape_of(edge), grad.shape, self.dim):
                if (each := unsummed[place]) is not None:
                    yield edge, Dense(self._summed(each.expand(grad.shape), shape_of(edge)))
            elif (product := self._product(grad, place, edge)) is not None:
                yield product
            elif (term := self._term(grad, place, shape_of(edge))) is not None:
                yield edge, term
            else:
                left.append((place, edge))
        if left:
            yield from self._one_by_one(grad, left)

    def _unsummed(self, grad: Tensor) -> dict[int, Tensor | None]:
        """{place: gradient} of inputs that were broadcast, of the output's shape; {} of other operations."""
        name = self.node.name()
        if name in ELEMENTWISE:
            return dict(enumerate(self._inputs_gradients(grad)))
        beta = getattr(self.node, "_saved_beta", 1)
        return {0: grad if beta == 1 else grad * beta} if name in (EXPAND, "AddmmBackward0") else {}

    def _product(self, grad: Tensor, place: int, edge: Edge) -> tuple[Edge, PerExampleGrads] | None:
        """The matrix at ``place`` of a real product of two, and its gradients: sums of outer products over its rows."""
        if grad.is_complex():
            return None
        if self.is_product(place):
            left, right = self.factor(), grad
        elif (self.node.name(), place, self.dim) == ("MmBackward0", 0, 1):
            left, right = grad.mT, self.node._saved_mat2.mT
        else:
            return None
        edge, transposed = untransposed(edge)
        left, right = (right, left) if transposed else (left, right)
        return edge, self._regrouped(OuterProduct(left.unsqueeze(1), right.unsqueeze(1), shape_of(edge)))

    def _term(self, grad: Tensor, place: int, shape: torch.Size) -> PerExampleGrads | None:
        """The gradients of a shared tensor of ``shape``, by the formula of a known operation; None for another one."""
        name = self.node.name()
        if name == "BmmBackward0" and self.dim == (2, 1)[place] and not isinstance(self.row_order, RowIndex):
            return None if grad.is_complex() else self._of_batched_product(grad, place, self.row_order)
        if (indices := self._rows_read()) is not None:
            return self._of_table(grad, indices, shape)
        if name == "ConvolutionBackward0" and place > 0 and self.dim == 0 and not grad.is_complex():
            return self._of_convolution(grad, place, shape)
        if place > 0 and self.dim < self._first_normalized(grad.dim()):
            return Dense(self._of_norm(grad, place, shape))
        return None

    def _of_batched_product(self, grad: Tensor, place: int, row_order: str) -> Dense:
        """Gradients [B, G, d, p] of a factor of G products of two matrices, whose rows or columns are the examples'."""
        factors = (grad.mT, self.node._saved_mat2.mT) if place == 0 else (self.node._saved_self, grad)
        own = [split_examples(to_float32(each).movedim(1, 0), self.count, row_order) for each in factors]
        return Dense(torch.einsum("btgd,btgp->bgdp", *own))

    def _inputs_gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """What the operation's own backward gives to each of its inputs, for a gradient of the output alone."""
        outputs = list(enumerate(self.node._input_metadata))
        backward = getattr(getattr(self.node, "_forward_cls", None), "backward", None)
        if backward is None:
            found = self.node(*[grad if number == self.number else None for number, _ in outputs])
            return found if isinstance(found, tuple) else (found,)
        # A Function written in Python answers for all its arguments, the graph knows of those that need gradients.
        whole = [
            grad if number == self.number else torch.zeros(tuple(of.shape), dtype=of.dtype, device=of.device)
            for number, of in outputs
        ]
        answers = backward(self.node, *whole)
        answers = answers if isinstance(answers, tuple) else (answers,)
        needed = iter([each for each, needs in zip(answers, self.node.needs_input_grad, strict=True) if needs])
        return tuple(None if below is None else next(needed) for below, _ in self.node.next_functions)

    def _regrouped(self, term: PerExampleGrads) -> PerExampleGrads:
        """The term of the examples from that of the entries along ``dim``."""
        return regrouped(term, self.count, self.row_order)

    def _sums(self, tensor: Tensor) -> Tensor:
        """[B, *the other dimensions] of a tensor of the output's shape."""
        return self._regrouped(Dense(tensor.movedim(self.dim, 0))).per_example()

    def _entries(self, tensor: Tensor) -> Sequence[Tensor]:
        """For each example, which entries along ``dim`` of a tensor of the output's shape are its own."""
        if isinstance(self.row_order, RowIndex):
            return self.row_order.entries()
        return split_examples(torch.arange(tensor.shape[self.dim], device=tensor.device), self.count, self.row_order)  # type: ignore[return-value]

    def _summed(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """A gradient of the output's shape summed to [B, *shape], for an input broadcast to the output."""
        whole = grad.dim()
        grad = self._sums(to_float32(grad)).unsqueeze(self.dim + 1)
        padded = (1,) * (whole - len(shape)) + tuple(shape)
        repeated = [1 + dim for dim, size in enumerate(padded) if size == 1 and grad.shape[1 + dim] != 1]
        return (grad.sum(repeated, keepdim=True) if repeated else grad).reshape(grad.shape[0], *shape)

    def _rows_read(self) -> Tensor | None:
        """The indices at which an operation looked up rows of a table, for each example its own; None for another."""
        node = self.node
        if node.name() == "EmbeddingBackward0":
            indices = node._saved_indices
        elif node.name() == "IndexSelectBackward0" and node._saved_dim == 0:
            indices = node._saved_index
        elif node.name() == "IndexBackward0" and len(node._saved_indices) == 1:
            (indices,) = node._saved_indices
        else:
            return None
        return indices if indices.dtype not in (torch.bool, torch.uint8) and self.dim < indices.dim() else None

    def _of_table(self, grad: Tensor, indices: Tensor, shape: torch.Size) -> PerExampleGrads:
        """Gradients of a table of ``shape`` whose rows were looked up."""
        rows = indices.movedim(self.dim, 0).unsqueeze(1).flatten(1)
        values = to_float32(grad).movedim(self.dim, 0).reshape(*rows.shape, shape[1:].numel())
        if 0 <= (padding := getattr(self.node, "_saved_padding_idx", -1)) < shape[0]:
            values = values.masked_fill((rows == padding).unsqueeze(2), 0)
        return self._regrouped(LookupGrads(rows % shape[0], values, shape))

    def _of_convolution(self, grad: Tensor, place: int, shape: torch.Size) -> PerExampleGrads | None:
        """Gradients of a filter (place 1) or a bias (2); None where a transposed one made positions of its own."""
        node = self.node
        if place == 2:
            return Dense(self._sums(to_float32(grad)).flatten(2).sum(2))
        images, grads = node._saved_input, grad
        if node._saved_transposed:
            # The backward of a convolution, which takes the gradient as images.
            images, grads = grads, images
            if any(more >= step for more, step in zip(node._saved_output_padding, node._saved_stride, strict=True)):
                return None
        geometry = Geometry(node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_groups)
        return self._regrouped(ConvGrads(images, grads, shape, geometry))

    def _first_normalized(self, dims: int) -> int:
        """The first dimension, of so many, that a normalization has its statistics over; 0 for other operations."""
        if self.node.name() == LAYER_NORM:
            return dims - len(self.node._saved_normalized_shape)
        return int(self.node.name() == GROUP_NORM)

    def _of_norm(self, grad: Tensor, place: int, shape: torch.Size) -> Tensor:
        """Gradients of a normalization's scale (place 1) or shift (2)."""
        node, grad = self.node, to_float32(grad)
        groups = node.name() == GROUP_NORM
        if place == 1:
            x, mean, rstd = (to_float32(t) for t in (node._saved_input, node._saved_result1, node._saved_result2))
            if groups:
                x = x.unflatten(1, (node._saved_group, -1)).flatten(2)
                mean, rstd = mean.unsqueeze(2), rstd.unsqueeze(2)
            grad = grad * ((x - mean) * rstd).view_as(grad)
        along = torch.Size((*shape, *(1,) * (grad.dim() - 2))) if groups else shape
        return self._summed(grad, along).reshape(-1, *shape)

    def _one_by_one(self, grad: Tensor, places: list[tuple[int, Edge]]) -> Iterator[tuple[Edge, Dense]]:
        """By the operation's own backward, once for every example.

        For one example it multiplies what the operation kept of the others with zeros. Numbers of theirs that are not
        finite would spoil its gradients, and are replaced. Its own are not, so that its gradient isn't finite, either.
        """
        wrong, found = _not_finite(self.node), list[list[Tensor]]()
        with _replaced(wrong, 0.0):
            self._refuse_spoilt(grad, [place for place, _ in places])
        for entries in self._entries(grad):
            alone = self._at(entries, grad)
            parts = self._parts(alone, places)
            if wrong and not _all_finite(parts) and not self._reads(wrong, entries, grad, places):
                with _replaced(wrong, 0.0):
                    parts = self._parts(alone, places)
            found.append(parts)
        for (_, edge), each in zip(places, zip(*found, strict=True), strict=True):
            yield edge, Dense(torch.stack(each))

    def _at(self, entries: Tensor, grad: Tensor) -> Tensor:
        """A gradient of the output that is zero but for the given entries along ``dim``."""
        if not grad.dim():
            return grad if len(entries) else torch.zeros_like(grad)
        alone = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        alone.movedim(self.dim, 0)[entries] = grad.movedim(self.dim, 0)[entries]
        return alone

    def _parts(self, grad: Tensor, places: list[tuple[int, Edge]]) -> list[Tensor]:
        """The gradients of the shared tensors for one of the output."""
        below, found = self._inputs_gradients(grad), list[Tensor]()
        for place, edge in places:
            part, shape = below[place], shape_of(edge)
            found.append(grad.new_zeros(shape) if part is None else part.sum_to_size(shape))
        return found

    def _reads(self, wrong: list[Tensor], entries: Tensor, grad: Tensor, places: list[tuple[int, Edge]]) -> bool:
        """Whether numbers that the operation kept, and which are not finite, are of the example with these entries.

        Then the example's gradients are others if these numbers are. (Its gradient at the output may be zero.)
        """
        seed = self._at(entries, torch.ones_like(grad))
        with _replaced(wrong, 0.25):
            once = self._parts(seed, places)
        with _replaced(wrong, 0.75):
            again = self._parts(seed, places)
        return not all(map(torch.equal, once, again))

    def _refuse_spoilt(self, grad: Tensor, places: list[int]) -> None:
        """Raises UnsupportedModelError where a gradient of zero doesn't give zeros.

        An operation in place on a part of a tensor keeps what it was given where nobody can replace it. Where one
        example's numbers aren't finite there, 0 * NaN would leave out all examples.
        """
        if is_traced():
            return
        found = self._inputs_gradients(torch.zeros_like(grad))
        if _all_finite([part for place in places if (part := found[place]) is not None]):
            return
        raise UnsupportedModelError(
            f"a parameter is used in an operation in place ({self.node.name()}) that kept numbers that are not finite, "
            "which can't be left out for their example alone; write it out of place (torch.cat or torch.where instead "
            "of h[:, 0] *= p)",
            place=self.node,
        )


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _not_finite(node: Any) -> list[Tensor]:
    """The tensors a node kept that are not finite throughout.

    A compiled graph has no values yet; where one isn't finite, the eager passes clip its batch.
    """
    if is_traced():
        return []
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    kept += getattr(node, "saved_tensors", ())
    return [_in_memory(tensor.data) for tensor in kept if isinstance(tensor, Tensor) and not _all_finite([tensor])]


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor without the dimensions along which it was expanded: nobody can write there."""
    return tensor[tuple([slice(None) if stride else slice(0, 1) for stride in tensor.stride()])]


@contextmanager
def _replaced(wrong: Sequence[Tensor], value: float) -> Iterator[None]:
    """Inside, the numbers of these tensors that are not finite are another one."""
    before = [tensor.clone() for tensor in wrong]
    for tensor in wrong:
        tensor.masked_fill_(~tensor.isfinite(), value)
    try:
        yield
    finally:
        for tensor, own in zip(wrong, before, strict=True):
            tensor.copy_(own)
