"""Memory that is used again: pages that were touched once cost nothing the second time (first touches cost more than
the arithmetic done in them).

A tensor is lent until nobody refers to it or to a view of it any more; only then may its memory be lent again, to
whoever asks for as much or less. What is not lent can be given up at any time, for others to use.
"""

from __future__ import annotations

import functools
import math
import mmap
import time
import weakref

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced

__all__ = ["FRESH", "Memory", "MemoryTrials", "first_touch"]

# Below this the allocator itself keeps pages at hand.
SMALL_BYTES = 1 << 16
# So many are touched to see what it costs.
TRIAL_BYTES = 1 << 20


def first_touch(nbytes: int) -> float:
    """Milliseconds by which writing so many bytes takes longer where the system has to find the pages first."""
    return 0.0 if nbytes <= SMALL_BYTES else nbytes * _milliseconds_a_byte()


@functools.cache
def _milliseconds_a_byte() -> float:
    """The same for a byte, the least of a few trials."""
    content, least = b"1" * TRIAL_BYTES, math.inf
    for _ in range(3):
        with mmap.mmap(-1, TRIAL_BYTES) as block:
            times = [time.perf_counter()]
            for _ in range(2):
                block[:] = content
                times.append(time.perf_counter())
        least = min(least, times[1] - times[0] - (times[2] - times[1]))
    return 1e3 * max(0.0, least) / TRIAL_BYTES


class Memory:
    """Lends uninitialised tensors on the CPU, from blocks it keeps up to ``cap`` bytes; beyond, they are plain ones.

    Other devices have allocators that do the same. A `detach`ed tensor or a numpy array of a lent tensor does not keep
    it lent.

    Args:
        cap: bytes of all blocks together, lent or not; 0 keeps nothing.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._bytes = 0
        self._free: list[torch.UntypedStorage] = []

    def __reduce__(self) -> tuple:
        return (Memory, (self.cap,))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks kept, lent or not."""
        return self._bytes

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor of ``shape``, with the dtype and device of ``like``."""
        nbytes = math.prod(shape) * like.element_size()
        if not SMALL_BYTES <= nbytes <= self.cap or like.device.type != "cpu" or is_traced():
            return like.new_empty(shape)
        storage = self._block(nbytes)
        if storage is None:
            return like.new_empty(shape)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        # Not a view of a tensor we hold: views made of it then refer to it, so that its end is the end of all of them.
        lent = torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, shape, strides)
        weakref.finalize(lent, self._take_back, self._free, storage).atexit = False
        return lent

    def to_keep(self, like: Tensor, *shape: int) -> Tensor:
        """The same for what is kept from one term to the next, and so isn't lent."""
        return like.new_empty(shape)

    def give_up(self) -> None:
        """Frees every block that is not lent; those that are lent now are freed as they come back."""
        # What is lent still refers to this list, and would keep what is in it.
        self._free.clear()
        self._free, self._bytes = [], 0

    def _take_back(self, free: list[torch.UntypedStorage], storage: torch.UntypedStorage) -> None:
        if free is self._free:
            free.append(storage)

    def _block(self, nbytes: int) -> torch.UntypedStorage | None:
        """The smallest free block that is large enough, or a new one, for which smaller free ones make room."""
        large = [place for place, block in enumerate(self._free) if block.nbytes() >= nbytes]
        if large:
            return self._free.pop(min(large, key=lambda place: self._free[place].nbytes()))
        self._bytes -= sum(block.nbytes() for block in self._free)
        self._free.clear()
        if self._bytes + nbytes > self.cap:
            return None
        self._bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()


class MemoryTrials(Memory):
    """Lends what is to be kept, too: where a way is tried several times, in memory that is there from the first on."""

    def to_keep(self, like: Tensor, *shape: int) -> Tensor:
        return self.empty(like, *shape)


# Keeps nothing.
FRESH = Memory(0)
