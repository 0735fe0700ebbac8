"""Whether what all examples share is the same whatever the examples are: the forward is run twice more.

A table of positions and a mean over the batch look alike in a gradient: several losses depend on each of their rows.
They differ in what they are computed from. So the forward is run again on two batches with no example in common (twice
for each guess of what is shared):

    batch              mean of the batch     a table
    a  b  c  d         (a + b + c + d) / 4   p
    a  b  b  b         (a + 3 b) / 4         p
    c  c  c  d         (3 c + d) / 4         p

For the gradient of ``s`` in ``h + s * h.mean(0)`` the product saves the mean. It saved two different ones: refused. In
``h + s * p`` it saved p both times. (Rows stay in order, so that sorted lengths stay sorted.)

Compared, bit for bit, are what the shared part of the graph saved for its gradients, what its layers read, and what
goes from there into operations with examples. A node of the batch's graph is found in the others from below: layers and
parameters by what they are, any other as a consumer of a node that was found. Uses and consumers count in the order of
the forward, and only where all are of the same types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import ACCUMULATE, Edge, inputs_first, inputs_of
from ghostclip.graph.operations import hides_constants
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses
from ghostclip.graph.rows import Owned, Rows, Subject
from ghostclip.graph.same_numbers import numbers_of
from ghostclip.graph.shared.boundary import BroadcastBoundary
from ghostclip.graph.shared.search import mixing_error
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall

__all__ = ["NOT_FIRST", "FindForward", "OverwrittenForward", "check_shared", "computed", "overwriting"]

# Runs the step's forward again on rows of the batch's first or second half (0 or 1) alone, given how many losses there
# are; returns tensors from which its graph is read. It leaves no trace in the model and in random states.
OverwrittenForward = Callable[[int, int], Sequence[Tensor]]
# Finds what runs it again; None where nothing can.
FindForward = Callable[[], OverwrittenForward | None]
REMEDY = "call engine.step(batch, loss_fn) or clipper.clip(loss_fn, batch), which can run the forward on other examples"
NOT_FIRST = (
    "whether what all examples share depends on them could not be tried: a tensor that the forward was given has not "
    "one row for each example in its first dimension, so that none could be overwritten. If examples mix, compute each "
    "loss from its own example; else move the examples to that tensor's first dimension (texts in a list are padded to "
    f"one tensor by the collate function). Outside of engine.step and clipper.clip, {REMEDY}"
)


def overwriting(half: int, rows: int) -> list[int]:
    """Which rows an overwritten batch has, of the first or second half (0, 1): of 4, [0, 1, 1, 1] or [2, 2, 2, 3]."""
    middle = rows // 2
    return [max(row, middle) if half else min(row, middle - 1) for row in range(rows)]


def computed(uses: Uses, region: SharedSubgraph) -> list[Any]:
    """What all examples share that isn't made of parameters alone, so that it may depend on the examples."""
    known = uses.made_of_parameters
    return [node for node in region.shared if node not in known and type(node) is not ACCUMULATE]


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
        Whether that was shown, or nothing had to be: what is computed from parameters alone depends on no example. Also
        where nothing runs the forward again and no operation saved a tensor: what was added to parameters isn't seen.
        False where both forwards gave the same, as in a batch whose examples are alike.
    """
    found = computed(uses, region)
    saving = [node for node in found if _may_save(type(node))]
    run = forward() if found else None
    if run is None:
        _refuse_unknown(saving, f"; {REMEDY}", names)
        return True
    try:
        reruns = [_Rerun(run, half, region.examples) for half in (0, 1)]
    except Exception as error:
        if not saving:  # what enters at boundaries is all that could be seen
            return True
        if isinstance(error, UnsupportedModelError):
            raise
        why = f": the forward on some of the batch's rows raised {type(error).__name__}: {error}"
        raise _untried(saving[0], why, names) from error
    pairs = _pairs(uses, set(region.shared), reruns)
    for node, pair in pairs.items():
        if node in saving and not _same(*(kept := [*map(_saved, pair)])):
            if _sizes(kept[0]) != _sizes(kept[1]):
                raise _sizes_differ(node, names)
            raise mixing_error(node, names)
    why = (
        ": the forward on some of the batch's rows takes another way, or this is computed outside of the model, as a "
        f"penalty on parameters; remove branches that depend on the examples from before this place, or {REMEDY}"
    )
    _refuse_unknown([node for node in saving if node not in pairs], why, names)
    for boundary in region.boundaries:
        nodes = pairs.get(boundary.node)
        if nodes is not None and not _same(
            *[rerun.entering(boundary, node) for rerun, node in zip(reruns, nodes, strict=True)]
        ):
            raise mixing_error(boundary.node, names)
    if saving:
        _refuse_unchanged(pairs, uses, region, owned, names)
    return not _same(*[rerun.outputs for rerun in reruns])


def _refuse_unknown(nodes: Iterable[Any], why: str, names: ParameterNames) -> None:
    """Raises UnsupportedModelError for operations that were given more than the model's own constants."""
    for node in nodes:
        if not _takes_constants(node, names):
            raise _untried(node, why, names)


