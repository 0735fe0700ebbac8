"""Sampling by turns: groups that stay, rates within them, failed batches, epochs, processes and seeds."""

from typing import Any

import numpy as np
import private_runs as runs
import pytest
from scipy import stats
from torch.utils.data import DataLoader

from ghostclip import accounting
from ghostclip.clipping import Schedule, Stage
from ghostclip.events import CyclicGaussian, CyclicPoissonGaussian, mechanism_of
from ghostclip.noise import BandedToeplitz, noise_source
from ghostclip.sampling import CyclicPoisson, LogicalBatches
from ghostclip.sampling.cyclic import drawn_groups

pytestmark = pytest.mark.usefixtures("coarse_losses")

# A false alarm once in a hundred thousand runs for each test.
RARE = 1e-5
BANDS = 3


def cyclic_poisson(**options: Any) -> LogicalBatches:
    return LogicalBatches(range(24), **{"batch_size": 4, "sampling": "cyclic_poisson", "bands": BANDS, **options})


def rows(batch: Any) -> list[int]:
    return [row for part in batch.rows for row in part]


def drawn(loader: LogicalBatches, steps: int) -> np.ndarray:
    """[steps, examples] of booleans: who was in which batch."""
    found: list[np.ndarray] = []
    while len(found) < steps:
        found += [np.isin(np.arange(loader.dataset_size), rows(batch)) for batch in loader]
    return np.array(found[:steps])


def test_each_example_is_in_batches_of_its_group_only_at_the_rate_of_its_group() -> None:
    loader = cyclic_poisson()
    found = drawn(loader, 3000)
    assert loader.groups is not None
    for example, group in enumerate(loader.groups):
        own = found[group::BANDS, example]
        assert found[:, example].sum() == own.sum()
        assert stats.binomtest(int(own.sum()), len(own), BANDS * 4 / 24).pvalue > RARE
    # Joined independently: of two examples of one group as often as the product says.
    first, second = np.flatnonzero(loader.groups == loader.groups[0])[:2]
    both = found[loader.groups[0] :: BANDS][:, [first, second]].all(1)
    assert stats.binomtest(int(both.sum()), len(both), (BANDS * 4 / 24) ** 2).pvalue > RARE


@pytest.mark.parametrize("mode", ["standard", "hardened"])
def test_groups_are_drawn_uniformly_and_independently(mode: str) -> None:
    scheme, generator = CyclicPoisson(6, 1, separation=BANDS), noise_source(mode).generator()
    found = np.array([drawn_groups(scheme, generator) for _ in range(1500)])
    assert stats.chisquare(np.bincount(found.ravel(), minlength=BANDS)).pvalue > RARE
    for other in range(1, 6):
        table = np.histogram2d(found[:, 0], found[:, other], BANDS)[0]
        assert stats.chisquare(table.ravel()).pvalue > RARE


@pytest.mark.parametrize(("size", "batch_size", "steps"), [(24, 4, 6), (25, 4, 6), (10, 10, 1), (11, 3, 4)])
def test_a_cyclic_epoch_has_each_example_once_in_the_same_order(size: int, batch_size: int, steps: int) -> None:
    loader = LogicalBatches(range(size), batch_size=batch_size, sampling="cyclic", max_physical_batch_size=3)
    first, second = ([rows(batch) for batch in loader] for _ in range(2))
    assert first == second
    assert sorted(row for batch in first for row in batch) == list(range(size))
    assert len(first) == steps
    assert max(map(len, first)) - min(map(len, first)) <= 1
    assert max(map(len, first)) == loader.largest
    assert (
        first != [rows(batch) for batch in LogicalBatches(range(size), batch_size=batch_size, sampling="cyclic")]
        or steps == 1
    )


def test_what_is_charged_is_what_was_drawn() -> None:
    assert cyclic_poisson().event(1.5) == CyclicPoissonGaussian(0.5, 1.5, separation=BANDS)
    assert cyclic_poisson(bands=1).event(1.5) == LogicalBatches(range(24), batch_size=4).event(1.5)
    assert LogicalBatches(range(24), batch_size=5, sampling="cyclic").event(1.5) == CyclicGaussian(
        1.0, 1.5, separation=5
    )
    assert cyclic_poisson().sample_rate == 4 / 24
    assert "each example is in one of 3 groups for good" in cyclic_poisson().scheme.words
    assert "each example once in 6 steps" in LogicalBatches(range(24), batch_size=4, sampling="cyclic").scheme.words
    with pytest.raises(ValueError, match=r"^bands \* batch_size / population, .* at most 1; got 7 \* 4 / 24.*6 bands"):
        cyclic_poisson(bands=7)
    with pytest.raises(ValueError, match=r"^bands must be a whole number >= 1"):
        cyclic_poisson(bands=0)


