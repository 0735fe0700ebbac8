"""Whole steps as one graph, noise and update as one: the same training as eager, charged before, with no new graph."""

import copy
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
from ghostclip.compiled import NOT_YET, Update, UpdateReader, trial
from ghostclip.compiled.region import _in_place, trace, write_back
from ghostclip.compiled.rules import rule_of

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


def losses_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def engine_for(make=Adam, dtype=torch.float64, *, examples=160, batch_size=16, dropout=0.0, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(6, 3)
    ).to(dtype)
    x, y = torch.randn(examples, 5, dtype=dtype), torch.randint(0, 3, (examples,))
    settings = {"self_check": False, "noise_multiplier": 1.0, "noise": "test", "seed": 3, "clipping": 0.5, **options}
    return ghostclip.PrivacyEngine(
        model, make(model.parameters(), lr=0.01), torch.utils.data.TensorDataset(x, y), batch_size=batch_size,
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
    """How often each kind of graph was run, trials included."""
    steps = engine._steps._compiled
    kinds = {"whole": steps.graphs.whole, "release": steps.graphs.releases, "passes": record_of(engine)._plans}
    return {kind: sum(plan.region.runs for plan in made.values() if plan.region) for kind, made in kinds.items()}


def assert_same(found, expected, dtype=torch.float64):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


OPTIMIZERS = {
    "sgd": lambda p, lr: SGD(p, lr),
    "sgd momentum": lambda p, lr: SGD(p, lr, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "sgd nesterov": lambda p, lr: SGD(p, lr, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p, lr: Adam(p, lr),
    "adam amsgrad": lambda p, lr: Adam(p, lr, amsgrad=True, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "adam maximize": lambda p, lr: Adam(p, lr, maximize=True),
    "adamw": lambda p, lr: AdamW(p, lr, weight_decay=0.1),
    "adamw fused": lambda p, lr: AdamW(p, lr, fused=True),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_formulas_are_the_optimizers_own(name, dtype):
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(4, 3, dtype=dtype)) for _ in range(2)] for _ in range(2))
    groups = [{"params": p[:1]} for p in (ours, theirs)], [{"params": p[1:], "lr": 0.3} for p in (ours, theirs)]
    mine, their = (OPTIMIZERS[name](list(pair), 0.1) for pair in zip(*groups, strict=True))
    reader = UpdateReader(mine, 0)
    for number in range(4):
        for group in (*mine.param_groups, *their.param_groups):
            group["lr"] *= 0.9
        for p in theirs:
            p.grad = torch.randn(4, 3, dtype=dtype)
        update = reader.read()
        if number == 0 and mine.defaults.get("momentum", 1):
            assert update == NOT_YET
            for p, q in zip(ours, theirs, strict=True):
                p.grad = q.grad.clone()
            mine.step()
        else:
            sums = [3.0 * p.grad for p in theirs]
            noise = torch.zeros(update.size, dtype=dtype)
            with torch.no_grad():
                after = update.formula(sums, noise, update.numbers(3.0), update.written)
                for old, new in zip(update.written, after, strict=True):
                    old.copy_(new)
            update.took_place()
        their.step()
    assert_same([*ours], [*theirs], dtype)
    for p, q in zip(ours, theirs, strict=True):
        assert_same([*mine.state[p].values()], [*their.state[q].values()], dtype)


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
    record, used = record_of(engine), graphs_used(engine)
    assert record.refusals == []
    if physical is None:
        assert record.graphs == 1
        assert used["whole"] >= 9
    else:
        assert record.graphs == 2
        assert used["release"] >= 9
        assert used["passes"] > used["release"]
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.steps_taken == 12


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sgd nesterov" else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_every_optimizer_trains_as_it_does_eagerly(name):
    make = OPTIMIZERS[name]
    engine = compiled(engine_for(make, torch.float32))
    assert_same(train(engine, 9), train(engine_for(make, torch.float32), 9), torch.float32)
    assert record_of(engine).refusals == []
    assert graphs_used(engine)["whole"] >= 7


@pytest.mark.usefixtures("interpreted")
def test_a_policy_that_may_use_all_norms_has_its_update_compiled_only():
    policy = Custom(lambda norms: 0.5 / (norms + 1), 0.5)
    engine = compiled(engine_for(clipping=policy))
    assert_same(train(engine, 9), train(engine_for(clipping=policy), 9))
    assert ["Custom may look at all norms" in reason for reason in record_of(engine).refusals] == [True]
    assert graphs_used(engine) == {"whole": 0, "release": 8, "passes": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_schedules_and_empty_batches_compile_nothing_anew():
    weights, sizes = [], []
    for make in (compiled, lambda engine: engine):
        engine = make(engine_for(examples=60, batch_size=3))
        schedule = torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 0.1, total_steps=30)
        weights.append(train(engine, 30, schedule.step))
        if make is compiled:
            assert record_of(engine).graphs <= 3
            assert record_of(engine).refusals == []
            assert graphs_used(engine)["whole"] > 20
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
def test_an_example_that_is_not_finite_is_left_out_with_the_noise_that_was_drawn(spoil):
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


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, 9], ids=["in one piece", "in pieces"])
def test_a_step_is_charged_before_its_graph_runs(physical, monkeypatch):
    engine = compiled(engine_for(max_physical_batch_size=physical))
    train(engine, 8)
    told, steps = [], engine._steps._compiled
    (plan,) = (steps.graphs.whole if physical is None else steps.graphs.releases).values()
    run, charge = plan.region, engine._steps.release.charge
    monkeypatch.setattr(plan, "region", lambda *inputs: told.append("graph") or run(*inputs))
    monkeypatch.setattr(engine._steps.release, "charge", lambda terms: told.append("charge") or charge(terms))
    train(engine, 2)
    assert told == ["charge", "graph"] * 2


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


