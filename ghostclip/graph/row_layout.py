"""How one batch is laid out: whose the rows of each layer are, and what is still to be seen in the pass itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge
from ghostclip.graph.owners import Gradients
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses
from ghostclip.graph.rows import Owned, Rows, Subject
from ghostclip.graph.shared.search import mixing_error
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall, Sink
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["RowLayout", "ZeroGradientCheck", "check_calls", "of_nobody", "row_layout"]


Regrouping = tuple[int, RowOrder, Tensor | None]


@dataclass(frozen=True)
class RowLayout:
    """Whose the rows behind a vector of losses are.

    Attributes:
        calls: every use of a parameter.
        regrouping: {id(call): (rows of each example, their order, those that are used)}, as `regrouped` takes them, of
            calls without one row of each example in the order of the losses. Where the order is an index, the number
            means nothing.
        rows: of every layer's use, and of the tensors at which parameters used outside of layers meet the examples.
        stored: whether the next batch like this one is taken to be laid out alike.
        measured: whether this one was measured.
        half: whether some operation computes in float16; False where the batch was measured.
        gradients: of a backward from ones, of all layers and boundaries; None where they weren't held.
        drops_odd: whether rows that aren't finite are nobody's here.
        check: what is left to be seen in the gradients of the pass itself; nothing is clipped before.
    """

    calls: list[LayerCall]
    regrouping: Mapping[int, Regrouping]
    rows: Mapping[Subject, Rows] = field(default_factory=dict)
    stored: bool = True
    measured: bool = False
    half: bool = False
    gradients: Gradients | None = None
    drops_odd: bool = False
    check: ZeroGradientCheck | None = None


class ZeroGradientCheck:
    """Sees whether a gradient that was zero when ownership was measured isn't any more.

    Args:
        calls: uses of layers.
        edges: tensors of the graph, which the pass must reach; their gradients are given to `found_nonzero`.
    """

    def __init__(self, calls: Sequence[LayerCall], edges: Sequence[Edge]) -> None:
        self._calls, self.edges = set(map(id, calls)), edges
        self._arrived = list[Tensor]()

    def watched(self, sink: Sink) -> Sink:
        """A sink for the pass, which is told what ``sink`` is to be told."""

        def look(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            if id(call) in self._calls:
                self._arrived.append(grad.any())
            sink(call, inputs, grad)

        return look

    def found_nonzero(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Whether one of them was given a gradient that isn't zero, bool []; None where none was given any."""
        arrived = [*self._arrived, *(grad.any() for grad in grads if grad is not None)]
        return torch.stack(arrived).any() if arrived else None


def row_layout(
    uses: Uses, rows: Mapping[Subject, Rows], region: SharedSubgraph | None, examples: int, **rest: Any
) -> RowLayout:
    """The layout of one batch; each call is told where its examples are."""
    shared = set() if region is None else set(region.calls.values())
    calls = [call for call in uses.calls if call not in shared]
    regrouping: dict[int, Regrouping] = {}
    for call in calls:
        own = rows[call]
        call.batch_dim = own.dim
        count = own.count(call.shape[own.dim], examples)
        if count != 1 or isinstance(own.order, RowIndex) or own.used is not None:
            regrouping[id(call)] = count, own.order, own.used
    if region is None:
        return RowLayout(calls, regrouping, rows, **rest)
    met: dict[Subject, Rows] = {each.edge: each.rows for each in region.boundaries}
    return RowLayout([*calls, *region.uses], regrouping, {**rows, **met}, **rest)


def of_nobody(call: LayerCall, dim: int, examples: int) -> Rows:
    """The rows of a use whose gradient is zero: they count for nobody, lest 0 * inf of one example be another's NaN."""
    none = torch.zeros(call.shape[dim], dtype=torch.bool, device=call.device)
    in_order = len(none) and not len(none) % examples
    return Rows(dim, "example" if in_order else RowIndex(none.long(), examples), none)


def check_calls(
    uses: Uses, owned: Mapping[Subject, Owned], shared: set[LayerCall], indices: Sequence[RowIndex],
    names: ParameterNames,
) -> None:  # fmt: skip
    """Raises unless every layer's rows have owners, where the user says they are."""
    for call in uses.calls:
        found = owned[call]
        if found.is_shared and call not in shared:
            raise mixing_error(uses.capturing[call], names)
        if found.rows is None or found.zero:
            continue
        if found.rows.dim != call.batch_dim and "ghost_batch_dim" in vars(call.layer):
            raise UnsupportedModelError(
                f"{names.layer(call)}: wrap(model, batch_dim=...) says that examples are in dimension "
                f"{call.batch_dim} of its output ({list(call.shape)}), but they are in dimension {found.rows.dim}",
                name=names.layer(call), place=call,
            )  # fmt: skip
        _check_index(call, found.rows, indices, names)


def _check_index(call: LayerCall, rows: Rows, indices: Sequence[RowIndex], names: ParameterNames) -> None:
    """Raises unless the rows belong to the examples that ``batch_index`` says."""
    size = call.shape[rows.dim]
    said = [index.index for index in indices if len(index) == size]
    if not said or any(index is rows.order for index in indices):
        return
    examples = indices[0].examples
    own, used = rows.owners(size, examples, call.device), getattr(rows.order, "used", None)
    if size == examples:  # or one of each example
        said.append(torch.arange(size, device=call.device))
    if all(bool((own != index if used is None else (own != index) & used).any()) for index in said):
        raise UnsupportedModelError(
            f"{names.layer(call)}: its {size} rows do not belong to the examples that batch_index says; correct it, or "
            "leave it out",
            name=names.layer(call), place=call,
        )  # fmt: skip
