"""Accounting: against dp-accounting called directly, by independent formulas, as inverse pairs, and at the edges."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism, pld, rdp
from scipy import stats

from ghostclip import accounting
from ghostclip.accounting import losses
from ghostclip.errors import LedgerError
from ghostclip.events import (
    RELATIONS,
    CyclicGaussian,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    JointGaussian,
    SampledGaussian,
    TruncatedGaussian,
    mechanism_of,
    merged,
    within,
)
from ghostclip.ledger.records import encoded

SETTING: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.05, "steps": 100, "delta": 1e-5}
TRUNCATED: dict[str, Any] = {"sampling": "truncated", "dataset_size": 2000, "max_batch_size": 140}
TARGET: dict[str, Any] = {"target_epsilon": 0.8, "sample_rate": 0.05, "steps": 200, "delta": 1e-5}


def by_dp_accounting(accountant: str, relation: str, event: Any, steps: int, delta: float) -> float:
    """dp-accounting's own answer for so many of its events."""
    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    kind = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    spent = kind(neighboring_relation=neighbours)
    spent.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return float(spent.get_epsilon(delta))


GRID = [pytest.param(seed, accountant, marks=() if (seed, accountant) in ((0, "pld"), (1, "rdp")) else pytest.mark.slow)
        for seed in range(12) for accountant in ("pld", "rdp")]  # fmt: skip


@pytest.mark.parametrize(("seed", "accountant"), GRID)
def test_epsilon_equals_dp_accounting(seed: int, accountant: str) -> None:
    """Poisson samples of one random setting; where dp-accounting has them, the other kinds and relations too.

    Of delta what its transforms round away is left out.
    """
    draw = np.random.default_rng(seed)
    sigma, size, steps = float(draw.uniform(0.8, 4)), int(10 ** draw.uniform(3, 5)), int(draw.integers(1, 2000))
    rate, delta = size / 10**6, float(10 ** draw.uniform(-7, -3))
    left = delta - (losses.lost_in_transforms(steps) if accountant == "pld" else 0.0)
    setting = {"noise_multiplier": sigma, "sample_rate": rate, "steps": steps, "delta": delta}
    poisson = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    cap = math.ceil(rate * 5000 * 1.2) + 1
    # The larger one of two neighbours has an example more than are there, unless one is replaced.
    cut, cut_alike = (dp_accounting.TruncatedSubsampledGaussianDpEvent(n, rate, cap, sigma) for n in (5001, 5000))
    truncated = {"sampling": "truncated", "dataset_size": 5000, "max_batch_size": cap}
    # Replacing moves the sum by twice the bound that the noise is measured by.
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(10**6, size, dp_accounting.GaussianDpEvent(sigma / 2))
    replaced: dict[str, Any] = {"neighboring": "replace_one"}
    cases = {
        "pld": [({}, poisson), (replaced, poisson), (truncated, cut), (truncated | replaced, cut_alike)],
        "rdp": [({}, poisson), ({"sampling": "without_replacement"} | replaced, fixed)],
    }
    for options, event in cases[accountant]:
        got = accounting.epsilon(**setting, **options, accountant=accountant)
        relation = options.get("neighboring", "add_or_remove_one")
        assert got == pytest.approx(by_dp_accounting(accountant, relation, event, steps, left), rel=1e-7)


def one_step_delta(epsilon: float, sigma: float, rate: float) -> float:
    """The exact delta of one release by hockey-stick divergence: the mixture against the centred Gaussian."""
    # The densities' ratio at x is 1 - rate + rate * exp((x - 1/2) / sigma^2); it exceeds exp(epsilon) above the cut.
    cut = 0.5 + sigma**2 * math.log((math.exp(epsilon) - 1 + rate) / rate)
    return float((1 - rate - math.exp(epsilon)) * stats.norm.sf(cut, 0, sigma) + rate * stats.norm.sf(cut, 1, sigma))


