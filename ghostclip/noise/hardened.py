"""Noise that withstands who reads floating-point numbers to the last digit: keys of a cipher, sums on a lattice.

Each release has a key of its own from the operating system (`cipher`) and gives, number by number, what a real
Gaussian mechanism rounded to a lattice would give (`lattice`). It has no state: neither a fork, nor a copy, nor the
number of processes or of physical batches changes what is drawn from. It promises nothing about time: how long a
release takes depends on the numbers drawn and, slightly, on the sums.

Sums on another device are brought to the CPU for it, and back. Where several processes train together, it is called by
one of them, on the sums of all, and what it returns is given to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.generator import CipherGenerator
from ghostclip.noise.lattice import Lattice
from ghostclip.noise.release import check_release, flat, on_flat

__all__ = ["HardenedNoise"]


class HardenedNoise:
    """Gaussian noise, fresh at each release, that leaves its sums on a lattice.

    Attributes:
        mode: "hardened".
        private: True; there is no seed.
        draws: releases that got noise so far.

    Raises:
        ModuleNotFoundError: the `cryptography` package is not installed.
    """

    mode = "hardened"
    private = True

    def __init__(self) -> None:
        KeyStream()
        self.draws = 0

    @torch.no_grad()
    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """(sum + noise) / divisor for each of ``sums``, rounded exactly to multiples of a power of two.

        Args:
            sums: float32 or float64.
            std: standard deviation of the noise in a sum, finite and >= 0; 0 gives sum / divisor, on no lattice.
            divisor: the public number the sums are divided by, > 0.

        Raises:
            TypeError: a sum is in a narrower type than float32.
            ValueError: ``std`` or ``divisor`` is out of range.
        """
        check_release(sums, std, divisor)
        if std == 0:
            return [tensor / divisor for tensor in sums]
        lattice, stream = Lattice(std, divisor), KeyStream()
        self.draws += 1

        def released(some: list[Tensor]) -> Tensor:
            found = lattice.release(flat(some).cpu().numpy(), stream)
            return torch.from_numpy(found).to(some[0].device)

        return on_flat(sums, released)

    def generator(self, key: bytes | None = None) -> CipherGenerator:
        """A fresh generator for sampling, from the same cipher under a key of its own or the one given."""
        return CipherGenerator(key)

    def positions(self) -> dict[str, Any]:
        """{}: there is nothing that a checkpoint could hold."""
        return {}

    def resume(self, positions: Mapping[str, Any]) -> None:
        """Does nothing: every release starts afresh."""
