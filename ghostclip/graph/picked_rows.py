"""Rows that are picked by index, worked on and put back, as tokens are by experts: whose they are, read from the graph.

An operation that puts rows back, ``y.index_add(0, index, rows)`` or ``rows[inverse]``, says whose each row is: the
example's whose row of the result it goes to. The owners are followed down from there, through operations that keep rows
apart, to where the rows were picked, ``h[index]``. That index must say the same: whole numbers are compared in each
batch, and it takes no other backward. So the gradients of these rows follow the losses of their owners alone if those
of the result do, which is tested once for a kind of graph (`ghostclip.graph.mixing_test`).

An operation that isn't known to keep rows apart, or a row that comes back as another example's, ends it: the graph is
one whose order of examples isn't known, and what can't be proved of it is refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ghostclip.graph.mixing_test import verdicts
from ghostclip.graph.nodes import REORDERING, Edge, from_below, inputs_of, said_by, shape_of, signed
from ghostclip.graph.parameter_names import serial_number
from ghostclip.graph.reader import Uses
from ghostclip.graph.row_operations import (
    ALONG,
    NOBODY,
    PICKS,
    POINTWISE,
    PRODUCTS,
    PUTS,
    RELAYING,
    ROW_BY_ROW,
    SPLITS,
    VIEWS,
    NotFollowed,
)  # fmt: skip
from ghostclip.graph.shared.search import CREATORS
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex

__all__ = ["PickedLayouts", "PickedRows"]

OUTSIDE = "whose rows come from outside of the graph"
LOAD_BALANCE = (
    "The model picks rows by index, as a mixture of experts does: a loss that balances experts over the batch mixes "
    "examples; leave it out (output_router_logits=False, or a coefficient of 0 in the config)"
)


class PickedRows:
    """The rows of one batch's graph that are picked by index.

    Args:
        losses: [B], of two examples or more.
        uses: what is behind them.
        row_order: how the tensors that rows are picked from and put back to have examples: "example" or "row".

    Attributes:
        owners: {node: [rows]}, the example of each row of its outputs; `NOBODY` where nothing uses a row.
        calls: {use of a layer that saw such rows: whose these are}.
        anchors: {tensor: its dimension with the examples' rows}, which rows are picked from and put back to.
        problem: why they aren't followed; empty where they are.
        mixes: whether that is for losses of examples that depend on rows of others.
        left: the nodes that the graph has beside these and what is shared, each after its inputs.
        size, structure: of these, as in `Uses`.
        moving: operations elsewhere that may order examples differently, as `Uses` has them.
    """

    def __init__(self, losses: Tensor, uses: Uses, row_order: str) -> None:
        self._examples, self.row_order, self._device = len(losses), row_order, losses.device
        self.owners: dict[Any, Tensor] = {}
        self.calls: dict[LayerCall, RowIndex] = {}
        self.anchors: dict[Edge, int] = {}
        self.problem, self.mixes = "", False
        self._indices: dict[int, RowIndex] = {}
        self._told: dict[Any, list[tuple[int | None, Tensor]]] = defaultdict(list)
        self._uses, self._chained = Counter[Any](), Counter[Any]()
        # What all examples share; what rows of all examples are handed on by.
        self._picked_from = set[Any]()
        self._shared, self._passed = set[Any](uses.leaves), set[Any]()
        nodes = from_below(losses.grad_fn)
        for node in nodes:
            below = [each for each, _ in inputs_of(node) if each is not None]
            self._uses.update(below)
            if below and self._shared.issuperset(below) and not hasattr(node, "call"):
                self._shared.add(node)
        try:
            for node in reversed(nodes):
                self._visit(node)
        except NotFollowed as end:
            self.problem, self.owners = str(end), {}
        self.calls = {node.call: self.index(node) for node in self.owners if hasattr(node, "call") and node.call.own}
        known = self._shared.union(self._passed, self.owners)
        self.left = [node for node in nodes if node not in known]
        self.size, self.structure = len(self.left), _structure(self.left)
        moving = {node for _, node in uses.moving}
        reordering = [node for node in self.left if type(node).__name__ in REORDERING]
        self.moving = [(number, node) for number, node in enumerate(reordering) if node in moving]

    def index(self, node: Any) -> RowIndex:
        """Whose the rows of a node's outputs are."""
        owners = self.owners[node]
        if id(owners) not in self._indices:
            used = owners != NOBODY
            self._indices[id(owners)] = (
                RowIndex(owners, self._examples)
                if bool(used.all())
                else RowIndex(torch.where(used, owners, 0), self._examples, used)
            )
        return self._indices[id(owners)]

    @property
    def note(self) -> str:
        """What a refusal of the model has to say of these rows; empty where there are none."""
        if self.problem and not self.mixes:
            return (
                "Rows picked by index, as a mixture of experts picks them, are followed from where they are put back "
                f"to where they were picked; here that ends at {self.problem}. Put each row back where it was picked, "
                "by index_add or an inverse permutation, or compute all rows and weigh them by a mask"
            )
        return LOAD_BALANCE if self.owners or self.mixes else ""

    def dim(self, edge: Edge) -> int:
        """The dimension of a tensor that has the rows."""
        dim = _row_dim(shape_of(edge), len(self.owners[edge[0]]))
        assert dim is not None
        return dim

    def _visit(self, node: Any) -> None:
        told, name = self._told.pop(node, None), node.name()
        if told is None:
            if node not in self._shared and name in PUTS | PICKS:
                self._begin(node)
            return
        if node in self._shared and name not in CREATORS:
            return
        if name in SPLITS and _row_dim(shape_of(node.next_functions[0]), len(told[0][1])) is None:
            self._passed.add(node)
            self._tell(node.next_functions[0], self._unsplit(node, told))
            return
        owners = self._merged(node, [owners for _, owners in told])
        if node in self._picked_from and self._are_in_order(owners):
            self._end((node, told[0][0] or 0), len(owners))
            return
        if len(told) < self._uses[node]:
            raise NotFollowed(f"{_described(node)}, whose rows are used in another way, too")
        self.owners[node] = owners
        if node not in self._shared:
            self._go_down(node, owners)

    def _begin(self, node: Any) -> None:
        """Starts at an operation that puts rows into a tensor with rows of all examples."""
        shape = shape_of((node, 0))
        dim = next((dim for dim, size in enumerate(shape) if size != 1), 0)
        owners = self._in_order(shape[dim]) if shape else None
        if owners is None or (picked := _index(node, dim)) is None:
            return
        self._passed.add(node)
        if self._chained[node] < self._uses[node]:
            self.anchors[node, 0] = dim
        if node.name() in PICKS:
            self._follow(node.next_functions[0], *picked, owners)
        else:
            (whole, _), rows = node.next_functions
            self._chained[whole] += 1
            self._tell(rows, _owners_at(node, owners, picked[1]))

    def _in_order(self, rows: int) -> Tensor | None:
        """[rows], the example of each where they are all examples' rows; None where they can't be."""
        if rows == 0 or rows % self._examples:
            return None
        return RowIndex.in_order(rows, self._examples, self.row_order, self._device)

    def _are_in_order(self, owners: Tensor) -> bool:
        all_rows = self._in_order(len(owners))
        return all_rows is not None and bool(((all_rows == owners) | (owners == NOBODY)).all())

    def _merged(self, node: Any, told: list[Tensor]) -> Tensor:
        """The owners of a node's rows, by all that uses them."""
        first = told[0]
        for other in told[1:]:
            if other is first:
                continue
            if len(other) != len(first) or bool(((other != first) & (other != NOBODY) & (first != NOBODY)).any()):
                raise NotFollowed(f"{_described(node)}, of which several examples use the same rows")
            first = torch.maximum(first, other)
        return first

    def _go_down(self, node: Any, owners: Tensor) -> None:
        """Follows rows into what they were computed from."""
        name, below, call = node.name(), inputs_of(node), getattr(node, "call", None)
        dim = _row_dim(shape_of((node, 0)), len(owners))
        keeps = name in PICKS or (name in ROW_BY_ROW and dim == 0)
        if name in VIEWS:
            self._through_view(node, owners)
        elif dim is None:
            raise NotFollowed(name)
        elif isinstance(call, LayerCall):
            self._through_layer(node, call, dim, owners)
        elif name in POINTWISE:
            for edge in below:
                place = dim + len(shape_of(edge)) - len(shape_of((node, 0))) if edge[0] is not None else -1
                self._tell_or_share(name, edge, owners, place >= 0 and shape_of(edge)[place] == len(owners))
        elif name in PICKS and (picked := _index(node, dim)):
            self._follow(below[0], *picked, owners)
        elif name in PUTS and (picked := _index(node, dim)):
            self._tell(below[0], owners)
            self._tell(below[1], _owners_at(node, owners, picked[1]))
        elif name in PRODUCTS and dim == 0:
            if below[PRODUCTS[name]][0] is None:
                raise NotFollowed(f"{name}, {OUTSIDE}")
            for place, edge in enumerate(below):
                self._tell_or_share(name, edge, owners, place == PRODUCTS[name])
        elif keeps or (name in ALONG and not _is_along_rows(node, len(owners))):
            for edge in below:
                self._tell(edge, owners)
        elif name == "CatBackward0" and all(each is not None for each, _ in below):
            for edge, part in zip(below, owners.split([shape_of(edge)[dim] for edge in below]), strict=True):
                self._tell(edge, part)
        elif name == "SliceBackward0":
            places = torch.arange(shape_of(below[0])[dim], device=self._device)
            places = places[signed(node._saved_start) : signed(node._saved_end) : node._saved_step]
            self._follow(below[0], dim, places, owners)
        else:
            raise NotFollowed(name)

    def _through_layer(self, node: Any, call: LayerCall, dim: int, owners: Tensor) -> None:
        if not call.sources:
            raise NotFollowed(f"{_described(node)}, {OUTSIDE}")
        call.batch_dim = dim if call.layer.row_by_row else call.batch_dim
        if call.shape[call.batch_dim] != len(owners):
            raise NotFollowed(_described(node))
        for each in call.sources:
            self._tell((get_gradient_edge(each).node if isinstance(each, Tensor) else each, None), owners)

    def _through_view(self, node: Any, owners: Tensor) -> None:
        """Follows rows that were given another shape, or made of parts of others, or of several."""
        (edge,) = node.next_functions
        shape, rows = shape_of(edge), len(owners)
        if _row_dim(shape, rows) is not None:
            self._tell(edge, owners)
            return
        given = next(size for size in shape if size != 1)
        if given % rows == 0:
            found = owners.repeat_interleave(given // rows)
        else:
            parts = owners.view(given, -1) if rows % given == 0 else owners.view(1, -1)
            found = parts.amax(1)
            if len(found) != given or not bool(((parts == found.unsqueeze(1)) | (parts == NOBODY)).all()):
                raise NotFollowed(node.name())
        self._picked_from.add(edge[0])
        self._tell(edge, found)

    def _tell(self, edge: tuple[Any, int | None], owners: Tensor) -> None:
        if edge[0] is not None:
            self._told[edge[0]].append((edge[1], owners))

    def _tell_or_share(self, name: str, edge: Edge, owners: Tensor, has_rows: bool) -> None:
        if has_rows:
            self._tell(edge, owners)
        elif edge[0] is not None and edge[0] not in self._shared:
            raise NotFollowed(f"{name}, with a tensor of other rows")

    def _follow(self, edge: Edge, dim: int, index: Tensor, owners: Tensor) -> None:
        """Follows rows to where they were picked, ``index`` [n, ...] along ``dim``."""
        if edge[0] is None or edge[0] in self._shared:
            return
        index = index % max(1, rows := shape_of(edge)[dim])
        owners = owners.view(-1, *[1] * (index.dim() - 1)).expand_as(index)
        used = owners != NOBODY
        found = torch.full((rows,), NOBODY, device=self._device)
        found[index[used]] = owners[used]
        if not torch.equal(found[index[used]], owners[used]):
            raise NotFollowed(f"{_described(edge[0])}, of which several examples pick the same rows")
        self._picked_from.add(edge[0])
        self._tell(edge, found)

    def _unsplit(self, node: Any, told: list[tuple[int | None, Tensor]]) -> Tensor:
        """The owners of rows that were split into parts."""
        (rows,) = [size for size in shape_of(node.next_functions[0]) if size != 1][:1]
        size = getattr(node, "_saved_split_size", 0)
        sizes = getattr(node, "_saved_split_sizes", ())
        found = torch.full((rows,), NOBODY, device=self._device)
        for number, owners in told:
            if number is None:
                raise NotFollowed(node.name())
            start = sum(sizes[:number]) + number * size
            part = found[start : start + len(owners)]
            part.copy_(self._merged(node, [owners, part.clone()]))
        self._picked_from.add(node.next_functions[0][0])
        return found

    def _end(self, edge: Edge, rows: int) -> None:
        """Notes the lowest tensor that hands on these rows of all examples."""
        while edge[0].name() in VIEWS | RELAYING and _row_dim(shape_of(edge[0].next_functions[0]), rows) is not None:
            self._passed.add(edge[0])
            edge = edge[0].next_functions[0]
        dim = _row_dim(shape_of(edge), rows)
        assert dim is not None
        self.anchors[edge] = dim


class PickedLayouts:
    """Remembers for which graphs the tensors that rows are picked from and put back to were tested."""

    def __init__(self) -> None:
        # Of how many examples the largest batch was.
        self._tested: dict[tuple, int] = {}

    def find(self, losses: Tensor, uses: Uses, remember: bool) -> PickedRows | None:
        """The picked rows behind ``losses`` [B]; None where there can't be any, with a ``problem`` where they aren't
        followed. What is tested of copies of examples isn't to be remembered."""
        if not uses.moving or len(losses) < 2 or is_traced():
            return None
        tried = []
        for row_order in ("example", "row"):
            picked = PickedRows(losses, uses, row_order)
            tried.append(picked)
            if picked.problem:
                continue
            rows = [(edge[0].name(), dim, shape_of(edge)[dim] // len(losses)) for edge, dim in picked.anchors.items()]
            key = (picked.size, picked.structure, uses.size[1], row_order, *rows)
            if len(losses) < 2 * self._tested.get(key, 0):
                return picked
            calls = [
                call for call in uses.calls if call not in picked.calls and call.shape[call.batch_dim] == len(losses)
            ]
            found = verdicts(losses, calls, {edge: [dim] for edge, dim in picked.anchors.items()}).values()
            in_order = [each.best and (each.best.row_order == row_order or each.best.count == 1) for each in found]
            if all(fits or (each.best and not each.shown) for fits, each in zip(in_order, found, strict=True)):
                if remember and all(each.sure for each in found):
                    self._tested[key] = len(losses)
                return picked
            picked.problem, picked.mixes = "examples mix", True
        return tried[0]


def _described(node: Any) -> str:
    """What a refusal calls an operation: the path of a layer, or the name that autograd has for it."""
    layer = getattr(getattr(node, "call", None), "layer", None)
    return node.name() if layer is None else getattr(layer, "ghost_path", type(layer).__name__)


def _row_dim(shape: torch.Size, rows: int) -> int | None:
    """The dimension with so many rows, if none but ones are before it."""
    for dim, size in enumerate(shape):
        if size == rows:
            return dim
        if size != 1:
            return None
    return None


def _index(node: Any, dim: int) -> tuple[int, Tensor] | None:
    """(dimension, [n, ...]), the places that rows are picked from or put to; None where ``dim`` has others."""
    shape = shape_of((node, 0))
    if hasattr(node, "_saved_dim"):
        return (dim, node._saved_index) if signed(node._saved_dim) % len(shape) == dim else None
    places = [place for place, index in enumerate(node._saved_indices) if index is not None]
    indices = [node._saved_indices[place] for place in places]
    first, masks = places[0], [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if first < dim or any(size != 1 for size in shape[:first]):
        return None
    if places != list(range(first, first + len(places))) or (masks and len(indices) > 1):
        raise NotFollowed(node.name())
    return first, masks[0].nonzero()[:, 0] if masks else torch.broadcast_tensors(*indices)[0]


def _owners_at(node: Any, owners: Tensor, index: Tensor) -> Tensor:
    """[n], the owners of rows that were put to the places ``index`` [n, ...]."""
    found = owners[index].unsqueeze(-1).flatten(1)
    if found.shape[1] == 0 or not bool((found == found[:, :1]).all()):
        raise NotFollowed(f"{_described(node)}, of which several examples use the same rows")
    return found[:, 0]


def _structure(nodes: list[Any]) -> int:
    """A hash of operations, each after its inputs, as `Uses` has one; other inputs than these are not told apart."""
    places = {node: place for place, node in enumerate(nodes)}
    words: list[Any] = []
    for node in nodes:
        kind: Any = type(node)
        numbers = [number for _, number in node.next_functions]
        if isinstance(call := getattr(node, "call", None), LayerCall):
            kind, numbers = serial_number(call.layer), call.numbers
        inputs = tuple(places.get(below, -1) for below, _ in inputs_of(node))
        words.append((kind, inputs, *numbers, said_by(node)))
    return hash(tuple(words))


def _is_along_rows(node: Any, rows: int) -> bool:
    """Whether an operation along a dimension goes along that of the rows, or may do so."""
    shape = next(shape_of(edge) for edge in node.next_functions if edge[0] is not None)
    dims = node._saved_dim if isinstance(node._saved_dim, tuple) else (node._saved_dim,)
    own = _row_dim(shape, rows)
    return own is None or dims in ((), (None,)) or own in [signed(dim) % len(shape) for dim in dims]