FIXED_SIZE = [{"sampling": "without_replacement", "neighboring": relation} for relation in RELATIONS]


@pytest.mark.parametrize(("sigma", "rate", "target"), [(1, 0.1, 0.5), (2, 0.3, 0.2), (1.5, 0.9, 0.5), (3, 0.01, 0.01)])
@pytest.mark.parametrize("options", [{}, *FIXED_SIZE])
@pytest.mark.one_in(6)
def test_one_step_by_an_independent_formula(sigma: float, rate: float, target: float, options: dict[str, Any]) -> None:
    """Whoever replaces an example, or leaves it out where another one takes its place, moves the sum by twice C."""
    noise, delta = (2 * sigma if options else sigma), one_step_delta(target, sigma, rate)
    got = accounting.epsilon(noise_multiplier=noise, sample_rate=rate, steps=1, delta=delta, **options)
    assert got == pytest.approx(target, rel=1e-6)


def cut_sums(size: int, rate: float, most: int, more: bool) -> dict[int, float]:
    """{sum: probability} of a truncated sample of so many examples of -1 and, with ``more``, one of +1."""
    found: dict[int, float] = {}
    for drawn, chance in enumerate(stats.binom.pmf(range(size + 1), size, rate)):
        kept = min(1.0, most / (drawn + 1))  # of one more
        joins = rate * kept if more else 0.0
        alone = -min(drawn, most)
        found[alone] = found.get(alone, 0.0) + chance * (1 - joins)
        beside = 1 - min(drawn, most - 1)
        found[beside] = found.get(beside, 0.0) + chance * joins
    return found


def delta_on_a_grid(epsilon: float, sigma: float, these: dict[int, float], those: dict[int, float]) -> float:
    """The larger hockey-stick divergence of two mixtures of normals."""
    x = np.linspace(min(these) - 12 * sigma, max(these) + 12 * sigma, 100_001)
    p, q = (sum(chance * stats.norm.pdf(x, mean, sigma) for mean, chance in each.items()) for each in (these, those))
    excess = (np.clip(one - math.exp(epsilon) * other, 0, None) for one, other in ((p, q), (q, p)))
    return max(float(each.sum()) for each in excess) * float(x[1] - x[0])


@pytest.mark.parametrize(("size", "batch_size", "most", "sigma"), [(20, 20, 20, 2), (20, 19, 20, 2), (20, 10, 12, 2)])
@pytest.mark.parametrize("fewer", [0, 1])
def test_a_truncated_sample_of_the_data_and_one_example_more(
    size: int, batch_size: int, most: int, sigma: float, fewer: int
) -> None:
    """With a nearly full batch the other example takes the place of one of the data's: 10^-5 was 0.018."""
    rate = batch_size / size
    cut: dict[str, Any] = {"sampling": "truncated", "dataset_size": size, "max_batch_size": most}
    claimed = accounting.epsilon(noise_multiplier=sigma, sample_rate=rate, steps=1, delta=1e-5, **cut)
    pair = [cut_sums(size - fewer, rate, most, more) for more in (True, False)]
    assert delta_on_a_grid(claimed, sigma, *pair) <= 1e-5


def test_divergences_of_a_truncated_sample_pay_for_cuts_in_delta() -> None:
    setting = {**SETTING, "accountant": "rdp"}
    plain = accounting.epsilon(**setting)
    for cap, least, most in [(190, plain, plain * 1.01), (160, plain * 1.001, plain * 1.5)]:
        got = accounting.epsilon(**setting, sampling="truncated", dataset_size=2000, max_batch_size=cap)
        assert least < got < most
        slip = 100 * stats.binom.sf(cap, 2000, 0.05) * (1 + math.exp(got))
        assert accounting.epsilon(**{**setting, "delta": 1e-5 - slip}) <= got * (1 + 1e-6)
    assert accounting.epsilon(**setting, sampling="truncated", dataset_size=2000, max_batch_size=105) == math.inf


