"""The lowest layers of a network of images, gone through some examples at a time.

A network of convolutions holds most of its numbers at its lowest layers, and a first pass comes to them last, with all
of the graph above still there for a second one: what such a backward takes there, several tensors as large as the
largest, is what it takes at all. But what lies between these layers, activations and pools, treats every example by
itself. So autograd is stopped above them, where tensors are small yet, and its own backward operations are called for
one part of the examples after another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.utils.hooks import RemovableHandle

from ghostclip.nn.base import CAPTURE, PROBE, Call
from ghostclip.norms.term import is_traced
from ghostclip.seams import shape_of

__all__ = ["Tail", "let_go_below", "tail_of"]

# Bytes of the largest pre-activation from which on a tail is worth its calls.
LEAST_BYTES = 2 << 20
# Layers go by parts while their pre-activations are at least this share of the largest; and by so many. Measured on
# the CNN of Lee & Kifer and the CIFAR network: memory over an ordinary backward 1.34 and 1.38 to 1.06 and 1.01, for
# 2 to 3% more time; with parts half as large 5%, and with smaller layers too 14%, for nothing.
SHARE, PARTS = 0.5, 4
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

aten = torch.ops.aten

# A gradient [b, ...] at an operation's output and the part it belongs to -> the gradient at its input.
Down = Callable[[Tensor, slice], Tensor]


def _of_result(operation: Callable[..., Tensor], *rest: Any) -> Callable[[Any], Down]:
    """For operations whose backward reads what they gave."""

    def make(node: Any) -> Down:
        result = node._saved_result
        return lambda grad, part: operation(grad, result[part], *rest)

    return make


def _of_input(operation: Callable[..., Tensor]) -> Callable[[Any], Down]:
    """For operations whose backward reads what they were given."""

    def make(node: Any) -> Down:
        given = node._saved_self
        return lambda grad, part: operation(grad, given[part])

    return make


def _gelu(node: Any) -> Down:
    given, approximate = node._saved_self, node._saved_approximate
    return lambda grad, part: aten.gelu_backward(grad, given[part], approximate=approximate)


def _leaky_relu(node: Any) -> Down:
    given, slope = node._saved_self, node._saved_negative_slope
    return lambda grad, part: aten.leaky_relu_backward(grad, given[part], slope, False)


def _max_pool(node: Any) -> Down:
    given, places = node._saved_self, node._saved_result1
    window = (node._saved_kernel_size, node._saved_stride, node._saved_padding, node._saved_dilation)
    rounds_up = node._saved_ceil_mode
    return lambda grad, part: aten.max_pool2d_with_indices_backward(grad, given[part], *window, rounds_up, places[part])


def _average_pool(node: Any) -> Down:
    given = node._saved_self
    window = (node._saved_kernel_size, node._saved_stride, node._saved_padding, node._saved_ceil_mode)
    counts = (node._saved_count_include_pad, node._saved_divisor_override)
    return lambda grad, part: aten.avg_pool2d_backward(grad, given[part], *window, *counts)


def _convolution(node: Any) -> Down:
    given, weight = node._saved_input, node._saved_weight
    window = (node._saved_stride, node._saved_padding, node._saved_dilation, False, node._saved_output_padding)
    groups = node._saved_groups

    def down(grad: Tensor, part: slice) -> Tensor:
        only_input = [True, False, False]
        return aten.convolution_backward(grad, given[part], weight, None, *window, groups, only_input)[0]

    return down


# What treats each example by itself, by the name of its node, and how its backward is had for some of them.
BETWEEN: dict[str, Callable[[Any], Down]] = {
    "AvgPool2DBackward0": _average_pool,
    "GeluBackward0": _gelu,
    "LeakyReluBackward0": _leaky_relu,
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "ReluBackward0": _of_result(aten.threshold_backward, 0),
    "SigmoidBackward0": _of_result(aten.sigmoid_backward),
    "SiluBackward0": _of_input(aten.silu_backward),
    "TanhBackward0": _of_result(aten.tanh_backward),
}


@dataclass
class Tail:
    """The lowest layers of a graph, from a tensor that all ways to them lead through.

    Attributes:
        top: the node of that tensor.
        steps: from there down: operations, and uses of layers with what they remember.
        calls: the uses, from the top down.
        tops: for each use, the node of what the layer above it read.
        examples: B.
        grad: the gradient at the top, once a backward came there.
    """

    top: Any
    steps: list[Down | tuple[Call, tuple[Tensor, ...]]]
    calls: list[Call]
    tops: list[Any]
    examples: int
    grad: Tensor | None = None

    @property
    def parts(self) -> list[slice]:
        """Equal parts of the examples."""
        count = min(self.examples, PARTS)
        ends = [number * self.examples // count for number in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Gradients of a backward in this context go no further down than the top, where they are kept."""

        def keep(grad: Tensor | None) -> None:
            self.grad = grad

        self.grad = None
        with _stopped_at(self.top, keep):
            for call in self.calls:
                call.hooks += 1  # this one
            yield

    def forget(self) -> None:
        """Holds on to nothing any more that a backward may free."""
        self.steps, self.grad = [], None

    def end_without(self, owners: Collection[int]) -> Any | None:
        """The node from which on a backward has no business, if none with the lowest layer, whose parameters are known.

        Args:
            owners: ids of parameters whose gradients are known.
        """
        end = None
        for call, top in zip(reversed(self.calls), reversed(self.tops), strict=True):
            if any(id(call.layer._parameters[name]) not in owners for name in call.parameters):
                break
            end = top
        return end

    def calls_of(self, part: slice) -> list[Call]:
        """The uses as the examples of that part alone would have made them, in the order of `calls`."""
        return [_of_some(call, part.stop - part.start) for call in self.calls]

    @torch.no_grad()
    def gradients(self, part: slice, calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[Tensor, ...], Tensor]]:
        """What a first pass is told of the layers for the examples of one part: use, inputs, and gradient.

        Args:
            part: of `parts`.
            calls: its `calls_of`.
        """
        used = iter(calls)
        if self.grad is None:
            grad = torch.zeros(shape_of((self.top, 0)), dtype=calls[0].dtype, device=calls[0].device)[part]
        else:
            grad = self.grad[part]
        for step in self.steps:
            if isinstance(step, tuple):
                yield next(used), tuple([tensor[part] for tensor in step[1]]), grad
            else:
                grad = step(grad, part)