@pytest.mark.usefixtures("interpreted")
def test_the_optimizers_state_is_as_its_own_steps_leave_it():
    engine, plain = compiled(engine_for()), engine_for()
    train(engine, 9)
    train(plain, 9)
    for one, other in zip(engine.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
        assert_same(one.values(), other.values())
    # Loaded, it is other tensors; the graph goes on with those.
    state = copy.deepcopy(plain.optimizer.state_dict())
    for kept in state["state"].values():
        kept["exp_avg"] += 1
    for each in (engine, plain):
        each.optimizer.load_state_dict(copy.deepcopy(state))
    assert_same(train(engine, 3), train(plain, 3))
    assert record_of(engine).graphs == 1


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


def replaced(optimizer):
    step = optimizer.step
    optimizer.step = lambda: step()


def tensor_rate(optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (Adam, hooked, "hooks on the optimizer's step want to be called"),
        (Adam, replaced, "the optimizer's step was replaced by another function"),
        (Adam, tensor_rate, "Adam with a learning rate or betas in a tensor has no compiled update"),
        (torch.optim.RMSprop, lambda _: None, "RMSprop has no compiled update (SGD, Adam, AdamW have)"),
    ],
)
def test_updates_that_are_left_to_the_optimizer_say_why(make, change, reason):
    weights = []
    for wanted in (compiled, lambda engine: engine):
        engine = wanted(engine_for(make))
        change(engine.optimizer)
        weights.append(train(engine, 8))
        if wanted is compiled:
            assert record_of(engine).refusals == [f"the update: {reason}"]
            assert graphs_used(engine)["whole"] == graphs_used(engine)["release"] == 0
            assert graphs_used(engine)["passes"] > 0
    assert_same(*weights)


def test_what_an_optimizer_may_not_have_to_be_compiled():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert "capturable=True" in rule_of(Adam, Adam([parameter], capturable=True).param_groups[0])
    half = SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], 0.1)
    assert UpdateReader(half, 0).read() == "parameters in torch.bfloat16 have no compiled update"
    mixed = SGD([parameter, torch.nn.Parameter(torch.ones(2, dtype=torch.float64))], 0.1)
    assert "several types" in UpdateReader(mixed, 0).read()
    frozen = SGD([parameter.requires_grad_(False)], 0.1)
    assert UpdateReader(frozen, 0).read() == "no parameter is trained"
    parameter.grad = torch.zeros(2)
    assert "has a gradient, by which the optimizer steps it" in UpdateReader(frozen, 0).read()


def test_axes_of_one_number_may_have_any_stride():
    """As torch's own gradients have, after which SGD's momentum is made."""

    def read(grad):
        parameter = torch.nn.Parameter(torch.ones(grad.shape))
        optimizer = SGD([parameter], 0.1, momentum=0.9)
        parameter.grad = grad
        optimizer.step()
        kept = optimizer.state[parameter]["momentum_buffer"]
        assert kept.stride() == grad.stride() != parameter.stride()
        return UpdateReader(optimizer, 0).read()

    assert isinstance(read(torch.ones(1, 5).mT), Update)
    assert "momentum_buffer doesn't lie in memory" in read(torch.ones(3, 5).mT)


