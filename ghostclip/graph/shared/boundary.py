"""Where a tensor that all examples share meets them: the gradient of each example there, before it is summed.

Autograd adds up over the batch on the way from such an operation down to what it was given by all examples in common.
Here that step is taken example by example. A few kinds of operation need one look at the whole batch; for any other,
the operation's own backward runs once for every example, on a gradient that is zero for the others, which is exact
whatever the operation is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.reader import Edge, shape_of
from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.term import split_examples, to_float32

__all__ = ["ELEMENTWISE", "EXPAND", "REPEAT", "BroadcastBoundary", "broadcasts"]

# Their backward gives a gradient of the output's shape to an input that was broadcast, and leaves summing to autograd.
ELEMENTWISE = {
    f"{name}Backward{variant}"
    for name in ("Add", "Addcdiv", "Addcmul", "Atan2", "Complex", "Div", "Fmax", "Fmin", "Hypot", "Lerp", "Logaddexp",
                 "Maximum", "Minimum", "Mul", "Polar", "Pow", "Rsub", "Sub", "Where", "Xlogy")
    for variant in (0, 1)
}  # fmt: skip
EXPAND, REPEAT = "ExpandBackward0", "RepeatBackward0"


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
        row_order: "example" or "row", as in `ghostclip.graph.row_layout`.
        shared: (place among the node's inputs, tensor) of what it was given for all examples.
    """

    node: Any
    number: int
    dim: int
    count: int
    row_order: str
    shared: list[tuple[int, Edge]]

    @property
    def edge(self) -> Edge:
        """The output."""
        return self.node, self.number

    def factor(self, place: int) -> Tensor | None:
        """The x [rows, d] of a product x @ P, where the input at ``place`` is P and rows are by example; else None."""
        name = self.node.name()
        if name == "MmBackward0" and place == 1 and self.dim == 0:
            return self.node._saved_self
        if name == "AddmmBackward0" and place == 2 and self.dim == 0 and self.node._saved_alpha == 1:
            return self.node._saved_mat1
        return None

    def is_product(self, place: int) -> bool:
        """Whether `factor` has a real answer; looks at no saved tensor."""
        wanted = {"MmBackward0": 1, "AddmmBackward0": 2}.get(self.node.name())
        if wanted != place or self.dim != 0 or getattr(self.node, "_saved_alpha", 1) != 1:
            return False
        return not self.node._input_metadata[self.number].dtype.is_complex

    def per_example(self, grad: Tensor, places: list[tuple[int, Edge]]) -> Iterator[tuple[Edge, Tensor]]:
        """(shared tensor, [B, *its shape]) for those of ``shared`` that are asked for.

        Args:
            grad: of the summed losses at the output.
            places: some of ``shared``.
        """
        left = []
        unsummed: tuple[Tensor | None, ...] | None = None
        for place, edge in places:
            name, shape = self.node.name(), shape_of(edge)
            if name == EXPAND:
                yield edge, self._summed(grad, shape)
            elif name == REPEAT and (share := self._of_repeat(grad, shape)) is not None:
                yield edge, share
            elif (indices := self._rows_read()) is not None:
                yield edge, self._of_table(grad, indices, shape)
            elif (factor := self.factor(place)) is not None:
                x, dz = (
                    split_examples(rows, self.count, self.row_order) for rows in (to_float32(factor), to_float32(grad))
                )
                yield edge, torch.bmm(x.mH, dz)
            elif name in ELEMENTWISE or (name == "AddmmBackward0" and place == 0):
                unsummed = self._inputs_gradients(grad) if unsummed is None else unsummed
                each = unsummed[place]
                if each is not None:
                    yield edge, self._summed(each.expand(grad.shape), shape)
            elif name == "ConvolutionBackward0" and place > 0 and self.dim == 0:
                yield edge, self._of_convolution(grad, place)
            else:
                left.append((place, edge))
        if left:
            yield from self._one_by_one(grad, left)

    def _inputs_gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """What the operation's own backward gives to each of its inputs, for a gradient of the output alone."""
        grads: list[Tensor | None] = [None] * len(self.node._input_metadata)
        grads[self.number] = grad
        backward = getattr(getattr(self.node, "_forward_cls", None), "backward", None)
        if backward is None:
            found = self.node(*grads)
            return found if isinstance(found, tuple) else (found,)
        # A Function written in Python answers for all its arguments, the graph knows of those that need gradients.
        whole = [self._zeros(number) if each is None else each for number, each in enumerate(grads)]
        answers = backward(self.node, *whole)
        answers = answers if isinstance(answers, tuple) else (answers,)
        needed = iter([each for each, needs in zip(answers, self.node.needs_input_grad, strict=True) if needs])
        return tuple(None if below is None else next(needed) for below, _ in self.node.next_functions)

    def _zeros(self, number: int) -> Tensor:
        told = self.node._input_metadata[number]
        return torch.zeros(tuple(told.shape), dtype=told.dtype, device=told.device)

    def _examples_first(self, tensor: Tensor) -> Tensor:
        """[B, count, *the other dimensions] of a tensor of the output's shape."""
        return split_examples(tensor.movedim(self.dim, 0), self.count, self.row_order)

    def _summed(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """A gradient of the output's shape summed to [B, *shape], for an input broadcast to the output."""
        whole = grad.dim()
        grad = self._examples_first(to_float32(grad)).sum(1).unsqueeze(self.dim + 1)
        padded = (1,) * (whole - len(shape)) + tuple(shape)
        repeated = [1 + dim for dim, size in enumerate(padded) if size == 1 and grad.shape[1 + dim] != 1]
        return (grad.sum(repeated, keepdim=True) if repeated else grad).reshape(grad.shape[0], *shape)

    def _of_repeat(self, grad: Tensor, shape: torch.Size) -> Tensor | None:
        """A gradient of the output's shape summed to [B, *shape], for an input repeated to the output."""
        padded = (1,) * (grad.dim() - len(shape)) + tuple(shape)
        own = padded[self.dim]
        if own != 1 and (self.count % own or self.row_order != "example"):
            return None
        rows = self._examples_first(to_float32(grad)).unflatten(1, (-1, own)).sum(1).movedim(1, self.dim + 1)
        for dim, size in enumerate(padded, 1):
            rows = rows.unflatten(dim, (-1, size)).sum(dim)
        return rows.reshape(rows.shape[0], *shape)

    def _rows_read(self) -> Tensor | None:
        """The indices at which an operation looked up rows of a table, for each example its own; None for another."""
        node, indices = self.node, None
        if node.name() == "EmbeddingBackward0":
            indices = node._saved_indices
        elif node.name() == "IndexSelectBackward0" and node._saved_dim == 0:
            indices = node._saved_index
        elif node.name() == "IndexBackward0" and len(node._saved_indices) == 1:
            (indices,) = node._saved_indices
        fits = indices is not None and indices.dtype not in (torch.bool, torch.uint8) and self.dim < indices.dim()
        return indices if fits else None

    def _of_table(self, grad: Tensor, indices: Tensor, shape: torch.Size) -> Tensor:
        """Gradients [B, *shape] of a table whose rows were looked up."""
        rows = self._examples_first(indices).flatten(1)
        values = self._examples_first(to_float32(grad)).flatten(1, indices.dim())
        padding = getattr(self.node, "_saved_padding_idx", -1)
        if 0 <= padding < shape[0]:
            values = values.masked_fill((rows == padding).view(*rows.shape, *[1] * (values.dim() - 2)), 0)
        first = torch.arange(len(rows), device=rows.device)[:, None] * shape[0]
        found = values.new_zeros(len(rows) * shape[0], *shape[1:])
        found.index_add_(0, (rows % shape[0] + first).flatten(), values.flatten(0, 1))
        return found.view(-1, *shape)

    def _of_convolution(self, grad: Tensor, place: int) -> Tensor:
        """Gradients of a filter (place 1) or a bias (2), by torch's own kernel on one example after another."""
        node = self.node
        if place == 2:
            return self._examples_first(to_float32(grad)).sum(1).flatten(2).sum(2)
        input, found = self._examples_first(node._saved_input), []
        geometry = [node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed]
        geometry += [node._saved_output_padding, node._saved_groups]
        for x, dz in zip(input, self._examples_first(grad), strict=True):
            parts = torch.ops.aten.convolution_backward(
                dz, x, node._saved_weight, None, *geometry, [False, True, False]
            )
            found.append(parts[1])
        return torch.stack(found)

    def _one_by_one(self, grad: Tensor, places: list[tuple[int, Edge]]) -> Iterator[tuple[Edge, Tensor]]:
        rows = self._examples_first(grad)
        found: list[list[Tensor]] = [[] for _ in places]
        with _finite_inside(self.node):
            self._refuse_spoilt(grad, [place for place, _ in places])
            for example in range(rows.shape[0]):
                alone = torch.zeros_like(grad, memory_format=torch.contiguous_format)
                self._examples_first(alone)[example] = rows[example]
                parts = self._inputs_gradients(alone)
                for gathered, (place, edge) in zip(found, places, strict=True):
                    part, shape = parts[place], shape_of(edge)
                    gathered.append(grad.new_zeros(shape) if part is None else part.sum_to_size(shape))
        for (_, edge), gathered in zip(places, found, strict=True):
            yield edge, torch.stack(gathered)

    def _refuse_spoilt(self, grad: Tensor, places: list[int]) -> None:
        """Raises UnsupportedModelError where a gradient of zero doesn't give zeros.

        An operation in place on a part of a tensor keeps what it was given where nobody can replace it. Where one
        example's numbers aren't finite there, 0 * NaN would leave out all examples.
        """
        if is_traced():
            return
        found = self._inputs_gradients(torch.zeros_like(grad))
        if all(found[place] is None or bool(torch.isfinite(found[place]).all()) for place in places):  # type: ignore[arg-type]
            return
        raise UnsupportedModelError(
            f"a parameter is used in an operation in place ({self.node.name()}) that kept numbers that are not finite, "
            "which can't be left out for their example alone; write it out of place (torch.cat or torch.where instead "
            "of h[:, 0] *= p)"
        )


@contextmanager
def _finite_inside(node: Any) -> Iterator[None]:
    """Zeros for what isn't finite among the tensors a node kept: 0 * inf would spoil the other examples.

    The example it belongs to is left out anyway, by its loss or by its gradient at the node. A compiled graph has no
    values yet; where one isn't finite, the eager passes clip its batch.
    """
    if is_traced():
        yield
        return
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    kept += getattr(node, "saved_tensors", ())
    wrong = [
        (tensor.data, tensor.data.clone())
        for tensor in kept
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    for tensor, _ in wrong:
        tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    try:
        yield
    finally:
        for tensor, before in wrong:
            tensor.copy_(before)
