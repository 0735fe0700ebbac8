"""Adaptive clipping: it finds the quantile, one example moves the count by 1/2, and the count is charged."""

import math
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from torch import nn

from ghostclip import GhostClipper, accounting
from ghostclip.clipping import Adaptive, Composed, Custom, Quantiles
from ghostclip.events import JointGaussian, SampledGaussian


def model_of_rows() -> nn.Module:
    """Example i's gradient is its own row of numbers, whatever the parameters are."""
    return nn.Linear(4, 1, bias=False)


def data(norms: torch.Tensor) -> torch.utils.data.TensorDataset:
    rows = torch.randn(len(norms), 4)
    return torch.utils.data.TensorDataset(rows / rows.norm(dim=1, keepdim=True) * norms[:, None])


def losses_of(model: nn.Module, examples: list[torch.Tensor]) -> torch.Tensor:
    return model(examples[0])[:, 0]


def engine_for(norms: torch.Tensor, clipping: Adaptive, **options: Any) -> Any:
    model = model_of_rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return runs.engine_for(
        model, optimizer, data(norms), clipping=clipping, self_check=False,
        **{"batch_size": 50, "noise_multiplier": 1.0, "noise": "test", "seed": 3, **options},
    )  # fmt: skip


def run(engine: Any, epochs: int) -> list[float]:
    """Trains; the clipping norm after each step."""
    found = []
    for _ in range(epochs):
        for batch in engine.batches():
            engine.step(batch, losses_of)
            found.append(engine.clipping.max_norm)
    return found


