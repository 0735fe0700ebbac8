"""Whether what all examples share is the same whatever the examples are: two forwards on overwritten rows.

A table of positions and a mean over the batch look alike in a gradient: several losses depend on their rows. They
differ in what they are computed from. So the forward is run twice more, once with every row of the second half of the
batch overwritten by the last row of the first half, and once with every row of the first half overwritten by the first
row of the second. What the shared part of the graph saved for its gradients, and what its layers read, must be the same
in both, bit for bit. (Rows stay in order, so that sorted lengths stay sorted.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.moves import hides_constants, made_of_parameters
from ghostclip.graph.nodes import ACCUMULATE, Edge
from ghostclip.graph.owners import Owned, Rows, Subject
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses, read_graph
from ghostclip.graph.shared.boundary import BroadcastBoundary
from ghostclip.graph.shared.search import mixes
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall

__all__ = ["FindForward", "Forward", "check_shared", "overwriting"]

# Runs the step's forward again on a batch overwritten in the first or second way (0 or 1), given how many losses there
# are; returns tensors from which its graph is read. It leaves no trace in the model and in random states.
Forward = Callable[[int, int], Sequence[Tensor]]
# Finds what runs it again; None where nothing can.
FindForward = Callable[[], Forward | None]
REMEDY = "call engine.step(batch, loss_fn) or clipper.clip(loss_fn, batch), which can run the forward on other examples"
NOT_FIRST = (
    "whether what all examples share depends on them could not be tried: a tensor that the forward was given has not "
    "one row for each example in its first dimension, so that none could be overwritten. If examples mix, compute each "
    f"loss from its own example; else put them there, or {REMEDY}"
)


class _Found(NamedTuple):
    """A node of the shared part in the batch's own graph, and the same in both others."""

    own: Any
    others: tuple[Any, Any]


def overwriting(part: int, rows: int) -> list[int]:
    """Which row stands in the place of each of so many (at least two), in the first or second (0 or 1) of both."""
    half = rows // 2
    return [max(row, half) if part else min(row, half - 1) for row in range(rows)]


def check_shared(
    uses: Uses, region: SharedSubgraph, owned: Mapping[Subject, Owned], names: ParameterNames, forward: FindForward
) -> bool:
    """Raises UnsupportedModelError unless what all examples share is the same whatever the examples are.

    Args:
        uses: of the batch's graph.
        region: what all examples share.
        owned: whose the rows of layers are.
        names: of the model.
        forward: finds what runs it again; None where nothing can.

    Returns:
        Whether that was shown: in a batch whose examples are alike nothing is.
    """
    known, examples = made_of_parameters(uses), region.examples
    questions = {
        node: None
        for node in region.shared
        if node not in known and type(node) is not ACCUMULATE and _saves(_kind(node))
    }
    first = next((node for node in region.shared if node not in known and type(node) is not ACCUMULATE), None)
    if first is None or ((run := forward()) is None and not questions):
        return True
    what = _in_words(next(iter(questions), first), names)
    graphs = list[_Graph]()
    try:
        graphs = [] if run is None else _graphs(run, examples, names, what, next(iter(questions), first))
    except UnsupportedModelError:
        if questions:  # else what enters at boundaries is all that could be seen
            raise
    met = {boundary.node: boundary for boundary in region.boundaries}
    shown = True
    if graphs:
        entries = [call for call in uses.calls if not call.sources and owned[call].rows is not None]
        entries = [call for call in entries if uses.capturing[call] not in region.calls]
        # Where nothing was kept of constants, all that could be seen is what enters at boundaries.
        shown = _examples_changed(uses, entries, owned, graphs, names, asked=bool(questions))
        for found in _alike(uses, graphs, {*region.shared, *uses.leaves, *met}):
            if found.own in met:
                # Where no layer reads examples, they come to an operation with parameters.
                shown = shown or not _same(*map(_saved, found.others))
                pairs = [*zip(graphs, found.others, strict=True)]
                same = _same(*(_entering(graph, node, met[found.own]) for graph, node in pairs))
            else:
                same = found.own not in questions or _same(*map(_saved, found.others))
            if not same:
                raise mixes(found.own, names)
            questions.pop(found.own, None)
    # Without another forward, or where it took another way, the model's own constants are known all the same.
    left = next((node for node in questions if not _held(node, names)), None)
    if left is not None:
        why = f"; {REMEDY}" if not graphs else (
            ": the forward on some of the batch's rows takes another way; remove branches that depend on the examples "
            "from before this place"
        )  # fmt: skip
        raise UnsupportedModelError(
            f"{_in_words(left, names)} depends on the examples could not be tried{why}", place=left
        )
    return shown


