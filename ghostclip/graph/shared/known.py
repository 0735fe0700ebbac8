"""What all examples share in graphs of one structure, to be found again in the next one.

Where node 3 of the walk is the boundary h = x * q, and q its second input, that is (3, 0, [1]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ghostclip.graph.nodes import Edge
from ghostclip.graph.owners import Rows
from ghostclip.graph.reader import Uses
from ghostclip.graph.shared.boundary import BroadcastBoundary
from ghostclip.graph.shared.subgraph import SharedSubgraph

__all__ = ["KnownShared"]


@dataclass(frozen=True)
class KnownShared:
    """What all examples share in graphs of a structure; places are those of nodes in the walk.

    Attributes:
        boundaries: (place of a node, number of its output, slots of its shared inputs).
        tables: numbers of the uses of layers that are shared.
        silent: (place of a node, number of its output) of tensors that may be boundaries once they have a gradient.
    """

    boundaries: Sequence[tuple[int, int, Sequence[int]]]
    tables: Sequence[int]
    silent: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, uses: Uses, region: SharedSubgraph | None) -> KnownShared:
        """That of a graph, to be found again in others."""
        if region is None:
            return cls([], [])
        places, tables = uses.places, set(region.calls.values())
        boundaries = [(places[each.node], each.number, each.shared) for each in region.boundaries]
        numbers = [number for number, call in enumerate(uses.calls) if call in tables]
        return cls(boundaries, numbers, [(places[node], number) for node, number in region.silent])

    def edges(self, uses: Uses) -> list[Edge]:
        """The boundaries' outputs in a graph."""
        return [(uses.nodes[place], number) for place, number, _ in self.boundaries]

    def region(self, uses: Uses, rows: Sequence[Rows], examples: int) -> SharedSubgraph | None:
        """The part of a graph that is shared, given the boundaries' rows; None where nothing is."""
        if not uses.leaves and not self.tables:
            return None
        boundaries = [
            BroadcastBoundary(uses.nodes[place], number, own, examples, slots)
            for (place, number, slots), own in zip(self.boundaries, rows, strict=True)
        ]
        calls = [uses.calls[number] for number in self.tables]
        tables = {uses.capturing[call]: call for call in calls}
        return SharedSubgraph(examples, boundaries, {node: node.variable for node in uses.leaves}, tables)
