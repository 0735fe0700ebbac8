"""Divides physical batches that don't fit into memory, by trial before the first step or after memory ran out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.cutting import take_rows
from ghostclip.clipper.forwards import LossFunction, forward_of, without_ranks
from ghostclip.clipper.second_pass import Add
from ghostclip.clipper.trial import without_trace
from ghostclip.engine.memory import MemoryMeter, in_words
from ghostclip.errors import PrivacyError, RowsMovedError, is_out_of_memory
from ghostclip.sampling import LogicalBatches, UserRows
from ghostclip.validate import positive_int

__all__ = ["MicroBatches", "Piece", "memory_for_trials", "slice_rows"]

# The trials end where a batch is within this of the largest that memory is foretold to hold.
CLOSE = 1.05
# Of the memory for passes, for what comes between them and for freed memory that the allocator keeps.
RESERVE = 0.1

log = logging.getLogger("ghostclip")


@dataclass
class Piece(AbstractContextManager[None]):
    """A physical batch or a part of one; a context for its forward and passes.

    It catches that memory ran out, after which `MicroBatches.pieces` gives a smaller one.

    Attributes:
        rows: size of its tensors in dimension 0, a multiple of ``units``.
        units: how many examples (or users) it has.
        users: whose rows they are; None where each row is a unit of its own.
        more: whether another piece of the same physical batch follows.
        out_of_memory: what torch said.
        done: whether its clipped sums are about to be added, or were: it must not come again.
    """

    examples: Any
    rows: int
    units: int
    users: UserRows | None = None
    batch_index: Any = None
    more: bool = False
    out_of_memory: str | None = None
    done: bool = False

    def part(self, start: int, stop: int) -> Piece:
        """Of the units from ``start`` to before ``stop``."""
        if stop - start == self.units:
            return replace(self)
        each = self.rows // self.units
        return Piece(
            slice_rows(self.examples, self.rows, start * each, stop * each), each * (stop - start), stop - start,
            None if self.users is None else self.users.part(start, stop), more=stop < self.units,
        )  # fmt: skip

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: Any) -> bool:
        """Whether the piece comes again; where memory ran out for good, an error that says what to do."""
        if error is None or self.done:
            return False
        if not isinstance(error, RuntimeError | MemoryError) or not is_out_of_memory(error):
            return False
        if reason := self._indivisible():
            raise _advised(error, self.units, reason) from error
        self.out_of_memory = (str(error).splitlines() or [type(error).__name__])[0]
        self.examples = None  # lest it be kept while a smaller one is made
        return True

    def _indivisible(self) -> str | None:
        """Why it can't be made smaller; None when it can."""
        if self.batch_index is not None:
            return "batch_index says whose rows are in the whole of it"
        if self.units < 2:
            return "it is a single one"
        try:
            slice_rows(self.examples, self.rows, 0, 1)
        except Exception as error:
            return str(error)
        return None


