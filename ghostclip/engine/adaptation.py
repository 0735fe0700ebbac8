"""Adaptive clipping in training: the count that is released with each step's gradients, and what it is charged as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipping import Adaptive
from ghostclip.events import Event, JointGaussian
from ghostclip.sampling import LogicalBatches

__all__ = ["Adaptation", "step_event"]


def step_event(loader: LogicalBatches, policy: Any, noise_multiplier: float) -> Event:
    """What a step is charged as: a noisy sum over a sample and, under adaptive clipping, a count over the same one.

    Args:
        loader: whose samples they are.
        policy: of clipping.
        noise_multiplier: standard deviation of the gradients' noise over the sensitivity; 0: none, on the count too.
    """
    gradients = loader.event(noise_multiplier)
    if not isinstance(policy, Adaptive):
        return gradients
    # One example moves the count by 1/2.
    count = loader.event(2 * policy.count_noise_for(loader.batch_size) if noise_multiplier else 0.0)
    return JointGaussian((gradients, count))


class Adaptation:
    """Counts norms over the physical batches of a logical one, and moves the policy's norm when the count is released.

    Args:
        policy: whose norm moves.
        batch_size: the expected, public one, by which the count is divided.
    """

    def __init__(self, policy: Adaptive, batch_size: int) -> None:
        self._policy, self._batch_size = policy, batch_size
        self._noise = policy.count_noise_for(batch_size)
        self._count: Tensor | None = None

    def discard(self) -> None:
        """A new logical batch begins, or one was left: its count is dropped."""
        self._count = None

    def saw(self, norms: Tensor) -> None:
        """The norms [B] of a physical batch."""
        found = self._policy.count(norms.detach())
        self._count = found if self._count is None else self._count + found

    def release(self, sums: list[Tensor], std: float, release: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """The private gradients of ``sums``; the count goes with them in the same draw, and the norm moves.

        Args:
            sums: clipped, as `Noise.release` takes them.
            std: of the noise on them; 0: none, on the count too.
            release: adds it, and divides by the batch size.
        """
        # On the scale of the sums, so that one standard deviation fits all.
        scale = std / self._noise if std else 1.0
        place = sums[0]
        count = torch.zeros(1, dtype=place.dtype, device=place.device)
        if self._count is not None:
            count += (self._count * scale).to(count)
        self._count = None
        *private, released = release([*sums, count])
        self._policy.update(released.item() / scale + 0.5)
        return private