@pytest.mark.parametrize(("options", "moved_by"), [({}, 1), ({"neighboring": "replace_one"}, 2), (FIXED_SIZE[1], 2)])
def test_the_full_batch_is_the_gaussian_mechanism(options: dict[str, Any], moved_by: int) -> None:
    exact = gaussian_mechanism.get_epsilon_gaussian(4.0 / moved_by / math.sqrt(9), 1e-5)
    got = accounting.epsilon(noise_multiplier=4.0, sample_rate=1.0, steps=9, delta=1e-5, **options)
    assert exact <= got <= exact * (1 + 1e-4)


@pytest.mark.parametrize(("sigma", "steps"), [(50.0, 2_500), (500.0, 10_000), (3000.0, 10**6)])
def test_rounding_of_transforms_takes_nothing_off_small_deltas(sigma: float, steps: int) -> None:
    """Losses of nearly all of the data are composed by transforms, those of all of it have a closed form."""
    setting = {"noise_multiplier": sigma, "steps": steps}
    for delta in (1e-8, 1e-10, 1e-12):
        exact = accounting.epsilon(**setting, delta=delta, sample_rate=1.0)
        composed = [SampledGaussian(1.0 - 1e-12, sigma, steps)]
        assert exact <= accounting.epsilon_of(composed, delta=delta) * (1 + 1e-8)
        assert exact <= accounting.risk_of(composed, delta=delta).epsilon * (1 + 1e-8)
    assert accounting.epsilon_of(composed, delta=1e-16 * steps) == math.inf


@pytest.mark.parametrize("delta", [1e-9, 0.2])
def test_releases_over_all_data_are_one_gaussian_release(delta: float) -> None:
    """Of several kinds together, and exactly: what distributions on a grid give is above it by their width."""
    events = [SampledGaussian(1.0, 5.0, 8), SampledGaussian(1.0, 7.0, 3), SampledGaussian(1.0, 40.0)]
    noise = (8 / 25 + 3 / 49 + 1 / 1600) ** -0.5
    exact = gaussian_mechanism.get_epsilon_gaussian(noise, delta)
    got, grid = accounting.epsilon_of(events, delta=delta), losses.composed(events, 1e-4).get_epsilon_for_delta(delta)
    assert exact < got < exact * (1 + 1e-7)
    assert got <= grid + 1e-7
    assert got == pytest.approx(grid, rel=1e-4)
    mixed = [*events, SampledGaussian(0.5, 2.0, 3)]
    assert accounting.epsilon_of(mixed, delta=delta) > got


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("target", "steps", "options"),
    [
        (0.8, 200, {}),
        (0.8, 20, {"sample_rate": 1.0}),
        (0.8, 200, {"accountant": "rdp"}),
        (0.8, 20, {"accountant": "rdp", "sampling": "without_replacement"}),
        (0.05, 4, {"accountant": "rdp", "sample_rate": 0.3}),  # far from the first guess
        (30.0, 4, {"accountant": "rdp", "sample_rate": 0.3}),
        (2.0, 100, {"sampling": "cyclic_poisson", "bands": 8, "sample_rate": 0.02}),
        (2.0, 100, {"sampling": "cyclic", "bands": 80, "sample_rate": 0.02}),
    ],
)
@pytest.mark.usefixtures("coarse_losses")
def test_noise_and_steps_invert_epsilon(target: float, steps: int, options: dict[str, Any]) -> None:
    common: dict[str, Any] = {"sample_rate": 0.05, "delta": 1e-5, **options}
    noise = accounting.noise_multiplier(target_epsilon=target, steps=steps, **common)
    assert accounting.epsilon(noise_multiplier=noise, steps=steps, **common) <= target
    assert accounting.epsilon(noise_multiplier=noise * (1 - 1e-4), steps=steps, **common) > target
    most = accounting.max_steps(target_epsilon=target, noise_multiplier=noise, **common)
    assert accounting.epsilon(noise_multiplier=noise, steps=most, **common) <= target
    assert accounting.epsilon(noise_multiplier=noise, steps=most + 1, **common) > target


