"""What stands in for a layer where there is none: parameters used outside of every rule, layers that saw no examples.

A bare Parameter (class token, position embedding, layer scale), a weight made by a parametrization, a module nobody
wrote a rule for, position ids of shape [1, T]: each is a tensor all examples share until an operation brings it
together with them. `ghostclip.graph.shared.search` finds these operations in the graph; here such uses become calls
like any layer's, which the rest of a pass need not tell from those.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.experts import ExpertProducts
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.ragged import RowIndex, RowOrder, regrouped
from ghostclip.norms.term import Dense, PerExampleGrads

from .base import LayerCall

__all__ = ["FallbackCall", "bare", "expert_product", "product", "spread"]

NormResult = Callable[[str, tuple[Tensor, ...], Tensor], PerExampleGrads]


class _Owner:
    """The part of a module that a pass looks at: its parameters, and no rule for all of them at once."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self._parameters = parameters

    def linear_pair(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Nothing is answered jointly."""


class FallbackCall(LayerCall):
    """A use of parameters that no layer captured with its examples.

    Attributes:
        region: the `ghostclip.graph.shared.subgraph.Region` that gives it its gradients during a first pass.
        answer: (parameter name, inputs, gradient) -> term.
    """

    __slots__ = ("answer", "region")

    def __init__(
        self,
        parameters: dict[str, Any],
        trained: tuple[str, ...],
        shape: tuple[int, ...],
        like: Tensor,
        answer: NormResult,
    ) -> None:
        self.layer: Any = _Owner(parameters)
        self.own, self.owners = trained, parameters
        self.parameters, self.rows, self.batch_dim, self.shape = trained, {}, 0, torch.Size(shape)
        self.dtype, self.device, self.sources, self.extra = like.dtype, like.device, [], None
        self.nbytes = math.prod(shape) * like.dtype.itemsize
        self.sink, self.answer, self.has_saved_tensor_hooks = None, answer, False
        self.region: Any = None

    def term(self, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        return self.answer(name, inputs, grad)


def bare(parameter: Tensor, examples: int) -> FallbackCall:
    """The use of a parameter whose gradient comes as [B, *shape]."""
    shape = (examples, *parameter.shape)
    return FallbackCall({"": parameter}, ("",), shape, parameter, lambda name, inputs, grad: Dense(grad))


def product(parameter: Tensor, examples: int, count: int, row_order: RowOrder, transposed: bool) -> FallbackCall:
    """The use of a parameter as the right side of a product ``x @ P`` (or ``x @ P.T``).

    Args:
        parameter: [d, p], or [p, d] if ``transposed``.
        examples: B.
        count: rows of x for each example.
        row_order: whether rows of one example lie together, or whose they are.
        transposed: what was multiplied with is the parameter's transpose.

    Returns:
        A use whose input is x [B * count, d] and whose gradient is the product's [B * count, p].
    """

    def answer(name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        left, right = inputs[0].unsqueeze(1), grad.unsqueeze(1)
        left, right = (right, left) if transposed else (left, right)
        return regrouped(OuterProduct(left, right, parameter.shape), count, row_order)

    width = parameter.shape[0 if transposed else 1]
    # As a shape, what it takes in memory is all that is read of it.
    count = math.ceil(len(row_order) / examples) if isinstance(row_order, RowIndex) else count
    return FallbackCall({"": parameter}, ("",), (examples, count, width), parameter, answer)


def expert_product(
    parameter: Tensor, examples: int, experts: Sequence[tuple[int, int]], rows: RowIndex, transposed: bool
) -> FallbackCall:
    """The uses of experts' matrices as the right sides of products, each with some of the rows.

    Args:
        parameter: [E, d, p], or [E, p, d] if ``transposed``.
        examples: B.
        experts: (expert, how many rows), in the order of the rows.
        rows: whose these are.
        transposed: what was multiplied with are the transposes of the matrices.

    Returns:
        A use whose input is x [R, d] and whose gradient is the products' [R, p].
    """

    def answer(name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        left, right = (grad, inputs[0]) if transposed else (inputs[0], grad)
        found = ExpertProducts(left, right, experts, rows, parameter.shape)
        return found if rows.used is None else found.keep_rows(rows.used)

    width = parameter.shape[1 if transposed else 2]
    return FallbackCall({"": parameter}, ("",), (examples, math.ceil(len(rows) / examples), width), parameter, answer)


def spread(call: LayerCall, examples: int) -> FallbackCall:
    """The use of a layer that saw no examples, as if every example had had its own copy of what the layer saw.

    Its inputs are the call's own, its gradient is [B, *shape of the pre-activation].
    """
    own = call.owners
    parameters = {name: own[name] for name in call.parameters}
    like = torch.empty(0, dtype=call.dtype, device=call.device)

    def answer(name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        return (_repeated if _is_row_by_row(call, inputs) else _one_by_one)(call, name, inputs, grad)

    use = FallbackCall(parameters, call.parameters, (examples, *call.shape), like, answer)
    use.rows = call.rows
    return use


def _is_row_by_row(call: LayerCall, inputs: tuple[Tensor, ...]) -> bool:
    return call.layer.row_by_row and not call.rows and len(inputs) == 1


def _repeated(call: LayerCall, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
    """The layer's rule on inputs repeated for every example."""
    examples, dim, rows = grad.shape[0], call.batch_dim, call.shape[call.batch_dim]
    many = copy.copy(call)
    many.shape = torch.Size((*call.shape[:dim], examples * rows, *call.shape[dim + 1 :]))
    grad = grad.movedim(0, dim).reshape(many.shape)
    (once,) = inputs
    sizes = [-1] * (once.dim() + 1)
    sizes[dim] = examples
    repeated = once.unsqueeze(dim).expand(sizes).flatten(dim, dim + 1)
    term = many.term(name, (repeated,), grad)
    return term if rows == 1 else term.split_rows(rows, "example")


def _one_by_one(call: LayerCall, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
    """The layer's rule once for every example; it knows best which dimension of its inputs is which."""
    rows, terms = call.shape[call.batch_dim], [call.term(name, inputs, each) for each in grad]
    found = [(term if rows == 1 else term.split_rows(rows, "example")).per_example() for term in terms]
    parameter: Any = call.owners[name]
    part = parameter[slice(*call.rows.get(name, (None, None)))]
    return Dense(torch.cat(found) if found else grad.new_zeros(0, *part.shape))
