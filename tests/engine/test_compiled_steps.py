"""Steps of an engine whose passes are compiled: the same training as eager, charged before, with no new graph."""

import math

import private_runs as runs
import pytest
import torch
from comparing import TOLERANCE
from graphs import interpret
from torch import nn

import ghostclip
from ghostclip.clipping import Automatic, Grouped, PerLayer


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


def engine_for(compiles, dtype=torch.float64, examples=160, **options):
    model = runs.network(dtype)
    torch.manual_seed(0)
    settings = {"batch_size": 16, "noise_multiplier": 1.0, "noise": "test", "seed": 3, "clipping": 0.5} | options
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = runs.engine_for(model, optimizer, runs.data(examples, dtype), self_check=False, **settings)
    engine.compile() if compiles else None
    return engine


POLICIES = {
    "flat": 0.5,
    "automatic": Automatic(0.5),
    "per layer": PerLayer(0.5),
    "grouped": Grouped({"first": ["0.*"], "rest": ["2.*"]}, max_norm=0.5),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, 9])
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.one_in(16)
def test_training_is_the_same_as_eager(policy, second_pass, physical):
    """A few are enough where minutes count: writing a graph down takes most of a second."""
    options = {"clipping": POLICIES[policy], "second_pass": second_pass, "max_physical_batch_size": physical}
    engine, eager = (engine_for(compiles, **options) for compiles in (True, False))
    for each in (engine, eager):
        runs.train(each, 20)
    exact = TOLERANCE[torch.float64]
    torch.testing.assert_close(runs.weights(engine.model), runs.weights(eager.model), rtol=exact, atol=exact)
    record = engine._steps._clipper.compiled
    assert record.refusals == []
    # Trials included.
    assert sum(plan.region.runs for plan in record._plans.values() if plan.region) >= 6
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.steps_taken == 20


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 16 + 3 * 4),
        ({"sampling": "without_replacement"}, 16),
        ({"max_physical_batch_size": 9}, 9),
        ({"examples": 18}, 18),
    ],
    ids=["Poisson", "one size", "pieces", "few examples"],
)
def test_a_graph_has_no_more_rows_than_batches_can_have(options, rows):
    seen = []

    def losses_of(model, batch):
        seen.append(len(batch[1]))
        return runs.losses_of(model, batch)

    runs.train(engine_for(True, **options), 6, losses_of)
    assert max(seen) <= rows


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, 9])
@pytest.mark.one_in(2)
def test_a_step_without_a_finite_example_is_named(physical, caplog):
    runs.train(engine := engine_for(True, examples=64, max_physical_batch_size=physical), 7)
    assert "finite loss" not in caplog.text
    nn.init.constant_(engine.model[0].weight, math.nan)
    engine.accept_parameters()
    runs.train(engine, 8)
    assert caplog.text.count("had a finite loss and gradient (private: not for release)") == 1


def refuse(terms):
    raise ghostclip.LedgerError("the disk is full")


def assert_moves_nothing(engine, error):
    before, moments = runs.weights(engine.model), [s["exp_avg"].clone() for s in engine.optimizer.state.values()]
    with pytest.raises(error):
        runs.train(engine, 1)
    assert engine.steps_taken == 8
    assert torch.equal(runs.weights(engine.model), before)
    assert all(map(torch.equal, moments, [s["exp_avg"] for s in engine.optimizer.state.values()]))


@pytest.mark.usefixtures("interpreted")
def test_a_step_that_must_not_be_released_moves_nothing(monkeypatch):
    """Without a charge, or with a foreign gradient."""
    runs.train(engine := engine_for(True), 8)
    with monkeypatch.context() as patched:
        patched.setattr(engine._steps.release, "charge", refuse)
        assert_moves_nothing(engine, ghostclip.LedgerError)
    engine.model[0].weight.grad = torch.ones_like(engine.model[0].weight)
    assert_moves_nothing(engine, ghostclip.GradientLeakError)
