"""What all examples share: from parameters used outside of layers, and layers that saw no examples, to where they meet.

A tensor is shared when it was made of parameters, constants and other shared tensors alone. Where the graph brings it
together with the examples is found by `ghostclip.graph.shared.search`; the gradient of each example there, by
`ghostclip.graph.shared.boundary`. From there it goes back down through the shared part here, once per example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge, from_below, shape_of, signed
from ghostclip.graph.reader import without_hooks
from ghostclip.graph.shared.boundary import BroadcastBoundary
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import CAPTURE, LayerCall
from ghostclip.nn.fallback import FallbackCall, bare, expert_product, product, spread
from ghostclip.norms.pullback import pulled_back
from ghostclip.norms.ragged import RowIndex

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
        watch: told (tensor, gradient) of each boundary in a pass that measures.
    """

    examples: int
    boundaries: list[BroadcastBoundary]
    leaves: dict[Any, Tensor]
    calls: dict[Any, LayerCall]
    uses: list[FallbackCall] = field(default_factory=list)
    watch: Callable[[Edge, Tensor], None] | None = None

    def __post_init__(self) -> None:
        # Uses as a factor of a product, with the number of the boundary; the other inputs of each boundary.
        self._products: list[tuple[list[int], FallbackCall]] = []
        experts: dict[tuple[int, bool], list[tuple[int, int | None, Tensor]]] = {}
        self._dense: list[list[tuple[int, Edge]]] = []
        for number, boundary in enumerate(self.boundaries):
            places = []
            for place, edge in boundary.shared:
                found = self._parameter_of(edge) if boundary.is_product(place) else None
                if found is None:
                    places.append((place, edge))
                    continue
                parameter, transposed, expert = found
                if parameter.dim() == 3:
                    experts.setdefault((id(parameter), transposed), []).append((number, expert, parameter))
                else:
                    use = product(parameter, self.examples, boundary.count, boundary.row_order, transposed)
                    self._products.append(([number], use))
            self._dense.append(places)
        self._products += [self._of_experts(parts, transposed) for (_, transposed), parts in experts.items()]
        nodes = set(from_below(*(edge[0] for places in self._dense for _, edge in places)))
        reached = {id(p): p for node, p in self.leaves.items() if node in nodes or not self.boundaries}
        tables = dict(self.calls)
        # A gradient from autograd has all of a parameter's uses below the boundaries.
        while others := [node for node, call in tables.items() if not _is_table(node, call, reached)]:
            for node in others:
                reached |= parameters_of(tables.pop(node))
        # Where autograd gives each use its gradient: a parameter, or the output of a layer that reads constants.
        self._bare = {bare(parameter, self.examples): parameter for parameter in reached.values()}
        self._tables = {spread(call, self.examples): node for node, call in tables.items()}
        self.uses = [use for _, use in self._products] + [*self._bare, *self._tables]
        for use in self.uses:
            use.region = self

    def _parameter_of(self, edge: Edge) -> tuple[Tensor, bool, int | None] | None:
        """(parameter, whether transposed, which of its matrices) of a tensor that is one, or its transpose.

        None for another; and for all matrices, one after another.
        """
        node, transposed, expert = edge[0], False, None
        while node not in self.leaves:
            name = node.name()
            if name == "SelectBackward0" and node._saved_dim == 0 and expert is None:
                expert = node._saved_index % shape_of(node.next_functions[0])[0]
            elif name in ("TBackward0", "TransposeBackward0") and 0 not in _swapped(node):
                transposed = not transposed
            elif name != "ToCopyBackward0":
                return None
            node = node.next_functions[0][0]
        return self.leaves[node], transposed, expert

    def _of_experts(
        self, parts: list[tuple[int, int | None, Tensor]], transposed: bool
    ) -> tuple[list[int], FallbackCall]:
        """One use for all products with matrices of a parameter: (numbers of boundaries, use)."""
        boundaries = [self.boundaries[number] for number, _, _ in parts]
        experts = [b.experts(expert) for b, (_, expert, _) in zip(boundaries, parts, strict=True)]
        rows = [boundary.rows(self.examples) for boundary in boundaries]
        own = [each for some in experts for each in some]
        use = expert_product(parts[0][2], self.examples, own, RowIndex.joined(rows), transposed)
        return [number for number, _, _ in parts], use

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
        for boundary, grad in zip(self.boundaries, grads, strict=True):
            if self.watch is not None and grad is not None:
                self.watch(boundary.edge, grad)
        for numbers, use in self._products:
            factors = [self.boundaries[number].factor() for number in numbers]
            shapes = [shape_of(self.boundaries[number].edge) for number in numbers]
            own = [
                factor.new_zeros(shape) if grads[number] is None else grads[number]
                for number, factor, shape in zip(numbers, factors, shapes, strict=True)
            ]
            sink(use, (_joined(factors),), _joined(own))
        if wanted is not None and not any(use in wanted for use in (*self._bare, *self._tables)):
            return
        shares: dict[Edge, Tensor] = {}
        if not self.boundaries and self.examples:
            # All there is belongs to the one example.
            shares = {(losses.grad_fn, losses.output_nr): torch.diag(seed)}
        for boundary, grad, places in zip(self.boundaries, grads, self._dense, strict=True):
            for edge, share in boundary.per_example(grad, places) if grad is not None else ():
                shares[edge] = shares[edge] + share if edge in shares else share
        grads.clear()
        found = self._down(shares)
        _refuse_spread(losses.detach(), list(found.values()))
        for use in (*self._bare, *self._tables):
            grad = found.pop(use, None)
            grad = torch.zeros(use.shape, dtype=use.dtype, device=use.device) if grad is None else grad
            sink(use, self._tables[use].saved_tensors if use in self._tables else (), grad.reshape(use.shape))

    def _down(self, shares: dict[Edge, Tensor]) -> dict[FallbackCall, Tensor]:
        """Each example's gradients at the uses, [B, *shape], given those at tensors of the region."""
        ends = {(node, 0): use for use, node in self._tables.items()}
        ends |= {(node, 0): use for use, p in self._bare.items() for node, leaf in self.leaves.items() if leaf is p}
        found = {use: shares.pop(edge) for edge, use in ends.items() if edge in shares}
        if not shares:
            return found
        outputs, dtypes = [GradientEdge(*edge) for edge in shares], [e[0]._input_metadata[e[1]].dtype for e in shares]
        inputs: list[Any] = [*self._bare.values(), *(GradientEdge(node, 0) for node in self._tables.values())]
        seeds = [share.to(dtype) for share, dtype in zip(shares.values(), dtypes, strict=True)]
        with without_hooks(list(self._bare.values())):
            each = pulled_back(outputs, inputs, seeds)
        for use, below in zip((*self._bare, *self._tables), each, strict=True):
            if below is not None:
                found[use] = found[use] + below if use in found else below
        return found


