"""Gradients of several examples, taken down the same part of a graph: a backward of many gradients at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.convolution import ConvGrads
from ghostclip.norms.outer import chunks
from ghostclip.norms.ragged import Ragged
from ghostclip.norms.term import Dense, PerExampleGrads

__all__ = ["pulled_back"]

# The gradients of so many bytes go down together.
BYTES = 1 << 22


def pulled_back(
    outputs: Sequence[GradientEdge], inputs: Sequence[Any], terms: Sequence[PerExampleGrads]
) -> list[Tensor | None]:
    """What each example's gradients at ``outputs`` make at ``inputs``: [B, *shape] for each, None where none arrives.

    Keeps the graph.

    Args:
        outputs: tensors of the graph, at least one.
        inputs: leaves, or tensors of the graph.
        terms: B gradients for each output. They are formed a chunk of examples at a time.
    """
    terms = [Dense(term.per_example()) if isinstance(term, Ragged) else term for term in terms]
    dtypes = [edge.node._input_metadata[edge.output_nr].dtype for edge in outputs]
    found: list[list[Tensor | None]] = []
    for part in chunks(terms[0].examples, 4 * max(term.shape.numel() for term in terms), BYTES):
        seeds = [_formed(term.pick(part)).to(dtype) for term, dtype in zip(terms, dtypes, strict=True)]
        one_by_one = is_traced() or len(seeds[0]) == 1
        found.append((_one_by_one if one_by_one else _together)(outputs, inputs, seeds))
    return [_joined(parts) for parts in zip(*found, strict=True)] if found else [None] * len(inputs)


def _formed(term: PerExampleGrads) -> Tensor:
    """`PerExampleGrads.per_example`; of a convolution by the first way that keeps gradients, which forms no patches."""
    if isinstance(term, ConvGrads) and term.examples:
        way = next(way for way in term.candidates().values() if way.keeps)
        if (kept := way.run(term, True).kept) is not None:
            return kept
    return term.per_example()


def _together(outputs: Sequence[GradientEdge], inputs: Sequence[Any], rows: Sequence[Tensor]) -> list[Tensor | None]:
    """By one backward of all examples; by one for each, where an operation can't be vectorised."""
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
