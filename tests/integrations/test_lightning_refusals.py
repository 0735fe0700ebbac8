"""PrivacyCallback refuses what can't be private, before a step is taken, and says what to use instead."""

import pytest

pytest.importorskip("lightning")

import lightning
import lightning_runs as lr
import private_runs as runs
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from torch.utils.data import DataLoader, WeightedRandomSampler

from ghostclip import (
    BudgetExceededError,
    GradientLeakError,
    LossShapeError,
    PrivacyError,
    UnsupportedModelError,
    VerificationError,
)
from ghostclip.integrations.lightning import PrivacyCallback

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")

SETTINGS = [
    ({"gradient_clip_val": 1.0}, "clipping="),
    ({"accumulate_grad_batches": 2}, "max_physical_batch_size="),
    ({"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]}, "max_physical_batch_size="),
    ({"callbacks": [LearningRateFinder()]}, "tune on public data"),
    ({"overfit_batches": 1}, "limit_train_batches"),
    ({"reload_dataloaders_every_n_epochs": 1}, "leave it out"),
    ({"precision": "16-true"}, "loss_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "remedy"), SETTINGS)
@pytest.mark.filterwarnings("ignore:.*overfit:UserWarning")
def test_settings_of_the_trainer(settings, remedy, tmp_path):
    with pytest.raises(PrivacyError, match=remedy):
        lr.fit(tmp_path, **settings)


def test_strategies(tmp_path):
    callback = PrivacyCallback(noise_multiplier=1.0)
    made = lr.trainer(tmp_path, callback)
    made.strategy.__class__ = type("FSDPStrategy", (type(made.strategy),), {})
    with pytest.raises(PrivacyError, match=r"FSDPStrategy .* 'ddp'"):
        made.fit(lr.Module(), lr.loader())


def test_a_finder_of_batch_sizes(tmp_path):
    module = lr.Module()
    module.batch_size, module.train_dataloader = 8, lr.loader
    with pytest.raises(PrivacyError, match="tune on public data"):
        lr.trainer(tmp_path, PrivacyCallback(noise_multiplier=1.0), BatchSizeFinder()).fit(module)


class Leaves(lr.Module):
    """Leaves out the rest of each epoch from its third batch on, as hooks of Lightning may."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


def test_a_batch_that_a_hook_leaves_out_is_charged(tmp_path):
    _, callback = lr.fit(tmp_path, Leaves())
    assert sum(event.count for event in callback.engine.events) == 6  # two epochs of two steps and one left out


class Mean(lr.Module):
    def losses(self, examples):
        return super().losses(examples).mean()


class Column(lr.Module):
    def losses(self, examples):
        return super().losses(examples)[:, None]


class Nothing(lr.Module):
    def training_step(self, batch, batch_idx):
        return None


class Two(lr.Module):
    def configure_optimizers(self):
        return [super(Two, self).configure_optimizers() for _ in range(2)]


class Clips(lr.Module):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Mixes(lr.Module):
    def losses(self, examples):
        losses = super().losses(examples)
        return losses * (losses / losses.mean()).detach()


class Normalises(lr.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(self.net, torch.nn.BatchNorm1d(3))


MODULES = [
    (Mean, LossShapeError, r'training_step .* \[B\] .* shape \[\].* reduction="none"'),
    (Column, LossShapeError, r"training_step .* shape \[\d+, 1\]"),
    (Nothing, LossShapeError, "training_step .* NoneType.* loss of zero"),
    (Clips, PrivacyError, "on_before_optimizer_step"),
    (Mixes, VerificationError, "examples that mix"),
    (Normalises, UnsupportedModelError, "BatchNorm"),
]


@pytest.mark.parametrize(("kind", "error", "words"), MODULES)
def test_modules(kind, error, words, tmp_path):
    module = kind()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(error, match=words):
        lr.fit(tmp_path, module)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))
    assert "training_step" not in vars(module)


def test_a_mean_in_manual_optimization(tmp_path):
    module = Mean(manual=True)
    with pytest.raises(LossShapeError, match="reduction"):
        lr.fit(tmp_path, module)


class Forgets(lr.Module):
    def manual_step(self, batch):
        for examples in batch.physical():
            self.manual_backward(self.losses(examples))


class Plain(lr.Module):
    def manual_step(self, batch):
        for examples in batch.physical():
            self.losses(examples).mean().backward()
        self.optimizers().step()


class Unpacks(lr.Module):
    def manual_step(self, batch):
        self.manual_backward(self.losses(batch))


class Penalizes(lr.Module):
    def manual_step(self, batch):
        for examples in batch.physical():
            sum(p.square().sum() for p in self.parameters()).backward()
            self.manual_backward(self.losses(examples))


class Rescales(lr.Module):
    looks = 0

    def on_before_optimizer_step(self, optimizer):
        assert all(parameter.grad is None for parameter in self.parameters())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)
        self.looks += 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Forgets, PrivacyError), (Plain, PrivacyError), (Unpacks, TypeError), (Penalizes, GradientLeakError)],
)
def test_manual_optimization(kind, error, tmp_path):
    module = kind(manual=True)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(error):
        lr.fit(tmp_path, module)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def test_gradients_are_not_there_yet_before_the_optimizer_s_step(tmp_path):
    module = Rescales(manual=True)
    lr.fit(tmp_path, module)
    assert module.looks


def test_several_optimizers(tmp_path):
    with pytest.raises(PrivacyError, match="2 optimizers"):
        lr.fit(tmp_path, Two(manual=True))


def test_loaders(tmp_path):
    sampled = DataLoader(runs.data(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 24, 24))
    with pytest.raises(PrivacyError, match="WeightedRandomSampler"):
        lr.fit(tmp_path, data=sampled)
    with pytest.raises(PrivacyError, match=r"one torch\.utils.data.DataLoader"):
        lr.fit(tmp_path, data=[lr.loader(), lr.loader()])


def test_options():
    with pytest.raises(TypeError, match="'noise_multiplyer' is no option"):
        PrivacyCallback(noise_multiplyer=1.0)
    with pytest.raises(TypeError, match="no argument max_grad_norm; use clipping"):
        PrivacyCallback(max_grad_norm=1.0)
    with pytest.raises(TypeError, match="'model' is no option"):
        PrivacyCallback(model=torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_spent_budget(tmp_path):
    steps = lr.Steps()
    with pytest.raises(BudgetExceededError):
        lr.fit(tmp_path, callbacks=[steps], engine={"max_epsilon": 5.2})
    assert len(steps.sizes) == 4


def test_weights_that_move_outside_of_steps(tmp_path):
    class Averages(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with torch.no_grad():
                pl_module.net[0].weight.mul_(0.5)

    with pytest.raises(PrivacyError, match="accept_parameters"):
        lr.fit(tmp_path, callbacks=[Averages()])
