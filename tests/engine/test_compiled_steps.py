"""Steps of an engine whose passes are compiled: the same training as eager, charged before, with no new graph."""

import itertools
import math

import pytest
import torch
from comparing import TOLERANCE
from graphs import interpret
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import ghostclip
from ghostclip.clipping import Automatic, Custom, Grouped, PerLayer
from ghostclip.compiled import trial
from ghostclip.compiled.region import _in_place, trace

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
def test_a_policy_that_may_use_all_norms_is_not_compiled():
    policy = Custom(lambda norms: 0.5 / (norms + 1), 0.5)
    engine = compiled(engine_for(clipping=policy))
    assert_same(train(engine, 9), train(engine_for(clipping=policy), 9))
    assert ["Custom may look at all norms" in reason for reason in record_of(engine).refusals] == [True]
    assert graphs_used(engine) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_schedules_and_empty_batches_compile_nothing_anew():
    weights, sizes = [], []
    for make in (compiled, lambda engine: engine):
        engine = make(engine_for(examples=60, batch_size=3))
        schedule = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 0.1, total_steps=30)
        weights.append(train(engine, 30, schedule.step))
        if make is compiled:
            assert record_of(engine).graphs <= 2
            assert record_of(engine).refusals == []
            assert graphs_used(engine) > 20
    for batch in engine_for(examples=60, batch_size=3).batches():
        sizes.append(sum(batch.sizes))
        batch.discard()
    assert 0 in sizes
    assert_same(*weights)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_dropout_draws_what_it_would_draw_eagerly():
    states = []
    for make in (compiled, lambda engine: engine):
        engine = make(engine_for(dropout=0.5))
        train(engine, 5)
        states.append(torch.random.get_rng_state())
    # Later steps draw for the padding, too.
    assert torch.equal(*states)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("spoil", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_an_example_that_is_not_finite_is_left_out(spoil):
    def losses(model, batch):
        return losses_of(model, batch) * torch.where(batch[0][:, 0] > 1.2, spoil, 1.0)

    weights = []
    for make in (compiled, lambda engine: engine):
        engine = make(engine_for(examples=64))
        train(engine, 7)
        for batch in engine.batches():
            record = engine.step(batch, losses)
        assert (record.weights == 0).any()
        weights.append([p.detach().clone() for p in engine.model.parameters()])
        assert all(p.isfinite().all() for p in engine.model.parameters())
        assert engine.steps_taken == 11
    assert_same(*weights)


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


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_graph_that_eager_beats_is_not_used(monkeypatch):
    # A clock of our own: a graph takes 2 seconds, the eager passes 1.
    readings = iter([0.0, 2.0, 2.0, 3.0] * trial.TRIALS)
    monkeypatch.setattr(trial, "clock", lambda: next(readings))
    engine = compiled(engine_for())
    found, expected = train(engine, 12), train(engine_for(), 12)
    assert_same(found, expected)
    assert record_of(engine).refusals == ["eager is faster (1e+03 ms, compiled 2e+03)"]
    assert graphs_used(engine) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_inductor_knows_which_inputs_last(monkeypatch):
    told = []

    def inner(graph, inputs, *, static_input_idxs, **settings):
        told.append(static_input_idxs)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", inner)
    weight, batch = torch.ones(3), torch.arange(6.0).view(2, 3)

    def step(weight, batch):
        return (batch.sum(0) * weight,)

    graph = trace(step, [weight, batch], [weight, batch.roll(1, 0)])
    (found,) = _in_place(graph, [weight, batch], 1)(weight, batch)
    assert told == [[0]]
    assert found.tolist() == [3.0, 5.0, 7.0]


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
