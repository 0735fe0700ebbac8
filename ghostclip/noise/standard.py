"""Gaussian noise for one release: drawn once for all parameters, from a generator no one can guess.

It does not withstand who reads floating-point numbers to the last digit (Mironov 2012): see `ghostclip.noise.hardened`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghostclip.noise.gaussian import ChaCha, Normal, normal_on
from ghostclip.noise.release import Noise, NoiseRecurrence, check_release, on_flat

__all__ = ["StandardNoise"]


class StandardNoise(Noise):
    """Draws Gaussian noise, fresh in every process and after every fork unless it has a seed.

    The numbers have the resolution of float32 (float64 for float64 sums); see `ghostclip.noise.gaussian`.

    Args:
        seed: None, or a whole number that makes the noise repeatable and worthless for privacy.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.private = seed is None
        self.mode = "standard" if seed is None else "test"
        self.draws = 0
        self._seed = seed
        self._process = os.getpid()
        self._streams: dict[torch.device, Normal] = {}

    def __reduce__(self) -> tuple:
        """A copy, or what another process unpickles, has streams of its own: two alike would cancel each other out."""
        return (StandardNoise, (self._seed,))

    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """See `Noise.release`; sums are overwritten where that is faster."""
        check_release(sums, std, divisor)
        if not sums:
            return []
        if std == 0:
            with torch.no_grad():
                torch._foreach_div_(list(sums), float(divisor))
            return list(sums)
        self.draws += 1
        stream = self._stream(sums[0].device)
        if isinstance(stream, ChaCha) and stream.add(sums, std / divisor, divisor):
            return list(sums)
        with torch.no_grad():
            noise = on_flat(sums, lambda some: self._drawn(some, std / divisor))
            torch._foreach_add_(noise, list(sums), alpha=1.0 / divisor)
        return noise

    def release_correlated(
        self, sums: Sequence[Tensor], recurrence: NoiseRecurrence, std: float, divisor: float
    ) -> bool:
        """See `Noise.release_correlated`: done on the CPU, by the C kernel."""
        check_release(sums, std, divisor)
        stream = self._stream(sums[0].device) if sums and std > 0 else None
        done = isinstance(stream, ChaCha) and stream.add(sums, std, divisor, recurrence)
        self.draws += done
        return done

    def _drawn(self, like: list[Tensor], std: float) -> Tensor:
        """As many numbers as these tensors of one device and type have, in one draw."""
        numbers = torch.empty(sum(tensor.numel() for tensor in like), dtype=like[0].dtype, device=like[0].device)
        self._stream(numbers.device).fill(numbers, std)
        return numbers

    def generator(self, key: bytes | None = None) -> np.random.Generator:
        """See `Noise.generator`."""
        if key is not None:
            return np.random.default_rng(int.from_bytes(key, "little"))
        return np.random.default_rng()

    def generator_on(self, device: torch.device) -> str:
        """See `Noise.generator_on`."""
        found = self._stream(device).generator
        return found if self.private else f"{found}, seeded (noise='test' counts as none)"

    def positions(self) -> dict[str, Any]:
        """See `Noise.positions`: {device: how far its stream has come}."""
        return {} if self.private else {str(device): stream.position for device, stream in self._streams.items()}

    def resume(self, positions: Mapping[str, Any]) -> None:
        """See `Noise.resume`."""
        if not self.private:
            self._streams = {}
            for device, position in positions.items():
                self._stream(torch.device(device)).position = position

    def _stream(self, device: torch.device) -> Normal:
        """The stream of a device; a forked process gets its own, lest it repeat its parent's noise."""
        if self.private and self._process != os.getpid():
            self._process, self._streams = os.getpid(), {}
        if device not in self._streams:
            self._streams[device] = normal_on(device, self._seed)
        return self._streams[device]
