"""Whose row is whose in a ragged batch, read from its graph: by the indices that operations saved.

Loss i is example i's. From there the owners of rows are followed down the graph: an operation that keeps rows apart
hands them on, and one that picks, adds or scatters rows by an index hands them on by that index. A row's gradient
depends on the losses of its owners alone, whatever the numbers are. Where the rows of each layer are owned as the
index of the batch says, no backward is needed to show it.

An operation that isn't known to keep rows apart ends it, and nothing is said of the batch; a row that two examples own
is reported. Both are left to the gradients (`ghostclip.graph.ragged_layout`). Hooks of tensors are not in the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghostclip.graph.nodes import ACCUMULATE, Edge, from_below, inputs_of, saved_dimensions, shape_of, signed
from ghostclip.graph.row_operations import (
    ATTENTION,
    FIRST,
    LOSS_FUNCTIONS,
    NOBODY,
    OTHERS_ALONG,
    PERMUTATIONS,
    PICKS,
    POINTWISE,
    PRODUCTS,
    PUTS,
    SCATTERS,
    SPLITS,
    VIEWS,
    WITH_A_TABLE,
    NotFollowed,
    in_view,
    narrowed,
    saved_places,
)  # fmt: skip
from ghostclip.graph.shared.boundary import LAYER_NORM
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["RaggedRows"]

# What uses a tensor says of its rows: (number of the output, dimension, owners).
Told = tuple[int | None, int, Tensor]


class RaggedRows:
    """The rows of one batch's graph.

    Args:
        losses: [B], of two examples or more.
        region: with the operations that bring parameters to rows; None where there are none.
        indices: of the batch.

    Attributes:
        problem: the operation at which rows aren't followed; empty where they are.
    """

    def __init__(self, losses: Tensor, region: SharedSubgraph | None, indices: Sequence[RowIndex]) -> None:
        self._device, self.problem = losses.device, ""
        self._boundaries = [] if region is None else region.boundaries
        self._examples = torch.arange(len(losses), device=self._device)
        # {rows: whose they are}, where just one index is as long.
        self._known: dict[int, Tensor | None] = {len(losses): self._examples}
        for rows in indices:
            self._known[len(rows)] = None if len(rows) in self._known else rows.index
        self._shared = {(boundary.node, place) for boundary in self._boundaries for place, _ in boundary.shared}
        # (dimension, owners) of rows of layers and of the outputs of operations.
        self._calls: dict[LayerCall, tuple[int, Tensor]] = {}
        self._rows: dict[Any, tuple[int, Tensor]] = {}
        self._told: dict[Any, list[Told]] = defaultdict(list)
        # (operation, owners, others, whether they differ, [] bool) wherever two have to say the same.
        self._compared: list[tuple[Any, Tensor, Tensor, Tensor]] = []
        # What an index makes of owners; both are kept, so that no other has their place in memory.
        self._found: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}
        nodes = from_below(losses.grad_fn)
        self._nodes = set(nodes)
        self._tell((losses.grad_fn, losses.output_nr), 0, self._examples)
        try:
            for node in reversed(nodes):
                if (told := self._told.pop(node, None)) is not None:
                    self._visit(node, told)
        except NotFollowed as end:
            self.problem = str(end)

    def follow(self, orders: Sequence[tuple[LayerCall, RowOrder]]) -> bool:
        """Whether the owners of all rows are known, of layers and at boundaries.

        Args:
            orders: uses of layers, and whose their rows have to be: "example", for one of each, or by an index.
        """
        wanted = [(call, self._calls.get(call), call.batch_dim, order) for call, order in orders]
        wanted += [(each.node, self._rows.get(each.node), each.dim, each.row_order) for each in self._boundaries]
        for subject, found, dim, order in wanted:
            index = order.index if isinstance(order, RowIndex) else self._examples
            if self.problem or found is None or found[0] != dim or len(found[1]) != len(index):
                self.problem = self.problem or _described(subject)
                return False
            self._compare(subject, found[1], index)
        return True

    def meeting(self) -> tuple[Any, str] | None:
        """An operation where rows of two examples meet, and in words; None where they don't, as far as is known."""
        if not self._compared or not bool(torch.stack([differ for *_, differ in self._compared]).any()):
            return None
        node, owners, others, _ = next(each for each in self._compared if bool(each[3]))
        pairs = torch.stack([owners, others])[:, _differ(owners, others)]
        first, second = sorted(pairs[:, 0].tolist())
        return node, f"rows of the examples {first} and {second} meet at {_described(node)}"

    def _compare(self, node: Any, owners: Tensor, others: Tensor) -> None:
        """Notes that both have to say the same, but where one is of nobody's rows."""
        if owners is not others:
            self._compared.append((node, owners, others, _differ(owners, others).any()))

    def _tell(self, edge: tuple[Any, int | None], dim: int, owners: Tensor) -> None:
        node, number = edge
        if node is None or type(node) is ACCUMULATE:
            return
        shape = shape_of((node, number or 0))
        if dim >= len(shape) or shape[dim] != owners.shape[0]:  # autograd sums for a tensor that was repeated
            raise NotFollowed(_described(node))
        if node in self._nodes:
            self._told[node].append((number, dim, owners))
        else:  # inside of a layer
            self._go_down(node, dim, owners)

    def _visit(self, node: Any, told: list[Told]) -> None:
        """Takes what all that uses a node's outputs says of their rows, and hands it on."""
        if node.name() in SPLITS:
            told = self._unsplit(node, told)
        _, dim, owners = told[0]
        for _, other_dim, other in told[1:]:
            if other_dim != dim or len(other) != len(owners):
                raise NotFollowed(_described(node))
            if other is not owners:
                self._compare(node, owners, other)
                owners = torch.maximum(owners, other)
        self._go_down(node, dim, self._settled(node, owners))

    def _settled(self, node: Any, owners: Tensor) -> Tensor:
        """An index of the batch itself where just one is as long: these rows have to be owned as it says."""
        known = self._known.get(owners.shape[0])
        if known is None or known is owners:
            return owners
        self._compare(node, owners, known)
        return known

    def _go_down(self, node: Any, dim: int, owners: Tensor) -> None:
        """Follows rows into what they were computed from."""
        name = node.name()
        self._rows[node] = dim, owners
        if isinstance(call := getattr(node, "call", None), LayerCall):
            self._through_layer(node, call, dim, owners)
        elif name in self.STEPS and not isinstance(node, torch.autograd.function.BackwardCFunction):
            self.STEPS[name](self, node, dim, owners)
        else:
            raise NotFollowed(name)

    def _inputs(self, node: Any) -> Iterator[tuple[int, Edge]]:
        """The tensors that an operation was given, by place, without leaves and what all examples share."""
        for place, edge in enumerate(node.next_functions):
            if edge[0] is not None and type(edge[0]) is not ACCUMULATE and (node, place) not in self._shared:
                yield place, edge

    def _through_layer(self, node: Any, call: LayerCall, dim: int, owners: Tensor) -> None:
        """A layer that works row by row has its rows in one dimension; of another, its own graph is followed."""
        own = in_view(shape_of((node, 0)), dim, call.shape)
        if own != call.batch_dim:
            raise NotFollowed(_described(node))
        self._calls[call] = own, owners
        if call.layer.row_by_row:
            for below, _ in inputs_of(node):
                self._tell((below, None), own, owners)
        elif call.sources:
            for _, edge in self._inputs(node):
                self._tell(edge, dim, owners)

    def _elementwise(self, node: Any, dim: int, owners: Tensor) -> None:
        whole = len(shape_of((node, 0)))
        for _, edge in self._inputs(node):
            own = dim + len(shape_of(edge)) - whole
            if own < 0:
                raise NotFollowed(node.name())
            self._tell(edge, own, owners)

    def _view(self, node: Any, dim: int, owners: Tensor) -> None:
        shape = shape_of((node, 0))
        for _, edge in self._inputs(node):
            given = shape_of(edge)
            if (own := in_view(shape, dim, given)) is not None:
                self._tell(edge, own, owners)
                continue
            first = next((place for place, size in enumerate(given) if size != 1), None)
            if first is None or shape[:dim].numel() != 1 or not len(owners):
                raise NotFollowed(node.name())
            if given[first] % len(owners) == 0:
                self._tell(edge, first, owners.repeat_interleave(given[first] // len(owners)))
            elif len(owners) % given[first] == 0:
                self._tell(edge, first, self._one_each(node, owners.view(given[first], -1)))
            else:
                raise NotFollowed(node.name())

    def _one_each(self, node: Any, owners: Tensor) -> Tensor:
        """[n], the owner of rows made of several, [n, ...], which have to be the same one's."""
        if owners.dim() == 1:
            return owners
        if not owners.numel():
            raise NotFollowed(node.name())
        found = owners.flatten(1).amax(1)
        self._compare(node, owners, found.view(-1, *[1] * (owners.dim() - 1)).expand_as(owners))
        return found

    def _permuted(self, node: Any, dim: int, owners: Tensor) -> None:
        whole = len(shape_of((node, 0)))
        order = list(range(whole))
        if node.name() == "PermuteBackward0":
            order = saved_dimensions(node, whole)
        else:
            ends = (0, -1) if node.name() == "TBackward0" else (node._saved_dim0, node._saved_dim1)
            first, second = (signed(end) % whole for end in ends)
            order[first], order[second] = second, first
        for _, edge in self._inputs(node):
            self._tell(edge, order[dim], owners)

    def _with_a_table(self, node: Any, dim: int, owners: Tensor) -> None:
        kept = len(shape_of((node, 0))) - len(node._saved_normalized_shape) if node.name() == LAYER_NORM else 1
        for place, edge in self._inputs(node):
            if place != PRODUCTS.get(node.name(), 0) or dim >= kept:
                raise NotFollowed(node.name())
            self._tell(edge, dim, owners)

    def _along_first(self, node: Any, dim: int, owners: Tensor) -> None:
        for _, edge in self._inputs(node):
            if dim != 0:
                raise NotFollowed(node.name())
            self._tell(edge, 0, owners)

    def _split(self, node: Any, dim: int, owners: Tensor) -> None:
        self._tell(node.next_functions[0], dim, owners)

    def _unsplit(self, node: Any, told: list[Told]) -> list[Told]:
        """What is said of parts along rows, of the whole."""
        shape = shape_of(node.next_functions[0])
        along = signed(node._saved_dim) % len(shape)
        if any(dim != along for _, dim, _ in told):
            return told
        size, sizes = getattr(node, "_saved_split_size", 0), getattr(node, "_saved_split_sizes", ())
        found = torch.full((shape[along],), NOBODY, device=self._device)
        for number, _, owners in told:
            if number is None:
                raise NotFollowed(node.name())
            start = sum(sizes[:number]) + number * size
            part = found[start : start + len(owners)]
            self._compare(node, part.clone(), owners)
            part.copy_(torch.maximum(part, owners))
        return [(0, along, found)]

    def _along(self, node: Any, dim: int, owners: Tensor) -> None:
        """An operation along other dimensions, which may be gone afterwards; or along rows."""
        saved, whole = node._saved_dim, len(shape_of((node, 0)))
        for _, edge in self._inputs(node):
            total = len(shape_of(edge))
            along = [
                signed(each) % total for each in (saved if isinstance(saved, tuple) else [saved]) if each is not None
            ]
            if not along or total - whole not in (0, len(along)):
                raise NotFollowed(node.name())
            kept = range(total) if total == whole else [place for place in range(total) if place not in along]
            if kept[dim] in along:
                self._along_rows(node, dim, owners)
                return
            self._tell(edge, kept[dim], owners)

    def _along_rows(self, node: Any, dim: int, owners: Tensor) -> None:
        name, edges = node.name(), node.next_functions
        if name == "CatBackward0" and all(below is not None for below, _ in edges):
            for edge, part in zip(edges, owners.split([shape_of(edge)[dim] for edge in edges]), strict=True):
                self._tell(edge, dim, part)
        elif name == "SliceBackward0":
            part = slice(signed(node._saved_start), signed(node._saved_end), node._saved_step)
            self._pick(node, dim, torch.arange(shape_of(edges[0])[dim], device=self._device)[part], owners)
        elif name == "GatherBackward0":
            self._pick(node, dim, node._saved_index.movedim(dim, 0), owners)
        else:
            raise NotFollowed(name)

    def _picking(self, node: Any, dim: int, owners: Tensor) -> None:
        first, index, taken = saved_places(node)
        if dim == first and index.dim():
            self._pick(node, first, index, owners)
            return
        if first < dim < first + index.dim():
            raise NotFollowed(node.name())
        for _, edge in self._inputs(node):
            self._tell(edge, dim if dim < first else dim - index.dim() + taken, owners)

    def _pick(self, node: Any, dim: int, index: Tensor, owners: Tensor) -> None:
        """Follows rows to where they were picked, ``index`` [n, ...] along ``dim``."""
        index = narrowed(index)
        for _, edge in self._inputs(node):
            rows = shape_of(edge)[dim]
            if len(index) != len(owners):
                raise NotFollowed(node.name())

            def find(rows: int = rows) -> Tensor:
                own = owners.view(-1, *[1] * (index.dim() - 1)).expand_as(index).flatten()
                places = index.flatten().long() % max(1, rows)
                found = torch.full((rows,), NOBODY, device=self._device).scatter_reduce_(0, places, own, "amax")
                self._compare(node, found[places], own)
                return self._settled(node, found)

            self._tell(edge, dim, self._once(rows, index, owners, find))

    def _putting(self, node: Any, dim: int, owners: Tensor) -> None:
        """Rows are put into a tensor with such rows, by an index along one dimension."""
        shape, (first, index, taken) = shape_of((node, 0)), saved_places(node)
        for place, edge in self._inputs(node):
            if place == 0:
                self._tell(edge, dim, owners)
                continue
            own = dim
            if node.name() in SCATTERS:
                given, index = index.shape, index.movedim(first, 0)
            else:
                given = torch.Size((*shape[:first], *index.shape, *shape[first + taken :]))
                own = dim if dim < first + taken else dim - taken + index.dim()
            if shape_of(edge) != given or first < dim < first + taken:
                raise NotFollowed(node.name())
            self._tell(edge, own, self._put(node, index, owners) if dim == first else owners)

    def _put(self, node: Any, index: Tensor, owners: Tensor) -> Tensor:
        """The owners of the rows that are put at ``index`` [n, ...]."""
        index = narrowed(index)

        def find() -> Tensor:
            found = self._one_each(node, owners[index.long() % max(1, len(owners))])
            return self._settled(node, found)

        return self._once(-1, index, owners, find)

    def _once(self, rows: int, index: Tensor, owners: Tensor, find: Callable[[], Tensor]) -> Tensor:
        """What ``find`` finds for this index and these owners; the layers of a network have the same."""
        key = (rows, index.data_ptr(), index.dtype, index.shape, index.stride(), id(owners))
        if key not in self._found:
            self._found[key] = (index, owners, find())
        return self._found[key][2]

    def _attention(self, node: Any, dim: int, owners: Tensor) -> None:
        """Rows that attend to rows of their own example, for the mask shuts out all others."""
        mask = node._saved_attn_mask
        if mask is None or dim != len(shape_of((node, 0))) - 2 or mask.shape[-2:] != (len(owners),) * 2:
            raise NotFollowed(node.name())
        if bool(((owners.unsqueeze(1) != owners) & (mask != -torch.inf)).any()):
            raise NotFollowed(node.name())
        for _, edge in self._inputs(node):
            self._tell(edge, dim, owners)

    STEPS: ClassVar[dict[str, Callable[[RaggedRows, Any, int, Tensor], None]]] = {
        **dict.fromkeys(POINTWISE | LOSS_FUNCTIONS, _elementwise),
        **dict.fromkeys(VIEWS, _view),
        **dict.fromkeys(PERMUTATIONS, _permuted),
        **dict.fromkeys(FIRST, _along_first),
        **dict.fromkeys(WITH_A_TABLE, _with_a_table),
        **dict.fromkeys(OTHERS_ALONG, _along),
        **dict.fromkeys(SPLITS, _split),
        **dict.fromkeys(PICKS, _picking),
        **dict.fromkeys(PUTS | SCATTERS, _putting),
        ATTENTION: _attention,
    }


def _described(subject: Any) -> str:
    """What messages call an operation or a layer: the path of the layer, or the name that autograd has for it."""
    call = subject if isinstance(subject, LayerCall) else getattr(subject, "call", None)
    if isinstance(call, LayerCall):
        return getattr(call.layer, "ghost_path", "") or type(call.layer).__name__
    return subject.name().removesuffix("Backward0")


def _differ(owners: Tensor, others: Tensor) -> Tensor:
    return (owners != others) & (torch.minimum(owners, others) != NOBODY)
