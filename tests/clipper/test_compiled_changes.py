"""What a model, a loss or a policy reads changes after its graph was made: another graph runs, or none."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from case_models import By, Wired
from graphs import assert_as_eager, interpret
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.clipping import PerLayer
from ghostclip.compiled import clip as compiling
from ghostclip.compiled.signature import ModelState, function_key


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch)


def batch_of(seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3))


def compiled(model, loss_fn=losses, policy=1e9):
    """A clipper whose graph for batches of 8 is in use."""
    clipper = ghostclip.GhostClipper(model, policy, compile=True)
    for seed in range(compiling.TRIALS + 2):
        model.zero_grad()
        clipper.clip(loss_fn, batch_of(seed))
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])
    return clipper


# What changes: each row makes a model, a loss function and the change ---


def of_net(change):
    model = net()
    return model, losses, lambda _: change(model)


OF_NETS = {
    "an attribute": lambda net: setattr(net[2], "p", 1),
    "an attribute's type": lambda net: setattr(net[2], "p", False),
    "a new attribute": lambda net: setattr(net[2], "extra", 3),
    "a module": lambda net: net.__setitem__(1, nn.ReLU()),
    "a module's class": lambda net: setattr(net[1], "__class__", nn.Sigmoid),
    "a module without parameters inside of a leaf": lambda net: net[1].add_module("inner", nn.ReLU()),
    "a mode": lambda net: net[2].eval(),
    "what is trained": lambda net: net[0].bias.requires_grad_(False),
    "a parameter": lambda net: setattr(net[0], "bias", nn.Parameter(torch.ones(8))),
    "a parameter's layout": lambda net: setattr(net[0].weight, "data", net[0].weight.data.mT.contiguous().mT),
    "a buffer": lambda net: net[1].register_buffer("table", torch.ones(2)),
    "a forward hook": lambda net: net[1].register_forward_hook(lambda *_: None),
    "a hook before the forward": lambda net: net[1].register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda net: net[1].register_full_backward_hook(lambda *_: None),
    "a hook before the backward": lambda net: net[1].register_full_backward_pre_hook(lambda *_: None),
    "a parameter's hook": lambda net: net[0].weight.register_hook(lambda grad: grad),
    "a hook on what was summed": lambda net: net[0].weight.register_post_accumulate_grad_hook(lambda p: None),
}


class Scaled(nn.Module):
    """A net whose outputs are scaled by an entry of a dict."""

    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.body, self.settings, self.active, self.waiting = net(), {"scale": 1.0}, [1.0], [2.0, 3.0]
        self.options = SimpleNamespace(weight=1.0)

    @property
    def weight(self):
        return self.options.weight

    @property
    def scale(self):
        return self.settings["scale"]

    def forward(self, x):
        return self.body(x) * self.settings["scale"]

    def elbo(self, batch):
        return self.settings["scale"] * losses(self.body, batch)

    def weighted(self, batch):
        return self.weight * losses(self.body, batch)

    def shares(self):
        return sum(self.active) / sum(share for share in self.waiting)


class ScaledBelow(Scaled):
    def forward(self, x):
        return super().forward(x)


def scaled(forward):
    return type("Model", (Scaled,), {"forward": forward})


def of_model(kind, change, loss_fn=losses):
    model = kind()
    return model, loss_fn, lambda patch: change(model, patch)


def reweigh(model, _):
    model.options.weight = 5.0


def rescale(model, _):
    model.settings.update(scale=7.0)


def rename(model, _):
    model.settings.update(other=model.settings.pop("scale"))


Warm = scaled(lambda self, x: self.body(x) * self.temperature)
OF_MODELS = {
    "dict behind a property": (scaled(lambda self, x: self.body(x) * self.scale), rescale),
    "dict read by the class above": (ScaledBelow, rescale),
    "dict read by a method that the loss calls": (Warm, rescale, lambda model, batch: model.elbo(batch)),
    "dict of the model read by the loss": (
        Warm, rescale, lambda model, batch: model.settings["scale"] * losses(model, batch),
    ),
    "keys of a dict": (scaled(lambda self, x: self.body(x) * (1.0 if "scale" in self.settings else 3.0)), rename),
    "an entry from one list to the next": (
        scaled(lambda self, x: self.body(x) * self.shares()), lambda m, _: m.active.append(m.waiting.pop(0)),
    ),
    "object's number behind a property": (scaled(lambda self, x: self.body(x) * self.weight), reweigh),
    "object's number in a method that the loss calls": (Warm, reweigh, lambda model, batch: model.weighted(batch)),
    "global of its file": (scaled(lambda self, x: self.body(x) * BETA), lambda _, p: p.setitem(globals(), "BETA", 2.0)),
    "number of the model's class": (Warm, lambda _, patch: patch.setattr(Warm, "temperature", 5.0)),
    "forward of the model's class": (Scaled, lambda _, patch: patch.setattr(Scaled, "forward", Warm.forward)),
}  # fmt: skip


BETA, WEIGHTS = 1.0, {"first": 1.0}


class Trainer:
    """Losses with weights, which trainers keep in several places; what it counts is no part of them."""

    gamma = 1.0

    def __init__(self):
        self.step, self.sum, self.history, self.settings = 0, 0.0, [], SimpleNamespace(weight=1.0)
        self.beta, self.table, self.rates, self.weights = 1.0, torch.ones(3), {"beta": 1.0}, [1.0, 2.0]
        self.criterion = nn.CrossEntropyLoss(torch.ones(3), reduction="none")
        self.trainer = SimpleNamespace(loop=SimpleNamespace(epoch=0))

    @property
    def by_step(self):
        return 1.0 + self.step

    @property
    def epoch(self):
        """As Lightning's modules ask their trainer's loops."""
        return self.trainer.loop.epoch

    def of_property(self, model, batch):
        return self.by_step * losses(model, batch)

    def of_epoch(self, model, batch):
        return (1.0 + self.epoch) * losses(model, batch)

    def of_settings(self, model, batch):
        return self.settings.weight * losses(model, batch)

    def of_helper(self, *given):
        return self.of_settings(*given)

    def of_parts(self, model, batch):
        outputs = model(batch[0])
        return self.more(outputs, batch[1]) * BETA + outputs.sum(1) * sum(w * w for w in self.weights)

    def more(self, outputs, labels):
        return outputs @ self.table * self.beta * self.rates["beta"] + self.gamma * self.criterion(outputs, labels)

    @classmethod
    def of_class(cls, model, batch):
        return cls.gamma * losses(model, batch)


class Inherited(Trainer):
    def of_property(self, model, batch):
        return super().of_property(model, batch) + 0.0


def of_method(method, change, kind=Trainer):
    trainer = kind()
    return net(), getattr(trainer, method), lambda patch: change(trainer, patch)


def next_step(trainer, _):
    trainer.step = 9


OF_METHODS = {
    "number": ("of_parts", lambda trainer, _: setattr(trainer, "beta", 2.0)),
    "tensor": ("of_parts", lambda trainer, _: setattr(trainer, "table", torch.ones(3))),
    "dict": ("of_parts", lambda trainer, _: trainer.rates.update(beta=2.0)),
    "list in a generator": ("of_parts", lambda trainer, _: trainer.weights.append(3.0)),
    "buffer of a criterion": ("of_parts", lambda trainer, _: setattr(trainer.criterion, "weight", torch.ones(3))),
    "attribute of a criterion": ("of_parts", lambda trainer, _: setattr(trainer.criterion, "label_smoothing", 0.1)),
    "class attribute": ("of_parts", lambda _, patch: patch.setattr(Trainer, "gamma", 2.0)),
    "global number": ("of_parts", lambda _, patch: patch.setitem(globals(), "BETA", 2.0)),
    "property": ("of_property", next_step),
    "property of an object far away": ("of_epoch", lambda trainer, _: setattr(trainer.trainer.loop, "epoch", 3)),
    "method of the class above": ("of_property", next_step, Inherited),
    "number of a class method's class": ("of_class", lambda _, patch: patch.setattr(Trainer, "gamma", 6.0)),
    "number of an object's object": ("of_helper", lambda trainer, _: setattr(trainer.settings, "weight", 4.0)),
}


def of_teacher(change):
    teacher = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.9)).requires_grad_(False)

    def distilled(model, batch):
        return (model(batch[0]) - teacher(batch[0])).square().sum(1)

    return net(), distilled, lambda _: change(teacher)


def other_weights(teacher):
    teacher.load_state_dict({name: 5 * each for name, each in teacher.state_dict().items()}, assign=True)
    teacher.eval()


class Smooth(nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=self.label_smoothing)


def of_criterion(change):
    criterion = Wired(lambda m, *given: m.first(*given) + m.second(*given), first=Smooth(), second=Smooth())
    return net(), lambda model, batch: criterion(model(batch[0]), batch[1]), lambda _: change(criterion)


def of_arguments():
    arguments = SimpleNamespace(weight=1.0, step=0)
    loss_fn = lambda model, batch: arguments.weight * losses(model, batch)  # noqa: E731
    return net(), loss_fn, lambda _: vars(arguments).update(weight=4)


def weighted(model, batch):
    return WEIGHTS["first"] * losses(model, batch)


def of_global_dict():
    return net(), lambda model, batch: weighted(model, batch), lambda patch: patch.setitem(WEIGHTS, "first", 4.0)


CHANGES = {
    **{name: partial(of_net, change) for name, change in OF_NETS.items()},
    **{name + " of the model's": partial(of_model, *row) for name, row in OF_MODELS.items()},
    **{name + " of the loss's object": partial(of_method, *row) for name, row in OF_METHODS.items()},
    "tensors of a teacher": lambda: of_teacher(other_weights),
    "mode of a teacher": lambda: of_teacher(nn.Module.eval),
    "number in a criterion of a criterion": lambda: of_criterion(lambda m: setattr(m.second, "label_smoothing", 0.9)),
    "hook on a criterion": lambda: of_criterion(
        lambda m: m.register_forward_hook(lambda m, inputs, output: 3 * output)
    ),
    "number of an object": of_arguments,
    "global dict in a helper function": of_global_dict,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_part_of_a_graphs_key(name, monkeypatch):
    model, loss_fn, change = CHANGES[name]()
    state = ModelState(model)
    before = state.key(), *function_key(loss_fn, model)
    change(monkeypatch)
    assert (state.key(), function_key(loss_fn, model)[0]) != before[:2]


def test_what_no_code_reads_is_no_part_of_a_graphs_key():
    model, trainer = net(), Trainer()
    model[1].history = []
    state, (before, kept) = ModelState(model), function_key(trainer.of_parts)
    key = state.key()
    model[1].history.append(1.0)
    assert state.key() is key
    trainer.step += 1
    trainer.sum += 1.0  # a name in the code, but of another object
    trainer.history.append(1.0)
    assert function_key(trainer.of_parts)[0] == before
    assert trainer in kept


class Halved:
    """A policy of one's own."""

    def __init__(self):
        self.sensitivity, self.shares = 1.0, {"all": 0.5}

    def weights(self, norms):
        return self.shares["all"] * (self.sensitivity / norms).clamp(max=1)