def _sizes(kept: Iterable[Any]) -> list[torch.Size]:
    return [each.shape for each in kept if isinstance(each, Tensor)]


def _named(node: Any, names: ParameterNames) -> str:
    call = getattr(node, "call", None)
    return f"layer {names.layer(call)}" if isinstance(call, LayerCall) else f"operation {node.name()}"


def _sizes_differ(node: Any, names: ParameterNames) -> UnsupportedModelError:
    """The error about what all examples share where only its sizes are known to follow from them."""
    return UnsupportedModelError(
        f"all examples share what the {_named(node, names)} gives, and it has another size for other rows of the "
        "batch, as where texts are padded to the longest inside of the forward or the loss function. So it depends on "
        "the examples; pad them in the collate function, or to one fixed length",
        place=node,
    )


def _untried(node: Any, why: str, names: ParameterNames) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"all examples share what the {_named(node, names)} gives; whether it depends on the examples could "
        f"not be tried{why}",
        place=node,
    )


def _takes_constants(node: Any, names: ParameterNames) -> bool:
    """Whether all that an operation was given beside the graph's tensors are buffers or frozen parameters."""
    constants = sum(below is None for below, _ in node.next_functions)
    if not constants or type(node).__module__ != "builtins" or hides_constants(node):
        return False
    return sum(isinstance(each, Tensor) and names.holds(each) for each in _saved(node)) >= constants


def _refuse_unchanged(
    pairs: Mapping[Any, Any], uses: Uses, region: SharedSubgraph, owned: Mapping[Subject, Owned], names: ParameterNames
) -> None:
    """Raises UnsupportedModelError where a layer read the same in both forwards, though its examples aren't alike."""
    for call in uses.calls:
        node, rows = uses.capturing[call], owned[call].rows
        if call.sources or rows is None or node in region.calls or node not in pairs or not node.saved_tensors:
            continue
        if _same(*[each.saved_tensors for each in pairs[node]]) and not _are_alike(node.saved_tensors[0], rows):
            raise UnsupportedModelError(
                f"whether what all examples share depends on them could not be tried: {names.layer(call)} read the "
                "same when rows of the batch were overwritten, since its examples are not in the first dimension of "
                f"what the forward was given; put them there, or {REMEDY}",
                name=names.layer(call), place=call,
            )  # fmt: skip


def _are_alike(tensor: Tensor, rows: Rows) -> bool:
    """Whether all rows of what a layer read are the same."""
    if tensor.dim() <= rows.dim or not tensor.shape[rows.dim]:
        return False
    return _same(tensor, tensor.narrow(rows.dim, 0, 1).expand_as(tensor))


