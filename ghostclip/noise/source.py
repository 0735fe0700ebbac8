"""Gaussian noise for one release: drawn once for all parameters, from a generator no one can guess."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ghostclip.noise.gaussian import ChaCha, Normal, normal_on
from ghostclip.validate import nonnegative, one_of, positive, whole

__all__ = ["MODES", "Noise", "noise_source"]

MODES = ("standard", "hardened", "test")


def noise_source(mode: str = "standard", seed: int | None = None) -> Noise:
    """The source of noise for a mode's name.

    Args:
        mode: "standard": a generator on each device, its state filled from the operating system's entropy;
            "test": repeatable noise from ``seed``, which protects nobody and is charged as epsilon = inf.
        seed: a whole number, with "test" only.

    Raises:
        ValueError: an unknown mode; a seed without "test", or "test" without one.
        NotImplementedError: "hardened" (noise that withstands attacks on floating point) is not part of this version.
    """
    one_of(MODES, noise=mode)
    if mode == "hardened":
        raise NotImplementedError('noise="hardened" is not there yet; use noise="standard"')
    if mode == "test" and seed is None:
        raise ValueError('noise="test" needs a seed: pass seed=..., a whole number')
    if mode == "standard" and seed is not None:
        raise ValueError(
            f'seed={seed!r} would make the noise predictable, so noise="standard" takes none; leave it out, or use '
            'noise="test", which reports epsilon = inf'
        )
    if seed is not None and whole(seed=seed) >= 2**63:
        raise ValueError(f"seed must be below 2**63; got {seed!r}")
    return Noise(None if seed is None else whole(seed=seed))


class Noise:
    """Draws Gaussian noise, fresh in every process and after every fork unless it has a seed.

    The numbers have the resolution of float32 (float64 for float64 sums); see `ghostclip.noise.gaussian`.

    Args:
        seed: None, or a whole number that makes the noise repeatable and worthless for privacy.

    Attributes:
        private: False when seeded.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.private = seed is None
        self._seed = seed
        self._process = os.getpid()
        self._streams: dict[torch.device, Normal] = {}

    def __reduce__(self) -> tuple:
        """A copy, or what another process unpickles, has streams of its own: two alike would cancel each other out."""
        return (Noise, (self._seed,))

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
        views: list[Tensor] = [torch.empty(0)] * len(like)
        for indices in _by_device_and_precision(like):
            shapes = [like[index] for index in indices]
            device, size = shapes[0].device, sum(tensor.numel() for tensor in shapes)
            flat = torch.empty(size, dtype=_precision(shapes[0]), device=device)
            self._stream(device).fill(flat, std)
            for index, view in zip(indices, _unflatten_dense_tensors(flat, shapes), strict=True):
                views[index] = view
        return views

    @torch.no_grad()
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
        positive(divisor=divisor)
        for tensor in sums:
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"noise is added in float32 or float64, and cast afterwards; got a sum in {tensor.dtype}"
                )
        if not sums:
            return []
        if nonnegative(std=std) == 0:
            torch._foreach_div_(list(sums), float(divisor))
            return list(sums)
        if sums[0].is_cpu and isinstance(stream := self._stream(sums[0].device), ChaCha):
            added = stream.add(sums, std / divisor, divisor)
            if added:
                return list(sums)
        noise = self.draw(sums, std / divisor)
        torch._foreach_add_(noise, list(sums), alpha=1.0 / divisor)
        return noise

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


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _by_device_and_precision(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of the tensors one flat draw can serve."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _precision(tensor)), []).append(index)
    yield from groups.values()
