"""What all examples share: from parameters used outside of layers, and layers that saw no examples, to where they meet.

A tensor is shared when it was made of parameters, constants and other shared tensors alone. Where the graph brings it
together with the examples is found by `ghostclip.graph.shared.search`; the gradient of each example there, by
`ghostclip.graph.shared.boundary`. From there it goes back down through the shared part here, once per example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge, shape_of
from ghostclip.graph.reader import without_hooks
from ghostclip.graph.shared.boundary import GROUPED_PRODUCT, BroadcastBoundary
from ghostclip.graph.shared.computed import of_parameters, untransposed
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import CAPTURE, LayerCall
from ghostclip.nn.fallback import FallbackCall, bare, spread
from ghostclip.norms.experts import ExpertProducts
from ghostclip.norms.precision import full_precision
from ghostclip.norms.pullback import pulled_back
from ghostclip.norms.ragged import RowIndex, combined
from ghostclip.norms.term import Dense, PerExampleGrads

__all__ = ["SharedSubgraph", "parameters_of"]

Sink = Callable[[LayerCall, tuple[Tensor, ...], Tensor], None]


@dataclass
class SharedSubgraph:
    """The shared part of one batch's graph.

    Attributes:
        examples: B.
        boundaries: where it meets the examples.
        leaves: the parameters it starts from outside of layers: {accumulating node: parameter}.
        calls: {capturing node: call} of layers that saw no examples.
        uses: what stands for both in a pass, with their gradients by example.
        shared: all of its nodes.
        shown: whether it was shown to be the same whatever the examples are.
        given: layers with examples that are given what all share; there is no rule for them.
        silent: tensors with a gradient of zeros where something shared may meet the examples.
        begins: called in a pass before gradients go down from the boundaries.
        watch: told (tensor, gradient) of each boundary in a pass that measures.
    """

    examples: int
    boundaries: list[BroadcastBoundary]
    leaves: dict[Any, Tensor]
    calls: dict[Any, LayerCall]
    uses: list[FallbackCall] = field(default_factory=list)
    watch: Callable[[Edge, Tensor], None] | None = None
    begins: Callable[[], None] | None = None
    shared: list[Any] = field(default_factory=list)
    shown: bool = True
    given: list[LayerCall] = field(default_factory=list)
    silent: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The inputs of each boundary that are matrices of experts, and the others.
        self._experts: dict[tuple[Any, bool], list[tuple[int, int | None]]] = {}
        self._others: list[list[tuple[int, Edge]]] = [[] for _ in self.boundaries]
        # Bytes of the products that a parameter is a factor of.
        products = Counter[int]()
        for number, boundary in enumerate(self.boundaries):
            for place, edge in boundary.shared:
                leaf = untransposed(edge)[0][0]
                if (matrix := self._expert(boundary, place, edge)) is None:
                    self._others[number].append((place, edge))
                else:
                    leaf, transposed, expert = matrix
                    self._experts.setdefault((leaf, transposed), []).append((number, expert))
                if leaf in self.leaves and (matrix is not None or boundary.is_product(place)):
                    products[id(self.leaves[leaf])] += shape_of(boundary.edge).numel() * self.leaves[leaf].itemsize
        reached = {id(parameter): parameter for parameter in self.leaves.values()}
        tables = dict(self.calls)
        # A gradient from autograd has all of a parameter's uses below the boundaries.
        while others := [node for node, call in tables.items() if not _is_table(node, call, reached)]:
            for node in others:
                reached |= parameters_of(tables.pop(node))
        # Where gradients arrive: at a parameter, or at the output of a layer that reads constants.
        self._bare = {bare(parameter, self.examples): parameter for parameter in reached.values()}
        self._tables = {spread(call, self.examples): node for node, call in tables.items()}
        self.uses = [*self._bare, *self._tables]
        for use in self.uses:
            use.region = self
        for use, parameter in self._bare.items():
            use.nbytes = min(use.nbytes, products.get(id(parameter), use.nbytes))

    def _expert(self, boundary: BroadcastBoundary, place: int, edge: Edge) -> tuple[Any, bool, int | None] | None:
        """(leaf, whether transposed, which of its matrices) of a factor that is a matrix of experts; None for another.

        The number is None for all matrices, one after another.
        """
        (node, _), transposed = untransposed(edge)
        grouped, expert = boundary.node.name() == GROUPED_PRODUCT and place == 1, None
        if node.name() == "SelectBackward0" and node._saved_dim == 0 and boundary.is_product(place):
            expert = node._saved_index % shape_of(node.next_functions[0])[0]
            (node, _), swapped = untransposed(node.next_functions[0])
            transposed = transposed != swapped
        known = (grouped or expert is not None) and node in self.leaves and self.leaves[node].dim() == 3
        return (node, transposed, expert) if known else None

    @torch.no_grad()
    def hand_over(
        self, grads: list[Any], losses: Tensor, seed: Tensor, sink: Sink, wanted: Collection[LayerCall] | None
    ) -> None:
        """Tells the sink of every use, given the gradients at the boundaries; the graph must be there still.

        Args:
            grads: one for each of ``boundaries``; None where none arrived.
            losses, seed: [B], and their gradient.
            sink, wanted: as in a first pass.
        """
        if self.begins is not None:
            self.begins()
        for boundary, grad in zip(self.boundaries, grads, strict=True):
            if self.watch is not None and grad is not None:
                self.watch(boundary.edge, grad)
        if wanted is not None and not any(use in wanted for use in self.uses):
            return
        with full_precision(losses.device), without_hooks(list(self._bare.values())):
            found = self._down(self._terms(grads, losses, seed))
        grads.clear()
        _refuse_spread(losses.detach(), found)
        for use in self.uses:
            terms = found.pop(use, [])
            if use in self._bare:
                use.found = combined(terms) if terms else Dense(use.zeros())
                sink(use, (), next(iter(use.found.tensors), losses))
                use.found = None
            else:
                grad = combined(terms).per_example() if terms else use.zeros()
                sink(use, self._tables[use].saved_tensors, grad.to(use.dtype).reshape(use.shape))

    def _terms(self, grads: list[Any], losses: Tensor, seed: Tensor) -> dict[Edge, list[PerExampleGrads]]:
        """Each example's gradients at tensors of the region."""
        if not self.boundaries and self.examples:
            # All there is belongs to the one example.
            return {(losses.grad_fn, losses.output_nr): [Dense(torch.diag(seed))]}
        found: dict[Edge, list[PerExampleGrads]] = {}
        for boundary, grad, places in zip(self.boundaries, grads, self._others, strict=True):
            for edge, term in boundary.terms(grad, places) if grad is not None else ():
                found.setdefault(edge, []).append(term)
        for (leaf, transposed), parts in self._experts.items():
            found.setdefault((leaf, 0), []).append(self._of_experts(grads, leaf, transposed, parts))
        return found

    def _of_experts(
        self, grads: list[Any], leaf: Any, transposed: bool, parts: list[tuple[int, int | None]]
    ) -> PerExampleGrads:
        """The term of all products with matrices of a parameter: (number of the boundary, which matrix)."""
        boundaries = [self.boundaries[number] for number, _ in parts]
        experts = [each for b, (_, expert) in zip(boundaries, parts, strict=True) for each in b.experts(expert)]
        rows = RowIndex.joined([boundary.rows(self.examples) for boundary in boundaries])
        inputs = [boundary.factor() for boundary in boundaries]
        own = [
            x.new_zeros(shape_of(boundary.edge)) if grads[number] is None else grads[number]
            for boundary, x, (number, _) in zip(boundaries, inputs, parts, strict=True)
        ]
        sides = (inputs[0], own[0]) if len(parts) == 1 else (torch.cat(inputs), torch.cat(own))
        left, right = sides[::-1] if transposed else sides
        found = ExpertProducts(left, right, experts, rows, self.leaves[leaf].shape)
        return found if rows.used is None else found.keep_rows(rows.used)

    def _down(self, terms: dict[Edge, list[PerExampleGrads]]) -> dict[FallbackCall, list[PerExampleGrads]]:
        """Each example's gradients at the uses, given those at tensors of the region."""
        uses = {id(parameter): use for use, parameter in self._bare.items()}
        ends: dict[Any, FallbackCall] = {node: use for use, node in self._tables.items()}
        ends |= {node: uses[id(parameter)] for node, parameter in self.leaves.items()}
        found: dict[FallbackCall, list[PerExampleGrads]] = {}
        left: dict[Edge, PerExampleGrads] = {}
        for edge, parts in terms.items():
            if edge[0] in ends:
                found.setdefault(ends[edge[0]], []).extend(parts)
                continue
            term = combined(parts)
            parameters = of_parameters(edge, term, self.leaves)
            if parameters is None:
                left[edge] = term
            for node, each in (parameters or {}).items():
                found.setdefault(ends[node], []).append(each)
        if left:
            inputs: list[Any] = [*self._bare.values(), *(GradientEdge(node, 0) for node in self._tables.values())]
            pulled = pulled_back([GradientEdge(*edge) for edge in left], inputs, list(left.values()))
            for use, below in zip(self.uses, pulled, strict=True):
                if below is not None:
                    found.setdefault(use, []).append(Dense(below))
        return found


