"""Normal numbers from generators whose whole key comes from the operating system.

On the CPU they come from a cipher, which nobody can foresee: ChaCha12 by one short C function, or where no kernel can
be had AES-256 by OpenSSL and tensor operations. torch's own draw takes a word of a Mersenne twister for each number,
which is slower than both, and keeps 32 bits of its seed. Other devices use torch's counter-based generator, whose key
has 64 bits.

What is lost beyond 9.4 standard deviations has probability 2^-63 for each pair of numbers, so that its loss raises the
delta of d parameters in T steps by at most (1 + e^epsilon) T d 2^-64: 1e-9 (1 + e^epsilon) for 10^6 parameters and
20,000 steps. Numbers of other devices are made of 32 bits and end near 6.7, which has probability 2^-33 a number; and
all of them are floats, whose last digits depend on what they are added to: `ghostclip.noise.hardened` is proof against
both, this is not.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghostclip.native import library
from ghostclip.native.calls import share_out
from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.release import NoiseRecurrence

__all__ = ["Aes", "ChaCha", "DeviceNormal", "Normal", "box_muller", "normal_on"]

ENTROPY_BYTES = 32
# Words of 32 bits in a block of AES.
WORDS_OF_BLOCK = 4
# Numbers that are worked on together by tensor operations, so that memory stays small and in the cache.
CHUNK = 1 << 17
# 31 random bits below it, once in 2^19 times, get 32 more, as in normal.c.
SMALL = 1 << 12
# Multiplications that take as long as a number.
WORK = 32


class Normal:
    """A stream of independent normal numbers, made of random words.

    Where a stream takes a ``seed``, None is for a key of the operating system's entropy: 256 bits on the CPU, else 64.

    Attributes:
        position: how far the stream has come, as plain data; kept of repeatable streams only.
        generator: where the words come from, in words.
    """

    position: Any
    generator: str

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint32."""
        raise NotImplementedError

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n], contiguous float32 or float64, with numbers of standard deviation ``std``."""
        for part in out.split(CHUNK):
            box_muller(self.words, part, std)


def normal_on(device: torch.device, seed: int | None) -> Normal:
    """The stream for a device: unpredictable, or repeatable from ``seed`` on the same machine."""
    if device.type != "cpu":
        return DeviceNormal(device, seed)
    compiled = library("normal")
    return Aes(seed) if compiled is None else ChaCha(compiled, seed)


class ChaCha(Normal):
    """Normal numbers on the CPU from the key stream of ChaCha12 (RFC 8439 with 12 rounds), by ``compiled`` normal.c.

    Its position is the number of blocks taken from the key stream.
    """

    generator = "ChaCha12, a cipher, in a C kernel"

    def __init__(self, compiled: ctypes.CDLL, seed: int | None = None) -> None:
        self._key = _key(seed)
        self.position = 0
        self._key_place = ctypes.cast(ctypes.c_char_p(self._key), ctypes.c_void_p).value
        self._lanes = compiled.ghostclip_lanes()
        self._normal, self._release = compiled.ghostclip_normal, compiled.ghostclip_release
        self._words = compiled.ghostclip_words
        self._normal.argtypes, self._release.argtypes = [ctypes.c_ssize_t] * 6, [ctypes.c_ssize_t] * 10
        self._words.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
        self._words.restype = ctypes.c_uint64

    def fill(self, out: Tensor, std: float) -> None:
        """See `Normal.fill`."""
        if out.dtype != torch.float32:
            return super().fill(out, std)
        self._share_out(self._normal, out.numel(), (out, float(std)))
        return torch.autograd.graph.increment_version(out)

    def add(
        self, sums: Sequence[Tensor], std: float, divisor: float, recurrence: NoiseRecurrence | None = None
    ) -> bool:
        """Turns each sum into sum / divisor + noise of standard deviation ``std``, in one read of it.

        Args:
            sums: that `fill` would give one flat draw.
            std: standard deviation.
            divisor: what the sums are divided by.
            recurrence: makes noise that depends on earlier steps', of which ``std`` is that of the independent part;
                the noise is divided, too, then.

        Returns:
            Whether it was done; False, and nothing was touched, unless all are float32, on the CPU, and without gaps in
            memory, contiguous or in channels_last; contiguous where there is a recurrence.
        """
        kept, factors = list[Tensor](), array("f", (1.0,))
        if recurrence is not None:
            kept, factors, std = [*recurrence.kept], _factors(recurrence, divisor), std / recurrence.first
        parts = array("q")
        for place, tensor in enumerate(sums):
            # Numbers that lie side by side get noise of the same law in either of two orders.
            dense = tensor.is_contiguous() or (not kept and tensor.is_contiguous(memory_format=torch.channels_last))
            if tensor.dtype != torch.float32 or not tensor.is_cpu or not dense:
                return False
            if kept and not kept[place].is_contiguous():
                return False
            parts.extend((tensor.data_ptr(), tensor.numel(), kept[place].data_ptr() if kept else 0))
        given = (parts.buffer_info()[0], len(sums), 1.0 / float(divisor), float(std), factors.buffer_info()[0])
        self._share_out(self._release, sum(parts[1::3]), (*given, len(factors) // 3))
        torch.autograd.graph.increment_version([*sums, *kept])
        return True

    def _share_out(self, function: Any, size: int, arguments: tuple[Any, ...]) -> None:
        """Has so many numbers made, in groups that all lanes make together."""
        block = self._take(size)
        share_out(function, size, 16 * self._lanes, WORK * size, (*arguments, self._key_place, block))

    def _take(self, size: int) -> int:
        """Where the blocks for so many numbers begin. They count as taken before they are: Ctrl-C repeats no noise."""
        block, blocks = self.position, -(-size // (16 * self._lanes)) * self._lanes
        self.position += blocks
        return block

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words of the key stream, uint32."""
        found = np.empty(count, np.uint32)
        self._words(found.ctypes.data, count, self._key, self._take(count))
        return found


