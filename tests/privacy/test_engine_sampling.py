"""Sampling in the engine, by turns too: what is charged is what the sampler did, and forecasts go on from there."""

import math
import random
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from drawn_rows import members, rows
from scipy import stats

from ghostclip import accounting
from ghostclip.engine import PrivacyEngine
from ghostclip.events import SAMPLINGS, CyclicGaussian, CyclicPoissonGaussian, mechanism_of
from ghostclip.noise import BandedToeplitz, noise_source
from ghostclip.sampling import CyclicPoisson, LogicalBatches
from ghostclip.sampling.schemes import drawn_groups

OPTIONS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "without_replacement": {},
    "truncated": {"max_batch_size": 11},
    "cyclic_poisson": {},
    "cyclic": {},
}


def trained(epochs: int = 1, **options: Any) -> PrivacyEngine:
    engine = runs.engine_for(runs.network(), **{"noise_multiplier": 6.0, "clipping": 1.0, **options})
    for _ in range(epochs):
        runs.train(engine)
    return engine


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.one_in(3)
def test_epsilon_is_that_of_the_sampling_and_the_relation(sampling: str, neighboring: str) -> None:
    engine = trained(sampling=sampling, neighboring=neighboring, **OPTIONS[sampling])
    (event,) = engine.events
    # One band of cyclic Poisson sampling is Poisson sampling.
    charged = "poisson" if sampling == "cyclic_poisson" else sampling
    assert (event.sampling, event.relation, event.count) == (charged, neighboring, 3)  # type: ignore[union-attr]
    options = {"dataset_size": 24, **OPTIONS[sampling]} if sampling == "truncated" else {}
    setting: dict[str, Any] = {"noise_multiplier": 6.0, "sample_rate": 8 / 24, "steps": 3, "delta": 1e-5, **options}
    expected = accounting.epsilon(**setting, sampling=sampling, neighboring=neighboring)
    assert engine.epsilon() == expected
    assert (engine.sampling, engine.neighboring) == (sampling, neighboring)
    assert f"({neighboring})" in engine.guarantee()
    assert f"epsilon {expected:.4g} (PLD)" in engine.guarantee()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_forecast_is_what_more_steps_will_have_spent(accountant: str) -> None:
    engine = trained()
    foretold = engine.forecast(3, accountant=accountant)
    assert engine.forecast(0, accountant=accountant) == engine.epsilon(accountant=accountant) < foretold
    assert engine.forecast(3, delta=1e-3, accountant=accountant) < foretold
    runs.train(engine)
    # By PLD a later call adds to what an earlier one composed, and rounds up.
    assert foretold <= engine.epsilon(accountant=accountant) <= foretold * (1 + 1e-3 * (accountant == "pld"))


@pytest.mark.parametrize("steps", [-1, 2.5, math.nan, True, None])
def test_a_forecast_checks_its_arguments(steps: Any) -> None:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0)
    with pytest.raises((ValueError, TypeError), match=r"^steps must be a whole number >= 0"):
        engine.forecast(steps)
    with pytest.raises(ValueError, match=r"^delta must be "):
        engine.forecast(1, delta=2.0)


def test_a_forecast_without_private_noise_is_infinite() -> None:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, noise="test", seed=1)
    assert engine.forecast(1) == engine.forecast(0) == engine.epsilon() == math.inf
    assert engine.guarantee().endswith("nothing was released")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sums_are_divided_by_the_public_size_under_every_sampling(sampling: str) -> None:
    engine = runs.engine_for(runs.network(), sampling=sampling, **OPTIONS[sampling])
    found: list[torch.Tensor] = []
    runs.on_step(engine.optimizer, lambda: found.append(runs.grads(engine.model)))
    examples = runs.gather(engine, next(batch for batch in engine.batches() if sum(batch.sizes)))
    engine.optimizer.step()
    expected = torch.cat([total.flatten() / 8 for total in runs.clipped_sum(runs.network(), examples, runs.HUGE)])
    assert torch.allclose(found[0], expected, rtol=1e-4, atol=1e-6)


pytestmark = pytest.mark.usefixtures("coarse_losses")

# A false alarm once in a hundred thousand runs for each test.
RARE = 1e-5
BANDS = 3


def cyclic_poisson(**options: Any) -> LogicalBatches:
    return LogicalBatches(range(24), **{"batch_size": 4, "sampling": "cyclic_poisson", "bands": BANDS, **options})


def test_each_example_is_in_batches_of_its_group_only_at_the_rate_of_its_group() -> None:
    loader = cyclic_poisson()
    found = members(loader, 3000)
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


