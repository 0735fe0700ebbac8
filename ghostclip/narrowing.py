"""Where all that losses depend on passes through one narrow tensor: a second pass needn't come down to it once more.

The head of a language model makes thousands of scores out of a few hundred features. Both passes over the graph behind
its losses have the same gradient at these features, up to the weights of the examples. The first keeps it, which is
small beside the scores; the second forms the head's clipped sum, and goes on below from the gradient that was kept. A
product as large as the head's forward is saved, and where the head isn't trained all of the way down to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ghostclip.nn.base import CAPTURE, Call
from ghostclip.seams import Edge, shape_of

__all__ = ["Narrowing", "narrowing_of"]

# A tensor is narrow if something on the way to it has at least so many times its numbers.
NARROW = 2


@dataclass
class Narrowing:
    """A tensor of the graph that all ways from the losses to other layers lead through.

    Attributes:
        edge: the tensor.
        user: the one operation that read it, and the place it has among what that was given.
        above: the use of a trained layer on the way down to it, the only one; None where there is none.
        done: whether a second pass has no business above the tensor at all.
        grad: its gradient in a first pass; None before.
    """

    edge: Edge
    user: tuple[Any, int]
    above: Call | None
    done: bool = False
    grad: Tensor | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The gradient is kept of a pass that goes by in this context."""
        # Taken from who gives it: hooks of the tensor itself run when it is handed on, in either pass.
        node, place = self.user

        def keep(given: tuple[Tensor | None, ...], received: object) -> None:
            self.grad = given[place]

        listening = node.register_hook(keep)
        try:
            yield
        finally:
            listening.remove()


def narrowing_of(losses: Tensor) -> Narrowing | None:
    """The narrow tensor behind ``losses``; None where ways part before one, or layers that aren't narrow come first."""
    user: tuple[Any, int] | None = None
    edge: Edge = (losses.grad_fn, losses.output_nr)
    widest = _numbers(edge)
    while True:
        call = getattr(edge[0], "call", None)
        ways = _ways(edge[0])
        if call is not None or len(ways) != 1:
            break
        user, edge = (edge[0], ways[0]), edge[0].next_functions[ways[0]]
        widest = max(widest, _numbers(edge))
    if user is not None and ways and NARROW * _numbers(edge) <= widest:
        return Narrowing(edge, user, None)
    user = _reader(edge[0], call) if isinstance(call, Call) and edge[0].name() == CAPTURE else None
    if user is None:
        return None
    edge = user[0].next_functions[user[1]]
    return Narrowing(edge, user, call) if NARROW * _numbers(edge) <= widest else None


def _numbers(edge: Edge) -> int:
    return math.prod(shape_of(edge))


def _ways(node: Any) -> list[int]:
    """The places among what a node was given from which the graph goes on."""
    return [place for place, (below, _) in enumerate(node.next_functions) if below is not None]


def _reader(node: Any, call: Call) -> tuple[Any, int] | None:
    """The operation inside a layer that read the layer's input, and at which place; None of several, or of a leaf."""
    if len(call.sources) != 1 or isinstance(call.sources[0], Tensor):
        return None
    found, seen = [], {node}
    stack = [node]
    while stack:
        above = stack.pop()
        for place in _ways(above):
            below = above.next_functions[place][0]
            if below is call.sources[0]:
                found.append((above, place))
            elif below not in seen:
                seen.add(below)
                stack.append(below)
    return found[0] if len(found) == 1 else None