@contextmanager
def _stopped_at(node: Any, keep: Callable[[Tensor | None], None]) -> Iterator[None]:
    def stop(grads: tuple[Tensor | None, ...]) -> tuple[None, ...]:
        keep(grads[0])
        return (None,) * len(grads)

    listening = node.register_prehook(stop)
    try:
        yield
    finally:
        listening.remove()


def let_go_below(end: Any) -> None:
    """Frees what the graph holds from a node of a tail on down, as a backward does that comes through."""
    edge, told = GradientEdge(end, 0), end._input_metadata[0]
    nothing = torch.zeros((), dtype=told.dtype, device=told.device).expand(shape_of((end, 0)))
    with _stopped_at(end, lambda grad: None):
        run_backward((edge,), (nothing,), False, False, (PROBE,), True, accumulate_grad=False)


@dataclass
class _Way:
    """From what a layer read down to the layer that is next there.

    Attributes:
        above: the use of the upper layer.
        nodes: the operations between them.
        capture: the node of the lower layer.
    """

    above: Call
    nodes: list[Any]
    capture: Any

    @property
    def below(self) -> Call:
        """The use of the lower layer."""
        return self.capture.call

    @property
    def top(self) -> Any:
        """The node of what the upper layer read."""
        return self.nodes[0] if self.nodes else self.capture

    def steps(self) -> list[Down | tuple[Call, tuple[Tensor, ...]]]:
        """For `Tail`, down to the lower layer's pre-activation."""
        operations: list[Down | tuple[Call, tuple[Tensor, ...]]] = [BETWEEN[node.name()](node) for node in self.nodes]
        return [*operations, (self.below, self.capture.saved_tensors)]


