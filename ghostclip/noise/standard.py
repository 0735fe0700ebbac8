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
from ghostclip.noise.release import check_release, on_flat, precision
from ghostclip.validate import nonnegative

__all__ = ["StandardNoise"]


class StandardNoise:
    """Draws Gaussian noise, fresh in every process and after every fork unless it has a seed.

    The numbers have the resolution of float32 (float64 for float64 sums); see `ghostclip.noise.gaussian`.

    Args:
        seed: None, or a whole number that makes the noise repeatable and worthless for privacy.

    Attributes:
        mode: "standard", or "test" when seeded.
        private: False when seeded.
        draws: releases that got noise so far.
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

    def draw(self, like: Sequence[Tensor], std: float) -> list[Tensor]:
        """One independent draw for each tensor, of its shape and device, float32 or wider.

        One flat draw is made for each device and precision (as a rule one in all); the results are views of it.

        Args:
            like: tensors whose shapes are wanted.
            std: standard deviation, finite and >= 0.

        Raises:
            ValueError: ``std`` is out of range.
        """
        nonnegative(std=std)

        def drawn(some: list[Tensor]) -> Tensor:
            device, size = some[0].device, sum(tensor.numel() for tensor in some)
            numbers = torch.empty(size, dtype=precision(some[0]), device=device)
            self._stream(device).fill(numbers, std)
            return numbers

        return on_flat(like, drawn)

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n], contiguous, with one release's noise as `draw` would give it; zeros for no noise."""
        if nonnegative(std=std) == 0:
            out.zero_()
        else:
            self.draws += 1
            self._stream(out.device).fill(out, std)

    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """(sum + noise) / divisor for each of ``sums``, with noise of standard deviation ``std``.

        Args:
            sums: float32 or float64; not to be used afterwards, since they are overwritten where that is faster.
            std: standard deviation of the noise in a sum, finite and >= 0.
            divisor: the public number the sums are divided by, > 0.

        Raises:
            TypeError: a sum is in a narrower type than float32, where noise would be rounded away.
            ValueError: ``std`` or ``divisor`` is out of range.
        """
        check_release(sums, std, divisor)
        if not sums:
            return []
        if std == 0:
            with torch.no_grad():
                torch._foreach_div_(list(sums), float(divisor))
            return list(sums)
        self.draws += 1
        if sums[0].is_cpu and isinstance(stream := self._stream(sums[0].device), ChaCha):
            added = stream.add(sums, std / divisor, divisor)
            if added:
                return list(sums)
        with torch.no_grad():
            noise = self.draw(sums, std / divisor)
            torch._foreach_add_(noise, list(sums), alpha=1.0 / divisor)
        return noise

    def generator(self, key: bytes | None = None) -> np.random.Generator:
        """A fresh generator for sampling, filled from the operating system's entropy or ``key``."""
        if key is not None:
            return np.random.default_rng(int.from_bytes(key, "little"))
        return np.random.default_rng()

    def positions(self) -> dict[str, Any]:
        """{device: how far its stream has come}, for a seeded source; {} for a private one, which nobody may repeat."""
        return {} if self.private else {str(device): stream.position for device, stream in self._streams.items()}

    def resume(self, positions: Mapping[str, Any]) -> None:
        """Goes on from `positions` of a source with the same seed; a private source starts afresh instead."""
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