@pytest.mark.parametrize(("size", "batch_size", "steps"), [(24, 4, 6), (10, 10, 1), (11, 3, 4)])
def test_a_cyclic_epoch_has_each_example_once_in_the_same_order(size: int, batch_size: int, steps: int) -> None:
    loader = LogicalBatches(range(size), batch_size=batch_size, sampling="cyclic", max_physical_batch_size=3)
    first, second = ([rows(batch) for batch in loader] for _ in range(2))
    assert first == second
    assert sorted(row for batch in first for row in batch) == list(range(size))
    assert len(first) == steps
    assert max(map(len, first)) - min(map(len, first)) <= 1
    assert max(map(len, first)) == loader.largest
    another = [rows(batch) for batch in LogicalBatches(range(size), batch_size=batch_size, sampling="cyclic")]
    assert first != another or steps == 1


def drawn_after_a_seed(**options: Any) -> list[float]:
    """Random numbers in a loop over batches, after the user's own seeds, and a data loader's for its workers."""
    loader = torch.utils.data.DataLoader(runs.data(), batch_size=8, generator=torch.Generator().manual_seed(0))
    engine = runs.engine_for(runs.network(), dataset=loader, **options)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    next(iter(engine.batches()))
    return [torch.rand(()).item(), np.random.rand(), random.random()]


@pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced")
@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"noise_multiplier": 1.0}, False),
        ({"noise_multiplier": 1.0, "noise": "hardened"}, False),
        ({"noise_multiplier": 1.0, "noise": "test", "seed": 0.0}, True),
        ({"noise_multiplier": 0.0}, True),
    ],
)
def test_random_numbers_of_a_private_training_follow_no_seed(options: dict[str, Any], again: bool) -> None:
    """Else one example more moves the dropout masks of all others, which the bound doesn't cover."""
    pairs = zip(*(drawn_after_a_seed(**options) for _ in range(2)), strict=True)
    assert [one == other for one, other in pairs] == 3 * [again]


class Seeding(torch.utils.data.Dataset[Any]):
    """Each of whose rows is augmented by a seed."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> Any:
        torch.manual_seed(0)
        return torch.randn(5), row % 3


@pytest.mark.parametrize(("options", "numbers"), [({"noise": "standard"}, 3), ({"noise": "test", "seed": 0}, 1)])
def test_random_numbers_of_a_private_training_follow_no_seed_of_its_data(options: dict[str, Any], numbers: int) -> None:
    drawn = set[float]()
    engine = runs.engine_for(
        runs.network(), dataset=Seeding(), noise_multiplier=1.0, sampling="without_replacement", **options
    )
    for batch in engine.batches():
        list(batch.physical())
        drawn.add(torch.rand(()).item())
        batch.discard()
    assert len(drawn) == numbers


@pytest.mark.filterwarnings("ignore:the DataLoader's RandomSampler is replaced")
def test_a_private_training_takes_no_generator_of_its_data_loader() -> None:
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(runs.data(), batch_size=8, generator=generator, shuffle=True)
    engine = runs.engine_for(runs.network(), dataset=loader, noise_multiplier=1.0)
    before = generator.get_state()
    runs.train(engine)
    assert torch.equal(generator.get_state(), before)


def test_what_is_charged_is_what_was_drawn() -> None:
    assert cyclic_poisson().event(1.5) == CyclicPoissonGaussian(0.5, 1.5, separation=BANDS)
    assert cyclic_poisson(bands=1).event(1.5) == LogicalBatches(range(24), batch_size=4).event(1.5)
    in_order = LogicalBatches(range(24), batch_size=5, sampling="cyclic")
    assert in_order.event(1.5) == CyclicGaussian(1.0, 1.5, separation=5)
    assert cyclic_poisson().sample_rate == 4 / 24
    assert "each example is in one of 3 groups for good" in cyclic_poisson().scheme.words
    assert "each example once in 5 steps" in in_order.scheme.words
    with pytest.raises(ValueError, match=r"^bands \* batch_size / population, .* at most 1; got 7 \* 4 / 24.*6 bands"):
        cyclic_poisson(bands=7)
    with pytest.raises(ValueError, match=r"^bands must be a whole number >= 1"):
        cyclic_poisson(bands=0)


def test_a_seed_repeats_groups_and_batches_and_processes_share_them() -> None:
    first, second = (members(cyclic_poisson(seed=3), 12) for _ in range(2))
    assert (first == second).all()
    generator = lambda: noise_source("standard").generator(bytes(32))  # noqa: E731
    shares = [members(cyclic_poisson(generator=generator, share=(rank, 2)), 6) for rank in range(2)]
    together = members(cyclic_poisson(generator=generator), 6)
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
@pytest.mark.parametrize("fails", [set(), {2, 3, 5, 8}], ids=len)
def test_a_batch_that_had_no_step_comes_again_for_its_group(sampling: str, fails: set[int]) -> None:
    """Else groups would take part sooner than the number of steps that is charged says, and share noise."""
    engine = runs.engine_for(
        runs.network(), batch_size=4, noise_multiplier=1.0, sampling=sampling, self_check=False,
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