class Aes(Normal):
    """Normal numbers on the CPU from the key stream of AES-256 in counter mode, where no C kernel can be had."""

    generator = "AES-256, a cipher, in OpenSSL"

    def __init__(self, seed: int | None = None) -> None:
        self._key = _key(seed)
        self.position = 0

    @property
    def position(self) -> int:
        """The number of words taken from the key stream."""
        return self._taken

    @position.setter
    def position(self, words: int) -> None:
        self._stream, self._taken = KeyStream(self._key, words // WORDS_OF_BLOCK), words
        self._stream.words32(words % WORDS_OF_BLOCK)

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint32. They count as taken before they are."""
        self._taken += count
        return self._stream.words32(count)


class DeviceNormal(Normal):
    """Normal numbers by torch's generator of a device."""

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self.generator = f"torch's generator of {device.type} with a seed of 64 bits, no cipher"
        self._generator = torch.Generator(device)
        self._generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True) if seed is None else seed)

    @property
    def position(self) -> list[int]:
        """torch's state of the generator, bytes."""
        return self._generator.get_state().tolist()

    @position.setter
    def position(self, state: list[int]) -> None:
        self._generator.set_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))

    def fill(self, out: Tensor, std: float) -> None:
        """See `Normal.fill`."""
        out.normal_(0.0, std, generator=self._generator)


def _factors(recurrence: NoiseRecurrence, divisor: float) -> array:
    """What normal.c's `recall` takes for each tensor that is kept, and at the end what the noise is multiplied with."""
    weights = recurrence.weights / recurrence.first
    rows = np.stack([weights, recurrence.shares, recurrence.gains], axis=1)
    return array("f", [*rows.ravel(), recurrence.scale / divisor])


def _key(seed: int | None) -> bytes:
    """256 bits of the operating system's entropy, or of a seed."""
    return os.urandom(ENTROPY_BYTES) if seed is None else hashlib.sha256(str(seed).encode()).digest()


@torch.no_grad()
def box_muller(words: Callable[[int], np.ndarray], out: Tensor, std: float) -> None:
    """Overwrites ``out`` [n] with std * sqrt(-2 ln u) (cos t, sin t), u in (0, 1], t in [-pi, pi) (Box, Muller 1958).

    Args:
        words: how many -> uint32; asked for n for float32 and 2n for float64, one pair more for an odd n, and one for
            each small float32 u, which has 63 bits then as all of float64's have, so that numbers reach 9.4 standard
            deviations.
        out: float32 (31 bits of u where it isn't small) or float64.
        std: standard deviation.
    """
    if out.numel() == 0:
        return
    narrow = out.dtype != torch.float64
    integers, size = (np.int32, 31) if narrow else (np.int64, 63)
    pairs = (out.numel() + 1) // 2
    first, second = torch.from_numpy(words(2 * pairs if narrow else 4 * pairs).view(integers)).split(pairs)
    # Whole numbers from 0 to 2^size - 1, each from two words; half a step more keeps the logarithm finite.
    numbers = first ^ (first >> size)
    radius = numbers.to(out.dtype).mul_(2.0**-size).add_(2.0 ** -(size + 1))
    small = (numbers < SMALL).nonzero().flatten() if narrow else numbers[:0]
    if len(small):
        more = torch.from_numpy(words(len(small)).astype(np.float64))
        radius[small] = ((numbers[small] * 2.0**32 + more + 0.5) * 2.0**-63).to(out.dtype)
    radius.log_().mul_(-2.0).sqrt_().mul_(std)
    angle = second.to(out.dtype).mul_(math.pi * 2.0**-size)
    rest = out.numel() - pairs
    torch.cos(angle, out=out[:pairs]).mul_(radius)
    torch.sin(angle[:rest], out=out[pairs:]).mul_(radius[:rest])
