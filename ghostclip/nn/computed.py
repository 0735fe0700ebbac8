"""Layers whose weights are computed from other parameters: parametrizations, and the hooks of weight_norm and pruning.

The layer's rule gives the gradient of each example at the weight, as for a weight that is a parameter. From there it
goes by the chain rule to the parameters that the weight was computed from, example by example; the part of the graph
that computed the weight is not run again. It must have no layers of the model in it, and end in parameters: otherwise
nothing is captured, and the parameters are followed through the graph (`ghostclip.graph.shared.subgraph`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize

from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.combine import combine
from ghostclip.norms.computed import DirectionGrads, Quotient, QuotientGrads, ScaledOuter, WeightNorm, materialised
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.pullback import pulled_back
from ghostclip.norms.term import Dense, PerExampleGrads

from .base import LAYERS, GhostLayer, LayerCall, has_saved_tensor_hooks

__all__ = ["ComputedCall", "with_computed_weights"]

ACCUMULATE = "torch::autograd::AccumulateGrad"
WEIGHT_NORM = "WeightNormInterfaceBackward0"
# Operations whose results have one entry for each of their inputs' entries, where all have the same shape.
ENTRYWISE = {
    f"{name}Backward0"
    for name in ("Abs", "Add", "Alias", "Clamp", "ClampMin", "Clone", "Div", "Exp", "Mul", "Neg", "Pow", "Relu",
                 "Sigmoid", "Softplus", "Sub", "Tanh", "ToCopy", "Where")
}  # fmt: skip

# Operations that leave every entry what it is, or add a constant to it.
SHIFTS = {f"{name}Backward0" for name in ("Add", "Alias", "Clone", "Sub", "ToCopy")}


@dataclass(frozen=True)
class ComputedWeight:
    """A weight as one forward used it.

    Attributes:
        name: the layer's attribute.
        value: of the weight, with the graph that computed it.
        leaves: the trained parameters it was computed from, by the names that the call has for them.
    """

    name: str
    value: Tensor
    leaves: dict[str, torch.nn.Parameter]

    def terms(self, term: PerExampleGrads) -> dict[str, PerExampleGrads]:
        """The per-example gradients of each leaf, given those of the weight."""
        if _is_shifted(self.value):
            return dict.fromkeys(self.leaves, term)
        if len(self.leaves) == 1 and (factor := self._factor()) is not None:
            (name,) = self.leaves
            return {name: ScaledOuter(term, factor) if isinstance(term, OuterProduct) else _scaled(term, factor)}
        if len(self.leaves) == 1 and (quotient := self._quotient()) is not None:
            (name,) = self.leaves
            if isinstance(term, OuterProduct):
                return {name: QuotientGrads(term, quotient)}
            return {name: Dense(quotient.of_v(materialised(term)))}
        if (norm := self._weight_norm()) is not None:
            if isinstance(term, OuterProduct) and term.left.shape[1] == 1 and term.groups == 1:
                of_v = DirectionGrads.of_one_position(term, norm)
                assert of_v.of_g is not None
                found: list[PerExampleGrads] = [of_v, Dense(of_v.of_g.view(-1, *norm.g.shape))]
            else:
                gradients = materialised(term)
                found = [Dense(norm.of_v(gradients)), Dense(norm.of_g(gradients))]
            return dict(zip(self.leaves, found, strict=True))
        seed = materialised(term).to(self.value.dtype)
        below = pulled_back([get_gradient_edge(self.value)], list(self.leaves.values()), [seed])
        return {
            name: Dense(seed.new_zeros(len(seed), *leaf.shape) if each is None else each)
            for (name, leaf), each in zip(self.leaves.items(), below, strict=True)
        }

    def _factor(self) -> Tensor | None:
        """The derivative of each entry by the leaf's own, where every operation is entry by entry; else None."""
        (leaf,) = self.leaves.values()
        if leaf.shape != self.value.shape or not _is_entrywise(self.value):
            return None
        (factor,) = torch.autograd.grad(self.value, leaf, torch.ones_like(self.value), retain_graph=True)
        return factor

    def _quotient(self) -> Quotient | None:
        """What the weight consists of where it is the leaf over one number computed from it; else None."""
        (leaf,) = self.leaves.values()
        node: Any = self.value.grad_fn
        if node.name() != "DivBackward0" or leaf.shape != self.value.shape:
            return None
        (above, _), (below, number) = node.next_functions
        divisor = node._saved_other
        if below is None or divisor.dim() or not _is_leaf(above):
            return None
        edge, seed = GradientEdge(below, number), torch.ones_like(divisor)
        (slope,) = torch.autograd.grad([edge], [leaf], [seed], retain_graph=True)
        return Quotient(self.value.detach(), divisor.detach(), slope)

    def _weight_norm(self) -> WeightNorm | None:
        """What torch's weight normalization by rows kept, if it made the weight of two leaves; else None."""
        node: Any = self.value.grad_fn
        if node.name() != WEIGHT_NORM or node._saved_dim != 0 or len(self.leaves) != 2:
            return None
        v, g = node._saved_v, node._saved_g
        if [v.data_ptr(), g.data_ptr()] != [leaf.data_ptr() for leaf in self.leaves.values()]:
            return None
        return WeightNorm(v.detach(), g.detach(), node._saved_result1.detach().view_as(g))


