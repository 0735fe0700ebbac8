"""Normal numbers from generators whose whole key comes from the operating system.

On the CPU they come from ChaCha20, a cipher that nobody can foresee, by one short C function; where that can't be
compiled, from PCG64-DXSM by tensor operations. torch's own draw takes a word of a Mersenne twister for each number,
which is slower than both, and keeps 32 bits of its seed. Other devices use torch's counter-based generator, whose key
has 64 bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ghostclip.native import library

__all__ = ["ChaCha", "DeviceNormal", "Normal", "Pcg", "box_muller", "normal_on"]

ENTROPY_BYTES = 32
# Numbers that are worked on together by tensor operations, so that memory stays small and in the cache.
CHUNK = 1 << 17


class Normal(Protocol):
    """A stream of independent normal numbers."""

    # How far the stream has come, as plain data; kept of repeatable streams only.
    position: Any

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n], contiguous float32 or float64, with numbers of standard deviation ``std``."""


def normal_on(device: torch.device, seed: int | None) -> Normal:
    """The stream for a device: unpredictable, or repeatable from ``seed`` on the same machine."""
    if device.type != "cpu":
        return DeviceNormal(device, seed)
    compiled = library("normal")
    return Pcg(seed) if compiled is None else ChaCha(compiled, seed)


class ChaCha:
    """Normal numbers on the CPU from the key stream of ChaCha20 (RFC 8439).

    Args:
        compiled: normal.c.
        seed: None for a key of 256 bits of the operating system's entropy.
    """

    def __init__(self, compiled: ctypes.CDLL, seed: int | None = None) -> None:
        self._key = os.urandom(ENTROPY_BYTES) if seed is None else hashlib.sha256(str(seed).encode()).digest()
        self._block = 0
        self._normal, self._words = compiled.ghostclip_normal, compiled.ghostclip_words
        key_and_block: list[type] = [ctypes.c_char_p, ctypes.c_uint64]
        self._normal.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float, *key_and_block]
        self._words.argtypes = [ctypes.c_void_p, ctypes.c_uint64, *key_and_block]
        self._release = compiled.ghostclip_release
        self._release.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float, ctypes.c_float, *key_and_block]
        self._normal.restype = self._words.restype = self._release.restype = ctypes.c_uint64

    @property
    def position(self) -> int:
        """The number of blocks taken from the key stream."""
        return self._block

    @position.setter
    def position(self, block: int) -> None:
        self._block = block

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n], contiguous float32 or float64, with numbers of standard deviation ``std``."""
        if out.dtype == torch.float32:
            self._block += self._normal(out.data_ptr(), out.numel(), std, self._key, self._block)
            torch.autograd.graph.increment_version(out)
        else:
            _fill_by_parts(out, std, self.words)

    def add(self, sums: Sequence[Tensor], std: float, divisor: float) -> bool:
        """Turns each sum into sum / divisor + noise of standard deviation ``std``, in one read of it.

        Args:
            sums: that `fill` would give one flat draw.
            std: standard deviation.
            divisor: what the sums are divided by.

        Returns:
            Whether it was done; False, and nothing was touched, unless all are contiguous, float32 and on the CPU.
        """
        parts = array("q")
        for tensor in sums:
            if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
                return False
            parts.extend((tensor.data_ptr(), tensor.numel()))
        where = parts.buffer_info()[0]
        self._block += self._release(where, len(sums), 1.0 / divisor, std, self._key, self._block)
        torch.autograd.graph.increment_version(sums)
        return True

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words of the key stream, uint32."""
        found = np.empty(count, np.uint32)
        self._block += self._words(found.ctypes.data, count, self._key, self._block)
        return found


class Pcg:
    """Normal numbers on the CPU from PCG64-DXSM, where no C compiler is.

    Args:
        seed: None for 256 bits of the operating system's entropy.
    """

    def __init__(self, seed: int | None = None) -> None:
        entropy = int.from_bytes(os.urandom(ENTROPY_BYTES), "little") if seed is None else seed
        # A pool of eight words takes in all 256 bits; the default of four would keep 128.
        self._bits = np.random.PCG64DXSM(np.random.SeedSequence(entropy, pool_size=ENTROPY_BYTES // 4))

    @property
    def position(self) -> Any:
        """numpy's state of the generator, a dict."""
        return self._bits.state

    @position.setter
    def position(self, state: Any) -> None:
        self._bits.state = state

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n], contiguous float32 or float64, with numbers of standard deviation ``std``."""
        _fill_by_parts(out, std, self.words)

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint32."""
        return self._bits.random_raw((count + 1) // 2).view(np.uint32)[:count]


class DeviceNormal:
    """Normal numbers by torch's generator of a device.

    Args:
        device: where the numbers are needed.
        seed: None for 64 bits of the operating system's entropy.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True) if seed is None else seed)

    @property
    def position(self) -> list[int]:
        """torch's state of the generator, bytes."""
        return self._generator.get_state().tolist()

    @position.setter
    def position(self, state: list[int]) -> None:
        self._generator.set_state(torch.tensor(state, dtype=torch.uint8))

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n] with numbers of standard deviation ``std``."""
        out.normal_(0.0, std, generator=self._generator)


def _fill_by_parts(out: Tensor, std: float, words: Words) -> None:
    for part in out.split(CHUNK):
        count = part.numel() + part.numel() % 2
        box_muller(words(count if out.dtype == torch.float32 else 2 * count), part, std)


class Words(Protocol):
    """A source of random words: how many -> uint32 array."""

    def __call__(self, count: int, /) -> np.ndarray: ...


@torch.no_grad()
def box_muller(words: np.ndarray, out: Tensor, std: float) -> None:
    """Overwrites ``out`` [n] with std * sqrt(-2 ln u) (cos t, sin t), u in (0, 1], t in [-pi, pi) (Box, Muller 1958).

    Args:
        words: random uint32, n of them for float32 and 2n for float64, one pair more for an odd n.
        out: float32 (u of 31 bits, so numbers up to 6.6 standard deviations) or float64 (63 bits).
        std: standard deviation.
    """
    if out.numel() == 0:
        return
    integers, size = (np.int64, 63) if out.dtype == torch.float64 else (np.int32, 31)
    pairs = (out.numel() + 1) // 2
    radius, angle = torch.from_numpy(words.view(integers)).to(out.dtype).split(pairs)
    # |integer| is in 0 ... 2^size; the half step keeps the logarithm finite.
    radius.abs_().mul_(2.0**-size).add_(2.0 ** -(size + 1)).log_().mul_(-2.0).sqrt_().mul_(std)
    angle.mul_(math.pi * 2.0**-size)
    rest = out.numel() - pairs
    torch.cos(angle, out=out[:pairs]).mul_(radius)
    torch.sin(angle[:rest], out=out[pairs:]).mul_(radius[:rest])
