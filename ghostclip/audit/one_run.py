"""One-run audit: many canaries, each in the data by a fair coin, and a single training (Steinke et al. 2023).

The training is the user's own: model, data, batch size, noise, clipping, optimizer, steps. Some examples give their
places to canaries. A canary's loss is a large multiple of a parameter of its own beside the model, so its gradient is
clipped and orthogonal to all others (a Dirac canary: Nasr et al. 2023; Steinke et al. 2023, section 6), and the user's
parameters are trained as ever. The adversary sees every released sum. With correlated noise C^-1 w it multiplies the
sequence of sums by C, and knows in which steps each canary has its turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ghostclip.audit.bounds import noise_from_rates, one_run_epsilon
from ghostclip.audit.trade_off import noise_from_guesses
from ghostclip.audit.training import LossFunction, Training, endless
from ghostclip.audit.trials import ErrorRates, Trials, log_ratios

__all__ = ["OneRun", "one_run", "scores"]

PULL = 100.0  # how many times the clipping bound a canary's gradient is
SIMULATIONS = 5
SHARES = np.geomspace(0.01, 1.0, 15)


@dataclass(frozen=True)
class OneRun:
    """What was guessed about the canaries of one training.

    Attributes:
        canaries: m.
        guesses: r, half of them "in" for the largest scores and half "out" for the smallest; the rest are abstained
            from.
        correct: v.
        errors: how often one threshold on a score errs, each canary a trial; None: only guesses are known.
    """

    canaries: int
    guesses: int
    correct: int
    errors: ErrorRates | None = None

    @property
    def _guessed(self) -> dict[str, int]:
        return {"canaries": self.canaries, "guesses": self.guesses, "correct": self.correct}

    def epsilon(self, delta: float, confidence: float) -> float:
        """The lower bound (Steinke et al. 2023, corollary 5.4)."""
        return one_run_epsilon(**self._guessed, delta=delta, confidence=confidence)

    def noise_multiplier(self, sample_rate: float, steps: int, confidence: float) -> float:
        """The noise that is refuted for a training of sampled Gaussian releases (Mahloujifar et al. 2025)."""
        failure = 1.0 - confidence
        return noise_from_guesses(**self._guessed, sample_rate=sample_rate, steps=steps, failure=failure)

    def independent_noise_multiplier(self, sample_rate: float, steps: int) -> float:
        """The noise that is refuted if it is independent in each coordinate, as that of sampled Gaussian releases is.

        Canaries have a coordinate each, so their scores are then independent trials of one attack (that scores of
        canaries are to be taken as samples of two distributions: Agrawal et al. 2026, "Let's ask Gauss"; here without
        their normal approximation, since the trade-off curve of the releases is known).
        """
        return noise_from_rates(*self.errors.bounds, sample_rate, steps) if self.errors else math.inf


def one_run(training: Training, canaries: int, confidence: float, watch: Callable[[], None]) -> OneRun:
    """Trains once and guesses which of so many canaries took part.

    The number of guesses and the threshold are chosen beforehand, by the ``confidence`` with which the bounds will be
    asked for.

    Raises:
        ValueError: too few canaries, or no fewer than there are examples; GhostClipError: the training can't be run.
    """
    if not 2 <= canaries < training.size:
        raise ValueError(
            f"canaries must be at least 2 (or 0, for none) and, since they take the places of examples, fewer than the "
            f"{training.size} examples; got {canaries}"
        )
    guesses, threshold = _choices_by_simulation(training, canaries, confidence)
    inside = np.random.default_rng().integers(0, 2, canaries).astype(bool)
    found = _train(training, inside, watch)
    errors = Trials(found, inside).error_rates_at(threshold, 1.0 - confidence)
    return OneRun(canaries, 2 * guesses, _correct(found, inside, guesses), errors)


def _train(training: Training, inside: np.ndarray, watch: Callable[[], None]) -> np.ndarray:
    """One training with those canaries in it; each canary's score [m]."""
    count, size = len(inside), training.size
    model = _WithCanaries(training.model_copy(), count)
    optimizer = training.optimizer(model.parameters())
    # The last places are the canaries'. One that is out leaves an example whose gradient is zero, so that the size of
    # the data set tells nothing.
    own, rows = torch.ones(size, device="cpu"), torch.zeros(size, dtype=torch.long, device="cpu")
    own[size - count :] = 0.0
    rows[size - count :] = torch.arange(1, count + 1, device="cpu") * torch.from_numpy(inside)
    data = TensorDataset(torch.arange(size, device="cpu"), own, rows)
    engine = training.engine(model, optimizer, data, training.batch_size)
    bound = engine.clipping.sensitivity
    released = np.zeros((training.steps, count))
    step = itertools.count()

    def look(*_: Any) -> None:
        gradient = model.canaries.weight.grad
        assert gradient is not None  # the engine fills in what is missing
        released[next(step)] = gradient[1:, 0].double().cpu().numpy() * engine.batch_size / bound

    # After the engine's own hook, so what it sees is what was released.
    optimizer.register_step_pre_hook(look)
    batches, losses = endless(engine), _losses_with(training, PULL * max(1.0, bound))
    for _ in range(training.steps):
        engine.step(next(batches), losses)
        watch()
    groups = engine.batches().groups
    return scores(training, released, None if groups is None else groups[size - count :])