class MicroBatches:
    """Works on physical batches in pieces that fit into memory.

    With ``trials`` it finds how many examples fit, by passes over batches of growing size that leave no trace. Sizes
    double as long as the growth of memory so far says that the next one fits. Each trial is a forward and both passes
    on the first batch's examples, some of them repeated.

    Args:
        trials: the memory that they may use, and the loader of whose samples they are, which divides physical batches
            from its next loop on; None: there are none, and batches are divided where memory runs out only.

    Attributes:
        most: how many examples (or users) are tried at once; None: all of a physical batch.
    """

    def __init__(self, trials: tuple[MemoryMeter, LogicalBatches] | None = None) -> None:
        self.most: int | None = None
        self._trials = trials

    @property
    def is_open(self) -> bool:
        """Whether ``most`` is still to be found by trial."""
        return self._trials is not None and self.most is None

    def check_found(self, caller: str) -> None:
        """Raises PrivacyError where ``most`` is still to be found, which the caller can't do."""
        if self.is_open:
            raise PrivacyError(
                'max_physical_batch_size="auto" is found by the first engine.step(batch, loss_fn), which can try '
                f"batches of other sizes, and {caller} came before it; take a step first, or give a number"
            )

    def agree(self, said: Sequence[int | None]) -> None:
        """Takes the smallest ``most`` of all ranks, where it was to be found."""
        known = [most for most in (self.most, *said) if most is not None]
        if self._trials is not None and known and self.most != min(known):
            self.most = min(known)
            self._trials[1].limit_physical(self.most)

    def find(self, clipper: GhostClipper, optimizer: Optimizer, loss_fn: LossFunction, whole: Piece) -> None:
        """Finds ``most`` by trial where it is still to be found and the physical batch has examples.

        Raises:
            TypeError: the batch can't be divided.
            MemoryError: not even one example fits.
        """
        examples, rows = whole.examples, whole.rows
        if self._trials is None or self.most is not None or not rows:
            return
        memory, loader = self._trials
        try:
            slice_rows(examples, rows, 0, 1)
        except TypeError as error:
            raise TypeError(f'max_physical_batch_size="auto" can\'t divide a batch: {error}; give a number') from error
        # Kept from trial to trial, as the sums of earlier physical batches are.
        sums = clipper.passes.new_sums()

        def trial(size: int) -> None:
            index = torch.arange(size) % rows
            batch = _mapped(examples, rows, lambda tensor: take_rows(tensor, index))
            _clip_without_a_trace(clipper, loss_fn, batch, size, sums.add)

        reserve = _bytes_of_state(optimizer)
        clipper.passes.index.watch()
        with clipper.passes.forgetting():
            most = _largest_that_fits(trial, memory, memory.limit - reserve, loader.largest)
        if not most:
            raise MemoryError(
                f"the passes over one example don't fit: {in_words(memory.limit)} is what this process may use "
                f"(memory_limit, or most of what the machine has), {in_words(memory.now())} are in use, and "
                f"{in_words(reserve)} kept for the optimizer; use a smaller model, shorter examples, or more memory"
            )
        log.info(
            'max_physical_batch_size="auto": batches of %d fit into %s (private: not for release; the loss '
            "function was called for batches of several sizes to find out)", most, in_words(memory.limit),
        )  # fmt: skip
        self.agree([most])

    def pieces(self, whole: Piece) -> Iterator[Piece]:
        """The physical batch, or parts of it in order that fit into memory, each entered before the next is asked for.

        A piece comes again, divided, where memory ran out. Nothing of the failed one may have stayed.
        """
        start = 0
        while start < whole.units:
            most = whole.units if self.most is None or whole.batch_index is not None else self.most
            stop = min(whole.units, start + most)
            piece = whole.part(start, stop)
            yield piece
            if piece.out_of_memory is None:
                start = stop
            else:
                self._halve(piece.units, piece.out_of_memory)

    def _halve(self, tried: int, failure: str) -> None:
        self.most = tried // 2
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        log.warning(
            "memory ran out with %d examples in a physical batch (%s); from now on at most %d are processed at once, "
            "with the same result. max_physical_batch_size=%d would save the attempt. The numbers are private: not for "
            "release",
            tried, failure, self.most, self.most,
        )  # fmt: skip


def _largest_that_fits(trial: Callable[[int], None], memory: MemoryMeter, limit: int, largest: int) -> int:
    """The largest size up to ``largest`` whose trial takes at most ``limit`` bytes, to within CLOSE; 0 for none."""

    def peak_of(size: int) -> float:
        try:
            return memory.peak_of(lambda: trial(size))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return math.inf

    for start in (2, 1) if largest > 1 else (1,):
        # The first trial also makes what is made once: gradients, plans, libraries' own memory.
        if peak_of(start) == math.inf:
            continue
        base, size, fits = memory.now(), start, 0
        known: tuple[int, float] | None = None
        while size > fits * CLOSE:
            if (peak := peak_of(size)) > limit:
                break
            at, bytes_at = known or (0, base)
            known, fits = known or (size, peak), size
            # Bytes for each further example.
            each = max((peak - bytes_at) / (size - at) if size > at else peak - base, 1)
            size = min(largest, 2 * size, size + int((limit - RESERVE * (limit - base) - peak) / each))
        if fits:
            return fits
    return 0


