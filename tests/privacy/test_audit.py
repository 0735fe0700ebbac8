"""The audit: its bounds hold as often as they say, planted bugs are found, the user's model is left alone."""

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_runs import data, losses_of, network
from scipy.optimize import linprog
from scipy.stats import binom, binomtest, norm
from scripts import script
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.audit import audit
from ghostclip.audit.bounds import (
    composed_false_negatives,
    epsilon_from_rates,
    error_bound,
    gaussian_mu,
    noise_from_rates,
    one_run_epsilon,
    one_run_p_value,
)
from ghostclip.audit.one_run import OneRun, scores
from ghostclip.audit.trade_off import _least_false, noise_from_guesses, refutes
from ghostclip.audit.training import Claim, Training
from ghostclip.audit.trials import Trials, log_ratios
from ghostclip.clipping import Adaptive, AutoV, ByLayer, Composed, EqualNoise, Grouped, PerLayer, Whole
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, noise_source
from ghostclip.report import plain
from ghostclip.sampling import Poisson

DELTA = 1e-5
STANDARD = type(noise_source("standard"))
# So sure that a test of a sound engine does not fail by chance.
SURE = 1 - 1e-7


def simulated(generator, count: int, noise: float, rate: float = 1.0, steps: int = 1) -> Trials:
    """Trials of the exact mechanism."""
    inside = generator.integers(0, 2, count).astype(bool)
    taken = inside[:, None] & (generator.random((count, steps)) < rate)
    seen = taken + noise * generator.standard_normal((count, steps))
    return Trials(log_ratios(seen, rate, noise).sum(1), inside)


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 10), (10, 10), (17, 4000)])
def test_clopper_pearson_is_scipy_s(errors, trials):
    expected = binomtest(errors, trials).proportion_ci(confidence_level=0.9, method="exact").high
    assert float(error_bound(errors, trials, 0.05)) == pytest.approx(expected, rel=1e-9)
    assert float(error_bound(0, 0, 0.05)) == 1.0  # without trials nothing is known


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_randomized_response_shows_its_epsilon(epsilon):
    wrong = 1 / (1 + math.exp(epsilon))
    assert float(epsilon_from_rates(wrong, wrong, 0.0)) == pytest.approx(epsilon)
    assert float(epsilon_from_rates(wrong, wrong, 0.01)) < epsilon
    assert float(epsilon_from_rates(0.5, 0.6, 0.0)) == 0.0


@pytest.mark.parametrize("threshold", [-1.0, 0.3, 2.0])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_error_rates_of_a_gaussian_give_back_its_distance(threshold, rate):
    mu = 1.7
    wrong_in, wrong_out = norm.sf(threshold), (1 - rate) * norm.cdf(threshold) + rate * norm.cdf(threshold - mu)
    assert float(gaussian_mu(wrong_in, wrong_out, rate)) == pytest.approx(mu)
    assert noise_from_rates(wrong_in, wrong_out, rate, 1) == pytest.approx(1 / mu)


def test_errors_of_a_blind_attack_show_nothing_and_impossible_ones_leave_no_noise():
    assert float(gaussian_mu(0.4, 0.6)) == pytest.approx(0.0)
    assert noise_from_rates(0.5, 0.6, 1.0, 3) == math.inf
    assert noise_from_rates(0.5, 0.6, 0.3, 3) == math.inf
    assert noise_from_rates(0.01, 0.5, 0.2, 1) == 0.0  # too few errors for the sampling rate


@pytest.mark.parametrize("false_positives", [0.001, 0.1, 0.6])
def test_the_composed_trade_off_is_the_gaussian_s_for_full_batches(false_positives):
    found = composed_false_negatives(false_positives, noise=2.0, sample_rate=1.0, steps=4)
    exact = norm.cdf(norm.isf(false_positives) - math.sqrt(4) / 2.0)
    assert exact - 2e-3 < found <= exact


def test_the_composed_noise_is_found_from_its_own_trade_off():
    least = composed_false_negatives(0.2, noise=1.5, sample_rate=0.25, steps=6)
    assert 1.5 <= noise_from_rates(0.2, least, 0.25, 6) < 1.5 * 1.01