def test_zero_steps_cost_nothing_and_a_step_without_noise_is_not_private() -> None:
    assert accounting.epsilon(**{**SETTING, "steps": 0}) == 0.0
    assert accounting.noise_multiplier(**{**TARGET, "steps": 0}) == 0.0
    assert accounting.epsilon_of([], delta=1e-5) == 0.0
    assert accounting.epsilon_of([SampledGaussian(0.1, 0.0, count=0)], delta=1e-5) == 0.0
    events = [SampledGaussian(0.1, 2.0, count=5), SampledGaussian(0.1, 0.0)]
    assert accounting.epsilon_of(events, delta=1e-5) == math.inf


def test_events_are_composed_once_for_each_mechanism() -> None:
    first, second = SampledGaussian(0.02, 1.5), SampledGaussian(0.01, 2.0)
    one_by_one = [first] * 30 + [second] * 20 + [first] * 10
    assert merged(one_by_one) == [SampledGaussian(0.02, 1.5, count=40), SampledGaussian(0.01, 2.0, count=20)]
    spent = rdp.RdpAccountant()
    for rate, sigma, count in [(0.02, 1.5, 40), (0.01, 2.0, 20)]:
        spent.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), count)
    got = accounting.epsilon_of(one_by_one, delta=1e-5, accountant="rdp")
    assert got == pytest.approx(spent.get_epsilon(1e-5), rel=1e-12)


def test_joint_releases_are_one_of_less_noise() -> None:
    """McMahan et al. 2018: dp-accounting's own rule for several Gaussian releases over one sample."""
    parts = (SampledGaussian(0.05, 1.5), SampledGaussian(0.05, 4.0))
    inner = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(1.5), dp_accounting.GaussianDpEvent(4.0)])
    event = dp_accounting.PoissonSampledDpEvent(0.05, inner)
    expected = by_dp_accounting("rdp", "add_or_remove_one", event, 100, 1e-5)
    joint = JointGaussian(parts, 100)
    assert accounting.epsilon_of([joint], delta=1e-5, accountant="rdp") == pytest.approx(expected, rel=1e-12)
    assert accounting.epsilon_of([joint, joint.together], delta=1e-5, accountant="rdp") > expected


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.usefixtures("coarse_losses")
def test_epsilon_over_time_is_epsilon_at_each_step(accountant: str) -> None:
    setting = {**SETTING, "noise_multiplier": 3.0, "accountant": accountant}
    marks, spent = accounting.epsilon_over_time(**setting, points=4)
    assert marks == [0, 1, 25, 50, 75, 100]
    assert spent == [accounting.epsilon(**{**setting, "steps": mark}) for mark in marks]
    assert spent == sorted(spent)
    assert accounting.epsilon_over_time(**{**setting, "steps": 0}) == ([0], [0.0])
    assert accounting.epsilon_over_time(**{**setting, "steps": 2}, points=50)[0] == [0, 1, 2]


ONE, SAMPLED = SampledGaussian(0.05, 3.0), SampledGaussian(0.05, 3.0, 100)
WORDS: list[tuple[Event, str]] = [
    (SAMPLED, "100 steps over Poisson samples at rate 0.05 with noise multiplier 3"),
    (FixedSizeGaussian(0.05, 3.0, 2), "drawn without replacement, at rate 0.05"),
    (TruncatedGaussian(0.05, 3.0, dataset_size=10, max_batch_size=4), "cut down to 4"),
    (JointGaussian((ONE, replace(ONE, noise_multiplier=4.0))), "multipliers 3, 4 in one release (2.4 together)"),
    (
        CyclicPoissonGaussian(0.16, 1.3, 9, separation=8, correlation="BandedToeplitz(bands=8)"),
        "9 steps over Poisson samples of 8 groups in turn at rate 0.16 with noise multiplier 1.3, correlated by "
        "BandedToeplitz(bands=8)",
    ),
    (
        CyclicGaussian(1.0, 2.0, separation=4, sensitivity=1.25, correlation="BufferedToeplitz(buffers=3)"),
        "batches in a fixed order, each example once in 4 steps, at rate 1 with noise multiplier 2, correlated by "
        "BufferedToeplitz(buffers=3) of sensitivity 1.25",
    ),
]


