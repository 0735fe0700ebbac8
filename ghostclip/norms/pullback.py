"""Gradients of several examples, taken down the same part of a graph: a backward of many gradients at once.

For q = p * p with p = 3 and gradients [2, 5] of two examples at q, theirs at p are [2, 5] * 2p = [12, 30].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.native.custom_ops import is_traced
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
    found = []
    for part in chunks(terms[0].examples, 4 * max(term.shape.numel() for term in terms), BYTES):
        seeds = [term.pick(part).per_example().to(dtype) for term, dtype in zip(terms, dtypes, strict=True)]
        found.append(_together(outputs, inputs, seeds))
    return [_joined(parts, torch.cat) for parts in zip(*found, strict=True)] if found else [None] * len(inputs)


def _together(
    outputs: Sequence[GradientEdge], inputs: Sequence[Any], rows: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """By one backward of all examples; by one for each in a trace, and where an operation can't be vectorised."""
    if len(rows[0]) > 1 and not is_traced():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="There is a performance drop")
                return torch.autograd.grad(
                    outputs, inputs, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except (RuntimeError, UserWarning):
            pass
    each = [
        torch.autograd.grad(outputs, inputs, seeds, retain_graph=True, allow_unused=True)
        for seeds in zip(*rows, strict=True)
    ]
    return [_joined(parts, torch.stack) for parts in zip(*each, strict=True)]


def _joined(parts: Sequence[Tensor | None], join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    """Zeros where none arrived for some examples alone, as a function of somebody's own may decide by values."""
    like = next((part for part in parts if part is not None), None)
    return None if like is None else join([torch.zeros_like(like) if part is None else part for part in parts])
