"""Noise that withstands who reads floating-point numbers to the last digit: keys of a cipher, sums on a lattice.

Each release has a key of its own from the operating system (`cipher`) and gives, number by number, what a real
Gaussian mechanism rounded to a lattice would give (`lattice`). It has no state: neither a fork, nor a copy, nor the
number of processes or of physical batches changes what is drawn from. It promises nothing about time: how long a
release takes depends on the numbers drawn and, slightly, on the sums.

Sums on another device are brought to the CPU for it, and back. Where several processes train together, it is called by
one of them, on the sums of all, and what it returns is given to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.generator import CipherGenerator
from ghostclip.noise.lattice import Lattice
from ghostclip.noise.release import Noise, check_release, flat, on_flat

__all__ = ["HardenedNoise"]


class HardenedNoise(Noise):
    """Gaussian noise, fresh at each release, that leaves its sums on a lattice.

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
        """See `Noise.release`; rounded exactly to multiples of a power of two, but for a ``std`` of 0."""
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
        """See `Noise.generator`; from the same cipher."""
        return CipherGenerator(key)
