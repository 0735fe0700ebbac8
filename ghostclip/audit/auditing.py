"""`audit`: an empirical lower bound on epsilon beside the claimed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip.audit.bounds import epsilon_from_rates, gaussian_mu, noise_from_rates
from ghostclip.audit.one_run import OneRun, one_run
from ghostclip.audit.result import Audit, Bound, CurvePoint, WhiteBox
from ghostclip.audit.training import Claim, LossFunction, Training, plain_sgd
from ghostclip.audit.white_box import TrialSetting, sampled_share, white_box_trials
from ghostclip.noise import Correlation
from ghostclip.validate import open_fraction, positive_int, whole

__all__ = ["Phase", "audit"]

SAMPLED_BATCHES, MOST_CANARIES = 200, 1000
LEAST_RELEASES, LEAST_TRIALS = 100, 20  # below them no bound is worth a point of the curve
# Three white-box bounds (two of epsilon, one of the rate) and three one-run bounds share the failure probability.
SHARES = 6

# (what is being done, how many of it) -> a context that gives the function to call after each.
Phase = Callable[[str, int], Any]


def audit(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    *,
    batch_size: int,
    noise_multiplier: float,
    steps: int,
    target_delta: float = 1e-5,
    clipping: Any = 1.0,
    second_pass: str = "auto",
    max_physical_batch_size: int | None = None,
    noise: str = "standard",
    sampling: str = "poisson",
    correlation: Correlation | None = None,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer] = plain_sgd,
    draws: int = 10_000,
    canaries: int | None = None,
    sampled: bool = False,
    steps_per_trial: int = 1,
    confidence: float = 0.95,
    phase: Phase = lambda name, count: nullcontext(lambda: None),
) -> Audit:
    """Attacks a training configuration. The result has lower bounds on its epsilon, beside the claimed epsilon.

    The adversary sees every released sum. There are two attacks. White box: ``draws`` releases of the engine, with or
    without a canary of known gradient among the examples. One run: one whole training with many canaries. Model, data
    and torch's random numbers are unchanged afterwards.

    The bounds of the whole training are "one-run f-DP" (the largest noise that explains the guesses of the one run),
    "one-run Gaussian" (the largest noise that explains the errors over its canaries; this assumes that the noise of
    different coordinates is independent), "gaussian" (the largest noise that explains the white-box errors, composed by
    the accountant over all steps, at a sampling rate counted in the engine's batches; this assumes that the steps are
    sampled Gaussian releases of some noise and rate) and "one-run" (which assumes nothing). The bounds of a
    single trial are "clopper-pearson" (which assumes nothing) and "gaussian".

    The claim is about data sets that differ by one example's presence. Correlated noise, and sampling by turns, protect
    a training as a whole: they are audited by one run (``draws=0``), whose adversary knows the matrix, and in which
    steps each canary has its turn. What the attacks release is not charged: the result of an audit over private data is
    private data.

    Args:
        model: any that can be trained privately.
        loss_fn: (model, batch) -> losses [B].
        data: a map-style data set, or a DataLoader, whose collate_fn is kept.
        batch_size, noise_multiplier, target_delta, clipping, second_pass, max_physical_batch_size, noise, correlation:
            as `PrivacyEngine`; there must be noise, since without it nothing is claimed.
        sampling: "poisson"; or "cyclic_poisson" or "cyclic", with or without ``correlation``.
        steps: of the whole training.
        optimizer: parameters -> the optimizer of the one run; plain SGD at rate 0.1 by default.
        draws: white-box releases; 0 leaves this attack out.
        canaries: of the one run; None: half of the examples, a thousand at most; 0 leaves this attack out.
        sampled: let the engine's coins decide, at (nearly) the training's sampling rate, whether a canary in the data
            is in a release, and don't tell the adversary. It needs far more draws for the same bound.
        steps_per_trial: releases that a white-box trial sees together.
        confidence: with which all bounds hold together.
        phase: told of each part's name and length; a context manager that gives what to call after each unit of it.

    Raises:
        ValueError, TypeError: an argument is out of range.
        GhostClipError: the training can't be run.
    """
    options = {"second_pass": second_pass, "max_physical_batch_size": max_physical_batch_size, "noise": noise}
    training = Training(
        model, loss_fn, data, batch_size, noise_multiplier, steps, target_delta, clipping, optimizer, options, sampling,
        correlation,
    )  # fmt: skip
    if training.by_turns and whole(draws=draws):
        raise ValueError(
            f"draws must be 0 with sampling={sampling!r}: single releases of a training by turns, or with correlated "
            "noise, claim nothing by themselves; the audit of one run sees them all"
        )
    failure = (1.0 - open_fraction(confidence=confidence)) / SHARES
    setting = TrialSetting.of(training, sampled, positive_int(steps_per_trial=steps_per_trial))
    canaries = min(MOST_CANARIES, training.size // 2) if canaries is None else whole(canaries=canaries)
    least = max(LEAST_RELEASES, LEAST_TRIALS * setting.steps)
    if 0 < whole(draws=draws) < least:
        raise ValueError(
            f"draws must be at least {least}, for {LEAST_TRIALS} trials and {LEAST_RELEASES} releases (or 0, for no "
            f"white-box audit); got {draws}"
        )
    started = time.perf_counter()
    white_box, run = None, None
    bounds: list[Bound] = []
    with torch.random.fork_rng(devices=[]):
        if draws:
            white_box, bounds = _white_box(training, setting, draws, failure, phase)
        if canaries:
            with phase("one run", training.steps) as watch:
                run = one_run(training, canaries, 1.0 - failure, watch)
            bounds += _one_run_bounds(run, training, failure)
    seconds = time.perf_counter() - started
    return Audit(training.claim.epsilon, training.target_delta, confidence, bounds, white_box, run, seconds)


def _one_run_bounds(run: OneRun, training: Training, failure: float) -> list[Bound]:
    """The bounds of the one run; each may fail with ``failure``."""
    claim = training.claim
    by_guesses = run.noise_multiplier(claim.sample_rate, claim.steps, 1.0 - failure)
    found = {
        "one-run": run.epsilon(training.target_delta, 1.0 - failure),
        "one-run f-DP": claim.with_noise(by_guesses),
        "one-run Gaussian": claim.with_noise(run.independent_noise_multiplier(claim.sample_rate, claim.steps)),
    }
    return [Bound(method, "training", epsilon, claim.epsilon) for method, epsilon in found.items()]


def _white_box(
    training: Training, setting: TrialSetting, draws: int, failure: float, phase: Phase
) -> tuple[WhiteBox, list[Bound]]:
    """Trials, coins, and the bounds over the number of releases; each bound may fail with ``failure``."""
    count = draws // setting.steps
    with phase("white box", count) as watch:
        trials = white_box_trials(training, setting, count, watch)
    with phase("sampling", SAMPLED_BATCHES) as watch:
        share = sampled_share(training, SAMPLED_BATCHES, watch)
    rate, delta = share.lower_bound(failure), training.target_delta
    trial = Claim(training.noise_multiplier, setting.sample_rate, setting.steps, delta)
    epsilon_at = partial(epsilon_from_rates, delta=delta)
    mu_at = partial(gaussian_mu, sample_rate=setting.sample_rate if setting.steps == 1 else 1.0)
    curve, marks = [], _marks(count, setting.steps)
    with phase("bounds", len(marks)) as watch:
        for mark in marks:
            # Each bound has the threshold that is best for it.
            direct, gaussian = (trials.first(mark).error_rates(merit, failure) for merit in (epsilon_at, mu_at))
            noise = noise_from_rates(*gaussian.bounds, setting.sample_rate, setting.steps)
            shown = float(epsilon_at(*map(np.asarray, direct.bounds)))
            whole_training = training.claim.with_noise(noise, rate)
            curve.append(CurvePoint(mark * setting.steps, shown, trial.with_noise(noise), whole_training))
            watch()
    last = curve[-1]
    bounds = [
        Bound("clopper-pearson", "trial", last.clopper_pearson, trial.epsilon),
        Bound("gaussian", "trial", last.gaussian, trial.epsilon),
        Bound("gaussian", "training", last.training, training.claim.epsilon),
    ]
    steps, sample_rate = setting.steps, setting.sample_rate
    return WhiteBox(last.releases, count, steps, sample_rate, direct, gaussian, noise, share, rate, curve), bounds


def _marks(count: int, steps: int) -> list[int]:
    """Numbers of trials at which the bounds are taken: of 200, 500, 1000, ... releases, and all."""
    releases = [figure * 10**power for power in range(2, 9) for figure in (1, 2, 5)]
    marks = {number // steps for number in releases if LEAST_RELEASES < number < count * steps}
    return [*sorted(mark for mark in marks if LEAST_TRIALS <= mark < count), count]
