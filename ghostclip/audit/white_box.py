"""White-box trials: an adversary who sees every released sum, and a canary whose gradient it knows.

In a trial the canary is in the data or not, by a fair coin, and the engine makes one real step (or several): sampling,
forward, both passes, clipping, noise, release to an optimizer that moves nothing. The adversary looks at the released
gradient along the canary's direction (Nasr et al. 2021 and 2023: gradient canaries, white box).

The data are the ones in which the canary is seen best, as the guarantee is for all data: a few of the user's examples,
whose clipped gradients the adversary knows, and the canary, an example of the user's with its loss multiplied so that
its gradient is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from ghostclip.audit.bounds import error_bound
from ghostclip.audit.training import Training, endless
from ghostclip.audit.trials import Trials, log_ratios
from ghostclip.engine import PrivacyEngine

__all__ = ["SampledShare", "TrialSetting", "sampled_share", "white_box_trials"]

BYSTANDERS = 3  # examples beside the canary in a full batch
LARGEST_BATCH = 8  # expected, where batches are sampled
TRIED = 32  # examples among which the canary is chosen
PULL = 100.0  # how many times the clipping bound the canary's gradient is


@dataclass(frozen=True)
class TrialSetting:
    """The data set of a white-box audit.

    Attributes:
        batch_size, size: of its engine; their quotient is the audited sampling rate.
        steps: releases in a trial.
    """

    batch_size: int
    size: int
    steps: int = 1

    @property
    def sample_rate(self) -> float:
        """The probability of the canary to be in a release when it is in the data."""
        return self.batch_size / self.size

    @classmethod
    def of(cls, training: Training, sampled: bool, steps: int) -> TrialSetting:
        """Full batches, or small sampled ones at (nearly) the training's rate."""
        rate = training.claim.sample_rate
        if not sampled or rate == 1:
            return cls(BYSTANDERS + 1, BYSTANDERS + 1, steps)
        near = min(
            ((size, round(size / rate)) for size in range(1, LARGEST_BATCH + 1)),
            key=lambda pair: (abs(pair[0] / max(pair) - rate), pair),
        )
        return cls(near[0], max(near), steps)


def white_box_trials(training: Training, setting: TrialSetting, count: int, watch: Callable[[], None]) -> Trials:
    """``count`` trials; the scores are log-likelihood ratios under the training's own claim.

    Raises:
        ValueError: no example has a gradient that could serve as a canary's; GhostClipError: the training can't be run.
    """
    canary = _Canary(training, setting)
    inside = np.random.default_rng().integers(0, 2, count).astype(bool)
    seen = np.empty((count, setting.steps))
    for trial in range(count):
        canary.put_in(bool(inside[trial]))
        for step in range(setting.steps):
            seen[trial, step] = canary.release()
        watch()
    return Trials(log_ratios(seen, setting.sample_rate, training.noise_multiplier).sum(1), inside)


