"""One graph, for the batches of one key, and how its trial goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from ghostclip.compiled.region import Region
from ghostclip.compiled.signature import CompileRequest
from ghostclip.compiled.trace_friendly import Clipped
from ghostclip.compiled.trial import Trial

__all__ = ["GraphPlan"]


@dataclass
class GraphPlan:
    """One key's graph, and how its trial goes.

    Attributes:
        kept: what the key was made of, so that no id in it is used again. Where there is no graph nothing is kept: who
            is taken for another by its id runs eagerly.
        held: parameters and buffers, the graph's first inputs.
        region: the graph; None where eager is to be used.
        structure: of losses, norms and weights, of which the latter may be by group.
        present: for each trained parameter, whether its sum is among the graph's outputs.
        trial: of graph and eager.
        batches: how many came for it.
        runs_without_result: how many of the last batches the graph gave no result to.
    """

    kept: list[Any] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    region: Region | None = None
    structure: TreeSpec | None = None
    present: list[bool] = field(default_factory=list)
    trial: Trial = field(default_factory=Trial)
    batches: int = 0
    runs_without_result: int = 0

    def run(self, asked: CompileRequest, keep: Tensor) -> Clipped | None:
        """The graph's result, without the rows that were padding; None when `trace_friendly` says that it is none.

        Args:
            asked: the batch.
            keep: 1 for rows that are examples, 0 for padding.
        """
        assert self.region is not None
        assert self.structure is not None
        fine, *found = self.region(*self.held, *asked.leaves, keep)
        if not math.isfinite(fine.item()):
            return None
        count = len(found) - sum(self.present)
        vectors, sums = found[:count], iter(found[count:])
        if asked.examples < len(vectors[0]):
            vectors = [vector[: asked.examples] for vector in vectors]
        losses, norms, weights = tree_unflatten(vectors, self.structure)
        return Clipped(losses, norms, weights, [next(sums) if there else None for there in self.present])
