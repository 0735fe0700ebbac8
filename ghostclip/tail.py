"""The lowest layers of a network of images, gone through some examples at a time.

A network of convolutions holds most of its numbers at its lowest layers, and a first pass comes to them last, with all
of the graph above still there for a second one: what such a backward takes there, several tensors as large as the
largest, is what it takes at all. But what lies between these layers, activations and pools, treats every example by
itself. So autograd is stopped above them, where tensors are small yet, and its own backward operations are called for
one part of the examples after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ghostclip.nn.base import CAPTURE, Call
from ghostclip.norms.term import is_traced
from ghostclip.seams import shape_of

__all__ = ["Tail", "tail_of"]

# Bytes of the largest pre-activation from which on a tail is worth its calls. Where all of them take less than the
# parameters do, as in VGG11, their gradients and the optimizer's state make the peak.
LEAST_BYTES = 2 << 20
# Layers go by parts while their pre-activations are at least this share of the largest; and by so many. Measured on
# the CNN of Lee & Kifer and the CIFAR network: memory over an ordinary step 1.34 and 1.38 to 1.06 and 1.00, for
# 1 to 6% more time; with parts half as large 5%, and with smaller layers too 14%, for nothing.
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


Step = Down | tuple[Call, tuple[Tensor, ...]]


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

    def steps(self) -> list[Step]:
        """For `Tail`, down to the lower layer's pre-activation."""
        return [*(BETWEEN[node.name()](node) for node in self.nodes), (self.below, self.capture.saved_tensors)]