class _Canary:
    """The engine under audit, with a slot in its data that holds the canary or an example without a gradient."""

    def __init__(self, training: Training, setting: TrialSetting) -> None:
        chosen, self._pull = _strongest(training)
        others = [index for index in range(training.size) if index != chosen] or [chosen]
        indices = [others[place % len(others)] for place in range(setting.size - 1)] + [chosen]
        # The slot is the last position; with weight 0 it is an example whose gradient is zero.
        self._weights = torch.ones(setting.size, device="cpu")
        places = torch.arange(setting.size, device="cpu")
        data = TensorDataset(torch.tensor(indices, device="cpu"), self._weights, places)
        self._model = training.model_copy()
        still = SGD(self._model.parameters(), lr=0.0)
        # Without the self-check, which would remark that nothing moves.
        self._engine: PrivacyEngine = training.engine(self._model, still, data, setting.batch_size, self_check=False)
        # After the engine's own hook, so that what it sees is what was released.
        still.register_step_pre_hook(self._look)
        self._model.eval()  # dropout would only blur the canary
        self._training, self._seen = training, 0.0
        self._present: list[Tensor] = []
        self._batches = endless(self._engine)
        self._known = self._look_up(data)

    def put_in(self, inside: bool) -> None:
        """Puts the canary into the slot, or takes it out."""
        self._weights[-1] = self._pull if inside else 0.0

    def release(self) -> float:
        """One step of the engine, as the adversary sees it: about 1 with the canary in it and 0 without.

        The unit is the clipping bound, so that the noise's standard deviation is the noise multiplier.
        """
        self._present.clear()
        self._engine.step(next(self._batches), self._losses)
        present = torch.cat(self._present) if self._present else torch.zeros(0, dtype=torch.long, device="cpu")
        seen = self._seen * self._engine.batch_size - float(self._known[present].sum())
        return seen / self._sensitivity

    def _look(self, *_: Any) -> None:
        """Measures the released gradient along the canary's direction."""
        self._seen = float(_gradient(self._model.parameters()) @ self._direction)

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        indices, weights, positions = batch
        self._present.append(positions)
        found = self._training.loss_fn(model, self._training.examples(indices))
        return found * weights.to(found)

    def _look_up(self, data: TensorDataset) -> Tensor:
        """Sets the direction to look along; returns each bystander's share of it [size], 0 for the canary."""
        clipper, size = self._training.clipper(), len(data)
        model = clipper.model
        self._sensitivity = clipper.sensitivity
        self.put_in(True)

        def clipped(position: int) -> Tensor:
            model.zero_grad()
            clipper.backward(self._losses(model, data[position : position + 1]))
            return _gradient(model.parameters())

        direction = clipped(size - 1)
        if not 0.0 < (length := float(direction.norm())) < math.inf:  # one whose gradient isn't finite is left out
            raise ValueError(
                f"the canary, an example whose loss is multiplied by {self._pull:.3g} so that its gradient is clipped, "
                f"has no gradient that is finite; lower the clipping norm, {self._sensitivity:.3g}, or use a wider type"
            )
        self._direction = direction / length
        shares = [float(clipped(position) @ self._direction) for position in range(size - 1)]
        return torch.tensor([*shares, 0.0], dtype=torch.float64, device="cpu")


def _strongest(training: Training) -> tuple[int, float]:
    """(index, factor of its loss) of the example with the largest gradient among the first few."""
    indices = torch.arange(min(TRIED, training.size), device="cpu")
    clipper = training.clipper()
    norms = clipper.norms(training.loss_fn(clipper.model, training.examples(indices))).nan_to_num(0.0, 0.0, 0.0)
    best = int(norms.argmax())
    if norms[best] <= 0:
        raise ValueError(
            f"none of the first {len(indices)} examples has a gradient, so none can serve as a canary; check that the "
            "model has trainable parameters and that the losses depend on them"
        )
    return best, PULL * max(1.0, clipper.sensitivity / float(norms[best]))


def _gradient(parameters: Iterable[nn.Parameter]) -> Tensor:
    """All gradients in one float64 vector, zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in parameters])


@dataclass(frozen=True)
class SampledShare:
    """Coins thrown by the sampling and how many of them took their example.

    Attributes:
        batches: logical batches drawn.
        coins: one for each example and batch.
        taken: how many examples were in their batch.
    """

    batches: int
    coins: int
    taken: int

    def lower_bound(self, failure: float) -> float:
        """The sampling rate is at least this, but with that probability (Clopper, Pearson 1934); 0 when none was taken.

        It is the mean over all examples, which the rate of the example that is sampled most can't be below. Where all
        were taken every time nothing was left to chance, and it is 1.
        """
        left_out = self.coins - self.taken
        return 1.0 - float(error_bound(left_out, self.coins, failure)) if left_out else 1.0


def sampled_share(training: Training, batches: int, watch: Callable[[], None]) -> SampledShare:
    """Draws ``batches`` logical batches of the engine's over a data set of the training's size, and counts.

    The examples are their own numbers, so that loading costs nothing; no step is taken and nothing released.
    """
    model = nn.Linear(1, 1, device="cpu")
    numbers = TensorDataset(torch.arange(training.size, device="cpu"))
    # Whose policy may be about groups of the user's model by name.
    sampled, optimizer = replace(training, clipping=1.0), SGD(model.parameters(), lr=0.0)
    engine = sampled.engine(model, optimizer, numbers, training.batch_size, self_check=False)
    drawn = endless(engine)
    taken = 0
    for _ in range(batches):
        batch = next(drawn)
        for (examples,) in batch.physical():
            taken += len(examples)
        batch.discard()
        watch()
    engine.detach()
    return SampledShare(batches, batches * training.size, taken)
