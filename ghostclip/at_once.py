"""Networks of small linear layers alone, where calling operations costs more than what they compute.

What an ordinary pass found of such a graph is remembered; from then on its norms, weights and clipped sums take one
call of native/affine.c, and a product for each layer whose sum is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ghostclip.clipping import Adaptive, Flat, Groupwise, Policy, Thresholds
from ghostclip.graph import Uses, captured_calls, first_pass
from ghostclip.groupwise import POSTPONED_BYTES
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call
from ghostclip.norms.affine import Affine, clipped_sums_of
from ghostclip.outcome import add_to_gradient, norm_dtype
from ghostclip.passes import Collector
from ghostclip.regroup import Grouping

__all__ = ["AtOnce"]


@dataclass(frozen=True)
class Known:
    """What an ordinary pass found.

    Attributes:
        trained: names and parameters.
        owners: ids of the parameters, in the order of the calls.
        groups: the number of each call's group.
        bounds: {group: bound}; {} where there is one for the whole.
    """

    trained: list[tuple[str, nn.Parameter]]
    owners: list[int]
    groups: list[int]
    bounds: dict[str, float]

    def holds(self, calls: Sequence[Call], trained: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Whether no parameter was exchanged, tied, frozen or thawed since."""
        same = [id(item) for item in trained] == [id(item) for item in self.trained]
        return same and self.owners == _owners(calls)


class AtOnce:
    """Clips networks of which it is known that linear layers on one position an example are all there is to them.

    Args:
        index: of the model.
        grouping: what was proved of its graphs.
        policy: nothing is ever known where it has weights other than min(1, bound / norm).
    """

    def __init__(self, index: ModelIndex, grouping: Grouping, policy: Policy | Groupwise) -> None:
        self._index, self._grouping, self._policy = index, grouping, policy
        self._known: dict[tuple, Known] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def learn(self, uses: Uses, run: Collector, partition: Mapping[str, str]) -> None:
        """Remembers a graph where every trained parameter has one use, and all that was answered at once is small."""
        trained, graph, owners = self._index.trained(), uses.key(run.examples), _owners(uses.calls)
        dtype = norm_dtype(trained)
        if run.joined != len(uses.calls) or run.joined_bytes > POSTPONED_BYTES or len(owners) != len(trained):
            return
        if not self._grouping.is_settled(graph, uses) or any(c.dtype is not dtype or c.packed for c in uses.calls):
            return
        bounds: dict[str, float] = {}
        groups = [0] * len(uses.calls)
        if isinstance(self._policy, Thresholds):
            order = list(dict.fromkeys(partition.values()))
            thresholds = self._policy.thresholds_of(order)
            bounds = {group: thresholds[group] for group in order}
            first = [self._index.names[id(call.layer._parameters[call.parameters[0]])] for call in uses.calls]
            groups = [order.index(partition[name]) for name in first]
        elif type(self._policy) not in (Flat, Adaptive):
            return
        self._known[graph] = Known(trained, owners, groups, bounds)

    def clip(self, losses: Tensor, retain_graph: bool) -> tuple[Any, Any] | None:
        """Adds the clipped sum to each p.grad; returns norms and weights, [B] or {group: [B]}.

        Returns None, and does nothing, for a graph that isn't known.
        """
        uses = captured_calls(losses, self._index)
        graph = uses.key(losses.shape[0])
        known = self._known.get(graph)
        if known is None or not self._grouping.is_settled(graph, uses):
            return None
        if not known.holds(uses.calls, self._index.trained()):
            return None
        taken: dict[int, Affine] = {}

        def take(call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            affine = call.layer.joint(call, tuple([tensor.detach() for tensor in inputs]), grad)
            assert affine is not None
            taken[id(call)] = affine

        first_pass(losses, uses.calls, take, retain_graph=retain_graph)
        affines = [taken[id(call)] for call in uses.calls]
        bounds = list(known.bounds.values()) or [self._policy.max_norm]  # type: ignore[union-attr]
        norms, weights, sums = clipped_sums_of(affines, known.groups, bounds, losses.detach())
        for call, each in zip(uses.calls, sums, strict=True):
            for name, amount in zip(call.parameters, each, strict=True):
                add_to_gradient(call.layer._parameters[name], None, amount)  # type: ignore[arg-type]
        if not known.bounds:
            return norms[0], weights[0]
        return dict(zip(known.bounds, norms, strict=True)), dict(zip(known.bounds, weights, strict=True))


def _owners(calls: Sequence[Call]) -> list[int]:
    """Ids of the parameters the calls used."""
    return [id(call.layer._parameters[name]) for call in calls for name in call.parameters]