class _Rerun(TorchFunctionMode):
    """A forward on overwritten rows.

    Args:
        run: runs it.
        half: of which half, 0 or 1.
        examples: B.

    Attributes:
        outputs: what it gave.
        values: two numbers of what each operation gave, by the tensor's place in the graph.
        followers: see `_followers`.
    """

    def __init__(self, run: OverwrittenForward, half: int, examples: int) -> None:
        super().__init__()
        self.values: dict[Edge, Tensor] = {}
        with self:
            outputs = run(half, examples)
        self.outputs = [output.detach() for output in outputs]
        self.followers = _followers(inputs_first(*[output.grad_fn for output in outputs]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor) and each.grad_fn is not None and each.layout == torch.strided:
                self.values.setdefault((each.grad_fn, each.output_nr), _in_numbers(each.detach()))
        return found

    def entering(self, boundary: BroadcastBoundary, node: Any) -> list[Tensor]:
        """What all examples share of what comes to the node in a boundary's place, as far as it is known."""
        edges = [node.next_functions[slot] for slot in boundary.shared]
        return [self.values[edge] for edge in edges if edge in self.values]


def _in_numbers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = tensor.double().nan_to_num().flatten()
    return torch.stack([flat.sum(), flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)])


def _before(node: Any) -> list[Any]:
    """What a node is found by: its layer if it has one, and the nodes that it was given."""
    call = getattr(node, "call", None)
    layer = [("layer", id(call.layer), call.parameters)] if isinstance(call, LayerCall) else []
    return [*layer, *(below for below, _ in inputs_of(node) if below is not None)]


def _followers(nodes: Iterable[Any]) -> dict[Any, list[Any]]:
    """{a node or layer: its consumers or uses}, in the order of the forward."""
    found: dict[Any, dict[Any, None]] = {}
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for before in _before(node):
            found.setdefault(before, {})[node] = None
    return {before: list(after) for before, after in found.items()}


def _pairs(uses: Uses, shared: set[Any], reruns: Sequence[_Rerun]) -> dict[Any, tuple[Any, Any]]:
    """{node of the batch's own graph: those in its place in both others}, each after all of its inputs.

    Nodes are found by their layers, and by inputs that are ``shared``.
    """
    ordered, found = inputs_first(*uses.nodes), dict[Any, tuple[Any, Any]]()
    own, first, second = _followers(ordered), reruns[0].followers, reruns[1].followers
    for node in ordered:
        for before in _before(node):
            if before not in shared and not isinstance(before, tuple):
                continue
            one, other = found.get(before, (before, before))  # a layer, and a parameter's node, is the same in all
            mine, ones, others = own[before], first.get(one, []), second.get(other, [])
            if [*map(type, mine)] == [*map(type, ones)] == [*map(type, others)]:
                found[node] = ones[mine.index(node)], others[mine.index(node)]
    return found


def _may_save(kind: type) -> bool:
    """Whether nodes of a type may keep tensors for their gradients."""
    return kind.__module__ != "builtins" or any(name.startswith("_raw_saved_") for name in dir(kind))


def _saved(node: Any) -> list[Any]:
    """What a node keeps for its gradient."""
    try:
        if type(node).__module__ == "builtins":
            return [getattr(node, name) for name in dir(type(node)) if name.startswith("_saved_")]
        own = [value for name, value in sorted(vars(node).items()) if isinstance(value, (Tensor, int, float))]
        return [*node.saved_tensors, *own]
    except RuntimeError:  # of a buffer that the forward changes; its values of then are gone
        return [object()]


def _same(first: Any, second: Any) -> bool:
    """Whether both are the same numbers, bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        alike = first.shape == second.shape and first.layout == second.layout
        return alike and all(map(torch.equal, _plain(first), _plain(second)))
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and bool(first == second)


def _plain(tensor: Tensor) -> list[Tensor]:
    parts = numbers_of(tensor.detach())
    return [each.nan_to_num() if each.is_floating_point() or each.is_complex() else each for each in parts]