def _is_table(node: Any, call: LayerCall, others: dict[int, Any]) -> bool:
    """Whether a layer read constants alone, by a node that keeps what its rule needs, with no parameter of others."""
    return not call.sources and node.name() == CAPTURE and others.keys().isdisjoint(parameters_of(call))


def parameters_of(call: LayerCall) -> dict[int, Any]:
    """The model's own parameters that a layer used, by id."""
    return {id(call.owners[name]): call.owners[name] for name in call.own}


def _refuse_spread(losses: Tensor, found: dict[FallbackCall, list[PerExampleGrads]]) -> None:
    """Raises UnsupportedModelError where what isn't finite came from one example to another's gradients.

    Those of examples with finite losses [B] would be left out for another's, which no bound covers.
    """
    if is_traced() or bool((finite := losses.isfinite()).all()):
        return
    for term in (term for terms in found.values() for term in terms if isinstance(term, Dense)):
        own = term.gradients.isfinite().reshape(term.examples, -1).all(1)
        if len(own) == len(finite) and bool((finite & ~own).any()):
            raise UnsupportedModelError(
                "an example whose loss is not finite spoils the gradients of others, through a parameter that is used "
                "outside of every layer with a rule, so that it can't be left out alone; give the module a rule (see "
                "CONTRIBUTING.md), or leave such examples out of the data"
            )
