"""Adaptive clipping in training: counts that are released with each step's gradients, and what they are charged as."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipping import Adaptive, Composed, Groupwise, as_policy
from ghostclip.clipping.choice import adapts
from ghostclip.errors import PrivacyError
from ghostclip.events import Event, JointGaussian
from ghostclip.sampling import Scheme

__all__ = ["Adaptation", "policy_for", "step_event"]


def policy_for(model: nn.Module, clipping: Any) -> Any:
    """The policy that ``clipping`` stands for, knowing the groups of the model's trained parameters.

    Raises:
        ValueError, TypeError: it is no policy, or none for this model.
    """
    if isinstance(clipping, type):
        raise TypeError(
            f"clipping is the class {clipping.__name__} itself; give an object of it, such as PerLayer(max_norm=1.0)"
        )
    policy = as_policy(clipping)
    if isinstance(policy, Groupwise):
        policy.partition({name: p.numel() for name, p in model.named_parameters() if p.requires_grad})
    return policy


def step_event(scheme: Scheme, policy: Any, noise_multiplier: float) -> Event:
    """What a step is charged as: a noisy sum over a sample and, under adaptive clipping, counts over the same one.

    Without noise on the sum (a multiplier of 0) there is none on the counts.
    """
    gradients = scheme.event(noise_multiplier)
    if not adapts(policy):
        return gradients
    # One example moves each of K counts by 1/2, and all of them together by sqrt(K) / 2.
    std = policy.count_noise_for(scheme.batch_size)
    counts = scheme.event(2 * std / math.sqrt(policy.counted) if noise_multiplier else 0.0)
    return JointGaussian((gradients, counts))


class Adaptation:
    """Counts norms over the physical batches of a logical one, and moves thresholds when the counts are released."""

    def __init__(self, policy: Adaptive | Composed) -> None:
        self._policy = policy
        self._charged = self._noise_of_counts()
        self._counts: Tensor | None = None

    def discard(self) -> None:
        """A new logical batch begins, or one was left: its counts are dropped."""
        self._counts = None

    def saw(self, norms: Any) -> None:
        """The norms [B], or {group: [B]}, of a physical batch, as the policy gets them."""
        found = self._policy.counts(norms)
        self._counts = found if self._counts is None else self._counts + found

    def counts(self, std: float, batch_size: int, like: Tensor) -> Tensor:
        """The counts of the logical batch, on the scale of its sums, so that one standard deviation fits all; private.

        Args:
            std: of the noise on sums; 0: none, on the counts too.
            batch_size: the expected, public one.
            like: a sum, whose type and device they get.
        """
        counts = torch.zeros(self._policy.counted, dtype=like.dtype, device=like.device)
        if self._counts is not None:
            counts += (self._counts * self._scale(std, batch_size)).to(counts)
        self._counts = None
        return counts

    def update(self, released: Tensor, std: float, batch_size: int) -> None:
        """Thresholds move by the noisy counts over the batch size, which are not private any more."""
        scale = self._scale(std, batch_size)
        self._policy.update([share / scale + 0.5 for share in released.tolist()])

    def _noise_of_counts(self) -> list[float]:
        """Noise on counts over what an example moves, for the smallest and a huge batch: some grows with the batch."""
        return [self._policy.count_noise_for(size) / math.sqrt(self._policy.counted) for size in (1, 1 << 40)]

    def check(self) -> None:
        """Raises PrivacyError where counts would get less noise than steps are charged for."""
        pairs = zip(self._noise_of_counts(), self._charged, strict=True)
        if any(now < charged * (1 - 1e-9) for now, charged in pairs):
            raise PrivacyError(
                "the counts of the clipping policy would get less noise than is charged: count_noise was changed, or "
                "there are more groups; build a new engine"
            )

    def _scale(self, std: float, batch_size: int) -> float:
        return std / self._policy.count_noise_for(batch_size) if std else 1.0