@pytest.mark.parametrize(("event", "words"), WORDS)
def test_guarantees_in_words_name_the_sampling(event: Event, words: str) -> None:
    assert words in accounting.guarantee([event], delta=1e-5, accountant="rdp")


def test_guarantees_in_words_name_epsilon_and_what_is_protected() -> None:
    spent = accounting.epsilon_of([SAMPLED], delta=1e-5, accountant="rdp")
    assert accounting.guarantee([SAMPLED], delta=1e-5, accountant="rdp") == (
        f"epsilon {spent:.4g} (RDP) at delta 1e-05, after {WORDS[0][1]}. Neighbouring data sets differ by the presence "
        "of one example (add_or_remove_one)."
    )
    fixed = FixedSizeGaussian(0.05, 3.0, 2, "replace_one")
    assert accounting.neighbours(fixed).endswith("differ in what one example is (replace_one).")
    assert accounting.guarantee([], delta=0.1).endswith("nothing was released")


def test_guarantees_of_two_kinds_of_steps_say_that_a_place_stays_empty() -> None:
    in_order = CyclicGaussian(1.0, 3.0, 10, separation=5, sensitivity=1.0)
    for every in ([SampledGaussian(0.1, 3.0, 2), in_order], [in_order]):
        assert "whose place in the order stays empty" in accounting.guarantee(every, delta=1e-5)


def test_more_steps_than_are_composed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def spent(steps: int, accountant: str = "pld") -> float:
        return accounting.epsilon(
            noise_multiplier=50.0, sample_rate=0.01, steps=steps, delta=1e-5, accountant=accountant
        )

    at_once = spent(2_345)
    monkeypatch.setattr(losses, "AT_ONCE", 1_000)
    assert spent(2_345) == pytest.approx(at_once, rel=1e-6)
    monkeypatch.undo()
    assert spent(10**7 + 7) < spent(10**7 + 7, "rdp")


def test_targets_at_the_ends() -> None:
    common: dict[str, Any] = {"delta": 1e-5, "accountant": "rdp"}
    step: dict[str, Any] = {"sample_rate": 0.01, "steps": 10, **common}
    assert accounting.epsilon(noise_multiplier=1e-200, **step) == math.inf
    assert accounting.epsilon(noise_multiplier=1e200, **step) == accounting.epsilon(noise_multiplier=1e12, **step)
    assert accounting.max_steps(noise_multiplier=1e-200, target_epsilon=3.0, sample_rate=0.01, **common) == 0
    found = accounting.noise_multiplier(target_epsilon=1e300, sample_rate=0.5, steps=1, **common)
    assert found == pytest.approx(0.01)
    assert accounting.max_steps(target_epsilon=0.1, noise_multiplier=0.5, sample_rate=1.0, **common) == 0
    with pytest.raises(ValueError, match=r"target_epsilon=1e-09 can't be reached: 'rdp' gives more"):
        accounting.noise_multiplier(target_epsilon=1e-9, sample_rate=1.0, steps=10**6, delta=1e-300, accountant="rdp")
    with pytest.raises(ValueError, match="more than 1000000000 steps stay within target_epsilon"):
        accounting.max_steps(target_epsilon=3.0, noise_multiplier=1e4, sample_rate=1e-5, **common)


