"""Schedules of noise, thresholds and batch size: each step is taken, and charged, by the terms of its stage."""

import copy
import math

import private_runs as runs
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import accounting
from ghostclip import clipping as c
from ghostclip.clipping import Schedule, Stage
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.events import JointGaussian, SampledGaussian
from ghostclip.ledger import Ledger

SIZE = 24
STAGES = Schedule(
    [Stage(2), Stage(3, noise_factor=0.5, threshold_factor=3.0, batch_size=SIZE), Stage(1, threshold_factor=0.25)]
)
PRIVATE = {"noise_multiplier": 1.5, "clipping": 0.5, "target_delta": 1e-3, "schedule": STAGES}


def engine_for(**changes):
    options = {"dataset": runs.data(SIZE, torch.float64), **PRIVATE, **changes}
    return runs.engine_for(runs.network(torch.float64), **options)


def test_stages_follow_each_other_and_the_last_goes_on() -> None:
    assert [STAGES.at(step) for step in range(8)] == [
        (0, 2), (0, 1), (1, 3), (1, 2), (1, 1), (2, None), (2, None), (2, None)
    ]  # fmt: skip
    assert STAGES.steps == 6
    made = Schedule.of(5, 2, noise_factor=lambda step: 1.0 + step, batch_size=lambda step: step or None)
    assert made == Schedule([Stage(2), Stage(2, 3.0, batch_size=2), Stage(1, 5.0, batch_size=4)])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Stage(0), ValueError, "steps"),
        (lambda: Stage(1, noise_factor=0.0), ValueError, "noise_factor"),
        (lambda: Stage(1, threshold_factor=math.inf), ValueError, "threshold_factor"),
        (lambda: Stage(1, batch_size=0), ValueError, "batch_size"),
        (lambda: Schedule([]), ValueError, "one Stage or more"),
        (lambda: Schedule(Stage(1)), TypeError, "list of ghostclip.clipping.Stage"),
        (lambda: engine_for(schedule=Schedule([Stage(1, batch_size=SIZE + 1)])), ValueError, "at most len"),
        (lambda: engine_for(noise_multiplier=None, target_epsilon=1.0, epochs=1), ValueError, "leave epochs and steps"),
        (lambda: engine_for().compile(), ValueError, "schedule don't go together"),
        (lambda: engine_for(schedule=[Stage(1)]), TypeError, "must be a ghostclip.clipping.Schedule"),
    ],
)
def test_what_cant_be_followed_is_refused(make, error, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


POLICIES = [
    c.Flat(0.05),
    c.Automatic(0.05),
    c.PerLayer(0.05),
    c.Custom(lambda norms: torch.full_like(norms, 0.2), 0.05),
    c.Composed(c.ByParameter(), 0.05, c.Psac()),
    c.Composed(c.Whole(), c.Quantiles(0.3, learning_rate=0.3), noise=c.EqualNoise()),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{type(policy).__name__}")
@pytest.mark.one_in(2)
def test_updates_are_those_of_the_policy_on_gradients_over_the_factor(policy) -> None:
    """Times the factor: as of an engine without a schedule."""
    factors, data = (1.0, 0.1, 7.0), runs.data(SIZE, torch.float64)
    stages = Schedule([Stage(1, threshold_factor=f, batch_size=SIZE) for f in factors])
    engine = engine_for(clipping=policy, schedule=stages, noise_multiplier=0.0, dataset=data)
    for factor in factors:
        model = runs.network(torch.float64)
        model.load_state_dict(engine.model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * factor)
        plain = runs.engine_for(model, optimizer, data, clipping=policy, batch_size=SIZE)
        vars(plain.clipping).update(copy.deepcopy(vars(engine.clipping)))  # thresholds as they are now
        runs.train(plain, 1, lambda model, examples, by=factor: runs.losses_of(model, examples) / by)
        bound = engine.clipping.sensitivity * factor
        runs.train(engine, 1)
        assert engine._steps.release.sensitivity == pytest.approx(bound, rel=1e-12)
        torch.testing.assert_close(runs.weights(engine.model), runs.weights(model), rtol=1e-9, atol=1e-12)
        assert engine.clipping.sensitivity == pytest.approx(plain.clipping.sensitivity, rel=1e-9)


@pytest.mark.slow
def test_noise_batch_size_and_charge_are_of_the_steps_stage() -> None:
    engine, drawn = engine_for(), []
    noise = engine._steps.release._noise
    release, noise.release = noise.release, lambda sums, *terms: drawn.append(terms) or release(sums, *terms)
    seen = runs.train(engine, 8)
    stds = [0.75] * 2 + [0.75 * 0.5 * 3.0] * 3 + [0.75 * 0.25] * 3
    assert drawn == [pytest.approx(pair, rel=1e-12) for pair in zip(stds, [8] * 2 + [SIZE] * 3 + [8] * 3, strict=True)]
    assert [len(step.losses) for step in seen[2:5]] == [SIZE] * 3
    assert engine.noise_std(next(engine.model.parameters())) == pytest.approx(stds[-1] / 8, rel=1e-12)
    assert engine.events == [SampledGaussian(8 / SIZE, 1.5, 5), SampledGaussian(1.0, 0.75, 3)]
    assert engine.epsilon() == accounting.epsilon_of(engine.events, delta=1e-3)


@pytest.mark.slow
def test_the_noise_is_calibrated_for_all_stages_and_ends_with_them() -> None:
    engine = engine_for(noise_multiplier=None, target_epsilon=4.0)
    assert engine.planned_steps == 6
    forecast = engine.forecast(6)
    with pytest.raises(BudgetExceededError, match="all 6 planned steps"):
        runs.train(engine, 7)
    assert engine.steps_taken == 6
    assert 4.0 * 0.999 < engine.epsilon() == forecast <= 4.0


def failing(*_):
    raise ZeroDivisionError


def test_a_discarded_batch_is_charged_as_its_stage_and_a_failed_one_is_not() -> None:
    engine = engine_for()
    runs.train(engine, 2)
    next(iter(engine.batches())).discard()
    with pytest.raises(ZeroDivisionError):
        engine.step(next(iter(engine.batches())), failing)
    assert engine.events == [SampledGaussian(8 / SIZE, 1.5, 2), SampledGaussian(1.0, 0.75, 1)]
    assert [len(step.losses) for step in runs.train(engine, 2)] == [SIZE] * 2
    runs.train(engine, 1)
    assert engine.events == [SampledGaussian(8 / SIZE, 1.5, 3), SampledGaussian(1.0, 0.75, 3)]


@pytest.mark.parametrize(("failed", "workers"), [(0, 0), (2, 0), pytest.param(4, 1, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*replaced by:UserWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_failed_batch_takes_no_step_from_its_stage(failed: int, workers: int) -> None:
    """Of each stage as many steps are taken as it has, by its terms."""
    data = DataLoader(runs.data(SIZE, torch.float64), 4, num_workers=workers)
    engine = engine_for(
        dataset=data, batch_size=4, max_physical_batch_size=4, self_check=False,
        schedule=Schedule([Stage(2), Stage(4, noise_factor=0.5, batch_size=SIZE)]),
    )  # fmt: skip
    sizes, left = [], failed
    while engine.steps_taken < 6:
        for batch in engine.batches():
            left -= bool(batch.sizes)  # an empty batch has no losses to fail
            if left == -1 and batch.sizes:
                with pytest.raises(ZeroDivisionError):
                    engine.step(batch, failing)
            elif engine.steps_taken < 6:
                sizes.append(len(engine.step(batch, runs.losses_of).losses))
            else:
                break
    assert sizes[2:] == [SIZE] * 4
    assert [event.count for event in engine.events] == [2, 4]


def test_a_checkpoint_goes_on_at_its_stage(tmp_path) -> None:
    engine = engine_for()
    runs.train(engine, 3)
    engine.save(tmp_path / "saved")
    other = engine_for()
    assert other.restore(tmp_path / "saved").steps == 3
    assert [len(step.losses) for step in runs.train(other, 2)] == [SIZE] * 2
    runs.train(other, 1)
    assert set(other.events) == {SampledGaussian(8 / SIZE, 1.5, 3), SampledGaussian(1.0, 0.75, 3)}
    for changed in (None, Schedule([*STAGES.stages, Stage(1)])):
        with pytest.raises(PrivacyError, match="schedule"):
            engine_for(schedule=changed).restore(tmp_path / "saved")


@pytest.mark.one_in(math.inf)
def test_steps_taken_again_after_a_restore_stay_within_the_target(tmp_path) -> None:
    engine = engine_for(noise_multiplier=None, target_epsilon=4.0)
    engine.save(tmp_path / "saved")
    runs.train(engine, 2)
    engine.restore(tmp_path / "saved")
    with pytest.raises(BudgetExceededError):
        runs.train(engine, 9)
    assert engine.epsilon() <= 4.0
    assert max(event.count for event in engine.events) == 4
    assert engine.steps_taken == 6


def test_a_ledger_holds_each_stages_steps_and_reserves_no_more(tmp_path) -> None:
    engine = engine_for(ledger=tmp_path / "run.ledger")
    runs.train(engine, 2)
    assert [sum(spent.values()) for spent in engine.ledger.contents.totals.values()] == [2]
    runs.train(engine, 4)
    engine.detach()
    assert Ledger(tmp_path / "run.ledger").events == [SampledGaussian(8 / SIZE, 1.5, 3), SampledGaussian(1.0, 0.75, 3)]


def test_counts_of_adaptive_thresholds_are_charged_at_each_batch_size() -> None:
    stages = Schedule([Stage(1), Stage(1, threshold_factor=4.0, batch_size=SIZE)])
    policy = c.Composed(c.ByLayer(), c.Quantiles(0.5))
    engine = engine_for(clipping=policy, schedule=stages)
    runs.train(engine, 2)
    counts = [2 * (0.05 * size * math.sqrt(2)) / math.sqrt(2) for size in (8, SIZE)]
    rates = (8 / SIZE, 1.0)
    assert engine.events == [
        JointGaussian((SampledGaussian(rate, 1.5), SampledGaussian(rate, count)))
        for rate, count in zip(rates, counts, strict=True)
    ]


def test_given_noise_is_for_the_engines_noise_multiplier_and_scales_with_the_stages() -> None:
    policy = c.Composed(c.ByLayer(), c.Fixed(0.5), noise=c.GivenNoise({"0": 0.5 * 2.0, "2": 0.5 * 2.0}))
    engine = engine_for(clipping=policy, noise_multiplier=2.0 / math.sqrt(2))
    for steps, std in ((1, 1.0 / 8), (2, 0.5 * 3.0 / SIZE)):
        runs.train(engine, steps)
        assert engine.noise_std(next(engine.model.parameters())) == pytest.approx(std, rel=1e-9)


def test_users_and_fixed_batches_follow_a_schedule() -> None:
    data = TensorDataset(*(tensor.repeat_interleave(2, 0) for tensor in runs.data(SIZE, torch.float64).tensors))
    people = [row // 2 for row in range(2 * SIZE)]
    model = runs.network(torch.float64)
    engine = runs.engine_for(model, dataset=data, unit_ids=people, **PRIVATE)
    assert [len(step.norms) for step in runs.train(engine, 4)[2:]] == [SIZE] * 2
    assert engine.events == [SampledGaussian(r, s, 2, unit="user") for r, s in ((8 / SIZE, 1.5), (1.0, 0.75))]
    stages = Schedule([Stage(1), Stage(1, batch_size=5)])
    fixed = engine_for(sampling="without_replacement", schedule=stages)
    assert [len(step.losses) for step in runs.train(fixed, 3)] == [8, 5, 5]
    assert [(event.sample_rate, event.count) for event in fixed.events] == [(8 / SIZE, 1), (5 / SIZE, 2)]


def test_physical_batches_are_found_for_the_largest_stage() -> None:
    engine = engine_for(schedule=Schedule([Stage(1, batch_size=2), Stage(1, batch_size=20)]), batch_size=2)
    assert engine.batches().largest == SIZE
