"""What a layout takes for granted until the gradients of the pass itself were seen; nothing is clipped before."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import Edge
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import LayerCall, Sink

__all__ = ["FirstGradients", "LayoutCheck"]


class LayoutCheck(Protocol):
    """What a layout takes for granted until the gradients of a first pass were seen."""

    def watched(self, sink: Sink) -> Sink:
        """A sink for the pass, which is told what ``sink`` is to be told."""

    def fails(self) -> bool:
        """Whether it does not hold, after the pass; the graph must be there still."""


class FirstGradients:
    """Sees whether a gradient reaches what none had reached so far, or tells apart what none told apart.

    Then these are to be proved.

    Args:
        calls: that no gradient has reached.
        region: with boundaries that have `BroadcastBoundary.alternatives`; None where there are none.
        names: of the model.
        awaited: operations with the numbers of their inputs that no gradient has reached.
    """

    def __init__(
        self, calls: Sequence[LayerCall], region: SharedSubgraph | None, names: ParameterNames,
        awaited: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> None:  # fmt: skip
        self._calls, self._region, self._arrived = set(map(id, calls)), region, list[Tensor]()
        boundaries = () if region is None else region.boundaries
        self._open = {each.edge: each for each in boundaries if each.alternatives != ()}
        if is_traced():
            what = names.layer(calls[0]) if calls else next(iter([*self._open, *awaited]))[0].name()
            raise UnsupportedModelError(f"no gradient has reached {what} yet")
        self._awaited, self._hooks = awaited, list[Any]()

    def watched(self, sink: Sink) -> Sink:
        """See `LayoutCheck.watched`."""

        def look(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            if id(call) in self._calls:
                self._arrived.append(grad.any())
            sink(call, inputs, grad)

        if self._region is not None:
            self._region.watch = self._see
        self._hooks = [node.register_hook(functools.partial(self._hand_on, slots)) for node, slots in self._awaited]
        return look

    def _hand_on(self, slots: Sequence[int], handed: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        self._arrived += [grad.any() for grad in [handed[slot] for slot in slots] if grad is not None]

    def _see(self, edge: Edge, grad: Tensor) -> None:
        if edge in self._open and self._region is not None:
            self._arrived.append(self._open[edge].tells_apart(grad, self._region.examples))

    def fails(self) -> bool:
        """Whether one of them was given a gradient that isn't zero, or not zero where alternatives differ."""
        if self._region is not None:
            self._region.watch = None
        for hook in self._hooks:
            hook.remove()
        return bool(self._arrived) and bool(torch.stack(self._arrived).any())