EVERYTHING: dict[str, Any] = (
    SETTING | TARGET | TRUNCATED | {"points": 3, "accountant": "pld", "neighboring": "replace_one", "expected_runs": 10}
)
FUNCTIONS = (
    accounting.epsilon, accounting.noise_multiplier, accounting.max_steps, accounting.epsilon_over_time,
    accounting.risk, accounting.selection_epsilon,
)  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, True, "1", None, 0.5j])
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    for function in FUNCTIONS:
        taken = {key: EVERYTHING[key] for key in EVERYTHING if key in inspect.signature(function).parameters}
        if name in taken:
            with pytest.raises((ValueError, TypeError), match=f"^{name} must be "):
                function(**{**taken, name: value})


def spent_on(other: Any) -> float:
    return accounting.epsilon_of([SampledGaussian(0.1, 1.0), other], delta=1e-5)


def joint_with(other: Any) -> JointGaussian:
    return JointGaussian((SampledGaussian(0.05, 1.5), other))


NO_BOUND = r"accountant='rdp' has no bound .* use accountant='pld'"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: accounting.epsilon(**SETTING, neighboring="replace_one", accountant="rdp"), NO_BOUND),
    (lambda: accounting.epsilon(**SETTING, **TRUNCATED, neighboring="replace_one", accountant="rdp"), NO_BOUND),
    (lambda: accounting.epsilon(**SETTING, dataset_size=100), "^dataset_size must be left out unless sampling="),
    (lambda: accounting.epsilon(**SETTING, max_batch_size=100), "^max_batch_size must be left out unless sampling="),
    (lambda: accounting.epsilon(**SETTING, **{**TRUNCATED, "dataset_size": None}), "^dataset_size must be given with"),
    (lambda: accounting.epsilon(**SETTING, **{**TRUNCATED, "max_batch_size": None}), "^max_batch_size must be given"),
    (lambda: accounting.epsilon(**{**SETTING, "noise_multiplier": 0.0}), "noise_multiplier must be a finite number > "),
    (lambda: accounting.epsilon(**SETTING, accountant="gdp"), "accountant must be one of 'pld', 'rdp'; got 'gdp'"),
    (lambda: accounting.epsilon(1.0, 0.01, 10, 1e-5), "positional argument"),  # type: ignore[misc]
    (lambda: spent_on(SampledGaussian(0.1, 1.0, relation="replace_one")), "must be about the same neighbours"),
    (lambda: spent_on(SampledGaussian(0.1, 1.0, unit="user")), "must be about the same neighbours"),
    (lambda: joint_with(FixedSizeGaussian(0.05, 4.0)), "must be one or more releases over the same sample"),
    (lambda: joint_with(SampledGaussian(0.04, 4.0)), "must be one or more releases over the same sample"),
    (lambda: joint_with(SampledGaussian(0.05, 4.0, 2)), "must be one or more releases over the same sample"),
    (lambda: SampledGaussian(0.0, 1.0), "^sample_rate must be "),
    (lambda: SampledGaussian(0.1, math.nan), "^noise_multiplier must be "),
    (lambda: SampledGaussian(0.1, 1.0, -1), "^count must be "),
    (lambda: SampledGaussian(0.1, 1.0, relation="replace"), "^relation must be "),
    (lambda: SampledGaussian(0.1, 1.0, unit=1), "^unit must be "),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_has_no_epsilon_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.usefixtures("coarse_losses")
def test_no_remarks_of_the_accountant_reach_the_user(caplog):
    setting = {"noise_multiplier": 1.19, "sample_rate": 0.1, "steps": 30, "delta": 1e-5}
    assert accounting.epsilon(**setting, accountant="rdp") > accounting.epsilon(**setting)
    assert caplog.records == []