class Tail:
    """The lowest layers of a graph, from a tensor that all ways to them lead through.

    Args:
        ways: down to the layers, the uppermost first.
        examples: B.

    Attributes:
        calls: the uses of the layers, from the top down.
        grad: the gradient at the top, once a backward came there.
    """

    def __init__(self, ways: list[_Way], examples: int) -> None:
        self.calls = [way.below for way in ways]
        self.grad: Tensor | None = None
        self._ways, self._examples = ways, examples
        self._steps: list[Step] = []

    @property
    def parts(self) -> list[slice]:
        """Equal parts of the examples, two of them at least in each: of one torch's kernels may round otherwise."""
        count = min(self._examples // 2, PARTS)
        ends = [number * self._examples // count for number in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Gradients of a backward in this context go no further down than the top, where they are kept.

        What the layers remember is held from here on until `forget`, also if the backward lets go of it.
        """

        def keep(grad: Tensor | None) -> None:
            # A graph may be let go of in this context, too: then there is none.
            self.grad = self.grad if grad is None else grad

        if not self._steps:
            self._steps = self._ways[0].steps()
            for upper, lower in pairwise(self._ways):
                self._steps += [_convolution(_operation(upper.capture)), *lower.steps()]
        self.grad = None
        with _stopped_at(self._ways[0].top, keep):
            self.calls[-1].registered += 1  # this one
            yield

    def forget(self) -> None:
        """Holds on to nothing any more that a backward may free."""
        self._steps, self.grad = [], None

    def calls_of(self, part: slice) -> list[Call]:
        """The uses as the examples of that part alone would have made them, in the order of `calls`."""
        return [_of_some(call, part.stop - part.start) for call in self.calls]

    @torch.no_grad()
    def gradients(self, part: slice, calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[Tensor, ...], Tensor]]:
        """What a pass is told of the layers for the examples of one part: use, inputs, and gradient.

        Args:
            part: of `parts`.
            calls: its `calls_of`, or the first of them.
        """
        used = iter(calls)
        left = len(calls)
        if self.grad is None:
            shape = shape_of((self._ways[0].top, 0))
            grad = torch.zeros(shape, dtype=calls[0].dtype, device=calls[0].device)[part]
        else:
            grad = self.grad[part]
        for step in self._steps:
            if isinstance(step, tuple):
                yield next(used), tuple([tensor[part] for tensor in step[1]]), grad
                left -= 1
            else:
                grad = step(grad, part)
            if not left:
                return

    def needed(self, owners: Collection[int]) -> int:
        """How many of `calls` a second pass has to do with, of whose parameters those in ``owners`` (ids) are known."""
        return max([number for number, call in enumerate(self.calls, 1) if not _is_known(call, owners)], default=0)


def _is_known(call: Call, owners: Collection[int]) -> bool:
    return all(id(parameter) in owners for parameter in _parameters(call))


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


def tail_of(losses: Tensor, calls: Sequence[Call]) -> Tail | None:
    """The tail of a graph; None where it has none, or a small one.

    Args:
        losses: [B].
        calls: all uses of layers behind them.
    """
    examples = len(losses)
    lowest = [call for call in calls if not call.sources and _treats_each_by_itself(call, examples)]
    if len(lowest) != 1 or examples < 4 or lowest[0].registered != RemovableHandle.next_id or is_traced():
        return None
    own = {id(parameter): parameter.nbytes for call in calls for parameter in _parameters(call)}
    if max([call.nbytes for call in calls]) < LEAST_BYTES or sum([call.nbytes for call in calls]) < sum(own.values()):
        return None
    ways = {id(way.below): way for call in calls if (way := _way_down(call, examples)) is not None}
    shared = _shared_nodes(losses)
    found: list[_Way] = []
    below = lowest[0]
    while (way := ways.get(id(below))) is not None:
        if any(node in shared for node in [*way.nodes, way.capture][1:]):
            break
        found.insert(0, way)
        if way.top in shared or not _treats_each_by_itself(way.above, examples):
            break
        below = way.above
    largest = max([way.below.nbytes for way in found], default=0)
    if largest < LEAST_BYTES:
        return None
    while found[0].below.nbytes < SHARE * largest:
        found.pop(0)
    if _are_used_elsewhere([way.below for way in found], calls):
        return None
    return Tail(found, examples)


def _shared_nodes(losses: Tensor) -> set[Any]:
    """The nodes of the graph that several others lead to, the insides of layers included."""
    shared: set[Any] = set()
    seen: set[Any] = set()
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            shared.add(node)
        elif node is not None:
            seen.add(node)
            stack += [edge[0] for edge in node.next_functions]
    return shared


def _are_used_elsewhere(some: Sequence[Call], calls: Sequence[Call]) -> bool:
    """Whether a parameter of some uses has another use."""
    own = [id(parameter) for call in some for parameter in _parameters(call)]
    every = [id(parameter) for call in calls for parameter in _parameters(call)]
    return sum([owner in own for owner in every]) != len(own)


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
    below = getattr(node, "call", None)
    if not isinstance(below, Call) or node.name() != CAPTURE or not _treats_each_by_itself(below, examples):
        return None
    operation, source = _operation(node), below.sources[0] if below.sources else None
    if operation.name() != "ConvolutionBackward0" or operation.next_functions[0][0] is not source:
        return None
    return _Way(call, nodes, node)


def _operation(capture: Any) -> Any:
    """What produced the pre-activation."""
    return capture.next_functions[0][0]


def _treats_each_by_itself(call: Call, examples: int) -> bool:
    """Whether the use is an ordinary convolution's of the whole batch, on a processor."""
    if getattr(type(call.layer), "wrapped", None) not in CONVOLUTIONS or call.device.type != "cpu":
        return False
    whole = call.batch_dim == 0 and call.shape[0] == examples and not call.rows
    return whole and not call.packed and call.dtype in (torch.float32, torch.float64)


def _parameters(call: Call) -> list[Tensor]:
    """Those that the use multiplied with, but for frozen ones."""
    return [parameter for name in call.parameters if (parameter := call.layer._parameters[name]) is not None]


def _of_some(call: Call, examples: int) -> Call:
    """The use of a layer as so many of its examples would have made it."""
    some = copy.copy(call)
    some.shape = torch.Size((examples, *call.shape[1:]))
    return some