@pytest.mark.parametrize(
    ("policy", "numbers", "others"),
    [
        (Halved(), lambda policy: policy.shares, {"all": 0.25}),
        (PerLayer(thresholds={"0": 0.006, "3": 0.008}), lambda policy: policy.thresholds, {"0": 0.008, "3": 0.006}),
    ],
    ids=["of one's own", "per layer, of the same sensitivity"],
)
def test_a_policy_with_other_numbers_has_another_graph(policy, numbers, others):
    clipper = compiled(net(), policy=policy)
    numbers(clipper.clipping).update(others)
    for _ in range(2):
        assert_as_eager(clipper, losses, batch_of())


def test_a_graph_holds_what_its_key_names():
    """Lest another object gets the id of one that is gone."""
    model, criterion = net(), Criterion(1.0)
    model[1] = By(lambda x: 3.0 * x)
    named = [weakref.ref(each) for each in (model[1], model[1].operation, criterion, model[0].bias, model[0])]
    clipper = compiled(model, partial(lambda each, model, batch: each(model, batch), criterion))
    del criterion
    model[0], model[1] = ghostclip.nn.Linear(6, 8), nn.ReLU()
    for _ in range(3):
        assert_as_eager(clipper, losses, batch_of())
    gc.collect()
    assert all(each() is not None for each in named)
    clipper.compiled._plans.clear()
    gc.collect()
    assert [each() for each in named[:3]] == [None] * 3


