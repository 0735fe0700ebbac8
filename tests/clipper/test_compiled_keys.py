"""What a compiled graph has built in may not change without another graph; and trials leave no trace."""

import collections
import functools
import gc
import weakref

import pytest
import torch
from case_models import By
from comparing import assert_dicts_close, gradients
from graphs import assert_as_eager, interpret

import ghostclip
from ghostclip.clipping import PerLayer
from ghostclip.compiled import clip as compiling
from ghostclip.compiled.signature import ModelState, function_key


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch)


def losses_of(model, x):
    return model(x).square().mean(1)


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(8, 3))


def batch_of(size=8, seed=0):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))


def trained(model, loss_fn=losses_of, policy=1e-2):
    """A clipper whose graph for batches of 8 is in use."""
    clipper = ghostclip.GhostClipper(model, policy, compile=True)
    for _ in range(compiling.TRIALS + 2):
        model.zero_grad()
        clipper.clip(loss_fn, batch_of())
    assert clipper.compiled.refusals == []
    assert clipper.compiled.graphs == 1
    return clipper


def test_a_graph_holds_what_its_key_names():
    """Lest another object gets the id of one that is gone."""
    model, criterion = classifier(), Criterion(1.0)
    model[1] = By(lambda x: 3.0 * x)
    named = [weakref.ref(each) for each in (model[1], model[1].operation, criterion, model[0].bias, model[0])]
    clipper = trained(model, functools.partial(lambda each, model, x: each(model, x), criterion))
    del criterion
    model[0], model[1] = ghostclip.nn.Linear(6, 8), torch.nn.ReLU()
    for _ in range(3):
        assert_as_eager(clipper, losses_of, batch_of())
    gc.collect()
    assert all(each() is not None for each in named)
    clipper.compiled._plans.clear()
    gc.collect()
    assert [each() for each in named[:3]] == [None] * 3


def test_autocast_and_hooks_of_all_modules_are_no_part_of_a_graph_made_without():
    clipper = trained(classifier())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert_as_eager(clipper, losses_of, batch_of())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: 2 * output)
    assert_as_eager(clipper, losses_of, batch_of())
    handle.remove()
    assert_as_eager(clipper, losses_of, batch_of())


def test_policies_are_keyed_by_their_numbers():
    clipper = trained(classifier(), policy=PerLayer(thresholds={"0": 0.006, "3": 0.008}))
    clipper.clipping.thresholds.update({"0": 0.008, "3": 0.006})
    assert_as_eager(clipper, losses_of, batch_of())


def bump(value):
    def change(model):
        model[2].p = value

    return change


def cast(model):
    model[0].weight.data = model[0].weight.data.mT.contiguous().mT


class Settings(torch.nn.Dropout):
    """A module with settings in containers."""

    def __init__(self):
        super().__init__(0.0)
        self.settings, self.rates, self.history = {"beta": 1.0}, [0.1, 0.2], []

    def forward(self, x):
        return x * self.settings["beta"] + self.shifted(x)

    def shifted(self, x):
        return sum(rate * x for rate in self.rates)