def test_a_seed_repeats_groups_and_batches_and_processes_share_them() -> None:
    first, second = (drawn(cyclic_poisson(seed=3), 12) for _ in range(2))
    assert (first == second).all()
    key = bytes(32)
    shares = [
        drawn(cyclic_poisson(generator=lambda: noise_source("standard").generator(key), share=(rank, 2)), 6)
        for rank in range(2)
    ]
    together = drawn(cyclic_poisson(generator=lambda: noise_source("standard").generator(key)), 6)
    assert (shares[0] | shares[1] == together).all()
    assert not (shares[0] & shares[1]).any()


def test_users_take_turns_with_all_their_rows() -> None:
    loader = cyclic_poisson(batch_size=2, unit_ids=np.arange(24) // 3)
    assert loader.groups is not None
    assert len(loader.groups) == 8
    for step, batch in enumerate(loader):
        assert {loader.groups[row // 3] for row in rows(batch)} <= {step % BANDS}
        assert all(row - row % 3 + each in rows(batch) for row in rows(batch) for each in range(3))


def groups_of_steps(engine: Any, epochs: int, fails: set[int]) -> list[set[int]]:
    """The groups in the batch of each step that was charged, where batches of some numbers fail before their step."""
    found, number = [], 0
    for _ in range(epochs):
        for batch in engine.batches():
            chosen = {int(engine.batches().groups[row]) for row in rows(batch)}
            number += 1
            if number in fails:
                runs.leave(engine)
                continue
            engine.step(batch, runs.losses_of)
            found.append(chosen)
    return found


@pytest.mark.parametrize("sampling", ["cyclic_poisson", "cyclic"])
@pytest.mark.parametrize("fails", [set(), {1}, {2, 3, 5, 8}], ids=len)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*replaced by:UserWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_batch_that_had_no_step_comes_again_for_its_group(sampling: str, fails: set[int], workers: int) -> None:
    """Else groups would take part sooner than the number of steps that is charged says, and share noise."""
    data = DataLoader(runs.data(24), 4, num_workers=workers) if workers else runs.data(24)
    engine = runs.engine_for(
        runs.network(), None, data, batch_size=4, noise_multiplier=1.0, sampling=sampling, self_check=False,
        correlation=BandedToeplitz(bands=BANDS), steps=18,
    )  # fmt: skip
    separation = engine.batches().scheme.separation
    found = groups_of_steps(engine, 3, fails)
    assert len(found) == engine.steps_taken == 18 - len(fails)
    assert all(groups <= {step % separation} for step, groups in enumerate(found))


def test_an_engine_charges_turns_of_a_mechanism_of_its_own() -> None:
    one, two = (runs.engine_for(runs.network(), noise_multiplier=2.0, sampling="cyclic") for _ in range(2))
    for engine in (one, two):
        runs.train(engine, 4)
    assert mechanism_of(one.events[0]) != mechanism_of(two.events[0])
    spent = accounting.epsilon(noise_multiplier=2.0, sample_rate=8 / 24, steps=4, delta=1e-5, sampling="cyclic")
    assert one.epsilon() == pytest.approx(spent, rel=1e-3)
    together = accounting.epsilon(noise_multiplier=2.0, sample_rate=8 / 24, steps=12, delta=1e-5, sampling="cyclic")
    assert accounting.epsilon_of([*one.events, *two.events], delta=1e-5) == pytest.approx(together, rel=1e-3)
    assert "batches in a fixed order, each example once in 3 steps" in one.guarantee()
    assert "by the presence of one example, whose place in the order stays empty without it" in one.guarantee()


def test_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r'schedule and sampling="cyclic" or "cyclic_poisson" don.t go together'):
        runs.engine_for(
            runs.network(), noise_multiplier=1.0, sampling="cyclic", schedule=Schedule([Stage(3), Stage(3)])
        )