@pytest.mark.parametrize(("rate", "steps"), [(0.3, 1), (1.0, 4)])
@pytest.mark.slow
def test_the_bounds_fail_no_more_often_than_they_say(rate, steps):
    generator, failure, runs = np.random.default_rng(5), 0.1, 200
    spent = Claim(1.0, rate, steps, DELTA).epsilon
    wrong_noise = wrong_epsilon = 0
    for _ in range(runs):
        trials = simulated(generator, 500, 1.0, rate, steps)
        rates = trials.error_rates(partial(gaussian_mu, sample_rate=rate if steps == 1 else 1.0), failure)
        wrong_noise += noise_from_rates(rates.false_positive_bound, rates.false_negative_bound, rate, steps) < 1.0
        rates = trials.error_rates(partial(epsilon_from_rates, delta=DELTA), failure)
        wrong_epsilon += epsilon_from_rates(rates.false_positive_bound, rates.false_negative_bound, DELTA) > spent
    allowed = binom.isf(1e-4, runs, failure)
    assert wrong_noise <= allowed
    assert wrong_epsilon <= allowed


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published"),
    # Steinke, Nasr, Jagielski 2023, as printed in appendix D and section 7.
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_one_run_bounds_are_the_published_ones(canaries, guesses, correct, delta, published):
    found = one_run_epsilon(canaries=canaries, guesses=guesses, correct=correct, delta=delta, confidence=0.95)
    assert abs(found - published) < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correct": 11}, "expected correct <= guesses <= canaries; got 11, 10 and 20"),
        ({"delta": -0.1}, "delta must be a number in"),
        ({"epsilon": math.nan}, "epsilon must be a finite number"),
    ],
)
def test_one_run_arguments_are_checked(changes, message):
    values = {"canaries": 20, "guesses": 10, "correct": 5, "epsilon": 1.0, "delta": 0.0, **changes}
    with pytest.raises(ValueError, match=message):
        one_run_p_value(**values)


def audited(model=None, dataset=None, **changes):
    """An audit of a small training: full batches of eight examples, one step, little noise."""
    options = {
        "batch_size": 8, "noise_multiplier": 0.5, "steps": 1, "draws": 200, "canaries": 0, "clipping": 2.0,
        "confidence": 0.999,
    }  # fmt: skip
    model = network() if model is None else model
    return audit(model, losses_of, data(8) if dataset is None else dataset, **options | changes)