def test_loss_functions_that_are_made_anew_are_not_kept():
    clipper, made = ghostclip.GhostClipper(net(), 1.0, compile=True), []
    for seed in range(6):
        values = torch.full((1,), float(seed))
        made.append(weakref.ref(values))
        clipper.clip(lambda model, batch, weight=values: weight * losses(model, batch), batch_of(seed))
        del values
    gc.collect()
    assert sum(each() is not None for each in made) <= clipper.compiled.graphs


def test_autocast_and_hooks_of_all_modules_are_no_part_of_a_graph_made_without():
    clipper = compiled(net())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert_as_eager(clipper, losses, batch_of())
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: 2 * output)
    assert_as_eager(clipper, losses, batch_of())
    handle.remove()
    assert_as_eager(clipper, losses, batch_of())


def test_a_change_that_is_found_in_batches_of_one_size_ends_the_graphs_of_all(monkeypatch):
    monkeypatch.setattr(compiling, "MEASURED", 16)
    settings = {"loss": {"loss": {"loss": {"loss": {"loss": 1.0}}}}}

    def loss_fn(model, batch):
        return settings["loss"]["loss"]["loss"]["loss"]["loss"] * losses(model, batch)

    clipper = ghostclip.GhostClipper(net(), 1e9, compile=True)
    for seed in range(12):
        for size in (8, 5):
            clipper.clip(loss_fn, batch_of(seed, size))
    assert clipper.compiled.graphs == 2
    settings["loss"]["loss"]["loss"]["loss"]["loss"] = 4.0
    for seed in range(16):
        clipper.clip(loss_fn, batch_of(seed))
    assert "differ from eager's" in clipper.compiled.refusals[0]
    assert_as_eager(clipper, loss_fn, batch_of(0, 5))


