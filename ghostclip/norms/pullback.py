"""Gradients of several examples, taken down the same part of a graph: a backward of many gradients at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.outer import chunks

__all__ = ["pulled_back"]

# The gradients of so many bytes go down together.
BYTES = 1 << 22


def pulled_back(outputs: Sequence[GradientEdge], inputs: Sequence[Any], seeds: Sequence[Tensor]) -> list[Tensor | None]:
    """What each example's gradients at ``outputs`` make at ``inputs``: [B, *shape] for each, None where none arrives.

    Keeps the graph.

    Args:
        outputs: tensors of the graph, at least one.
        inputs: leaves, or tensors of the graph.
        seeds: [B, *shape] for each output.
    """
    examples, largest = len(seeds[0]), max(math.prod(seed.shape[1:]) * seed.element_size() for seed in seeds)
    found: list[list[Tensor | None]] = []
    for part in chunks(examples, largest, BYTES):
        rows = [seed[part] for seed in seeds]
        found.append(_one_by_one(outputs, inputs, rows) if is_traced() else _together(outputs, inputs, rows))
    return [_joined(parts) for parts in zip(*found, strict=True)] if found else [None] * len(inputs)


def _together(outputs: Sequence[GradientEdge], inputs: Sequence[Any], rows: Sequence[Tensor]) -> list[Tensor | None]:
    """The same by one backward of all examples; by one for each, where an operation can't be vectorised."""
    if len(rows[0]) == 1:
        return _one_by_one(outputs, inputs, rows)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")
            found = torch.autograd.grad(
                outputs, inputs, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        return list(found)
    except (RuntimeError, UserWarning):
        return _one_by_one(outputs, inputs, rows)


def _one_by_one(outputs: Sequence[GradientEdge], inputs: Sequence[Any], rows: Sequence[Tensor]) -> list[Tensor | None]:
    each = [
        torch.autograd.grad(outputs, inputs, seeds, retain_graph=True, allow_unused=True)
        for seeds in zip(*rows, strict=True)
    ]
    return [_stacked(parts) for parts in zip(*each, strict=True)]


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    like = next((part for part in parts if part is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if p is None else p for p in parts])


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
