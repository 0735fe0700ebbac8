"""Several processes that train one model: what they tell each other, so that all take a step or none does.

Rank 0 of them leads: it alone draws the noise and charges. Whatever differs between ranks where it must not, and
whatever fails on one of them, becomes an error on all before anything is released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ghostclip import errors
from ghostclip.errors import PrivacyError
from ghostclip.noise.release import flat, on_flat

__all__ = ["Alone", "Ranks", "refuse_differences"]

T = TypeVar("T")
# What is raised on the other ranks as what it was on one.
KINDS = {name: kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)}
KINDS |= {kind.__name__: kind for kind in (ValueError, TypeError, OSError, MemoryError, ModuleNotFoundError)}


class Alone:
    """One process that trains by itself: it agrees with itself.

    Attributes:
        rank: which of the processes this is.
        size: how many there are.
        leads: whether it draws the noise and charges.
    """

    rank, size = 0, 1

    def __init__(self, checked: bool = False) -> None:
        self._checked = checked

    @property
    def leads(self) -> bool:
        """Whether this rank draws the noise and charges."""
        return self.rank == 0

    def agreed(self, work: Callable[[], T], facts: Callable[[], dict[str, Any]]) -> tuple[T, list[dict[str, Any]]]:
        """What ``work`` returns here, once it has come to an end on all ranks, and the ``facts`` of them all.

        Raises:
            PrivacyError: processes have joined since the engine was built; or another rank failed.
            What ``work`` raises here.
        """
        if not self._checked and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise PrivacyError(
                "processes were joined after this PrivacyEngine was built, which samples, charges and draws noise for "
                "its own process alone; call torch.distributed.init_process_group() first and build the engine then"
            )
        return work(), []

    def refuse(self, problem: Exception) -> None:
        """Takes part in the `agreed` that the other ranks wait in, with what failed here; raises nothing for it."""

    def led(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on the leading rank, where alone it runs; raises on all ranks what it raises."""
        return work()

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order; plain data."""
        return [value]

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks of each tensor; they may be overwritten."""
        return list(tensors)

    def spread(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The leading rank's tensors, on all; those of other ranks say which shapes and types to expect."""
        return list(tensors)


class Ranks(Alone):
    """The processes of a group, each with an engine of its own over the same model and data.

    Args:
        group: of torch.distributed; None: all processes.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__(checked=True)
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._leader = 0 if group is None else dist.get_global_rank(group, 0)

    def agreed(self, work: Callable[[], T], facts: Callable[[], dict[str, Any]]) -> tuple[T, list[dict[str, Any]]]:
        """See `Alone.agreed`."""
        try:
            done, told = work(), {"failed": None, **facts()}
        except Exception as problem:
            self.refuse(problem)
            raise
        said = self.gathered(told)
        for rank, each in enumerate(said):
            if each["failed"] is not None:
                raise PrivacyError(
                    f"nothing was released, because rank {rank} failed: {each['failed'][1]} ({each['failed'][0]} there)"
                )
        return done, said

    def refuse(self, problem: Exception) -> None:
        """See `Alone.refuse`."""
        self.gathered({"failed": _told(problem)})

    def led(self, work: Callable[[], T]) -> T:
        """See `Alone.led`."""
        told: list[Any] = [None, None]
        problem: Exception | None = None
        if self.leads:
            try:
                told[1] = work()
            except Exception as error:
                told[0], problem = _told(error), error
        dist.broadcast_object_list(told, self._leader, self._group)
        if problem is not None:
            raise problem
        if told[0] is not None:
            kind, message = told[0]
            raise KINDS[kind](f"{message} (on rank 0, which leads)")
        return told[1]

    def gathered(self, value: T) -> list[T]:
        """See `Alone.gathered`."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, self._group)
        return found

    @torch.no_grad()
    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Alone.total`."""

        def summed(some: list[Tensor]) -> Tensor:
            dist.all_reduce(numbers := flat(some), group=self._group)
            return numbers

        return on_flat(tensors, summed)

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Alone.spread`."""

        def given(some: list[Tensor]) -> Tensor:
            dist.broadcast(numbers := flat(some), self._leader, self._group)
            return numbers

        return on_flat(tensors, given)


def _told(problem: Exception) -> tuple[str, str]:
    """The nearest kind of error that all ranks know, and the message."""
    kind = next((kind.__name__ for kind in type(problem).__mro__ if KINDS.get(kind.__name__) is kind), None)
    if kind is None:
        return PrivacyError.__name__, f"{type(problem).__name__}: {problem}"
    return kind, str(problem)


def refuse_differences(said: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises PrivacyError unless all ranks say the same; the first thing in which they differ is named."""
    for name in dict.fromkeys(name for each in said for name in each):
        values = [each.get(name, "nothing") for each in said]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise PrivacyError(
                f"the ranks must agree on {name} {where}; rank 0 has {values[0]} and rank {other} {values[other]}"
            )
