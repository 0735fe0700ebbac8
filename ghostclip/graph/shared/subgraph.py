"""The way down from the boundaries to the parameters: gradients of all examples at once, each its own.

Where a boundary was given a parameter itself, its gradients by example are known there. Others go down the shared part
of the graph: by formulas for tables and computed weights (computed.py), else by a backward of every example's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge, inputs_first, shape_of
from ghostclip.graph.reader import without_hooks
from ghostclip.graph.rows import crossed_error, shows_all
from ghostclip.graph.shared.boundary import BroadcastBoundary, Target
from ghostclip.graph.shared.closed_forms import terms_at
from ghostclip.graph.shared.computed import of_parameters
from ghostclip.graph.shared.own_backward import not_finite
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import LayerCall, Part, Sink
from ghostclip.nn.fallback import FallbackCall, of_table
from ghostclip.norms.precision import full_precision
from ghostclip.norms.pullback import pulled_back
from ghostclip.norms.ragged import combined
from ghostclip.norms.term import Dense, PerExampleGrads

__all__ = ["SharedSubgraph", "parameters_of"]


@dataclass
class SharedSubgraph:
    """The shared part of one batch's graph.

    Attributes:
        examples: B.
        boundaries: where it meets the examples.
        leaves: the parameters it starts from outside of layers: {accumulating node: parameter}.
        calls: {capturing node: call} of layers that saw no examples.
        shared: all of its nodes; empty where it was found again by a stored layout.
        shown: whether it was shown to be the same whatever the examples are.
        given: layers with a shared input and an output with examples, for which there is no rule.
        silent: tensors with a gradient of zeros where something shared may meet the examples.
        uses: of its parameters in a pass, with their gradients by example.
        watch: told (tensor, gradient) of each boundary in a pass that measures.
    """

    examples: int
    boundaries: list[BroadcastBoundary]
    leaves: dict[Any, Tensor]
    calls: dict[Any, LayerCall]
    shared: list[Any] = field(default_factory=list)
    shown: bool = True
    given: list[LayerCall] = field(default_factory=list)
    silent: list[Edge] = field(default_factory=list)
    uses: list[FallbackCall] = field(default_factory=list)
    watch: Callable[[Edge, Tensor], None] | None = None

    def __post_init__(self) -> None:
        targets, products = dict[Target, None](), Counter[Target]()
        for boundary in self.boundaries:
            for slot in boundary.shared:
                own = boundary.targets(slot)
                targets |= dict.fromkeys(own)
                if boundary.is_product(slot) or len(own) > 1:
                    nbytes = shape_of(boundary.edge).numel() * boundary.node._input_metadata[0].dtype.itemsize
                    products.update(dict.fromkeys(own, nbytes // len(own)))
        self._parameters = {id(parameter): parameter for parameter in self.leaves.values()}
        for call in self.calls.values():
            self._parameters |= parameters_of(call)
        parts = [(node, part) for (node, _), part in targets if part is not None]
        # Experts' matrices have uses of their own; a parameter that nothing else uses has no other.
        others = set(inputs_first(*[node for (node, _), part in targets if part is None])) if parts else set()
        split = {id(self.leaves[node]) for node, _ in parts if node not in others}
        uses: list[Part] = [(owner, None) for owner in self._parameters if owner not in split]
        uses += [(id(self.leaves[node]), part) for node, part in parts]
        self._uses = {use: FallbackCall(self._parameters[use[0]], self.examples, use[1]) for use in uses}
        self.uses = [*self._uses.values()]
        for use in self.uses:
            use.region = self
        # A product's term takes no more bytes than the product.
        for ((node, _), part), nbytes in products.items():
            if node in self.leaves:
                use = self._uses[id(self.leaves[node]), part]
                use.nbytes = min(use.nbytes, nbytes)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All below the boundaries, frozen ones, too."""
        of_layers = [parameter for call in self.calls.values() for parameter in call.layer.parameters()]
        return [node.variable for node in self.leaves] + of_layers

    @torch.no_grad()
    def hand_over(self, grads: list[Any], losses: Tensor, sink: Sink, wanted: Collection[LayerCall] | None) -> None:
        """Tells the sink of every use, given the gradients at the boundaries; the graph must be there still.

        Args:
            grads: one for each of ``boundaries``; None where none arrived.
            losses: [B].
            sink, wanted: as in a first pass.
        """
        for boundary, grad in zip(self.boundaries, grads, strict=True):
            if self.watch is not None and grad is not None:
                self.watch(boundary.edge, grad)
            rows = boundary.rows
            if grad is not None and rows.crossed and (not_finite(boundary.node) or not shows_all(grad, rows)):
                raise crossed_error(boundary.node, f"what {boundary.node.name()} gives")
        grad = None  # the list alone holds gradients, and is emptied
        if wanted is not None and not any(use in wanted for use in self.uses):
            return
        with full_precision(losses.device), without_hooks(list(self._parameters.values())):
            found = self._down(self._terms(grads), losses.detach())
        grads.clear()
        _refuse_spread(losses.detach(), chain.from_iterable(found.values()))
        for key, use in self._uses.items():
            use.found = combined(found.pop(key)) if key in found else None
            sink(use, (), losses if use.found is None else use.found.tensors[0])
            use.found = None

    def _terms(self, grads: list[Any]) -> dict[Target, list[PerExampleGrads]]:
        """Each example's gradients at tensors of the region."""
        found: dict[Target, list[PerExampleGrads]] = {}
        for boundary, grad in zip(self.boundaries, grads, strict=True):
            for target, term in terms_at(boundary, grad) if grad is not None else ():
                found.setdefault(target, []).append(term)
        return found

    def _down(self, terms: dict[Target, list[PerExampleGrads]], losses: Tensor) -> dict[Part, list[PerExampleGrads]]:
        """Each example's gradients at the uses, given those at tensors of the region."""
        found: dict[Part, list[PerExampleGrads]] = {}
        left: dict[Edge, PerExampleGrads] = {}
        for (edge, part), parts in terms.items():
            if edge[0] in self.leaves:
                found.setdefault((id(self.leaves[edge[0]]), part), []).extend(parts)
                continue
            term = combined(parts)
            parameters = self._by_formula(edge, term)
            if parameters is None:
                left[edge] = term
            for owner, each in (parameters or {}).items():
                found.setdefault((owner, None), []).append(each)
        if left:
            outputs = [GradientEdge(*edge) for edge in left]
            pulled = pulled_back(outputs, [*self._parameters.values()], list(left.values()))
            whole = {
                owner: Dense(below) for owner, below in zip(self._parameters, pulled, strict=True) if below is not None
            }
            _refuse_spread(losses, whole.values(), is_pulled=True)
            for owner, term in whole.items():
                found.setdefault((owner, None), []).append(term)
        return found

    def _by_formula(self, edge: Edge, term: PerExampleGrads) -> dict[int, PerExampleGrads] | None:
        """The gradients of parameters, by their ids, from those at a tensor; None where no formula is known."""
        if (call := self.calls.get(edge[0])) is None:
            return of_parameters(edge, term, self.leaves)
        if not call.layer.reads_indices or call.sources or call.rows:
            return None
        found = of_table(call, edge[0].saved_tensors, term.per_example().to(call.dtype))
        return None if found is None else {id(call.owners[call.parameters[0]]): found}


def parameters_of(call: LayerCall) -> dict[int, Any]:
    """The model's own parameters that a layer used, by id."""
    return {id(call.owners[name]): call.owners[name] for name in call.own}


def _refuse_spread(losses: Tensor, found: Iterable[PerExampleGrads], is_pulled: bool = False) -> None:
    """Raises UnsupportedModelError where what isn't finite may have come from one example to another's gradients.

    Those of examples with finite losses [B] would be left out for another's, which no bound covers. Where all losses
    are finite, only gradients that were pulled back through several operations may have done so; one example's may be
    its own.
    """
    if is_traced():
        return
    finite = losses.isfinite()
    most = int(bool(finite.all()))
    if most and not is_pulled:
        return
    for term in (term for term in found if isinstance(term, Dense)):
        own = term.gradients.isfinite().reshape(term.examples, -1).all(1)
        if len(own) == len(finite) and int((finite & ~own).sum()) > most:
            raise UnsupportedModelError(
                "an example whose loss or gradient is not finite spoils the gradients of others, through a parameter "
                "that is used outside of every layer with a rule, so that it can't be left out alone; give the module "
                "a rule (see CONTRIBUTING.md), or leave such examples out of the data"
            )