def test_an_optimizer_that_changed_is_read_anew():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = SGD([first], 0.1)
    reader = UpdateReader(optimizer, 0)
    update = reader.read()
    assert isinstance(update, Update)
    assert reader.read() is update
    optimizer.param_groups[0]["lr"] = 0.2
    assert reader.read().numbers(1.0).tolist() == [1.0, 0.2, 0.0, 0.0, 1.0]
    optimizer.add_param_group({"params": [second]})
    assert reader.read().size == 4
    assert reader.read().key != update.key
    second.requires_grad_(False)
    assert reader.read().key == update.key


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_whole_step_that_eager_does_faster_is_left_to_it_and_the_update_tried_alone(monkeypatch):
    # A clock of our own: a whole graph takes 2 seconds and what it replaces 1; an update 1, and what it replaces 2.
    readings = iter([*[0.0, 1.0, 1.0, 3.0, 3.0, 3.0] * trial.TRIALS, *[0.0, 1.0, 1.0, 3.0] * trial.TRIALS])
    monkeypatch.setattr(trial, "clock", lambda: next(readings))
    engine = compiled(engine_for())
    found, expected = train(engine, 12), train(engine_for(), 12)
    assert_same(found, expected)
    assert record_of(engine).refusals == ["eager is faster (1e+03 ms, compiled 2e+03)"]
    assert graphs_used(engine) == {"whole": 0, "release": 7, "passes": 0}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, pytest.param(9, marks=pytest.mark.slow)], ids=["in one piece", "in pieces"])
def test_a_graph_that_goes_elsewhere_than_the_optimizer_is_found_out(physical, monkeypatch):
    numbers = Update.numbers
    monkeypatch.setattr(Update, "numbers", lambda self, divisor: numbers(self, 0.5 * divisor))
    engine = compiled(engine_for(max_physical_batch_size=physical))
    assert_same(train(engine, 9), train(engine_for(max_physical_batch_size=physical), 9))
    assert "differ from eager's" in str(record_of(engine).refusals)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("physical", [None, 9], ids=["in one piece", "in pieces"])
def test_what_a_graph_writes_lasts_and_is_tried_in_one_place(physical, monkeypatch):
    # Inductor takes no CUDA graph of a step that writes to other inputs, and records one anew for memory elsewhere.
    places, copy_ = [], trial.Trial.copy
    monkeypatch.setattr(trial.Trial, "copy", lambda self, those: places.append(copy_(self, those)) or places[-1])
    engine = compiled(engine_for(max_physical_batch_size=physical))
    train(engine, 9)
    steps = engine._steps._compiled
    (plan,) = (steps.graphs.releases if physical else steps.graphs.whole).values()
    written = steps._reader.read().written
    assert len(written) == plan.region.lasting
    assert len({tuple(each.data_ptr() for each in copies) for copies in places}) == 1 < len(places)
    assert plan.trial.copies == []


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
        return batch.sum(), weight - batch.sum(0)

    graph = trace(step, [weight, batch], [weight, batch.roll(1, 0)])
    write_back(graph, 1)
    (total,) = _in_place(graph, [weight, batch], 1)(weight, batch)
    assert told == [[0]]
    assert total == 15
    assert weight.tolist() == [-2.0, -4.0, -6.0]


def test_a_gpu_has_done_its_work_when_the_clock_is_read(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(trial, "clock", lambda: done.append("looked") or 0.0)
    assert trial.timed(lambda: done.append("ran")) == (None, 0.0)
    assert done == ["waited", "looked", "ran", "waited", "looked"]


@pytest.mark.slow
def test_one_graph_from_forward_to_update_and_none_anew(monkeypatch):
    note = trial.Trial.note
    monkeypatch.setattr(trial.Trial, "note", lambda self, took, eager, *rest: note(self, 0.0, 1.0, *rest))
    engine = compiled(engine_for(dtype=torch.float32, examples=200, batch_size=10))
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
    plain = engine_for(dtype=torch.float32, examples=200, batch_size=10)
    schedule = torch.optim.lr_scheduler.StepLR(plain.optimizer, 2, 0.9)
    train(plain, 7, schedule.step)
    assert_same(found, train(plain, 25, schedule.step), torch.float32)