def test_a_graph_that_meets_a_tensor_of_another_type_leaves_the_batch_to_eager():
    teacher = nn.Linear(6, 3).requires_grad_(False)

    def distilled(model, batch):
        return (model(batch[0]) - teacher(batch[0].to(teacher.weight.dtype)).float()).square().sum(1)

    clipper = compiled(net(), distilled)
    teacher.double()
    assert_as_eager(clipper, distilled, batch_of())
    assert "dtype" in clipper.compiled.refusals[0]


# Which function it is ---


class Criterion(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, model, batch):
        return losses(model, batch) * self.value


def with_attribute(value):
    loss_fn = lambda model, batch: losses(model, batch)  # noqa: E731
    loss_fn.scale = value
    return loss_fn


MADE = {
    "closing": lambda value: lambda model, batch: losses(model, batch) * (value is True or value == 2),
    "default": lambda value: lambda model, batch, scale=value: losses(model, batch) * scale,
    "keyword": lambda value: lambda model, batch, *, scale=value: losses(model, batch) * scale,
    "attribute": with_attribute,
    "bound": lambda value: partial(lambda scale, model, batch: losses(model, batch) * scale, value),
    "bound by name": lambda value: partial(lambda model, batch, scale: losses(model, batch) * scale, scale=value),
    "module": Criterion,
    "method": lambda value: Criterion(value).forward,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_functions_are_keyed_by_everything_that_is_bound_to_them(make):
    values = [True, 1, 1.0, 0, 0.0, -0.0, False, None, "1", b"1", float("nan"), (1, 2), (True, 2), [1, 2], {"a": 1}]
    values += [{"a": True}, (1, (2, 3)), (1, (2, 4)), torch.tanh, torch.exp]
    functions = [make(value) for value in values]
    keys = [function_key(function)[0] for function in functions]
    assert len(set(keys)) == len(keys)
    assert [function_key(function)[0] for function in functions] == keys


def test_a_function_remade_with_another_value_is_not_clipped_by_the_old_graph():
    make = MADE["closing"]
    clipper = compiled(net(), make(2), 1e-2)
    for value in (True, 2.0, 1, 2):
        for _ in range(2):
            assert_as_eager(clipper, make(value), batch_of())


class Circular:
    """Methods that call each other and themselves, of an object that refers to itself."""

    def __init__(self):
        self.own, self.steps = self, 0

    def losses(self, model, batch):
        return self.again(model, batch) if self.steps < 0 else losses(model, batch)

    def again(self, model, batch):
        return self.own.losses(model, batch) + self.again(model, batch)


class Raising:
    """A loss whose attributes can't be read."""

    @property
    def __dict__(self):
        raise RuntimeError("not yet")

    def __call__(self, model, batch):
        return losses(model, batch)


def test_no_object_of_a_loss_stops_a_step():
    assert function_key(Circular().losses)[0]
    clipper = ghostclip.GhostClipper(net(), 1e-2, compile=True)
    for _ in range(3):
        assert_as_eager(clipper, Raising(), batch_of())
    assert clipper.compiled.refusals == ["the loss function can't be told from others: RuntimeError: not yet"]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.one_in(12)
def test_no_graph_of_before_runs_after_a_change(name, monkeypatch):
    model, loss_fn, change = CHANGES[name]()
    clipper = compiled(model, loss_fn)
    (plan,) = clipper.compiled._plans.values()
    assert plan.region.runs > compiling.TRIALS
    change(monkeypatch)
    runs = plan.region.runs
    states = torch.get_rng_state()
    for seed in (20, 21):
        torch.set_rng_state(states)
        clipper.clip(loss_fn, batch_of(seed))
        model.zero_grad()
    assert plan.region.runs == runs
