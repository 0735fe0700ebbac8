"""Steps of an engine whose passes are compiled: the same training as eager, charged before, with no new graph."""

import itertools
import math

import pytest
import torch
from comparing import TOLERANCE
from graphs import interpret
from torch._dynamo.utils import counters

import ghostclip
from ghostclip.clipping import Automatic, Grouped, PerLayer
from ghostclip.compiled import trial

Adam = torch.optim.Adam


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


def losses_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def engine_for(dtype=torch.float64, *, examples=160, batch_size=16, dropout=0.0, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(6, 3)
    ).to(dtype)
    x, y = torch.randn(examples, 5, dtype=dtype), torch.randint(0, 3, (examples,))
    settings = {"self_check": False, "noise_multiplier": 1.0, "noise": "test", "seed": 3, "clipping": 0.5, **options}
    return ghostclip.PrivacyEngine(
        model, Adam(model.parameters(), lr=0.01), torch.utils.data.TensorDataset(x, y), batch_size=batch_size,
        **settings,
    )  # fmt: skip


def train(engine, steps, after=lambda: None):
    left = steps
    while left:
        for batch in engine.batches():
            engine.step(batch, losses_of)
            after()
            left -= 1
            if not left:
                break
    return [parameter.detach().clone() for parameter in engine.model.parameters()]


def compiled(engine):
    engine.compile()
    return engine


def record_of(engine):
    return engine._steps._clipper.compiled


def graphs_used(engine):
    """How often graphs were run, trials included."""
    return sum(plan.region.runs for plan in record_of(engine)._plans.values() if plan.region)


def assert_same(found, expected, dtype=torch.float64):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


POLICIES = {
    "flat": 0.5,
    "automatic": Automatic(0.5),
    "per layer": PerLayer(0.5),
    "grouped": Grouped({"first": ["0.*"], "rest": ["3.*"]}, max_norm=0.5),
}


USUAL = [("flat", "reweight", None), ("flat", "cached", 9), ("per layer", "reweight", None)]


def combinations():
    """A few are enough where minutes count: writing a graph down takes most of a second."""
    for policy, second_pass, physical in itertools.product(POLICIES, ("reweight", "cached"), (None, 9)):
        usual = (policy, second_pass, physical) in USUAL
        yield pytest.param(policy, second_pass, physical, marks=() if usual else pytest.mark.slow)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("policy", "second_pass", "physical"), list(combinations()))
@pytest.mark.one_in(2)
def test_training_is_the_same_as_eager(policy, second_pass, physical):
    options = {"clipping": POLICIES[policy], "second_pass": second_pass, "max_physical_batch_size": physical}
    engine = compiled(engine_for(**options))
    assert_same(train(engine, 12), train(engine_for(**options), 12))
    record = record_of(engine)
    assert record.refusals == []
    assert record.graphs == 1
    assert graphs_used(engine) >= 9
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.steps_taken == 12


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
    engine = compiled(engine_for(**options))
    train(engine, 6)
    assert {key[0] for key in record_of(engine)._plans} == {rows}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, 9])
def test_a_step_without_a_finite_example_is_named(physical, caplog):
    engine = compiled(engine_for(examples=64, max_physical_batch_size=physical))
    train(engine, 7)
    assert "finite loss" not in caplog.text
    with torch.no_grad():
        engine.model[0].weight.fill_(math.nan)
    engine.accept_parameters()
    train(engine, 8)
    assert caplog.text.count("had a finite loss and gradient (private: not for release)") == 1


@pytest.mark.usefixtures("interpreted")
def test_a_step_that_can_not_be_charged_is_not_taken():
    engine = compiled(engine_for())
    before = train(engine, 8)
    moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]

    def refuse(terms):
        raise ghostclip.LedgerError("the disk is full")

    engine._steps.release.charge = refuse
    for batch in engine.batches():
        with pytest.raises(ghostclip.LedgerError):
            engine.step(batch, losses_of)
        break
    assert_same([*engine.model.parameters()], before)
    assert_same([state["exp_avg"] for state in engine.optimizer.state.values()], moments)


@pytest.mark.usefixtures("interpreted")
def test_a_foreign_gradient_is_refused_before_anything_is_charged():
    engine = compiled(engine_for())
    before = train(engine, 8)
    engine.model[0].weight.grad = torch.ones_like(engine.model[0].weight)
    for batch in engine.batches():
        with pytest.raises(ghostclip.GradientLeakError):
            engine.step(batch, losses_of)
        break
    assert engine.steps_taken == 8
    assert_same([*engine.model.parameters()], before)


def test_a_gpu_has_done_its_work_when_the_clock_is_read(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(trial, "clock", lambda: done.append("looked") or 0.0)
    assert trial.timed(lambda: done.append("ran")) == (None, 0.0)
    assert done == ["waited", "looked", "ran", "waited", "looked"]


@pytest.mark.slow
def test_one_graph_and_none_anew(monkeypatch):
    note = trial.Trial.note
    monkeypatch.setattr(trial.Trial, "note", lambda self, took, eager, *rest: note(self, 0.0, 1.0, *rest))
    engine = compiled(engine_for(torch.float32, examples=200, batch_size=10))
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.9)
    counters.clear()
    train(engine, 7, schedule.step)
    made = counters["aot_autograd"]["total"]
    assert made == record_of(engine).graphs == 1
    found = train(engine, 25, schedule.step)
    assert record_of(engine).refusals == []
    assert record_of(engine).seconds > 0
    assert counters["aot_autograd"]["total"] == made
    assert not counters["graph_break"]
    assert not counters["frames"]
    plain = engine_for(torch.float32, examples=200, batch_size=10)
    schedule = torch.optim.lr_scheduler.StepLR(plain.optimizer, 2, 0.9)
    train(plain, 7, schedule.step)
    assert_same(found, train(plain, 25, schedule.step), torch.float32)