@pytest.mark.usefixtures("coarse_losses")
def test_an_audit_of_a_sound_engine_is_consistent_and_leaves_the_user_s_model_alone():
    model, dataset, state = network(), data(8), torch.get_rng_state()
    found = audited(model, dataset, draws=600, canaries=4, confidence=0.9999)
    assert not found.violated
    assert found.verdict.startswith("consistent: at confidence")
    assert 0.5 < found.white_box.noise_multiplier < 3.0
    assert 0 < found.audited < found.claimed
    figures = json.loads(json.dumps(plain(found.figures()), allow_nan=False))
    assert [(bound["method"], bound["about"]) for bound in figures["bounds"]] == [
        ("clopper-pearson", "trial"), ("gaussian", "trial"), ("gaussian", "training"), ("one-run", "training"),
        ("one-run f-DP", "training"), ("one-run Gaussian", "training"),
    ]  # fmt: skip
    assert [point["releases"] for point in figures["white_box"]["curve"]] == [200, 500, 600]
    assert figures["audited_epsilon"] <= figures["claimed_epsilon"]
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert all(torch.equal(value, network().state_dict()[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p._backward_hooks is None for p in model.parameters())
    assert model.training


@pytest.mark.slow
def test_more_than_the_claimed_share_of_examples_is_found(monkeypatch):
    monkeypatch.setattr(Poisson, "count", lambda self, generator: generator.binomial(self.population, 0.9))
    found = audited(dataset=data(60), batch_size=1, noise_multiplier=0.8, draws=900)
    assert found.white_box.sample_rate_bound > 0.85
    assert [bound.violated for bound in found.bounds if bound.about == "training"] == [True]


BY_TURNS = {
    "bands": {"sampling": "cyclic_poisson", "correlation": BandedToeplitz(bands=3)},
    "bands in order": {"sampling": "cyclic", "correlation": BandedToeplitz(bands=4)},
    "more bands than batches": {"sampling": "cyclic", "correlation": BandedToeplitz(bands=8)},
    "buffers": {"sampling": "cyclic", "correlation": BufferedToeplitz(buffers=2)},
    "in order": {"sampling": "cyclic"},
}


@pytest.mark.parametrize("name", BY_TURNS)
def test_scores_by_turns_are_log_likelihood_ratios_of_what_is_released(name):
    """By the densities of C x + w, for canaries that were in all of their turns, or in none."""
    training = Training(network(), losses_of, data(200), 40, 2.0, 12, **BY_TURNS[name])
    groups = np.arange(10) % training.separation
    turns = (np.arange(12)[:, None] % training.separation == groups).astype(float)
    inside, rate = np.arange(10) < 6, training.claim.sample_rate
    matrix = np.eye(12) if training.correlation is None else training.correlation.matrix(12)
    seen = matrix @ (turns * inside) + np.random.default_rng(1).standard_normal((12, 10))
    # A sum over all subsets of turns that the canary may have been sampled in.
    ratios = np.zeros(10)
    for canary in range(10):
        own = np.flatnonzero(turns[:, canary])
        for taken in itertools.product([0.0, 1.0], repeat=len(own)):
            mean = matrix[:, own] @ np.array(taken)
            probability = np.prod([rate if each else 1 - rate for each in taken])
            ratios[canary] += probability * np.exp((2 * seen[:, canary] @ mean - mean @ mean) / (2 * 2.0**2))
    found = scores(training, np.linalg.solve(matrix, seen), groups)
    assert found == pytest.approx(np.log(ratios), rel=1e-9)


@pytest.mark.parametrize("batch_size", [50, 30])
@pytest.mark.parametrize("sampling", [*BY_TURNS.values(), {"sampling": "poisson"}], ids=[*BY_TURNS, "independent"])
@pytest.mark.one_in(12)
@pytest.mark.usefixtures("coarse_losses")
def test_one_run_by_turns_is_held_against_the_engine_s_epsilon_and_finds_a_bug(monkeypatch, sampling, batch_size):
    # So many steps that hardly any canary isn't sampled in one of them: one that never is can only be guessed wrong.
    options = {"draws": 0, "canaries": 100, "batch_size": batch_size, "steps": 36, "noise_multiplier": 2.0, **sampling}
    engines, step = set(), PrivacyEngine.step
    monkeypatch.setattr(PrivacyEngine, "step", lambda self, *given: engines.add(self) or step(self, *given))
    sound = audited(dataset=data(200), confidence=SURE, **options)
    (engine,) = engines
    assert not sound.violated
    assert (sound.white_box, sound.one_run.canaries) == (None, 100)
    assert sound.claimed == pytest.approx(engine.epsilon(), rel=1e-6)
    release = STANDARD.release
    too_little = lambda self, sums, std, divisor=1.0: release(self, sums, std / 100, divisor)  # noqa: E731
    monkeypatch.setattr(STANDARD, "release", too_little)
    monkeypatch.setattr(STANDARD, "release_correlated", lambda *given: False)  # which leaves it to `release`
    broken = audited(dataset=data(200), confidence=0.95, **options)
    assert broken.one_run.correct >= 0.9 * broken.one_run.guesses
    assert broken.audited > sound.audited


TRIALS = {
    "sampled": {"sampled": True},
    "sampled and composed": {"sampled": True, "steps_per_trial": 3},
    "hardened": {"noise": "hardened"},
    "another loop": {
        "dataset": DataLoader(data(16), batch_size=8), "clipping": PerLayer(1.0), "second_pass": "cached",
        "max_physical_batch_size": 3, "optimizer": lambda parameters: torch.optim.Adam(parameters),
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", TRIALS.values(), ids=TRIALS)
def test_trials_of_every_kind_hold(options):
    found = audited(**{"dataset": data(16), **options}, draws=600, confidence=SURE, noise_multiplier=0.3, canaries=4)
    assert not found.violated
    assert found.white_box.sample_rate == (0.5 if "sampled" in options else 1.0)
    assert found.white_box.trials == 600 // options.get("steps_per_trial", 1)
    assert found.white_box.noise_multiplier > 0.3
    assert found.one_run.canaries == 4


# No example moves it.
UNMOVED = nn.Sequential(nn.Linear(5, 3), nn.Hardtanh(-1e-30, 1e-30))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draws": 99}, r"draws must be at least 100, for 20 trials and 100 releases \(or 0, .*; got 99"),
        ({"draws": 100, "steps_per_trial": 9}, "draws must be at least 180"),
        ({"canaries": 8}, r"canaries must be at least 2 .* fewer than the 8 examples; got 8"),
        ({"canaries": 1}, "canaries must be at least 2"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number > 0; got 0.0"),
        ({"confidence": 1.0}, "confidence must be a number in"),
        ({"batch_size": 9}, "batch_size must be at most the 8 examples; got 9"),
        ({"clipping": Adaptive(1.0)}, "an adaptive clipping norm is released along with the gradients"),
        ({"sampling": "cyclic", "draws": 600}, "draws must be 0 with sampling='cyclic'"),
        ({"sampling": "truncated"}, "sampling must be one of 'poisson', 'cyclic_poisson', 'cyclic'; got 'truncated'"),
        ({"correlation": BandedToeplitz(bands=2)}, "bands must be 1 unless sampling="),
        ({"noise": "test"}, "noise must be one of 'standard', 'hardened'; got 'test'"),
        ({"noise_multiplyer": 1.0}, "unexpected keyword argument 'noise_multiplyer'"),
        ({"model": UNMOVED, "draws": 200}, "none of the first 8 examples has a gradient"),
        ({"clipping": 1e30, "draws": 200}, r"has no gradient that is finite; lower the clipping norm, 1e\+30"),
    ],
)
def test_what_cannot_be_audited_is_said_by_name(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        audited(**{"draws": 0, **changes})


def test_scores_that_are_not_numbers_prove_nothing():
    inside = np.arange(200) % 2 == 0
    for threshold in (0.0, math.nan):
        rates = Trials(np.full(200, math.nan), inside).error_rates_at(threshold, 0.05)
        assert (rates.false_positives, rates.false_negatives) == (100, 100)


@pytest.mark.parametrize("clipping", [Composed(ByLayer(), 2.0, noise=EqualNoise()), Composed(Whole(), 2.0, AutoV())])
@pytest.mark.usefixtures("coarse_losses")
def test_policies_that_learn_the_groups_of_a_model_are_audited(clipping):
    found = audited(dataset=data(16), clipping=clipping, canaries=4, confidence=SURE, noise_multiplier=0.3)
    assert not found.violated
    assert found.one_run.canaries == 4


@pytest.mark.usefixtures("coarse_losses")
def test_groups_by_the_names_of_the_user_s_parameters_are_attacked_in_the_white_box():
    groups = {"first": ["0.*"], "rest": ["[!0].*"]}
    assert not audited(clipping=Grouped(groups, max_norm=1.0), canaries=0, confidence=SURE).violated


@pytest.mark.slow
def test_the_published_audits_run_and_find_the_planted_bug(tmp_path, capsys):
    small = ["--draws", "600", "--runs", "1", "--turns", "1"]
    assert script("audit").main([*small, "--only", "planted bug", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "audit.json").read_text())
    assert results["audits"]["planted bug"]["violated"] is True
    page = (tmp_path / "audit.md").read_text()
    assert "| planted bug | gaussian | training | 8.078 |" in page
    assert "| 8 bands, cyclic_poisson | columns of C half as long | 1 | 1.993 | " in page
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert "VIOLATED" in capsys.readouterr().out


def test_the_published_bound_at_a_hundred_thousand_draws_is_above_80_percent():
    root = Path(__file__).resolve().parents[2]
    audits = json.loads((root / "experiments" / "results" / "audit.json").read_text())["audits"]
    first = audits["one release"]
    assert first["white_box"]["releases"] == 100_000
    assert 0.8 * first["claimed_epsilon"] < first["audited_epsilon"] < first["claimed_epsilon"]
    assert [name for name, found in audits.items() if found["violated"]] == ["planted bug"]


CLAIM = Claim(1.0, 0.25, 20, 1e-5)
FAILURE = 0.01


def gaussian(right: float, mu: float) -> float:
    """x(y) of a mu-Gaussian mechanism."""
    return float(norm.cdf(norm.ppf(right) - mu))


def pure(right: float, epsilon: float) -> float:
    """x(y) of pure differential privacy."""
    return max(right * math.exp(-epsilon), 1 - math.exp(epsilon) * (1 - right), 0.0)


def largest_probability(epsilon: float, m: int, r: int, v: int) -> float:
    """The largest P[j >= v] that the inequalities allow, as a linear program: x is a maximum of two lines."""
    j = np.arange(r + 1)
    rows, limits = [], []
    for c in range(1, r + 1):
        false, right = np.where(j >= c - 1, (r - j) / m, 0.0), np.where(j >= c, j / m, 0.0)
        rows += [math.exp(-epsilon) * right - false, math.exp(epsilon) * right - false]
        limits += [0.0, math.exp(epsilon) - 1.0]
    found = linprog(-(j >= v).astype(float), rows, limits, [np.ones(r + 1)], [1.0], bounds=(0, 1))
    assert found.status == 0
    return -float(found.fun)


@pytest.mark.parametrize(("m", "r", "v"), [(10, 10, 8), (40, 20, 16), (12, 12, 7), (30, 5, 5)])
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_the_recursion_finds_what_a_linear_program_finds(epsilon: float, m: int, r: int, v: int) -> None:
    most = largest_probability(epsilon, m, r, v)
    curve = partial(pure, epsilon=epsilon)
    if most < 1 - 1e-6:
        assert refutes(curve, canaries=m, guesses=r, correct=v, failure=most * (1 + 1e-6))
    assert not refutes(curve, canaries=m, guesses=r, correct=v, failure=most * (1 - 1e-6))


def test_randomized_response_is_never_refuted_more_often_than_it_may() -> None:
    """All guessed: j is binomial with the accuracy of epsilon-private randomized response (Steinke et al. 2023)."""
    m, epsilon = 50, 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    for v in range(m + 1):
        tail = float(binom.sf(v - 1, m, accuracy))
        if 0 < tail < 1:
            least = tail * (1 - 1e-9)
            assert not refutes(partial(pure, epsilon=epsilon), canaries=m, guesses=m, correct=v, failure=least)


def guessed(generator: Any, noise: float, canaries: int, guesses: int) -> OneRun:
    """One run of the claimed rate and steps with that noise; guesses by the scores of the claim, half "in"."""
    inside = generator.integers(0, 2, canaries).astype(bool)
    taken = inside[:, None] & (generator.random((canaries, CLAIM.steps)) < CLAIM.sample_rate)
    seen = taken + noise * generator.standard_normal(taken.shape)
    order = np.argsort(log_ratios(seen, CLAIM.sample_rate, CLAIM.noise_multiplier).sum(1))
    half = guesses // 2
    return OneRun(canaries, guesses, int(inside[order[-half:]].sum() + (~inside[order[:half]]).sum()))


def claimed_curve(noise: float = 1.0) -> Callable[[float], float]:
    return partial(_least_false, noise=noise, sample_rate=CLAIM.sample_rate, steps=CLAIM.steps)


def test_a_sound_mechanism_is_never_above_its_claim_in_200_repetitions() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        run = guessed(generator, 1.0, 1000, 200)
        told = {"canaries": run.canaries, "guesses": run.guesses, "correct": run.correct}
        assert not refutes(claimed_curve(), **told, failure=FAILURE)


@pytest.mark.parametrize(("noise", "repetitions", "refuted"), [(1.0, 200, False), (0.5, 20, True)])
def test_canaries_as_independent_trials_find_half_the_noise_and_never_refute_the_claim(
    noise: float, repetitions: int, refuted: bool
) -> None:
    """Clipping at twice the bound is half the noise over it: found in each training, where epsilon 8 is claimed."""
    generator = np.random.default_rng(3)
    for _ in range(repetitions):
        errors = simulated(generator, 1000, noise, CLAIM.sample_rate, CLAIM.steps).error_rates_at(0.2, FAILURE)
        least = composed_false_negatives(errors.false_positive_bound, 1.0, CLAIM.sample_rate, CLAIM.steps)
        assert (least > errors.false_negative_bound) == refuted
    found = OneRun(1000, 0, 0, errors).independent_noise_multiplier(CLAIM.sample_rate, CLAIM.steps)
    assert (found < CLAIM.noise_multiplier) == refuted
    assert OneRun(1000, 0, 0).independent_noise_multiplier(CLAIM.sample_rate, CLAIM.steps) == math.inf


@pytest.mark.parametrize(("bound", "found"), [(1.0, False), (2.0, True)])
def test_clipping_at_twice_the_bound_is_found_where_little_is_claimed(bound: float, found: bool) -> None:
    """One release of noise multiplier 2 over all of 4,000 canaries, a tenth guessed about; epsilon 8 hides the bug."""
    generator = np.random.default_rng(2)
    for _ in range(5):
        inside = generator.integers(0, 2, 4000).astype(bool)
        order = np.argsort(bound * inside + 2.0 * generator.standard_normal(4000))
        correct = int(inside[order[-200:]].sum() + (~inside[order[:200]]).sum())
        curve = partial(gaussian, mu=1 / 2.0)
        assert refutes(curve, canaries=4000, guesses=400, correct=correct, failure=FAILURE) == found


def test_the_noise_is_the_least_that_is_refuted() -> None:
    arguments: dict[str, Any] = {"canaries": 200, "guesses": 60, "correct": 55, "failure": FAILURE}
    noise = noise_from_guesses(**arguments, sample_rate=1.0, steps=1)
    assert refutes(partial(gaussian, mu=1 / noise), **arguments)
    assert not refutes(partial(gaussian, mu=1.05 / noise), **arguments)


@pytest.mark.parametrize("correct", [0, 30, 33])
def test_guesses_like_a_coin_s_refute_nothing(correct: int) -> None:
    arguments: dict[str, Any] = {"canaries": 200, "guesses": 60, "correct": correct, "failure": FAILURE}
    assert noise_from_guesses(**arguments, sample_rate=0.5, steps=2) == math.inf
    assert (CLAIM.with_noise(math.inf), CLAIM.with_noise(0.0)) == (0.0, math.inf)