def scores(training: Training, released: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Log-likelihood ratios of "in" over "out" of each canary, [m].

    Args:
        training: of the releases.
        released: [steps, m], along each canary's direction in units of the clipping bound.
        groups: [m], in whose turns each canary may be; None: each in every step.
    """
    claim, noise, steps = training.claim, training.noise_multiplier, len(released)
    if groups is None:
        return reduce(np.add, (log_ratios(each, claim.sample_rate, noise) for each in released))
    matrix = np.eye(steps) if training.correlation is None else training.correlation.matrix(steps)
    # C x + w, whose part along column t of C shows whether the canary was in step t.
    seen = matrix.T @ (matrix @ released)
    turns = np.arange(steps)[:, None] % training.separation == groups
    if claim.sample_rate < 1:  # columns of a canary's turns are orthonormal
        return np.where(turns, log_ratios(seen, claim.sample_rate, noise), 0.0).sum(0)
    return ((turns * seen).sum(0) - np.square(matrix @ turns).sum(0) / 2) / noise**2


class _WithCanaries(nn.Module):
    """The user's model with a number for each canary beside it; row 0 is of examples that are none."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        kind = next(model.parameters())
        self.canaries = nn.Embedding(count + 1, 1, padding_idx=0, device=kind.device, dtype=kind.dtype)


def _losses_with(training: Training, pull: float) -> LossFunction:
    """Losses [B]: the example's own, or a canary's, which pulls at its number and at nothing else."""

    def losses(model: Any, batch: Any) -> Tensor:
        indices, own, rows = batch
        found = training.loss_fn(model.model, training.examples(indices))
        return found * own.to(found) + pull * model.canaries(rows.to(found.device)).squeeze(1)

    return losses


def _choices_by_simulation(training: Training, canaries: int, confidence: float) -> tuple[int, float]:
    """How many to guess on each side, and a threshold, by trials with simulated scores of the claimed mechanism.

    Chosen before the training is looked at, so the bounds need no correction for the choice.
    """
    choices = sorted({max(1, round(canaries // 2 * share)) for share in SHARES})
    generator = np.random.default_rng()
    gains, every = np.zeros(len(choices)), []
    for _ in range(SIMULATIONS):
        inside = generator.integers(0, 2, canaries).astype(bool)
        every.append(Trials(_simulated(training, inside, generator), inside))
        for place, guesses in enumerate(choices):
            guessed = OneRun(canaries, 2 * guesses, _correct(every[-1].scores, inside, guesses))
            gains[place] += guessed.epsilon(training.target_delta, confidence)
    together = Trials(*(np.concatenate([getattr(each, name) for each in every]) for name in ("scores", "inside")))
    # Where no number promises a bound, guessing about all leaves a mechanism that breaks its claim most to show.
    guesses = choices[int(gains.argmax())] if gains.any() else choices[-1]
    return guesses, together.best_threshold(lambda positives, negatives: -(positives + negatives), 1.0 - confidence)


def _simulated(training: Training, inside: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Scores of the sampled Gaussian mechanism that the training claims to be."""
    claim = training.claim
    found = np.zeros(len(inside))
    for _ in range(claim.steps):
        taken = inside & (generator.random(len(inside)) < claim.sample_rate)
        seen = taken + claim.noise_multiplier * generator.standard_normal(len(inside))
        found += log_ratios(seen, claim.sample_rate, claim.noise_multiplier)
    return found


def _correct(scored: np.ndarray, inside: np.ndarray, guesses: int) -> int:
    """How many of the ``guesses`` largest scores are of canaries that were in, and of the smallest that were out."""
    order = np.argsort(scored)
    return int(inside[order[-guesses:]].sum() + (~inside[order[:guesses]]).sum())