CHANGES = {
    "an attribute": bump(1),
    "a setting": lambda model: model[4].settings.update(beta=2.0),
    "a rate": lambda model: model[4].rates.__setitem__(1, 0.3),
    "an attribute's type": bump(False),
    "a new attribute": lambda model: setattr(model[2], "extra", 3),
    "a module": lambda model: model.__setitem__(1, torch.nn.ReLU()),
    "a module without parameters inside of a leaf": lambda model: model[1].add_module("inner", torch.nn.ReLU()),
    "a mode": lambda model: model[2].eval(),
    "what is trained": lambda model: model[0].bias.requires_grad_(False),
    "a parameter": lambda model: setattr(model[0], "bias", torch.nn.Parameter(torch.ones(8))),
    "a parameter's layout": cast,
    "a buffer": lambda model: model[1].register_buffer("table", torch.ones(2)),
    "a forward hook": lambda model: model[1].register_forward_hook(lambda *_: None),
    "a hook before the forward": lambda model: model[1].register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda model: model[1].register_full_backward_hook(lambda *_: None),
    "a hook before the backward": lambda model: model[1].register_full_backward_pre_hook(lambda *_: None),
    "a parameter's hook": lambda model: model[0].weight.register_hook(lambda grad: grad),
    "a hook on what was summed": lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_about_a_model_makes_another_key(change):
    model = classifier().append(Settings())
    state = ModelState(model)
    before = state.key()
    model[4].history.append(1.0)  # of which the forward knows nothing
    assert state.key() is before
    change(model)
    assert state.key() != before


def closing(value):
    return lambda model, x: losses_of(model, x) * (value is True or value == 2)


def with_default(value):
    def loss(model, x, scale=value):
        return losses_of(model, x) * scale

    return loss


def with_keyword(value):
    def loss(model, x, *, scale=value):
        return losses_of(model, x) * scale

    return loss


def with_attribute(value):
    def loss(model, x):
        return losses_of(model, x)

    loss.scale = value
    return loss


def bound(value):
    return functools.partial(lambda scale, model, x: losses_of(model, x) * scale, value)


def bound_by_name(value):
    return functools.partial(lambda model, x, scale: losses_of(model, x) * scale, scale=value)


class Criterion(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, model, x):
        return losses_of(model, x) * self.value


def of_method(value):
    return Criterion(value).forward


@pytest.mark.parametrize(
    "make", [closing, with_default, with_keyword, with_attribute, bound, bound_by_name, Criterion, of_method]
)
def test_functions_are_keyed_by_everything_that_is_bound_to_them(make):
    values = [True, 1, 1.0, 0, 0.0, -0.0, False, None, "1", b"1", float("nan"), (1, 2), (True, 2), [1, 2], {"a": 1}]
    values += [{"a": True}, (1, (2, 3)), (1, (2, 4)), torch.tanh, torch.exp]
    functions = [make(value) for value in values]
    keys = [function_key(function)[0] for function in functions]
    assert len(set(keys)) == len(keys)
    assert [function_key(function)[0] for function in functions] == keys


BETA = 1.0


class Trainer:
    """Its loss is a method, and it is no function itself; what it counts is no part of the loss."""

    gamma = 1.0

    def __init__(self):
        self.beta, self.table, self.settings, self.steps = 1.0, torch.ones(3), {"beta": 1.0}, 0
        self.sum, self.history, self.weights = 0.0, [], [1.0, 2.0]
        self.criterion = torch.nn.CrossEntropyLoss(torch.ones(3), reduction="none")

    def losses(self, model, x):
        return losses_of(model, x) * BETA + self.more(model(x)) + model(x).sum(1) * sum(w * w for w in self.weights)

    def more(self, outputs):
        classes = self.criterion(outputs, torch.zeros(len(outputs), dtype=torch.int64))
        return outputs @ self.table * self.beta * self.settings["beta"] + self.gamma * classes


@pytest.mark.parametrize(
    "change",
    [
        lambda trainer, _: setattr(trainer, "beta", 2.0),
        lambda trainer, _: setattr(trainer, "table", torch.ones(3)),
        lambda trainer, _: trainer.settings.update(beta=2.0),
        lambda trainer, _: trainer.weights.append(3.0),
        lambda trainer, _: setattr(trainer.criterion, "weight", torch.ones(3)),
        lambda trainer, _: setattr(trainer.criterion, "label_smoothing", 0.1),
        lambda trainer, patch: patch.setattr(Trainer, "gamma", 2.0),
        lambda trainer, patch: patch.setitem(globals(), "BETA", 2.0),
    ],
    ids=[
        "number",
        "tensor",
        "dict",
        "list in a generator",
        "buffer of a criterion",
        "its attribute",
        "class attribute",
        "global number",
    ],
)
def test_methods_are_keyed_by_what_their_code_reads_and_by_nothing_else(change, monkeypatch):
    trainer = Trainer()
    before, kept = function_key(trainer.losses)
    trainer.steps += 1
    trainer.sum += 1.0  # a name in the code, but of another object
    trainer.history.append(1.0)
    assert function_key(trainer.losses)[0] == before
    change(trainer, monkeypatch)
    assert function_key(trainer.losses)[0] != before
    assert trainer in kept


class Circular:
    """Methods that call each other and themselves, of an object that refers to itself."""

    def __init__(self):
        self.own, self.steps = self, 0

    def losses(self, model, x):
        return self.again(model, x) if self.steps < 0 else losses_of(model, x)

    def again(self, model, x):
        return self.own.losses(model, x) + self.again(model, x)


class Raising:
    """A loss whose attributes can't be read."""

    @property
    def __dict__(self):
        raise RuntimeError("not yet")

    def __call__(self, model, x):
        return losses_of(model, x)


def test_no_object_of_a_loss_stops_a_step():
    assert function_key(Circular().losses)[0]
    clipper = ghostclip.GhostClipper(classifier(), 1e-2, compile=True)
    for _ in range(3):
        assert_as_eager(clipper, Raising(), batch_of())
    assert clipper.compiled.refusals == ["the loss function can't be told from others: RuntimeError: not yet"]


@pytest.mark.parametrize("make", [closing, with_default, with_keyword])
@pytest.mark.one_in(3)
def test_a_function_remade_with_another_value_is_not_clipped_by_the_old_graph(make):
    clipper = trained(classifier(), make(2))
    for value in (True, 2.0, 1, 2):
        for _ in range(2):
            assert_as_eager(clipper, make(value), batch_of())


def test_a_hook_added_to_a_compiled_model_is_called_at_each_step():
    model, seen = classifier(), []
    clipper = trained(model)
    handle = model[1].register_forward_hook(lambda module, inputs, output: seen.append(1) or 2 * output)
    for _ in range(8):
        clipper.clip(losses_of, batch_of())
    assert_as_eager(clipper, losses_of, batch_of())
    assert len(seen) == 10
    assert "hooks of 1 want to be called" in clipper.compiled.refusals[0]
    handle.remove()
    assert_as_eager(clipper, losses_of, batch_of())
    assert len(seen) == 10


def test_hooks_of_parameters_run_on_the_sum_though_compiling_was_asked_for():
    model = classifier()
    ghostclip.GhostClipper(model, 1e-2).clip(losses_of, batch_of())
    expected = gradients(model)
    model[0].weight.register_hook(lambda grad: 3 * grad)
    clipper = ghostclip.GhostClipper(model, 1e-2, compile=True)
    for _ in range(7):
        model.zero_grad()
        clipper.clip(losses_of, batch_of())
    assert_dicts_close(gradients(model), {**expected, "0.weight": 3 * expected["0.weight"]}, 1e-5)


FORWARDS = collections.deque()


def counted(model, batch):
    FORWARDS.append(1)
    return losses_of(model, batch[0])


class Counting(torch.nn.Module):
    """Counts its forwards, in the given manner."""

    def __init__(self, change):
        super().__init__()
        self.change, self.calls = change, 0
        self.register_buffer("count", torch.zeros(()))
        self.inner = torch.nn.Linear(6, 3)

    def forward(self, x):
        if self.change == "in place":
            self.count += 1
        elif self.change == "anew":
            self.count = self.count + 1
        elif self.change == "attribute":
            self.calls += 1
        elif self.change == "kept":
            self.last = x * 2
        elif self.change == "value":
            x = x if float(x.sum()) < 1e9 else -x
        return self.inner(x)


@pytest.mark.parametrize("change", ["in place", "anew", "attribute", "kept", "value"])
def test_trials_leave_no_trace_and_a_refusal_is_remembered(change):
    clipper = ghostclip.GhostClipper(Counting(change), 1.0, compile=True)
    model, record = clipper.model, clipper.compiled
    sizes = (8, 5, 8, 7, 6, 9, 10, 11, 12, 4, 3, 2, 8, 8, 8, 8)
    FORWARDS.clear()
    for size in sizes:
        model.zero_grad()
        clipper.clip(counted, (batch_of(size),))
    assert float(model.count) == (len(sizes) if change in ("in place", "anew") else 0)
    assert model.calls == (len(sizes) if change == "attribute" else 0)
    assert record.graphs == 0
    assert len(FORWARDS) <= len(sizes) + 2 * (2 if change == "value" else 1)
    assert len(record.refusals) <= 2
    reason = "looks at values" if change == "value" else "changes the model's buffers, attributes"
    assert all(reason in refusal for refusal in record.refusals)
