"""What a model or a loss reads changes after its graph was made: another graph runs, or none."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graphs import assert_as_eager, interpret
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.compiled import clip as compiling


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
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def compiled(model, loss_fn, policy=1e9, batches=range(compiling.TRIALS + 2)):
    """A clipper after so many batches."""
    clipper = ghostclip.GhostClipper(model, policy, compile=True)
    for seed in batches:
        model.zero_grad()
        clipper.clip(loss_fn, batch_of(seed))
    return clipper


class Annealed:
    """A loss with a weight, in the manner of trainers."""

    weight = 1.0

    def __init__(self):
        self.step = 0

    @property
    def by_step(self):
        return 1.0 + self.step

    def losses(self, model, batch):
        return self.by_step * losses(model, batch)

    @classmethod
    def of_class(cls, model, batch):
        return cls.weight * losses(model, batch)


class ByEpoch(Annealed):
    """As Lightning's modules, which ask their trainer's loops."""

    def __init__(self):
        self.trainer = SimpleNamespace(loop=SimpleNamespace(epoch=0))

    @property
    def epoch(self):
        return self.trainer.loop.epoch

    def losses(self, model, batch):
        return (1.0 + self.epoch) * losses(model, batch)


class Inherited(Annealed):
    def losses(self, model, batch):
        return super().losses(model, batch) + 0.0


class Scaled(nn.Module):
    """A net whose outputs are scaled by an entry of a dict."""

    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.body, self.settings = net(), {"scale": 1.0}

    @property
    def scale(self):
        return self.settings["scale"]

    def forward(self, x):
        return self.body(x) * self.settings["scale"]

    def elbo(self, batch):
        return self.settings["scale"] * losses(self.body, batch)


class ScaledByProperty(Scaled):
    def forward(self, x):
        return self.body(x) * self.scale


class ScaledBelow(Scaled):
    def forward(self, x):
        return super().forward(x)


class ScaledByClass(Scaled):
    def forward(self, x):
        return self.body(x) * self.temperature


class Flagged(Scaled):
    def forward(self, x):
        return self.body(x) * (1.0 if "scale" in self.settings else 3.0)


class Growing(nn.Module):
    """More of its blocks are used as training goes on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.active, self.waiting = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]), [0], [1, 2]
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for number in self.active:
            x = self.blocks[number](x).tanh()
        return self.head(x) if self.waiting else self.head(2 * x)


class Smooth(nn.Module):
    def __init__(self, smoothing):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=self.smoothing)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Smooth(0.0), Smooth(0.0)])

    def forward(self, outputs, labels):
        return sum(part(outputs, labels) for part in self.parts)


class Halved:
    """A policy of one's own."""

    def __init__(self):
        self.sensitivity, self.share = 1.0, 0.5

    def weights(self, norms):
        return self.share * (self.sensitivity / norms).clamp(max=1)


def of_trainer(kind):
    trainer = kind()
    return net(), trainer.losses, lambda _: setattr(trainer, "step", 9)


def of_epochs():
    trainer = ByEpoch()
    return net(), trainer.losses, lambda _: setattr(trainer.trainer.loop, "epoch", 3)


def of_class():
    return net(), Annealed.of_class, lambda patch: patch.setattr(Annealed, "weight", 6.0)


def of_settings(kind, loss_fn=losses):
    model = kind()
    return model, loss_fn, lambda _: model.settings.update(scale=7.0)


def of_class_of_model():
    return ScaledByClass(), losses, lambda patch: patch.setattr(ScaledByClass, "temperature", 5.0)


def of_forward():
    return Scaled(), losses, lambda patch: patch.setattr(Scaled, "forward", Flagged.forward)


def of_keys():
    model = Flagged()
    return model, losses, lambda _: model.settings.update(other=model.settings.pop("scale"))


def of_lists():
    model = Growing()
    return model, losses, lambda _: model.active.append(model.waiting.pop(0))


def of_type():
    model = Scaled()
    return model, losses, lambda _: setattr(model.body[1], "__class__", nn.Sigmoid)


def of_teacher(change):
    teacher = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.9)).requires_grad_(False)

    def distilled(model, batch):
        return (model(batch[0]) - teacher(batch[0])).square().sum(1)

    return net(), distilled, lambda _: change(teacher)


def other_weights(teacher):
    teacher.load_state_dict({name: 5 * each for name, each in teacher.state_dict().items()}, assign=True)
    teacher.eval()


def of_criterion(change):
    criterion = Sum()
    return net(), lambda model, batch: criterion(model(batch[0]), batch[1]), lambda _: change(criterion)


def of_arguments():
    arguments = SimpleNamespace(weight=1.0, step=0)
    return (
        net(),
        lambda model, batch: arguments.weight * losses(model, batch),
        lambda _: vars(arguments).update(weight=4),
    )


class OfSettings:
    def __init__(self):
        self.settings = SimpleNamespace(weight=1.0)

    def losses(self, model, batch):
        return self.settings.weight * losses(model, batch)


def of_arguments_of_trainer():
    trainer = OfSettings()
    return net(), trainer.losses, lambda _: setattr(trainer.settings, "weight", 4.0)


WEIGHTS = {"first": 1.0}


def weighted(model, batch):
    return WEIGHTS["first"] * losses(model, batch)


def of_global_dict():
    return net(), lambda model, batch: weighted(model, batch), lambda patch: patch.setitem(WEIGHTS, "first", 4.0)


