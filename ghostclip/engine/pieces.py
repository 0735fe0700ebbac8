"""Out of memory inside a physical batch: it is divided, and what fits is remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Pieces", "is_out_of_memory", "rows_of"]

T = TypeVar("T")
# How the CPU's allocator and the GPU's libraries say it, in RuntimeErrors of no type of their own.
SIGNS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")

log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


class Pieces:
    """Works on physical batches in pieces that fit into memory.

    Attributes:
        most: the most examples (or users) that are tried at once; None before memory ran out.
    """

    def __init__(self) -> None:
        self.most: int | None = None

    def run(self, work: Callable[[Any, int, int], T], examples: Any, units: int, rows: int) -> list[T]:
        """``work(piece, start, stop)`` for units start to stop, all of ``examples`` in order, each in one piece.

        Args:
            work: raises, and leaves no trace, when memory runs out.
            examples: a physical batch.
            units: how many examples (or users) it has.
            rows: of its tensors in dimension 0, as many for each unit.

        Raises:
            What ``work`` raises; out of memory only where a piece can't be divided any more, saying why.
        """
        done: list[T] = []
        start = 0
        while start < units:
            stop = units if self.most is None else min(units, start + self.most)
            failure = None
            try:
                # The piece has no name here, lest it be kept while a smaller one is made.
                done.append(work(_piece(examples, start, stop, units, rows), start, stop))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if reason := _whole_for_good(examples, stop - start, rows):
                    raise _advised(error, stop - start, reason) from error
                failure = (str(error).splitlines() or [type(error).__name__])[0]
            # Outside of the handler: the error holds on to the tensors of the passes that failed.
            if failure is None:
                start = stop
            else:
                self._halve(stop - start, failure)
        return done

    def _halve(self, tried: int, failure: str) -> None:
        self.most = tried // 2
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        log.warning(
            "memory ran out with %d examples in a physical batch (%s); from now on at most %d are processed at once, "
            "with the same result. max_physical_batch_size=%d would save the attempt",
            tried, failure, self.most, self.most,
        )  # fmt: skip


def _piece(examples: Any, start: int, stop: int, units: int, rows: int) -> Any:
    if stop - start == units:
        return examples
    each = rows // units
    return rows_of(examples, rows, start * each, stop * each)


def rows_of(examples: Any, rows: int, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of a physical batch: tensors with ``rows`` in dimension 0, nested as they are.

    Raises:
        TypeError: something else is in it, of which nobody knows whose it is.
    """
    if isinstance(examples, Tensor):
        if examples.dim() == 0 or examples.shape[0] != rows or examples.layout != torch.strided:
            raise TypeError(f"it holds a tensor of shape {[*examples.shape]}, which has not one row for each example")
        return examples[start:stop]
    if examples is None:
        return None
    if isinstance(examples, Mapping):
        kind: Any = type(examples)
        return kind({name: rows_of(value, rows, start, stop) for name, value in examples.items()})
    if isinstance(examples, tuple) and hasattr(examples, "_fields"):
        return type(examples)(*(rows_of(value, rows, start, stop) for value in examples))
    if type(examples) in (tuple, list):
        return type(examples)(rows_of(value, rows, start, stop) for value in examples)
    raise TypeError(
        f"it holds something of type {type(examples).__name__}, and not only tensors with a row for each example"
    )


def _whole_for_good(examples: Any, units: int, rows: int) -> str | None:
    """Why a piece of so many units can't be made smaller; None when it can."""
    if units < 2:
        return "it is a single one"
    try:
        rows_of(examples, rows, 0, 1)
    except Exception as error:
        return str(error)
    return None


def _advised(error: BaseException, units: int, reason: str) -> BaseException:
    """An error of the same kind that says what to do."""
    kind = next(kind for kind in (torch.OutOfMemoryError, MemoryError, RuntimeError) if isinstance(error, kind))
    remedy = "use a smaller model or shorter examples" if units < 2 else "give a smaller max_physical_batch_size"
    return kind(
        f"memory ran out with {units} example{'s' if units > 1 else ''} in a physical batch, which can't be divided: "
        f"{reason}; {remedy}. Nothing was released or charged. torch says: {error}"
    )