def _graphs(run: Forward, examples: int, names: ParameterNames, what: str, place: Any) -> list[_Graph]:
    """The graphs of both forwards; raises UnsupportedModelError where one fails."""
    found = []
    for part in (0, 1):
        try:
            with _Tape() as tape:
                outputs = run(part, examples)
            found.append(_Graph(outputs, names, tape.values))
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{what} depends on the examples could not be tried: the forward on some of the batch's rows raised "
                f"{type(error).__name__}: {error}",
                place=place,
            ) from error
    return found


def _examples_changed(
    uses: Uses, entries: Sequence[LayerCall], owned: Mapping[Subject, Owned], graphs: Sequence[_Graph],
    names: ParameterNames, asked: bool,
) -> bool:  # fmt: skip
    """Whether the layers that read the examples read others in both forwards.

    Raises:
        UnsupportedModelError: one read the same, and its examples aren't alike; if that is ``asked``.
    """
    changed = False
    for call in entries:
        node = uses.capturing[call]
        own = _in_turn([each for each in uses.nodes if _name(each) == _name(node)])
        matched = _matched(own, [graph.starts.get(_name(node), []) for graph in graphs])
        pairs = [found.others for found in matched if found.own is node]
        if not pairs:
            continue
        if not _same(*(each.saved_tensors for each in pairs[0])):
            changed = True
        elif asked and node.saved_tensors and not _are_alike(node.saved_tensors[0], owned[call].rows):
            raise UnsupportedModelError(
                f"whether what all examples share depends on them could not be tried: {names.layer(call)} read the "
                "same when rows of the batch were overwritten, since its examples are not in the first dimension of "
                f"what the forward was given; put them there, or {REMEDY}",
                name=names.layer(call), place=call,
            )  # fmt: skip
    return changed


def _are_alike(tensor: Tensor, rows: Rows | None) -> bool:
    """Whether all rows of what a layer read are the same."""
    if rows is None or tensor.dim() <= rows.dim or not tensor.shape[rows.dim]:
        return False
    return bool(torch.equal(_plain(tensor), _plain(tensor.narrow(rows.dim, 0, 1).expand_as(tensor))))


def _entering(graph: _Graph, node: Any, boundary: BroadcastBoundary) -> list[Tensor]:
    """What comes to an operation, at which shared tensors meet the examples, from the former; as far as it is known."""
    edges = [node.next_functions[slot] for slot in boundary.shared]
    return [graph.values[edge] for edge in edges if edge in graph.values]


def _in_words(node: Any, names: ParameterNames) -> str:
    call = getattr(node, "call", None)
    what = f"layer {names.layer(call)}" if isinstance(call, LayerCall) else f"operation {node.name()}"
    return f"all examples share what the {what} gives; whether it"


