"""What all examples share in graphs of one structure, to be found again in the next one.

Where node 3 of the walk is the boundary h = x * q, q its second input and h [2, 5] with two examples in dimension 0,
that is (3, 0, [1], 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ghostclip.graph.nodes import Edge
from ghostclip.graph.reader import Uses
from ghostclip.graph.rows import Owned, Rows, Subject
from ghostclip.graph.shared.boundary import BroadcastBoundary
from ghostclip.graph.shared.subgraph import SharedSubgraph

__all__ = ["KnownShared"]


@dataclass(frozen=True)
class KnownShared:
    """What all examples share in graphs of a structure; places are those of nodes in the walk.

    Attributes:
        boundaries: (place of a node, number of its output, slots of its shared inputs, dimension of the examples; None
            where it isn't certain).
        shared_calls: numbers of the uses of layers that are shared.
        layers: of each use of a layer, the dimension that has the examples; None where none has, or it isn't certain.
        silent: (place of a node, number of its output) of tensors that may be boundaries once they have a gradient.
    """

    boundaries: Sequence[tuple[int, int, Sequence[int], int | None]]
    shared_calls: Sequence[int]
    layers: Sequence[int | None]
    silent: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, uses: Uses, owned: Mapping[Subject, Owned], region: SharedSubgraph | None) -> KnownShared:
        """The record of a graph that was measured, by which its shared part is found in others."""
        layers = [owned[call].dim for call in uses.calls]
        if region is None:
            return cls([], [], layers)
        places, tables = uses.places, set(region.calls.values())
        boundaries = [(places[each.node], each.number, each.shared, owned[each.edge].dim) for each in region.boundaries]
        numbers = [number for number, call in enumerate(uses.calls) if call in tables]
        return cls(boundaries, numbers, layers, [(places[node], number) for node, number in region.silent])

    def edges(self, uses: Uses) -> list[Edge]:
        """The boundaries' outputs in a graph."""
        return [(uses.nodes[place], number) for place, number, *_ in self.boundaries]

    def shared_inputs(self, uses: Uses) -> list[set[Any]]:
        """Of each boundary, the nodes that gave it what all examples share."""
        nodes = [(uses.nodes[place], slots) for place, _, slots, _ in self.boundaries]
        return [{node.next_functions[slot][0] for slot in slots} for node, slots in nodes]

    def dims(self, uses: Uses) -> dict[Subject, int]:
        """The dimensions that have the examples, of layers and of the boundaries' outputs."""
        dims: list[tuple[Subject, int | None]] = [*zip(uses.calls, self.layers, strict=True)]
        dims += [((uses.nodes[place], number), dim) for place, number, _, dim in self.boundaries]
        return {subject: dim for subject, dim in dims if dim is not None}

    def region(self, uses: Uses, rows: Sequence[Rows], examples: int) -> SharedSubgraph | None:
        """The part of a graph that is shared, given the boundaries' rows; None where nothing is."""
        if not uses.leaves and not self.shared_calls:
            return None
        boundaries = [
            BroadcastBoundary(uses.nodes[place], number, own, examples, slots)
            for (place, number, slots, _), own in zip(self.boundaries, rows, strict=True)
        ]
        calls = [uses.calls[number] for number in self.shared_calls]
        tables = {uses.capturing[call]: call for call in calls}
        return SharedSubgraph(examples, boundaries, {node: node.variable for node in uses.leaves}, tables)