def _swapped(node: Any) -> tuple[int, ...]:
    """The dimensions of a matrix, or of each of several, that a transposition swaps."""
    if node.name() == "TBackward0":
        return (-1, -2)
    dims = len(shape_of((node, 0)))
    return tuple(signed(dim) % dims for dim in (node._saved_dim0, node._saved_dim1))


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _is_table(node: Any, call: LayerCall, others: dict[int, Any]) -> bool:
    """Whether a layer read constants alone, by a node that keeps what its rule needs, with no parameter of others."""
    return not call.sources and node.name() == CAPTURE and others.keys().isdisjoint(parameters_of(call))


def parameters_of(call: LayerCall) -> dict[int, Any]:
    """The model's own parameters that a layer used, by id."""
    return {id(call.owners[name]): call.owners[name] for name in call.own}


def _refuse_spread(losses: Tensor, found: list[Tensor]) -> None:
    """Raises UnsupportedModelError where what isn't finite came from one example to another's gradients.

    Those of examples with finite losses [B] would be left out for another's, which no bound covers.
    """
    if is_traced() or bool((finite := losses.isfinite()).all()):
        return
    for gradients in found:
        own = gradients.isfinite().reshape(len(gradients), -1).all(1)
        if len(own) == len(finite) and bool((finite & ~own).any()):
            raise UnsupportedModelError(
                "an example whose loss is not finite spoils the gradients of others, through a parameter that is used "
                "outside of every layer with a rule, so that it can't be left out alone; give the module a rule (see "
                "CONTRIBUTING.md), or leave such examples out of the data"
            )