class _Tape(TorchFunctionMode):
    """Two numbers of what each operation of a forward gave, by the tensor's place in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Edge, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor) and each.grad_fn is not None and each.layout == torch.strided:
                with torch.no_grad():
                    self.values.setdefault((each.grad_fn, each.output_nr), _in_numbers(each))
        return found


def _in_numbers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = tensor.detach().double().nan_to_num().flatten()
    return torch.stack([flat.sum(), flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)])


class _Graph:
    """The graph of a forward, as far as shared parts are looked for in it."""

    def __init__(self, outputs: Sequence[Tensor], names: ParameterNames, values: Mapping[Edge, Tensor]) -> None:
        self._kept, self.values = outputs, values
        self.consumers: dict[Any, list[Any]] = {}
        self.starts: dict[Any, list[Any]] = {}
        for output in outputs:
            if output.grad_fn is None:
                continue
            uses = read_graph(output, names)
            for node, each in uses.consumers.items():
                self.consumers.setdefault(node, []).extend(each)
            for node in uses.nodes:
                self.starts.setdefault(_name(node), []).append(node)
        # Consumers and uses of layers in the order of the forward.
        for table in (self.consumers, self.starts):
            for key, nodes in table.items():
                table[key] = _in_turn(nodes)


def _in_turn(nodes: Sequence[Any]) -> list[Any]:
    return sorted(dict.fromkeys(nodes), key=lambda node: node._sequence_nr())


def _name(node: Any) -> tuple[Any, ...] | None:
    """What a node is found by: a layer or a parameter; None for others."""
    if isinstance(call := getattr(node, "call", None), LayerCall):
        return "layer", id(call.layer), call.parameters
    return ("parameter", id(node.variable)) if type(node) is ACCUMULATE else None  # type: ignore[union-attr]


def _alike(uses: Uses, graphs: Sequence[_Graph], shared: set[Any]) -> Iterator[_Found]:
    """The shared nodes of a graph with those in their place in two others, from parameters and layers on upwards."""
    starts: dict[Any, list[Any]] = {}
    for node in uses.nodes:
        starts.setdefault(_name(node), []).append(node)
    stack, seen = list[_Found](), set[Any]()
    for name, nodes in starts.items():
        if name is not None and any(node in shared for node in nodes):
            stack += _matched(_in_turn(nodes), [graph.starts.get(name, []) for graph in graphs])
    while stack:
        found = stack.pop()
        if found.own in seen or found.own not in shared:
            continue
        seen.add(found.own)
        yield found
        others = [graph.consumers[node] for graph, node in zip(graphs, found.others, strict=True)]
        stack += _matched(_in_turn(uses.consumers[found.own]), others)


def _matched(own: Sequence[Any], others: Sequence[Sequence[Any]]) -> list[_Found]:
    """Each node with those in its place; nothing where there are other nodes."""
    kinds = [[type(node) for node in nodes] for nodes in (own, *others)]
    if any(each != kinds[0] for each in kinds):
        return []
    return [_Found(each[0], (each[1], each[2])) for each in zip(own, *others, strict=True)]


def _held(node: Any, names: ParameterNames) -> bool:
    """Whether all that an operation was given beside the graph's tensors are buffers or frozen parameters."""
    constants = sum(below is None for below, _ in node.next_functions)
    if not constants or type(node).__module__ != "builtins" or hides_constants(node):
        return False
    tensors = [each for each in _saved(node) if isinstance(each, Tensor)]
    return sum(map(names.holds, tensors)) >= constants


def _kind(node: Any) -> type:
    return type(node)


@functools.cache
def _saves(kind: type) -> bool:
    """Whether nodes of a type may keep tensors for their gradients."""
    return kind.__module__ != "builtins" or any(name.startswith("_raw_saved_") for name in dir(kind))


def _saved(node: Any) -> list[Any]:
    """What a node keeps for its gradient."""
    try:
        return _read(node)
    except RuntimeError:  # of a buffer that the forward changes; its values of then are gone
        return [object()]


def _read(node: Any) -> list[Any]:
    if type(node).__module__ != "builtins":
        own = [value for name, value in sorted(vars(node).items()) if isinstance(value, (Tensor, int, float))]
        return [*node.saved_tensors, *own]
    return [getattr(node, name) for name in _names_of_saved(type(node))]


def _names_of_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def _same(first: Any, second: Any) -> bool:
    """Whether both are the same numbers, bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and bool(torch.equal(_plain(first), _plain(second)))
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and bool(first == second)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.nan_to_num() if tensor.is_floating_point() or tensor.is_complex() else tensor