def _clip_without_a_trace(clipper: GhostClipper, loss_fn: LossFunction, batch: Any, rows: int, add: Add) -> None:
    """Forward and passes, as `LogicalStep._clip` has them; what is learnt of graphs is the caller's."""
    # Ranks make as many trials as each of them needs, so that none may wait for another in a forward.
    inner, passes = without_ranks(clipper.model), clipper.passes
    with without_trace(clipper.model), passes.running(forward_of(inner, loss_fn, batch, rows)):
        try:
            passes.clip(loss_fn(inner, batch), add, retain_graph=False)
        except RowsMovedError:
            passes.clip(loss_fn(inner, batch), add, retain_graph=False)


def _bytes_of_state(optimizer: Optimizer) -> int:
    """What an optimizer will make at its first step: as a rule two tensors for each parameter, as Adam does."""
    if optimizer.state:
        return 0
    groups = optimizer.param_groups
    each = [bool(g["momentum"]) if isinstance(optimizer, SGD) else 2 for g in groups]
    sizes = [sum(parameter.nbytes for parameter in group["params"]) for group in groups]
    return sum(count * size for count, size in zip(each, sizes, strict=True))


def slice_rows(examples: Any, rows: int, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of a physical batch: tensors with ``rows`` in dimension 0, in the structure they have.

    Raises:
        TypeError: something else is in it, of which nobody knows whose it is.
    """

    def pick(tensor: Tensor) -> Tensor:
        return take_rows(tensor, torch.arange(start, stop)) if tensor.is_nested else tensor[start:stop]

    return _mapped(examples, rows, pick)


def _mapped(examples: Any, rows: int, pick: Callable[[Tensor], Tensor]) -> Any:
    """What ``pick`` makes of the tensors of a physical batch, in their structure; raises as `slice_rows`."""
    if isinstance(examples, Tensor):
        if examples.is_nested and examples.size(0) != rows:
            raise TypeError(f"it holds a nested tensor of {examples.size(0)} rows, which has not one for each example")
        dense = examples.is_nested or examples.layout == torch.strided
        if examples.dim() == 0 or examples.size(0) != rows or not dense:
            raise TypeError(f"it holds a tensor of shape {[*examples.shape]}, which has not one row for each example")
        return pick(examples)
    if examples is None:
        return None
    if isinstance(examples, Mapping):
        kind: Any = type(examples)
        return kind({name: _mapped(value, rows, pick) for name, value in examples.items()})
    if isinstance(examples, tuple) and hasattr(examples, "_fields"):
        return type(examples)(*(_mapped(value, rows, pick) for value in examples))
    if type(examples) in (tuple, list):
        return type(examples)(_mapped(value, rows, pick) for value in examples)
    raise TypeError(
        f"it holds something of type {type(examples).__name__}, and not only tensors with a row for each example"
    )


def _advised(error: BaseException, units: int, reason: str) -> BaseException:
    """An error of the same kind that says what to do."""
    kind = next(kind for kind in (torch.OutOfMemoryError, MemoryError, RuntimeError) if isinstance(error, kind))
    remedy = "use a smaller model or shorter examples" if units < 2 else "give a smaller max_physical_batch_size"
    return kind(
        f"memory ran out with {units} example{'s' if units > 1 else ''} in a physical batch, which can't be divided: "
        f"{reason}; {remedy}. Nothing was released or charged. torch says: {error}"
    )


def memory_for_trials(
    model: nn.Module, max_physical_batch_size: int | str | None, memory_limit: int | None, unit_ids: Any
) -> MemoryMeter | None:
    """The memory that trials of "auto" may use; None where a number is given.

    Raises:
        ValueError, TypeError: an argument is out of range, or some don't go together.
    """
    if not isinstance(max_physical_batch_size, str):
        if memory_limit is not None:
            raise ValueError('memory_limit is for max_physical_batch_size="auto"; leave it out with a number')
        return None
    if max_physical_batch_size != "auto":
        raise ValueError(f"max_physical_batch_size must be a number, 'auto' or None; got {max_physical_batch_size!r}")
    if unit_ids is not None:
        raise ValueError(
            'max_physical_batch_size="auto" and unit_ids don\'t go together; give the most rows in a physical batch'
        )
    if memory_limit is not None:
        positive_int(memory_limit=memory_limit)
    return MemoryMeter(next(model.parameters()).device, memory_limit)