CHANGES = {
    "property of a loss's object": lambda: of_trainer(Annealed),
    "property of an object far away": of_epochs,
    "method of the class above": lambda: of_trainer(Inherited),
    "number of a class method's class": of_class,
    "dict behind a property": lambda: of_settings(ScaledByProperty),
    "dict read by the class above": lambda: of_settings(ScaledBelow),
    "dict read by a method that the loss calls": lambda: of_settings(
        ScaledByClass, lambda model, batch: model.elbo(batch)
    ),
    "dict of the model read by the loss": lambda: of_settings(
        ScaledByClass, lambda model, batch: model.settings["scale"] * losses(model, batch)
    ),
    "number of the model's class": of_class_of_model,
    "forward of the model's class": of_forward,
    "keys of a dict": of_keys,
    "an entry from one list to the next": of_lists,
    "class of a module": of_type,
    "tensors of a teacher": lambda: of_teacher(other_weights),
    "mode of a teacher": lambda: of_teacher(nn.Module.eval),
    "number in a criterion of a criterion": lambda: of_criterion(lambda each: setattr(each.parts[1], "smoothing", 0.9)),
    "hook on a criterion": lambda: of_criterion(
        lambda each: each.register_forward_hook(lambda module, inputs, output: 3 * output)
    ),
    "global dict in a helper function": of_global_dict,
    "number of an object": of_arguments,
    "number of an object's object": of_arguments_of_trainer,
}


@pytest.mark.parametrize("name", CHANGES)
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


def test_loss_functions_that_are_made_anew_are_not_kept():
    clipper, made = ghostclip.GhostClipper(net(), 1.0, compile=True), list[Any]()
    for seed in range(10):
        values = torch.full((1,), float(seed))
        made.append(weakref.ref(values))
        clipper.clip(lambda model, batch, weight=values: weight * losses(model, batch), batch_of(seed))
        del values
    gc.collect()
    assert sum(each() is not None for each in made) <= clipper.compiled.graphs


def test_a_policy_of_one_s_own_with_another_number_has_another_graph():
    policy = Halved()
    clipper = compiled(net(), losses, policy)
    policy.share = 0.25
    for _ in range(2):
        assert_as_eager(clipper, losses, batch_of())


def test_a_change_that_is_found_in_batches_of_one_size_ends_the_graphs_of_all(monkeypatch):
    monkeypatch.setattr(compiling, "MEASURED", 16)

    settings = {"loss": {"loss": {"loss": {"loss": {"loss": 1.0}}}}}

    def loss_fn(model, batch):
        return settings["loss"]["loss"]["loss"]["loss"]["loss"] * losses(model, batch)

    model = net()
    clipper = ghostclip.GhostClipper(model, 1e9, compile=True)
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
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])
    teacher.double()
    assert_as_eager(clipper, distilled, batch_of())
    assert "dtype" in clipper.compiled.refusals[0]


@pytest.mark.parametrize("generator", [np.random.default_rng(0), np.random.RandomState(0)], ids=["numpy", "older"])
def test_a_loss_that_draws_from_a_generator_of_its_own_has_no_graph(generator):
    clipper = compiled(net(), lambda model, batch: losses(model, batch) * (0.1 + (generator.uniform() < 0.999)))
    assert clipper.compiled.graphs == 0
    assert "depends on something besides the batch" in clipper.compiled.refusals[0]


PICKS = {
    "a mask": lambda lengths: lengths[lengths < 4].numel() == 0,
    "masked_select": lambda lengths: lengths.masked_select(lengths < 4).numel() == 0,
    "nonzero": lambda lengths: len((lengths < 4).nonzero()) == 0,
    "where": lambda lengths: len(torch.where(lengths < 4)[0]) == 0,
    "argwhere": lambda lengths: len(torch.argwhere(lengths < 4)) == 0,
    "unique": lambda lengths: len(lengths.unique()) == 1,
    "unique_consecutive": lambda lengths: len(lengths.unique_consecutive()) == 1,
    "bincount": lambda lengths: len(lengths.bincount()) == 1,
    "repeat_interleave": lambda lengths: len(lengths.repeat_interleave(4 - lengths)) == 0,
}


@pytest.mark.parametrize("picks", PICKS.values(), ids=PICKS)
def test_a_branch_on_how_many_entries_are_picked_has_no_graph(picks):
    """The sums of later batches would depend on the batch that the graph was made with."""

    def loss_fn(model, batch):
        found = losses(model, batch)
        return found if picks(batch[1]) else 2 * found

    clipper = compiled(net(), loss_fn)
    assert clipper.compiled.graphs == 0
    assert "looks at values of its tensors" in clipper.compiled.refusals[0]


def test_numbers_of_a_tensor_that_the_forward_makes_of_sizes_are_constants():
    clipper = compiled(net(), lambda model, batch: losses(model, batch) / torch.tensor(batch[0].shape[1]).sqrt().item())
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])


@pytest.mark.parametrize("copies", [False, True], ids=["read", "copied into a tensor of the forward's"])
def test_numbers_of_any_other_tensor_are_not(copies):
    temperature = torch.tensor(1.0)

    def loss_fn(model, batch):
        read = torch.tensor(0.0).copy_(temperature) if copies else temperature
        return losses(model, batch) * read.item()

    clipper = compiled(net(), loss_fn)
    assert "looks at values of its tensors" in clipper.compiled.refusals[0]
    temperature.fill_(0.1)
    assert_as_eager(clipper, loss_fn, batch_of())


def test_rows_moved_by_a_tensor_that_a_graph_would_read_anew_have_no_graph():
    """There and back: whose rows are whose in between would be known from the order of earlier batches."""
    order = torch.arange(8)

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.first(x)[order].tanh())[order.argsort()]

    clipper = compiled(Moving(), losses, 0.1)
    assert clipper.compiled.graphs == 0
    assert_as_eager(clipper, losses, batch_of())
    order.copy_(torch.tensor([3, 2, 1, 0, 7, 6, 5, 4]))
    assert_as_eager(clipper, losses, batch_of(1))