class ComputedCall(LayerCall):
    """A use of a layer with computed weights; its parameters are what these were computed from, and the layer's own.

    Attributes:
        weights: the computed ones.
        rule: the layer as a module that has the values of its weights as attributes.
    """

    __slots__ = ("_beside", "rule", "weights")

    weights: list[ComputedWeight]
    rule: GhostLayer
    # A gradient, and what was materialised of it beside what was asked for, by the name of the parameter.
    _beside: tuple[weakref.ref[Tensor], dict[str, PerExampleGrads]] | None

    def linear_pair(self, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        return None

    def term(self, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        terms = [self._by_rule(name, inputs, grad)] if name in self.rule._parameters else []
        for weight in self.weights:
            if name not in weight.leaves:
                continue
            found = self._found_beside(name, grad) if len(self.weights) == 1 else None
            if found is None:
                every = weight.terms(self._by_rule(weight.name, inputs, grad))
                found = every.pop(name)
                self._beside = weakref.ref(grad), {n: each for n, each in every.items() if isinstance(each, Dense)}
            terms.append(found)
        return combine(terms)

    def _found_beside(self, name: str, grad: Tensor) -> PerExampleGrads | None:
        return None if self._beside is None or self._beside[0]() is not grad else self._beside[1].pop(name, None)

    def _by_rule(self, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        found = self.rule.per_example(name, self, inputs, grad)
        return Dense(found) if isinstance(found, Tensor) else found


class Computed(GhostLayer):
    """What the wrappers of layers with computed weights share."""

    # The wrapper of the same layer with plain weights.
    plain: ClassVar[type[GhostLayer]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Whoever asks for a parametrized weight inside is given the same tensor.
        with parametrize.cached():
            return super().forward(*args, **kwargs)

    def new_call(
        self,
        preactivation: Tensor,
        inputs: tuple[Tensor, ...],
        parameters: tuple[str, ...],
        rows: Mapping[str, tuple[int, int]] | None = None,
        batch_dim: int | None = None,
        extra: Any = None,
    ) -> LayerCall | None:
        """As ever; with a `ComputedCall` where weights are computed, of parameters alone."""
        computed = {name: getattr(self, name, None) for name in parameters if name not in self._parameters}
        values = {name: value for name, value in computed.items() if isinstance(value, Tensor) and value.requires_grad}
        inside = parametrize._cache_enabled > 0 or not values.keys() & getattr(self, "parametrizations", {}).keys()
        if not values or not inside or rows or has_saved_tensor_hooks() or is_traced():
            return super().new_call(preactivation, inputs, parameters, rows, batch_dim, extra)
        weights, names = [], dict[int, str]()
        owners = {name: p for name, p in self._parameters.items() if name in parameters and p is not None}
        for name, value in values.items():
            leaves = _leaves(value)
            if leaves is None:
                return None
            for leaf in leaves:
                names.setdefault(id(leaf), next((n for n, p in owners.items() if p is leaf), f"{name}/{len(names)}"))
            weights.append(ComputedWeight(name, value, {names[id(leaf)]: leaf for leaf in leaves}))
            owners |= weights[-1].leaves
        own = tuple(name for name in owners if owners[name].requires_grad)
        call = ComputedCall(self, own, {}, self._examples_in(preactivation, batch_dim), preactivation, inputs, extra)
        call.owners, call.weights, call._beside = owners, weights, None
        call.rule = _with_values(self, {name: value.detach() for name, value in values.items()})
        return call


def with_computed_weights(module: torch.nn.Module, wrapper: type[GhostLayer]) -> type[GhostLayer]:
    """The wrapper for ``module``: ``wrapper``, or the same for computed weights where the module has such."""
    own = module._parameters
    names = [name for name in wrapper.parameter_names(module) if name not in own]
    made = getattr(module, "parametrizations", {})
    if not wrapper.takes_computed_weights or not any(
        n in made or isinstance(vars(module).get(n), Tensor) for n in names
    ):
        return wrapper
    plain = next((each for each in wrapper.__mro__ if LAYERS.get(getattr(each, "wrapped", object)) is each), None)
    if plain is None:
        return wrapper
    content = {"wrapped": wrapper.wrapped, "plain": plain, "__module__": wrapper.__module__, "__doc__": wrapper.__doc__}
    return type(wrapper.__name__, (Computed, wrapper), content)


def _with_values(layer: Computed, values: dict[str, Tensor]) -> GhostLayer:
    """The layer as a module of its plain wrapper, with the values of computed weights as attributes."""
    found = object.__new__(layer.plain)
    object.__setattr__(found, "__dict__", {**vars(layer), **values})
    return found


def _leaves(value: Tensor) -> list[torch.nn.Parameter] | None:
    """The parameters that ``value`` was computed from; None where a layer took part, or a tensor that is none."""
    found: dict[int, Any] = {}
    seen, stack = set(), [value.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "call", None), LayerCall):
            return None
        if node.name() == ACCUMULATE:
            if not isinstance(node.variable, torch.nn.Parameter):
                return None
            found[id(node.variable)] = node.variable
        stack += [below for below, _ in reversed(node.next_functions)]
    return list(found.values()) or None


def _is_shifted(value: Tensor) -> bool:
    """Whether ``value`` is one parameter plus constants, as under a straight-through estimator."""
    node: Any = value.grad_fn
    while node.name() != ACCUMULATE:
        below = [(slot, each) for slot, (each, _) in enumerate(node.next_functions) if each is not None]
        plain = node.name() in SHIFTS and len(below) == 1 and (below[0][0] == 0 or node.name() == "AddBackward0")
        if not plain or (below[0][0] == 1 and node._saved_alpha != 1) or not _is_of_shape(node, value):
            return False
        node = below[0][1]
    return bool(node.variable.shape == value.shape)


def _is_leaf(node: Any) -> bool:
    return node is not None and node.name() == ACCUMULATE


def _is_of_shape(node: Any, value: Tensor) -> bool:
    return tuple(node._input_metadata[0].shape) == tuple(value.shape)


def _is_entrywise(value: Tensor) -> bool:
    seen, stack = set(), [value.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATE:
            continue
        if node.name() not in ENTRYWISE or not _is_of_shape(node, value):
            return False
        stack += [below for below, _ in node.next_functions]
    return True


def _scaled(term: PerExampleGrads, factor: Tensor) -> Dense:
    return Dense(materialised(term) * factor)