IN_TURN: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.02, "steps": 100, "delta": 1e-5}


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("bands", "steps"), [(1, 100), (8, 96), (8, 97), (50, 30), (3, 1)])
@pytest.mark.one_in(3)
def test_epsilon_is_that_of_as_many_poisson_samples_as_turns(bands: int, steps: int, accountant: str) -> None:
    kind = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    spent = kind(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    event = gaussian if bands == 50 else dp_accounting.PoissonSampledDpEvent(bands * 0.02, gaussian)
    spent.compose(event, math.ceil(steps / bands))
    options = {**IN_TURN, "steps": steps, "accountant": accountant}
    got = accounting.epsilon(**options, sampling="cyclic_poisson", bands=bands)
    assert got == pytest.approx(spent.get_epsilon(1e-5), rel=1e-7)


@pytest.mark.parametrize(("steps", "bands", "squared"), [(50, 1, 1), (51, 1, 2), (200, 50, 4), (200, 51, 12)])
def test_cyclic_batches_are_one_gaussian_release(steps: int, bands: int, squared: int) -> None:
    """Its sensitivity is the root of the number of turns; where columns share rows, more by how many meet."""
    noise = 6.0
    got = accounting.epsilon(**{**IN_TURN, "steps": steps, "noise_multiplier": noise}, sampling="cyclic", bands=bands)
    expected = gaussian_mechanism.get_epsilon_gaussian(noise / math.sqrt(squared), 1e-5)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "cyclic_poisson", "bands": 51}, r"bands \* sample_rate, .* at most 1; got 1.02.*50 bands"),
        ({"sampling": "cyclic_poisson", "bands": 0}, "bands must be a whole number >= 1; got 0"),
        ({"bands": 2}, r'bands must be 1 unless sampling="cyclic_poisson" or "cyclic"; got 2'),
        ({"sampling": "truncated", "bands": 2}, "bands must be 1 unless"),
    ],
)
def test_bands_are_checked(options: dict[str, Any], message: str) -> None:
    kinds = {"epsilon": "target_epsilon", "noise_multiplier": "noise_multiplier", "max_steps": "steps"}
    for function, left_out in kinds.items():
        given = {name: value for name, value in {**IN_TURN, "target_epsilon": 1.0}.items() if name != left_out}
        with pytest.raises(ValueError, match=f"^{message}"):
            getattr(accounting, function)(**given, **options)


def turns(*events: Any) -> float:
    return accounting.epsilon_of(events, delta=1e-5, accountant="rdp")


def test_steps_add_up_to_turns_within_one_mechanism_only() -> None:
    """Three steps of two runs each are a turn each, and six steps of one run are one turn."""
    step = CyclicPoissonGaussian(0.16, 1.3, separation=8, mechanism="one")
    once, twice = (accounting.epsilon_of([SampledGaussian(0.16, 1.3, n)], delta=1e-5, accountant="rdp") for n in (1, 2))
    assert turns(replace(step, count=6)) == turns(*[step] * 6) == turns(replace(step, count=8)) == once
    assert turns(replace(step, count=3), replace(step, count=3, mechanism="two")) == twice
    assert turns(replace(step, count=9)) == twice
    unnamed = replace(step, count=3, mechanism="")
    assert turns(unnamed, unnamed) == twice
    with pytest.raises(LedgerError, match="without a mechanism can't be written to a ledger"):
        encoded(unnamed)
    with pytest.raises(LedgerError, match="without a mechanism"):
        encoded(JointGaussian((replace(unnamed, count=1),)))


def test_a_sensitivity_above_1_counts_as_less_noise() -> None:
    event = CyclicGaussian(1.0, 3.0, 7, separation=4, sensitivity=1.5, mechanism="one")
    assert event.turns == SampledGaussian(1.0, 2.0 / math.sqrt(2))
    joint = JointGaussian((replace(event, count=1, sensitivity=1.0, noise_multiplier=z) for z in (3.0, 4.0)), 7)  # type: ignore[arg-type]
    assert turns(joint) == pytest.approx(turns(SampledGaussian(1.0, 2.4, 2)), rel=1e-12)
    assert mechanism_of(joint) == "one"
    assert mechanism_of(SampledGaussian(0.1, 1.0)) is None
    renamed = within(joint, "two")
    assert {part.mechanism for part in renamed.events} == {"two"}
    assert within(SampledGaussian(0.1, 1.0), "two") == SampledGaussian(0.1, 1.0)
