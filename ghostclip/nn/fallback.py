"""What stands in for a layer where there is none: parameters used outside of every rule, layers that saw no examples.

A bare Parameter (class token, position embedding, layer scale), a weight made by a parametrization, a module nobody
wrote a rule for, position ids of shape [1, T]: each is a tensor all examples share until an operation brings it
together with them. `ghostclip.graph.shared.search` finds these operations in the graph; here such uses become calls
like any layer's, which the rest of a pass need not tell from those.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.term import Dense, PerExampleGrads

from .base import LayerCall

__all__ = ["FallbackCall", "bare", "spread"]

Rule = Callable[[str, tuple[Tensor, ...], Tensor], PerExampleGrads]


class _Owner:
    """The part of a module that a pass looks at: its parameters, and no rule for all of them at once."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self._parameters = parameters

    def linear_pair(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Nothing is answered jointly."""


class FallbackCall(LayerCall):
    """A use of parameters that no layer captured with its examples.

    Attributes:
        region: the `ghostclip.graph.shared.subgraph.SharedSubgraph` that gives it its gradients during a first pass.
        answer: (parameter name, inputs, gradient) -> term.
        found: the term of a parameter's use, while a sink is told of it.
    """

    __slots__ = ("answer", "found", "region")

    def __init__(
        self, parameters: dict[str, Any], shape: tuple[int, ...], like: Any, answer: Rule | None = None
    ) -> None:
        self.layer: Any = _Owner(parameters)
        self.own = self.parameters = tuple(parameters)
        self.owners, self.rows, self.batch_dim, self.shape = parameters, {}, 0, torch.Size(shape)
        self.dtype, self.device, self.sources, self.extra = like.dtype, like.device, [], None
        self.nbytes = math.prod(shape) * like.dtype.itemsize
        self.sink, self.answer, self.has_saved_tensor_hooks = None, answer, False
        self.region: Any = None
        self.found: PerExampleGrads | None = None

    def term(self, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        if self.answer is not None:
            return self.answer(name, inputs, grad)
        assert self.found is not None
        return self.found

    def zeros(self) -> Tensor:
        """The gradients [B, ...] where none arrives."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


def bare(parameter: Tensor, examples: int) -> FallbackCall:
    """The use of a parameter outside of layers."""
    return FallbackCall({"": parameter}, (examples, *parameter.shape), parameter)


def spread(call: LayerCall, examples: int) -> FallbackCall:
    """The use of a layer that saw no examples, as if every example had had its own copy of what the layer saw.

    Its inputs are the call's own, its gradient is [B, *shape of the pre-activation].
    """
    parameters = {name: call.owners[name] for name in call.parameters}

    def answer(name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        return (_repeated if _is_row_by_row(call, inputs) else _one_by_one)(call, name, inputs, grad)

    use = FallbackCall(parameters, (examples, *call.shape), call, answer)
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
