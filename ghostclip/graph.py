"""Reading the autograd graph behind a vector of losses: which layers took part, and that nothing else did.

What a layer remembers lives in the graph only, so the graph is where a clipper finds it. The walk goes from the losses
down, jumps over the inside of each captured layer, and so meets a trained parameter only where one is used outside
of every rule: such a use has a gradient that no norm would count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.index import ModelIndex
from ghostclip.nn.base import PROBE, Call

__all__ = ["captured_calls", "first_pass"]

ACCUMULATE = type(torch.zeros((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def captured_calls(losses: Tensor, index: ModelIndex) -> list[Call]:
    """Every use of a wrapper layer that ``losses`` depend on.

    Args:
        losses: [B], attached to the graph.
        index: of the model.

    Raises:
        UnsupportedModelError: a trained parameter is used outside of its layer, or by reentrant checkpointing.
    """
    calls: list[Call] = []
    seen: set[Any] = set()
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if isinstance(node, Tensor):
            _refuse_foreign_use(node, index)
        elif type(node) is ACCUMULATE:
            _refuse_foreign_use(node.variable, index)  # type: ignore[union-attr]
        elif isinstance(call := getattr(node, "call", None), Call):
            if not index.knows(call):
                index.refresh()
            if index.own_parameters(call):
                calls.append(call)
            stack += call.sources
        else:
            if type(node).__name__ == "CheckpointFunctionBackward":
                raise UnsupportedModelError(
                    "reentrant activation checkpointing hides the layers inside it; "
                    "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            stack += [edge[0] for edge in node.next_functions]
    return calls


def _refuse_foreign_use(leaf: Tensor, index: ModelIndex) -> None:
    name = index.name_of(leaf)
    if name is not None:
        raise UnsupportedModelError(
            f"parameter {name!r} is used outside of its layer (a bare Parameter, F.linear(h, layer.weight), a layer "
            "that ran before the model was wrapped, or a compiled submodule), where no per-example gradient can be "
            "had; call the layer itself, run the forward again after wrapping, or freeze the parameter"
        )


def first_pass(losses: Tensor, calls: list[Call], sink: Any, seed: Tensor | None = None, *, retain_graph: bool) -> None:
    """A backward from ``losses`` to the pre-activations and no further; ``sink`` is told of each as it arrives.

    Args:
        losses: [B].
        calls: from `captured_calls`.
        sink: called with (call, inputs, gradient at the pre-activation); nothing is kept on its behalf.
        seed: gradient of the losses, [B]; None for ones.
        retain_graph: as torch's.
    """
    for call in calls:
        call.sink = sink
    try:
        seed = torch.ones_like(losses) if seed is None else seed
        torch.autograd.grad(losses, PROBE, seed, retain_graph=retain_graph, allow_unused=True)
    finally:
        for call in calls:
            call.sink = None