def tail_of(calls: Sequence[Call], shared: Collection[Any], examples: int) -> Tail | None:
    """The tail of a graph; None where it has none, or a small one.

    Args:
        calls: all uses of layers in it.
        shared: its nodes that several others lead to.
        examples: B.
    """
    lowest = [call for call in calls if not call.sources and _treats_each_by_itself(call, examples)]
    if len(lowest) != 1 or examples < 2 or lowest[0].hooks != RemovableHandle.next_id or is_traced():
        return None
    found = _trimmed(_ways_up(lowest[0], calls, shared, examples))
    own = {id(call.layer._parameters[name]) for way in found for call in [way.below] for name in call.parameters}
    uses = sum([id(call.layer._parameters[name]) in own for call in calls for name in call.parameters])
    if not found or uses != sum([len(way.below.parameters) for way in found]):
        return None
    steps = found[-1].steps()
    for upper, lower in zip(found[:0:-1], found[-2::-1], strict=True):
        steps += [_convolution(_operation(upper.capture)), *lower.steps()]
    down = found[::-1]
    return Tail(down[0].top, steps, [way.below for way in down], [way.top for way in down], examples)


def _ways_up(lowest: Call, calls: Sequence[Call], shared: Collection[Any], examples: int) -> list[_Way]:
    """The ways down to the lowest layer, to the one above it, and so on, as far as there is only one to each."""
    ways = {id(way.below): way for call in calls if (way := _way_down(call, examples)) is not None}
    found: list[_Way] = []
    below = lowest
    while (way := ways.get(id(below))) is not None:
        nodes = [*way.nodes, way.capture]
        if any(node in shared for node in nodes[1:]):
            break
        found.append(way)
        if nodes[0] in shared or not _treats_each_by_itself(way.above, examples):
            break
        below = way.above
    return found


def _way_down(call: Call, examples: int) -> _Way | None:
    """The way from what a layer read, through operations that treat each example by itself, to the next layer."""
    if len(call.sources) != 1 or isinstance(call.sources[0], Tensor):
        return None
    nodes: list[Any] = []
    node: Any = call.sources[0]
    while node is not None and node.name() in BETWEEN:
        if shape_of((node, 0))[:1] != (examples,):
            return None
        nodes.append(node)
        node = node.next_functions[0][0]
    if node is None or node.name() != CAPTURE or not _treats_each_by_itself(node.call, examples):
        return None
    operation, sources = _operation(node), node.call.sources
    if operation.name() != "ConvolutionBackward0" or operation.next_functions[0][0] is not (sources or [None])[0]:
        return None
    return _Way(call, nodes, node)


def _operation(capture: Any) -> Any:
    """What produced the pre-activation."""
    return capture.next_functions[0][0]


def _trimmed(ways: list[_Way]) -> list[_Way]:
    """Without layers at the upper end that are small; [] where all are."""
    largest = max([_bytes(way.below) for way in ways], default=0)
    if largest < LEAST_BYTES:
        return []
    while _bytes(ways[-1].below) < SHARE * largest:
        ways.pop()
    return ways


def _treats_each_by_itself(call: Call, examples: int) -> bool:
    """Whether the use is an ordinary convolution's of the whole batch, on a processor."""
    if getattr(type(call.layer), "wrapped", None) not in CONVOLUTIONS or call.device.type != "cpu":
        return False
    whole = call.batch_dim == 0 and call.shape[0] == examples and not call.rows
    return whole and not call.packed and call.dtype in (torch.float32, torch.float64)


def _bytes(call: Call) -> int:
    """Of what the layer produced."""
    return math.prod(call.shape) * call.dtype.itemsize


def _of_some(call: Call, examples: int) -> Call:
    """The use of a layer as so many of its examples would have made it."""
    some = copy.copy(call)
    some.shape = torch.Size((examples, *call.shape[1:]))
    return some
