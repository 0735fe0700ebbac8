"""Correlated noise: its matrices, the law of what is released over steps, what interrupts it, and what goes with it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from graphs import interpret
from ledgers import in_child
from scipy import stats
from torch import Tensor, nn

from ghostclip import accounting
from ghostclip.clipping import Adaptive, Composed, OptimalNoise, Schedule, Stage
from ghostclip.engine import PrivacyEngine
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.events import mechanism_of
from ghostclip.ledger import Ledger
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, Correlation, noise_source
from ghostclip.noise.history import history_of
from ghostclip.sampling import LogicalBatches

pytestmark = pytest.mark.usefixtures("coarse_losses")

# A false alarm once in a hundred thousand runs for each test.
RARE = 1e-5
STEPS = 12
CORRELATIONS: dict[str, tuple[Correlation, str]] = {
    "bands": (BandedToeplitz(bands=3), "cyclic_poisson"),
    "coefficients": (BandedToeplitz(coefficients=[1.0, 0.5, -0.3]), "cyclic"),
    "buffers": (BufferedToeplitz(buffers=2), "cyclic"),
}
# What else releases noise of three bands.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "users": {"batch_size": 2, "unit_ids": [row // 2 for row in range(24)]},
    "groups with noise of their own": {"clipping": Composed(thresholds=2.0, noise=OptimalNoise())},
    "compiled": {"compiled": True},
}
CASES = {name: (*case, {}) for name, case in CORRELATIONS.items()} | {
    name: (*CORRELATIONS["bands"], way) for name, way in WAYS.items()
}


def squares(model: nn.Module, examples: list[Tensor]) -> Tensor:
    return model(examples[0]).square().sum(1)


def nothing(model: nn.Module, examples: list[Tensor]) -> Tensor:
    """Losses without a gradient: what is released is noise."""
    return 0 * squares(model, examples)


def engine_for(
    correlation: Correlation | None, sampling: str = "cyclic_poisson", dtype: torch.dtype = torch.float64,
    compiled: bool = False, **changes: Any,
) -> Any:  # fmt: skip
    options: dict[str, Any] = {
        "batch_size": 4, "noise_multiplier": 1.5, "clipping": 2.0, "steps": STEPS, "sampling": sampling,
        "correlation": correlation, "self_check": False, **changes,
    }  # fmt: skip
    if correlation is None:
        del options["steps"]
    torch.manual_seed(0)
    # So wide that one step has many numbers of noise.
    model = nn.Sequential(nn.Linear(5, 60), nn.Linear(60, 8)).to(dtype)
    engine = runs.engine_for(model, None, runs.data(24, dtype), **options)
    if compiled:
        engine.compile()
    return engine


def released(engine: PrivacyEngine, steps: int = STEPS, clipping: Any = 2.0) -> np.ndarray:
    """[steps, numbers]: the noise in sums, over what its standard deviation would be without correlation."""
    plain = engine_for(None, "poisson", clipping=clipping)
    stds = [plain.noise_std(p) * plain.batch_size / engine.batch_size for p in plain.model.parameters()]
    found: list[np.ndarray] = []

    def note() -> None:
        own = [p.grad.double().flatten() / std for p, std in zip(engine.model.parameters(), stds, strict=True)]
        found.append(torch.cat(own).numpy())

    runs.on_step(engine.optimizer, note)
    runs.train(engine, steps, nothing)
    return np.array(found[:steps])


def assert_independent(fresh: np.ndarray) -> None:
    """Whether rows are independent and have variance 1, by chi-square."""
    numbers = fresh.shape[1]
    for step, row in enumerate(fresh):
        square = float(row @ row)
        assert min(stats.chi2.cdf(square, numbers), stats.chi2.sf(square, numbers)) > RARE / len(fresh), step
    correlations = np.corrcoef(fresh)[np.triu_indices(len(fresh), 1)]
    # Under independence about normal with variance 1 / numbers.
    assert stats.kstest(correlations * math.sqrt(numbers), "norm").pvalue > RARE
    assert np.abs(correlations).max() * math.sqrt(numbers) < stats.norm.isf(RARE / len(correlations))


@pytest.mark.parametrize("name", CASES)
def test_c_times_the_released_noise_is_independent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    correlation, sampling, options = CASES[name]
    engine = engine_for(correlation, sampling, **options)
    noise = released(engine, clipping=options.get("clipping", 2.0))
    matrix = correlation.matrix(steps=STEPS)
    assert_independent(matrix @ noise)
    covariance, expected = noise @ noise.T / noise.shape[1], np.linalg.inv(matrix.T @ matrix)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)) + expected**2) / math.sqrt(noise.shape[1])
    assert np.abs((covariance - expected) / scale).max() < stats.norm.isf(RARE / STEPS**2)
    assert repr(correlation) in engine.guarantee(accountant="rdp")
    assert engine.events[0].unit == ("user" if name == "users" else "example")


def test_noise_never_gets_less_and_what_is_trained_stays() -> None:
    """The noise of a step covers the sums of earlier ones, which may have moved by more."""
    history, noise, numbers = history_of(BandedToeplitz(bands=2), 4), noise_source(), torch.zeros(4000)
    assert history is not None
    found = [history.release(noise, [numbers.clone()], std, 1)[0].double().numpy() for std in (1.0, 3.0, 2.0)]
    fresh = (BandedToeplitz(bands=2).matrix(steps=4)[:3, :3] @ found) / np.array([[1.0], [3.0], [3.0]])
    assert_independent(fresh)
    with pytest.raises(PrivacyError, match="the trained parameters are not those of the steps before"):
        history.release(noise, [numbers[:2].clone()], 3.0, 1)
    history.release(noise, [numbers.clone()], 3.0, 1)
    with pytest.raises(PrivacyError, match="planned for 4 steps; got step 5"):
        history.release(noise, [numbers.clone()], 3.0, 1)


@pytest.mark.parametrize("sampling", ["poisson", "cyclic_poisson"])
def test_one_band_releases_bit_for_bit_what_no_correlation_releases(sampling: str) -> None:
    found = []
    for correlation in (None, BandedToeplitz(bands=1)):
        engine = engine_for(correlation, sampling, noise="test", seed=3)
        runs.train(engine, STEPS, squares)
        found.append(runs.weights(engine.model))
    assert torch.equal(*found)


@pytest.mark.parametrize(("correlation", "sampling"), CORRELATIONS.values(), ids=CORRELATIONS)
def test_a_resumed_run_goes_on_with_the_history(correlation: Correlation, sampling: str, tmp_path: Any) -> None:
    """With repeatable noise the resumed run is the uninterrupted one, bit for bit."""
    first, second = (engine_for(correlation, sampling, noise="test", seed=3) for _ in range(2))
    runs.train(first, 7, squares)
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    for engine in (first, second):
        runs.train(engine, STEPS - 7, squares)
    assert torch.equal(runs.weights(first.model), runs.weights(second.model))


def turns(count: int) -> float:
    """The epsilon of so many turns of an example, each a Poisson sample at three times the rate."""
    return accounting.epsilon(noise_multiplier=1.5, sample_rate=0.5, steps=count, delta=1e-5, accountant="rdp")


def test_a_checkpoint_older_than_the_last_release_begins_a_new_mechanism(tmp_path: Any) -> None:
    """Its history of noise was used by steps after it; going on with it would release them twice over."""
    correlation, ledger = BandedToeplitz(bands=3), Ledger(tmp_path / "run.ledger", block=1)
    engine = engine_for(correlation, ledger=ledger)
    runs.train(engine, 4, nothing)
    engine.save(tmp_path / "saved")
    (begun,) = engine.events
    engine.detach()
    exact = engine_for(correlation, ledger=ledger)
    exact.restore(tmp_path / "saved")
    runs.train(exact, 1, nothing)
    assert {mechanism_of(event) for event in exact.events} == {mechanism_of(begun)}  # nothing was released since
    assert exact.epsilon(accountant="rdp") == turns(2)  # 5 steps of one mechanism with 3 bands
    late = engine_for(correlation, ledger=ledger)
    late.restore(tmp_path / "saved")
    assert_independent(correlation.matrix(steps=STEPS)[:4, :4] @ released(late, 4))
    assert len({mechanism_of(event) for event in late.events}) == 2
    assert late.epsilon(accountant="rdp") == turns(4)  # 5 steps, and 4 of another one
    late.restore(tmp_path / "saved")
    runs.train(late, 1, nothing)
    assert late.epsilon(accountant="rdp") == turns(5)


@pytest.mark.parametrize("block", [1, 2, 32])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_killed_run_released_or_reserved_counts(block: int, tmp_path: Any) -> None:
    """Five steps, of which a checkpoint has three, and three more after the restart: 2 + 1 turns at least."""
    correlation, path = BandedToeplitz(bands=3), tmp_path / "run.ledger"

    def killed() -> None:
        engine = engine_for(correlation, ledger=Ledger(path, block=block))
        runs.train(engine, 3, nothing)
        engine.save(tmp_path / "saved")
        runs.train(engine, 2, nothing)

    assert in_child(killed) == 0  # which ends without giving back what it reserved
    after = engine_for(correlation, ledger=Ledger(path, block=block))
    after.restore(tmp_path / "saved")
    noise = released(after, 3)
    assert_independent(correlation.matrix(steps=STEPS)[:3, :3] @ noise)
    reserved = {1: 5, 2: 6, 32: STEPS}[block]
    assert sorted(event.count for event in after.events) == [3, reserved]
    assert after.epsilon(accountant="rdp") == turns(-(-reserved // 3) + 1)


@pytest.mark.parametrize("sampling", ["cyclic", "cyclic_poisson"])
def test_one_of_several_engines_goes_on_with_a_checkpoint(sampling: str, tmp_path: Any) -> None:
    """Restored before any of them steps: an example takes part in each of them at the same step."""
    ledger = Ledger(tmp_path / "run.ledger", block=1)
    first = engine_for(BandedToeplitz(bands=3), sampling, ledger=ledger)
    runs.train(first, 2, nothing)
    first.save(tmp_path / "saved")
    first.detach()
    engines = [engine_for(BandedToeplitz(bands=3), sampling, ledger=ledger) for _ in range(3)]
    for engine in engines:
        engine.restore(tmp_path / "saved")
    for engine in engines:
        runs.train(engine, 1, nothing)
    assert sorted(event.count for event in Ledger(tmp_path / "run.ledger").events) == [1, 1, 3]


@pytest.mark.parametrize("correlation", [None, BandedToeplitz(bands=3)], ids=str)
def test_a_fork_begins_a_new_mechanism(correlation: Correlation | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(correlation, "cyclic")
    runs.train(engine, 2, nothing)
    monkeypatch.setattr(engine._mechanism, "_process", -1)  # what the process that was forked finds
    runs.train(engine, 2, nothing)
    assert sorted(event.count for event in engine.events) == [2, 2]


def test_interrupted_noise_begins_a_new_mechanism(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """In the engine, and after a restart."""
    engine, after = (engine_for(BandedToeplitz(bands=3)) for _ in range(2))
    runs.train(engine, 2, nothing)
    with monkeypatch.context() as patched:
        patched.setattr(BandedToeplitz, "recurrence", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            runs.train(engine, 1, nothing)
    assert engine.steps_taken == 3
    engine.save(tmp_path / "saved")
    after.restore(tmp_path / "saved")
    for each in (engine, after):
        runs.train(each, 2, nothing)
        assert sorted(event.count for event in each.events) == [2, 3]
        assert each.epsilon(accountant="rdp") == turns(2)


@pytest.mark.parametrize(("one", "then"), [("newer", "other"), ("other", "newer")])
def test_two_continuations_of_one_checkpoint_do_not_add_up_without_a_ledger(one: str, then: str, tmp_path: Any) -> None:
    """Three steps, and in two ways a fourth one, which is the second turn of the first group in both."""
    first, second, third = (engine_for(BandedToeplitz(bands=3), "cyclic") for _ in range(3))
    runs.train(first, 3, nothing)
    first.save(tmp_path / "earlier")
    runs.train(first, 1, nothing)
    first.save(tmp_path / "newer")
    second.restore(tmp_path / "earlier")
    runs.train(second, 1, nothing)
    second.save(tmp_path / "other")
    third.restore(tmp_path / one)
    spent = third.events
    with pytest.raises(PrivacyError, match="each in its own way, which don't add up"):
        third.restore(tmp_path / then)
    third.restore(tmp_path / "earlier")  # which both contain
    assert third.events == spent
    third.detach()
    # A ledger that took in one of them knows of it in any later engine.
    for name in (one, one, then):
        later = engine_for(BandedToeplitz(bands=3), "cyclic", ledger=tmp_path / "ledger")
        if name == one:
            later.restore(tmp_path / one)
        else:
            with pytest.raises(PrivacyError, match="each in its own way, which don't add up"):
                later.restore(tmp_path / then)
        assert later.events == spent
        later.detach()


def test_steps_that_were_discarded_keep_the_noise_in_step() -> None:
    correlation = BandedToeplitz(bands=3)
    engine = engine_for(correlation)
    found: dict[int, np.ndarray] = {}
    step = 0
    runs.on_step(engine.optimizer, lambda: found.update({step: runs.grads(engine.model).numpy() * 4 / 3.0}))
    while step < STEPS:
        for batch in engine.batches():
            if step in (2, 3, 7):
                batch.discard()
            else:
                engine.step(batch, nothing)
            step += 1
    assert engine.steps_taken == STEPS
    # The noise that was released has the covariance of its rows of C^-1 w.
    matrix, rows = np.linalg.inv(correlation.matrix(steps=STEPS)), sorted(found)
    whitened = np.linalg.inv(np.linalg.cholesky((matrix @ matrix.T)[np.ix_(rows, rows)])) @ [found[row] for row in rows]
    assert_independent(whitened)
    with pytest.raises(BudgetExceededError, match=f"all {STEPS} planned steps were taken, for which the noise"):
        runs.train(engine, 1, nothing)
    assert engine.steps_taken == STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "poisson"}, "needs sampling='cyclic_poisson' or 'cyclic'"),
        ({"correlation": BufferedToeplitz()}, "needs sampling='cyclic', so that"),
        ({"steps": None}, r"needs the planned steps.* give steps=\.\.\. or epochs"),
        ({"correlation": BandedToeplitz(bands="auto")}, 'bands="auto" needs target_epsilon'),
        ({"schedule": Schedule([Stage(3)])}, "correlation and schedule don't go together"),
        ({"clipping": Adaptive(1.0, count_noise=1.0)}, "correlation and adaptive clipping don't go together"),
        ({"noise": "hardened"}, "correlation and noise=.hardened. don't go together"),
        ({"correlation": BandedToeplitz(coefficients=[1.0, 1e30])}, "has no bounded inverse over"),
        ({"correlation": BandedToeplitz(coefficients=[1.0, 2.0]), "steps": 30}, "grow to more than 10,000 times"),
        (
            {"correlation": None, "sampling": "cyclic", "schedule": Schedule([Stage(3)])},
            'schedule and sampling="cyclic" or "cyclic_poisson" don.t go together',
        ),
        ({"correlation": 8}, "correlation must be a BandedToeplitz or a BufferedToeplitz; got 8"),
        ({"correlation": BandedToeplitz(bands=7)}, r"bands \* batch_size / population, .* at most 1; got 7 \* 4 / 24"),
    ],
)
def test_what_does_not_go_with_correlation_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        engine_for(**{"correlation": BandedToeplitz(bands=3), **options})


def test_auto_takes_the_bands_with_the_smallest_noise_in_sums() -> None:
    auto = engine_for(BandedToeplitz(bands="auto"), noise_multiplier=None, target_epsilon=1.0, batch_size=2)
    chosen = auto.correlation
    assert [row.bands for row in chosen.table] == [1, 2, 4, 8]
    assert chosen.matrix.bands == min(chosen.table, key=lambda row: row.noise_multiplier * row.error).bands
    for row in chosen.table:
        assert row.error == BandedToeplitz(bands=row.bands).error(steps=STEPS)
        spent = accounting.epsilon(
            noise_multiplier=row.noise_multiplier, sample_rate=2 / 24, steps=STEPS, delta=1e-5,
            sampling="cyclic_poisson", bands=row.bands,
        )  # fmt: skip
        assert 0.999 < spent <= 1.0
    assert auto.noise_multiplier == min(chosen.table, key=lambda row: row.product).noise_multiplier
    assert "bands  noise multiplier" in str(chosen)
    runs.train(auto, STEPS, nothing)
    assert auto.epsilon() <= 1.0


@pytest.mark.parametrize(("size", "batch_size"), [(49, 2), (51, 2), (98, 4), (24, 5)])
def test_cyclic_sampling_is_planned_with_the_engine_s_epochs(size: int, batch_size: int) -> None:
    """Epochs of half a step more or less, which the sampling rate tells but for rounding."""
    setting = accounting.Setting(batch_size / size, "cyclic")
    assert setting.event(1.0).separation == len(LogicalBatches(runs.data(size), batch_size=batch_size))


def test_cyclic_sampling_charges_the_sensitivity_of_the_matrix() -> None:
    correlation = BufferedToeplitz(buffers=2)
    engine = engine_for(correlation, "cyclic", noise_multiplier=6.0)
    runs.train(engine, STEPS, nothing)
    matrix = correlation.matrix(steps=STEPS)
    sensitivity = max(np.linalg.norm(matrix[:, [first, first + 6]].sum(1)) for first in range(6))
    expected = accounting.epsilon(noise_multiplier=6.0 / sensitivity, sample_rate=1.0, steps=1, delta=1e-5)
    assert expected <= engine.epsilon() * (1 + 1e-6)
    assert engine.epsilon() == pytest.approx(expected, rel=0.02)
    last = np.linalg.norm(np.linalg.inv(matrix)[-1])
    assert engine.noise_std(engine.model[0].weight) == pytest.approx(6.0 * 2.0 * last / 4, rel=1e-9)


def test_the_noise_of_2000_steps_is_that_of_the_matrix() -> None:
    steps, correlation = 2000, BandedToeplitz(bands=8)
    history, noise, sums = history_of(correlation, steps), noise_source(), torch.zeros(256, dtype=torch.float64)
    assert history is not None
    found = np.array([history.release(noise, [sums.clone()], 3.0, 1)[0].numpy() / 3.0 for _ in range(steps)])
    assert_independent(correlation.matrix(steps=steps) @ found)
    errors = np.cumsum(found, 0)
    assert math.sqrt((errors**2).mean()) == pytest.approx(correlation.error(steps=steps), rel=0.1)


ROWS = 30
MATRICES: list[Correlation] = [
    BandedToeplitz(bands=1),
    BandedToeplitz(bands=8),
    BandedToeplitz(bands=40),
    BandedToeplitz(coefficients=[2.0, 1.0, 0.5]),
    BandedToeplitz(coefficients=[1.0, -0.4, 0.1]),
    BufferedToeplitz(buffers=1),
    BufferedToeplitz(buffers=3),
]


@pytest.mark.parametrize("correlation", MATRICES, ids=repr)
def test_matrices_are_lower_triangular_with_columns_of_norm_1(correlation: Correlation) -> None:
    matrix = correlation.matrix(steps=ROWS)
    assert (matrix.shape, matrix.dtype) == ((ROWS, ROWS), np.float64)
    assert np.abs(np.linalg.norm(matrix, axis=0) - 1).max() < 1e-14
    assert not np.triu(matrix, 1).any()
    if correlation.bands is not None:
        assert not np.tril(matrix, -correlation.bands).any()
        assert np.diagonal(matrix, -min(correlation.bands, ROWS) + 1).all()
    # Toeplitz but for the norms by which columns are divided.
    series = correlation.series(ROWS)
    for step, column in enumerate(matrix.T):
        assert column[step:] == pytest.approx(series[: ROWS - step] / np.linalg.norm(series[: ROWS - step]))
    prefix = np.tri(ROWS) @ np.linalg.inv(matrix)
    assert correlation.error(steps=ROWS) == pytest.approx(math.sqrt((prefix**2).sum(1).mean()), rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 30, 2000, 10**5])
def test_one_band_has_the_error_of_independent_noise(steps: int) -> None:
    assert BandedToeplitz(bands=1).error(steps=steps) == math.sqrt((steps + 1) / 2)


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_no_other_coefficients_nearby_have_a_smaller_error(bands: int) -> None:
    best, draw = BandedToeplitz(bands=bands), np.random.default_rng(bands)
    series = best.series(ROWS)[:bands]
    least = best.error(steps=ROWS)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            other = series + size * draw.standard_normal(bands) * series
            assert BandedToeplitz(coefficients=other.tolist()).error(steps=ROWS) > least


def test_coefficients_of_long_runs_are_better_than_those_of_shorter_ones() -> None:
    """In memory for a few times the bands of numbers a step."""
    best, steps = BandedToeplitz(bands=8), 20_000
    shorter = BandedToeplitz(coefficients=best.series(steps // 4)[:8].tolist())
    assert 0.99 * shorter.error(steps=steps) < best.error(steps=steps) < shorter.error(steps=steps)


def test_errors_fall_with_bands_and_buffers_to_that_of_the_best_toeplitz_matrix() -> None:
    banded = [BandedToeplitz(bands=bands).error(steps=200) for bands in (1, 2, 4, 8, 16, 200)]
    buffered = [BufferedToeplitz(buffers=buffers).error(steps=200) for buffers in (1, 2, 3)]
    assert banded == sorted(banded, reverse=True)
    assert buffered == sorted(buffered, reverse=True)
    assert banded[-1] < buffered[-1] < 1.02 * banded[-1]


@pytest.mark.parametrize("correlation", MATRICES, ids=repr)
@pytest.mark.parametrize("separation", [1, 4, 7, 30])
def test_no_participation_moves_more_than_the_sensitivity(correlation: Correlation, separation: int) -> None:
    """Random directions and signs, and the adversarial one that lets all columns add up."""
    matrix, draw = correlation.matrix(steps=ROWS), np.random.default_rng(separation)
    bound = correlation.sensitivity(ROWS, separation)
    per_turn = correlation.turn_sensitivity(ROWS, separation)
    reached = 0.0
    for first in range(separation):
        turns = np.arange(first, ROWS, separation)
        directions = draw.standard_normal((20, len(turns), 3))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        moved = [np.linalg.norm(matrix[:, turns] @ each) for each in directions]
        moved += [np.linalg.norm(matrix[:, turns] @ signs) for signs in (np.ones(len(turns)), (-1.0) ** turns)]
        assert max(moved) <= bound * (1 + 1e-12)
        # What cyclic Poisson sampling is charged for: whichever turns are taken, |C d|^2 is at most their number.
        for taken in [turns, *(turns[draw.random(len(turns)) < 0.5] for _ in range(20))]:
            assert np.linalg.norm(matrix[:, taken].sum(1)) <= per_turn * math.sqrt(len(taken)) * (1 + 1e-12)
        reached = max(reached, *moved)
    if correlation.bands is not None and correlation.bands <= separation:
        assert per_turn == pytest.approx(1.0, rel=1e-12)
    if min(correlation.series(ROWS)) >= 0:
        assert reached == pytest.approx(bound, rel=1e-12)


WHOLE = "must be a whole number >= 1"
FINITE = "coefficients must be finite numbers, the first of them > 0"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: BandedToeplitz(bands=0), f"bands {WHOLE}; got 0"),
    (lambda: BandedToeplitz(bands=1.5), f"bands {WHOLE}"),  # type: ignore[arg-type]
    (lambda: BandedToeplitz(bands=True), f"bands {WHOLE}"),
    (lambda: BandedToeplitz(bands="all"), f"bands {WHOLE}, or \"auto\"; got 'all'"),  # type: ignore[arg-type]
    *((lambda given=given: BandedToeplitz(coefficients=given), FINITE) for given in ([], [0.0, 1.0], [1.0, math.nan])),
    (lambda: BandedToeplitz(bands="auto").matrix(steps=3), ".*chosen by a PrivacyEngine"),
    (lambda: BandedToeplitz().error(steps=0), f"steps {WHOLE}; got 0"),
    (lambda: BufferedToeplitz(buffers=0), f"buffers {WHOLE}; got 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_arguments_are_checked(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
