"""Adaptive clipping in training: counts that are released with each step's gradients, and what they are charged as."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipping import Adaptive, Composed, Groupwise, as_policy
from ghostclip.events import Event, JointGaussian
from ghostclip.sampling import Scheme

__all__ = ["Adaptation", "adapts", "policy_for", "step_event"]


def policy_for(model: nn.Module, clipping: Any) -> Any:
    """The policy that ``clipping`` stands for, knowing the groups of the model's trained parameters.

    Raises:
        ValueError, TypeError: it is no policy, or none for this model.
    """
    policy = as_policy(clipping)
    if isinstance(policy, Groupwise):
        policy.partition({name: p.numel() for name, p in model.named_parameters() if p.requires_grad})
    return policy


def adapts(policy: Any) -> bool:
    """Whether a policy's thresholds follow noisy counts."""
    return isinstance(policy, Adaptive) or (isinstance(policy, Composed) and policy.counted > 0)


def step_event(scheme: Scheme, policy: Any, noise_multiplier: float) -> Event:
    """What a step is charged as: a noisy sum over a sample and, under adaptive clipping, counts over the same one.

    Args:
        scheme: how samples are drawn.
        policy: of clipping, as `policy_for` returns it.
        noise_multiplier: standard deviation of the gradients' noise over the sensitivity; 0: none, on the counts too.
    """
    gradients = scheme.event(noise_multiplier)
    if not adapts(policy):
        return gradients
    # One example moves each of K counts by 1/2, and all of them together by sqrt(K) / 2.
    std = policy.count_noise_for(scheme.batch_size)
    counts = scheme.event(2 * std / math.sqrt(policy.counted) if noise_multiplier else 0.0)
    return JointGaussian((gradients, counts))


class Adaptation:
    """Counts norms over the physical batches of a logical one, and moves thresholds when the counts are released.

    Args:
        policy: whose thresholds move.
    """

    def __init__(self, policy: Adaptive | Composed) -> None:
        self._policy = policy
        self._counts: Tensor | None = None

    def discard(self) -> None:
        """A new logical batch begins, or one was left: its counts are dropped."""
        self._counts = None

    def saw(self, norms: Any) -> None:
        """The norms [B], or {group: [B]}, of a physical batch, as the policy gets them."""
        found = self._policy.counts(norms)
        self._counts = found if self._counts is None else self._counts + found

    def release(
        self, sums: list[Tensor], std: float, batch_size: int, release: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """The private gradients of ``sums``; the counts go with them in the same draw, and thresholds move.

        Args:
            sums: clipped, as `Noise.release` takes them.
            std: of the noise on them; 0: none, on the counts too.
            batch_size: the expected, public one, by which the counts are divided.
            release: adds noise, and divides by the batch size.
        """
        # On the scale of the sums, so that one standard deviation fits all.
        scale = std / self._policy.count_noise_for(batch_size) if std else 1.0
        place = sums[0]
        counts = torch.zeros(self._policy.counted, dtype=place.dtype, device=place.device)
        if self._counts is not None:
            counts += (self._counts * scale).to(counts)
        self._counts = None
        *private, released = release([*sums, counts])
        self._policy.update([share / scale + 0.5 for share in released.tolist()])
        return private
