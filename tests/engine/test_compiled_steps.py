"""Steps of an engine whose passes are compiled: the same training as eager, charged before, with no new graph."""

import math

import private_runs as runs
import pytest
import torch
from comparing import TOLERANCE
from graphs import interpret
from torch import nn
from torch._dynamo.utils import counters

import ghostclip
from ghostclip.clipping import Automatic, Grouped, PerLayer
from ghostclip.compiled import trial


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


def record_of(engine):
    return engine._steps._clipper.compiled


def graphs_used(engine):
    """How often graphs were run, trials included."""
    return sum(plan.region.runs for plan in record_of(engine)._plans.values() if plan.region)


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
@pytest.mark.one_in(12)
def test_training_is_the_same_as_eager(policy, second_pass, physical):
    """A few are enough where minutes count: writing a graph down takes most of a second."""
    options = {"clipping": POLICIES[policy], "second_pass": second_pass, "max_physical_batch_size": physical}
    engine, eager = (engine_for(compiles, **options) for compiles in (True, False))
    for each in (engine, eager):
        runs.train(each, 30)
    exact = TOLERANCE[torch.float64]
    torch.testing.assert_close(runs.weights(engine.model), runs.weights(eager.model), rtol=exact, atol=exact)
    record = record_of(engine)
    assert record.refusals == []
    assert record.graphs >= 1
    assert graphs_used(engine) >= 6
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.steps_taken == 30


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
    runs.train(engine := engine_for(True, **options), 6)
    assert max(key[0] for key in record_of(engine)._plans) <= rows


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, 9])
def test_a_step_without_a_finite_example_is_named(physical, caplog):
    runs.train(engine := engine_for(True, examples=64, max_physical_batch_size=physical), 7)
    assert "finite loss" not in caplog.text
    nn.init.constant_(engine.model[0].weight, math.nan)
    engine.accept_parameters()
    runs.train(engine, 8)
    assert caplog.text.count("had a finite loss and gradient (private: not for release)") == 1


def without_a_charge(engine):
    def refuse(terms):
        raise ghostclip.LedgerError("the disk is full")

    engine._steps.release.charge = refuse


def with_a_foreign_gradient(engine):
    engine.model[0].weight.grad = torch.ones_like(engine.model[0].weight)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("spoil", "error"),
    [(without_a_charge, ghostclip.LedgerError), (with_a_foreign_gradient, ghostclip.GradientLeakError)],
)
def test_a_step_that_must_not_be_released_moves_nothing(spoil, error):
    runs.train(engine := engine_for(True), 8)
    before, moments = runs.weights(engine.model), [s["exp_avg"].clone() for s in engine.optimizer.state.values()]
    spoil(engine)
    with pytest.raises(error):
        runs.train(engine, 1)
    assert engine.steps_taken == 8
    assert torch.equal(runs.weights(engine.model), before)
    assert all(map(torch.equal, moments, [s["exp_avg"] for s in engine.optimizer.state.values()]))


def test_a_gpu_has_done_its_work_when_the_clock_is_read(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(trial, "clock", lambda: done.append("looked") or 0.0)
    assert trial.timed(lambda: done.append("ran")) == (None, 0.0)
    assert done == ["waited", "looked", "ran", "waited", "looked"]


@pytest.mark.slow
def test_one_graph_and_none_anew(monkeypatch):
    """In batches of one size."""
    note = trial.Trial.note
    monkeypatch.setattr(trial.Trial, "note", lambda self, took, eager, *rest: note(self, 0.0, 1.0, *rest))
    found = []
    for compiles in (True, False):
        engine = engine_for(compiles, torch.float32, batch_size=10, sampling="without_replacement")
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.9)
        counters.clear()
        runs.train(engine, 7, after=schedule.step)
        made = counters["aot_autograd"]["total"]
        runs.train(engine, 25, after=schedule.step)
        found.append(runs.weights(engine.model))
        assert made == counters["aot_autograd"]["total"] == int(compiles)
        assert not compiles or (record_of(engine).graphs, record_of(engine).refusals) == (1, [])
        assert not counters["graph_break"]
        assert not counters["frames"]
    torch.testing.assert_close(*found, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])