@pytest.mark.parametrize(("quantile", "start"), [(0.8, 40.0), (0.2, 0.1)])
def test_the_norm_finds_its_quantile(quantile: float, start: float) -> None:
    norms = torch.exp(torch.randn(400))
    path = run(engine_for(norms, Adaptive(start, quantile)), 25)
    settled = np.median(path[len(path) // 2 :])
    assert float((norms <= settled).float().mean()) == pytest.approx(quantile, abs=0.06)


@pytest.mark.parametrize("abandon", [False, True])
def test_one_step_follows_the_formula(abandon: bool) -> None:
    """The count is over the physical batches together, and divided by the public batch size, not the realised one."""
    norms, policy = torch.linspace(0.2, 2.0, 100), Adaptive(1.0, target_quantile=0.3, learning_rate=0.5)
    engine = engine_for(norms, policy, noise_multiplier=0.0, noise="standard", seed=None, max_physical_batch_size=7)
    epoch = iter(engine.batches())
    if abandon:
        engine.backward(losses_of(engine.model, next(iter(next(epoch).physical()))))
        runs.leave(engine)
    record = engine.step(next(epoch), losses_of)
    share = float(((record.norms <= 1.0).float() - 0.5).sum()) / 50 + 0.5
    assert engine.clipping.max_norm == pytest.approx(math.exp(-0.5 * (share - 0.3)), rel=1e-5)


def test_one_example_moves_the_count_by_a_half() -> None:
    policy = Adaptive(1.0)
    norms = torch.tensor([0.5, 1.0, 1.5, math.inf, math.nan])
    assert policy.counts(norms) == -0.5
    for extra in (0.0, 1.0, 7.0, math.inf, math.nan):
        moved = policy.counts(torch.cat([norms, torch.tensor([extra])])) - policy.counts(norms)
        assert abs(moved) == 0.5


@pytest.mark.slow
def test_noise_on_the_count_has_its_standard_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, shares = Adaptive(2.0, count_noise=3.0), []
    engine = engine_for(torch.full((400,), 5.0), policy, noise_multiplier=0.7, batch_size=4, seed=11)
    monkeypatch.setattr(engine.clipping, "update", shares.append)
    run(engine, 8)
    # All are above: the count is minus half the sample's size, whose variance is that of a binomial number.
    spread = np.std(np.array(shares) * 4)
    expected = math.sqrt(3.0**2 + 400 * 0.01 * 0.99 / 4)
    assert len(shares) == 800
    assert spread == pytest.approx(expected, rel=0.12)


@pytest.mark.slow
def test_a_target_is_met_with_the_count_included() -> None:
    planned: dict[str, Any] = {"target_epsilon": 2.0, "steps": 10, "noise_multiplier": None, "batch_size": 40}
    planned |= {"noise": "standard", "seed": None}
    engine = engine_for(torch.rand(400), Adaptive(1.0, count_noise=1.0), **planned)
    assert len(run(engine, 1)) == 10
    assert 1.9 < engine.epsilon() <= 2.0
    with pytest.raises(ValueError, match=r"target_epsilon=2.0 can't be reached"):
        engine_for(torch.rand(400), Adaptive(1.0, count_noise=0.1), **planned)


@pytest.mark.parametrize("noise", ["standard", "hardened"])
def test_the_norm_is_one_within_a_logical_batch_and_the_default_noise_a_twentieth_of_it(noise: str) -> None:
    norms = torch.linspace(0.2, 2.0, 100)
    engine = engine_for(norms, Adaptive(1.0), max_physical_batch_size=5, noise=noise, seed=None)
    for batch in engine.batches():
        seen = {engine.backward(losses_of(engine.model, part)).sensitivity for part in batch.physical()}
        assert seen == {engine.clipping.max_norm}
        engine.optimizer.step()
        assert engine.clipping.max_norm not in seen
        engine.optimizer.zero_grad()
    assert [part.noise_multiplier for part in engine.events[0].events] == [1.0, 2 * 50 / 20]


@pytest.mark.parametrize("options", [{"noise_multiplier": 0.0, "noise": "standard", "seed": None}, {}])
def test_without_private_noise_the_count_isnt_private_either(options: dict[str, Any]) -> None:
    engine = engine_for(torch.rand(400), Adaptive(1.0), **options)
    run(engine, 1)
    assert engine.epsilon() == math.inf
    assert all(event.noise_multiplier == 0 for event in engine.events)


@pytest.mark.parametrize("policy", [Adaptive(1.0), Composed(thresholds=Quantiles(1.0))], ids=["flat", "by layer"])
def test_what_one_engine_learnt_is_no_start_for_another(policy: Any) -> None:
    """The second engine's data would be charged alone for what both say."""
    norms = torch.full((400,), 30.0)
    first = engine_for(norms, policy)
    for batch in first.batches():
        first.step(batch, losses_of)
    assert first.clipping.sensitivity > 1.02
    for given in (policy, first.clipping):
        assert engine_for(norms, given).clipping.sensitivity == pytest.approx(1.0)


def test_a_norm_that_the_user_set_is_the_start_and_a_state_without_one_is_refused() -> None:
    policy = Adaptive(1.0)
    policy.max_norm = 3.0
    assert engine_for(torch.rand(400), policy).clipping.max_norm == 3.0
    for wrong in ({}, {"max_norm": math.nan}, {"max_norm": -1.0}):
        with pytest.raises((ValueError, TypeError), match="max_norm must be a finite number > 0"):
            policy.load_state_dict(wrong)
    assert policy.max_norm == 3.0


def test_noise_alone_never_leaves_floating_point() -> None:
    policy = Adaptive(1.0)
    for share in (-1e6, 1e6, math.inf):
        for _ in range(1000):
            policy.update([share])
        assert 0.9e-12 < policy.max_norm < 1.1e12


@pytest.mark.parametrize("name", ["max_norm", "target_quantile", "learning_rate", "count_noise"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0, True, "1", Custom(torch.ones_like, 1.0)])
def test_arguments_are_named_when_wrong(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{name} must be a"):
        Adaptive(**{"max_norm": 1.0, name: value})


def test_graphs_are_refused_since_the_norm_would_be_built_in() -> None:
    for build in (engine_for(torch.rand(400), Adaptive(1.0)).compile,
                  lambda: GhostClipper(model_of_rows(), Adaptive(1.0), compile=True)):  # fmt: skip
        with pytest.raises(ValueError, match="compile and adaptive clipping don't go together"):
            build()


def test_a_checkpoint_keeps_the_norm_and_a_ledger_the_charge(tmp_path: Any) -> None:
    options: dict[str, Any] = {"noise": "standard", "seed": None, "sampling": "truncated", "max_batch_size": 60}
    norms = torch.rand(400)
    engine = engine_for(norms, Adaptive(1.0), ledger=tmp_path / "run.ledger", **options)
    path = run(engine, 1)
    engine.save(tmp_path / "run")
    steps = engine.steps_taken
    engine.detach()
    other = engine_for(norms, Adaptive(1.0), ledger=tmp_path / "run.ledger", **options)
    other.restore(tmp_path / "run")
    assert other.clipping.max_norm == path[-1] != 1.0
    (event,) = other.events
    assert isinstance(event, JointGaussian)
    assert event.count == steps
    run(other, 1)
    assert other.events[0].count == 2 * steps


@pytest.mark.slow
def test_a_step_is_charged_as_both_releases() -> None:
    """Row "adaptive clipping not charged; divided by realised size": the count is part of the event."""
    engine = engine_for(torch.rand(400), Adaptive(1.0, count_noise=2.0), noise="standard", seed=None, batch_size=40)
    steps = len(run(engine, 1))
    parts = (SampledGaussian(0.1, 1.0), SampledGaussian(0.1, 4.0))
    assert engine.events == [JointGaussian(parts, steps)]
    together = (1.0**-2 + 4.0**-2) ** -0.5
    setting: dict[str, Any] = {"sample_rate": 0.1, "steps": steps, "delta": 1e-5}
    assert engine.epsilon() == accounting.epsilon(noise_multiplier=together, **setting)
    assert engine.epsilon() > accounting.epsilon(noise_multiplier=1.0, **setting)
