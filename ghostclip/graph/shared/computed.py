"""Weights computed from parameters by weight or spectral normalization, or entry by entry: the chain rule in a formula.

The graph between a weight and its parameters is read here; the formula is `ghostclip.norms.computed`'s. A pruned weight
W = mask * v with mask [0, 1] and gradients [3, 4] of an example at W gives v the gradients [0, 4]. For 64 examples and
a matrix of 784 x 256, gradients formed one by one take 20 to 40 ordinary steps, the formula one half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.graph.nodes import ACCUMULATE, Edge, inputs_first
from ghostclip.norms.computed import ComputedGrads
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import Dense, PerExampleGrads, may_sync, to_float32

__all__ = ["of_parameters"]

# Operations each entry of whose results depends on one entry of each input.
ENTRYWISE = {
    f"{name}Backward0"
    for name in ("Abs", "Add", "Alias", "Clamp", "ClampMin", "Clone", "Div", "Exp", "Mul", "Neg", "Pow", "Relu",
                 "Sigmoid", "Softplus", "Sub", "Tanh", "ToCopy", "Where")
}  # fmt: skip


def of_parameters(edge: Edge, term: PerExampleGrads, leaves: Mapping[Any, Tensor]) -> dict[int, PerExampleGrads] | None:
    """The per-example gradients of the parameters, by their ids, that a weight is computed from; None for no formula.

    Args:
        edge: the weight, a tensor of the graph.
        term: its per-example gradients.
        leaves: the parameters that count, {accumulating node: parameter}.
    """
    if not isinstance(term, OuterProduct):
        return None
    below = inputs_first(edge[0])
    if not all(n in leaves if type(n) is ACCUMULATE else not hasattr(n, "call") for n in below):
        return None  # a layer, or a parameter that isn't in ``leaves``, took part
    if edge[0].name() == "WeightNormInterfaceBackward0":
        return _weight_norm(edge[0], term, leaves)
    parameters = [node for node in below if node in leaves]
    if len(parameters) != 1 or leaves[parameters[0]].shape != term.shape:
        return None
    (leaf,) = parameters
    if all(n is leaf or n.name() in ENTRYWISE for n in below):  # none of which makes anything smaller
        factor = _slope(edge, leaves[leaf], term)
        of_weight = may_sync(factor.device) and bool((factor == 1).all())  # as of a straight-through estimator
        return {id(leaves[leaf]): term if of_weight else ComputedGrads(term, factor)}
    return _quotient(edge[0], term, leaf, leaves[leaf])


def _like(term: OuterProduct, *tensors: Tensor) -> list[Tensor]:
    """Constants in the type that the term's gradients are formed in."""
    return [tensor.detach().to(to_float32(term.left[:0]).dtype) for tensor in tensors]


def _slope(edge: Edge, leaf: Tensor, term: OuterProduct) -> Tensor:
    """The gradient of the sum of a tensor's entries, for a parameter that it is computed from."""
    of = edge[0]._input_metadata[edge[1]]
    seed = torch.ones(tuple(of.shape), dtype=of.dtype, device=of.device)
    (found,) = torch.autograd.grad([GradientEdge(*edge)], [leaf], [seed], retain_graph=True)
    return _like(term, found)[0]


def _weight_norm(node: Any, term: OuterProduct, leaves: Mapping[Any, Tensor]) -> dict[int, PerExampleGrads] | None:
    """Of torch's weight normalization by rows."""
    (of_v, _), (of_g, _) = node.next_functions
    if node._saved_dim != 0 or not {of_v, of_g} <= {*leaves, None}:
        return None
    v, g, norms = _like(term, node._saved_v, node._saved_g, node._saved_result1)
    unit = v / norms.view_as(g)
    grads = ComputedGrads(term, g / norms.view_as(g), unit, unit, by_row=True)
    found = {of_v: grads, of_g: Dense(grads.products.view(-1, *g.shape))}
    return {id(leaves[leaf]): each for leaf, each in found.items() if leaf is not None}


def _quotient(node: Any, term: OuterProduct, leaf: Any, parameter: Tensor) -> dict[int, PerExampleGrads] | None:
    """Of a parameter over one number that is computed from it."""
    if node.name() != "DivBackward0" or node.next_functions[0][0] is not leaf or node._saved_other.dim():
        return None
    value, divisor = _like(term, node._saved_self, node._saved_other)
    slope = _slope(node.next_functions[1], parameter, term)
    return {id(parameter): ComputedGrads(term, divisor.reciprocal().view(1, 1), value / divisor, slope)}
