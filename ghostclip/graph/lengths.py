"""Lengths of examples in the arguments of operations: packed sequences, bags between offsets, nested tensors.

Whose the rows below such an operation are depends on these arguments, which no node of the graph tells: a layer on the
rows of a packed sequence, say. What is proved of such a graph holds for other batches with the same lengths. Where all
rows below are padded before they are packed, lengths don't matter.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.nn.base import LayerCall

__all__ = ["has_lengths", "lengths_of"]

# From padded rows to those of a packed sequence.
PACKING = "PackPaddedSequenceBackward0"
_NEVER_AGAIN = itertools.count()


def has_lengths(kind: type) -> bool:
    """Whether torch's nodes of this type are given lengths of examples, which they don't tell."""
    return "Nested" in kind.__name__


def lengths_of(subjects: Sequence[Any], index: ParameterNames) -> Any:
    """What lengths the proofs of this graph hold for; None where they hold for all.

    Args:
        subjects: calls of layers with ``lengths``, and nodes of types that `has_lengths` names.
        index: the model's names.
    """
    found: list[Any] = []
    for subject in subjects:
        call = isinstance(subject, LayerCall)
        sources = subject.sources if call else [below for below, _ in subject.next_functions]
        lengths = subject.lengths if call else ()
        if _meet_parameters(sources, lengths, index):
            # A nested tensor's are nowhere to be read: no later batch is known to have the same.
            found.append(_numbers(lengths) if call else next(_NEVER_AGAIN))
    return repr(found) if found else None


def _numbers(lengths: Sequence[Tensor | None]) -> list[list[int] | None]:
    return [None if each is None else each.tolist() for each in lengths]


def _are_same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return len(one) == len(other) and (all(map(operator.is_, one, other)) or _numbers(one) == _numbers(other))


def _meet_parameters(sources: Sequence[Any], lengths: Sequence[Tensor | None], index: ParameterNames) -> bool:
    """Whether trained layers or parameters have seen the rows, but layers that tell them apart by the same lengths."""
    seen: set[Any] = set()
    stack = list(sources)
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen or isinstance(node, Tensor):
            continue
        seen.add(node)
        call, leaf = getattr(node, "call", None), getattr(node, "variable", None)
        if isinstance(call, LayerCall):
            if not call.lengths or not _are_same(call.lengths, lengths):
                return True
        elif leaf is not None:
            if index.name_of(leaf) is not None:
                return True
        elif node.name() != PACKING:
            stack += [below for below, _ in node.next_functions]
    return False
