"""Gaussian noise for one release: drawn once for all parameters, from a generator no one can guess."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ghostclip.validate import nonnegative, one_of, whole

__all__ = ["MODES", "Noise", "noise_source"]

MODES = ("standard", "hardened", "test")
# Where torch keeps the twister in a CPU generator's state: 624 words of 32 bits, each in 8 bytes.
TWISTER_START, TWISTER_WORDS = 24, 624


def noise_source(mode: str = "standard", seed: int | None = None) -> Noise:
    """The source of noise for a mode's name.

    Args:
        mode: "standard": torch's generator on each device, its state filled from the operating system's entropy;
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

    The numbers have the resolution of torch's own normal draws in float32 (float64 for float64 sums).

    Args:
        seed: None, or a whole number that makes the noise repeatable and worthless for privacy.

    Attributes:
        private: False when seeded.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.private = seed is None
        self._seed = seed
        self._process = os.getpid()
        self._generators: dict[torch.device, torch.Generator] = {}

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
            flat.normal_(0.0, std, generator=self._generator(device))
            for index, view in zip(indices, _unflatten_dense_tensors(flat, shapes), strict=True):
                views[index] = view
        return views

    @torch.no_grad()
    def add_(self, sums: Sequence[Tensor], std: float) -> None:
        """Adds noise of standard deviation ``std`` to every number of ``sums``, in place.

        Raises:
            TypeError: a sum is in a narrower type than float32, where noise would be rounded away.
        """
        for tensor in sums:
            if tensor.dtype != _precision(tensor):
                raise TypeError(
                    f"noise is added in float32 or float64, and cast afterwards; got a sum in {tensor.dtype}"
                )
        if std != 0 and sums:
            torch._foreach_add_(list(sums), self.draw(sums, std))

    def _generator(self, device: torch.device) -> torch.Generator:
        """The generator of a device; a forked process gets its own, lest it repeat its parent's noise."""
        if self.private and self._process != os.getpid():
            self._process, self._generators = os.getpid(), {}
        if device not in self._generators:
            made = torch.Generator(device)
            _fill_from_system(made) if self._seed is None else made.manual_seed(self._seed)
            self._generators[device] = made
        return self._generators[device]


def _fill_from_system(generator: torch.Generator) -> None:
    """Sets the generator's state from the operating system's entropy.

    torch keeps only 32 bits of a seed on the CPU, few enough to try them all, so there the 624 words of the Mersenne
    twister's state are written themselves. A GPU's Philox generator takes all 64 bits as its key.
    """
    generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
    if generator.device.type != "cpu":
        return
    state = generator.get_state()
    words = state.numpy()[TWISTER_START : TWISTER_START + 8 * TWISTER_WORDS].view(np.uint64)
    words[:] = np.frombuffer(os.urandom(4 * TWISTER_WORDS), np.uint32)
    generator.set_state(state)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _by_device_and_precision(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of the tensors one flat draw can serve."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _precision(tensor)), []).append(index)
    yield from groups.values()
