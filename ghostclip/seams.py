"""Where a tensor that all examples share meets them: the gradient of each example there, before it is summed.

Autograd adds up over the batch on the way from such an operation down to what it was given by all examples in common.
Here that step is taken example by example. A few kinds of operation need one look at the whole batch; for any other,
the operation's own backward runs once for every example, on a gradient that is zero for the others, which is exact
whatever the operation is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.term import split_examples, wide

__all__ = ["ELEMENTWISE", "Edge", "Seam", "broadcasts", "shape_of"]

# (node, number of its output): a tensor of the graph.
Edge = tuple[Any, int]

# Their backward gives a gradient of the output's shape to an input that was broadcast, and leaves summing to autograd.
ELEMENTWISE = {
    f"{name}Backward{variant}"
    for name in ("Add", "Addcmul", "Div", "Lerp", "Maximum", "Minimum", "Mul", "Pow", "Rsub", "Sub", "Where")
    for variant in (0, 1)
}
EXPAND = "ExpandBackward0"


def shape_of(edge: Edge) -> torch.Size:
    """The shape of a tensor of the graph."""
    node, number = edge
    return torch.Size(tuple(node._input_metadata[number].shape))


def broadcasts(shape: torch.Size, whole: torch.Size, dim: int) -> bool:
    """Whether a tensor of ``shape``, made to be ``whole`` by broadcasting, is repeated along ``dim``."""
    place = dim - (len(whole) - len(shape))
    return place < 0 or (shape[place] == 1 and whole[dim] != 1)


@dataclass
class Seam:
    """An output of an operation that brings shared tensors and examples together.

    Attributes:
        node: of the graph.
        number: of the output among the node's.
        dim: the output's dimension that holds examples.
        count: entries of that dimension for each example.
        major: "example" or "row", as in `ghostclip.regroup`.
        shared: (place among the node's inputs, tensor) of what it was given for all examples.
    """

    node: Any
    number: int
    dim: int
    count: int
    major: str
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
        """Whether `factor` has an answer; looks at no saved tensor."""
        wanted = {"MmBackward0": 1, "AddmmBackward0": 2}.get(self.node.name())
        return wanted == place and self.dim == 0 and getattr(self.node, "_saved_alpha", 1) == 1

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
            elif (factor := self.factor(place)) is not None:
                x, dz = (split_examples(rows, self.count, self.major) for rows in (wide(factor), wide(grad)))
                yield edge, torch.bmm(x.mT, dz)
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
        return split_examples(tensor.movedim(self.dim, 0), self.count, self.major)

    def _summed(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """A gradient of the output's shape summed to [B, *shape], for an input broadcast to the output."""
        whole = grad.dim()
        grad = self._examples_first(wide(grad)).sum(1).unsqueeze(self.dim + 1)
        padded = (1,) * (whole - len(shape)) + tuple(shape)
        repeated = [1 + dim for dim, size in enumerate(padded) if size == 1 and grad.shape[1 + dim] != 1]
        return (grad.sum(repeated, keepdim=True) if repeated else grad).reshape(grad.shape[0], *shape)

    def _of_convolution(self, grad: Tensor, place: int) -> Tensor:
        """Gradients of a filter (place 1) or a bias (2), by torch's own kernel on one example after another."""
        node = self.node
        if place == 2:
            return self._examples_first(wide(grad)).sum(1).flatten(2).sum(2)
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
        for example in range(rows.shape[0]):
            alone = torch.zeros_like(grad, memory_format=torch.contiguous_format)
            self._examples_first(alone)[example] = rows[example]
            parts = self._inputs_gradients(alone)
            for gathered, (place, edge) in zip(found, places, strict=True):
                part, shape = parts[place], shape_of(edge)
                gathered.append(grad.new_zeros(shape) if part is None else part.sum_to_size(shape))
        for (_, edge), gathered in zip(places, found, strict=True):
            yield edge, torch.stack(gathered)
