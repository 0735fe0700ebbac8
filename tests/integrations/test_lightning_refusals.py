"""PrivacyCallback refuses what can't be private, before a step is taken, and says what to use instead."""

import pytest

pytest.importorskip("lightning")

import lightning_runs as lr
import private_runs as runs
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    SpikeDetection,
)
from torch.utils.data import DataLoader, WeightedRandomSampler

from ghostclip import LossShapeError, PrivacyError, UnsupportedModelError
from ghostclip.integrations.lightning import PrivacyCallback, setup_fabric
from ghostclip.integrations.lightning.refusals import check_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


# Arguments of `lightning_runs.fit`, and what is said.
SETTINGS = [
    ({"gradient_clip_val": 1.0}, "clipping="),
    ({"accumulate_grad_batches": 2}, "max_physical_batch_size="),
    ({"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]}, "max_physical_batch_size="),
    ({"callbacks": [LearningRateFinder()]}, "tune on public data"),
    ({"callbacks": [SpikeDetection()]}, "reads private losses"),
    ({"callbacks": [LambdaCallback(on_before_optimizer_step=print)]}, "LambdaCallback's on_before_optimizer_step"),
    ({"overfit_batches": 1}, "limit_train_batches"),
    ({"reload_dataloaders_every_n_epochs": 1}, "leave it out"),
    ({"precision": "16-true"}, "loss_scale"),
    ({"data": DataLoader(runs.data(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 24, 24))},
     "WeightedRandomSampler"),
    ({"data": [lr.loader(), lr.loader()]}, r"one torch\.utils.data.DataLoader"),
    ({"data": lr.Data(), "engine": {"unit_ids": [0, 1, 2] * 8}},
     "values for the rows of a data set that Data makes in the fit"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "remedy"), SETTINGS)
@pytest.mark.filterwarnings("ignore:.*overfit:UserWarning")
def test_settings_of_the_trainer_and_data(settings, remedy, tmp_path):
    with pytest.raises(PrivacyError, match=remedy):
        lr.fit(tmp_path, **settings)


def strategy(folder):
    made = lr.trainer(folder, PrivacyCallback(noise_multiplier=1.0))
    made.strategy.__class__ = type("FSDPStrategy", (type(made.strategy),), {})
    made.fit(lr.Module(), lr.loader())


def finder(folder):
    module = lr.Module()
    module.batch_size, module.train_dataloader = 8, lr.loader
    lr.trainer(folder, PrivacyCallback(noise_multiplier=1.0), BatchSizeFinder()).fit(module)


def forks(folder):
    made = lr.trainer(folder, strategy="ddp_fork")
    check_trainer(made, lr.Module(), {})  # in the process that a fit would begin


def test_units_by_a_function_are_those_of_the_rows_that_lightning_made(tmp_path):
    data, seen = lr.Data(), []

    def units(rows):
        seen.append(rows)
        return [row % 12 for row in rows.indices]

    _, callback = lr.fit(tmp_path, data=data, engine={"unit_ids": units})
    assert len(seen) == 1
    assert seen[0] is data.rows
    (event,) = callback.engine.events
    assert (event.unit, event.sample_rate) == ("user", 8 / 12)


def elsewhere(folder):
    """A Trainer of the package that is published under Lightning's older name."""
    other = pytest.importorskip("pytorch_lightning")
    module = type("Own", (other.LightningModule,), {
        "training_step": lambda self, batch, batch_idx: None, "configure_optimizers": lambda self: None,
    })()  # fmt: skip
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    callback = PrivacyCallback(noise_multiplier=1.0)
    other.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback], **quiet).fit(module, lr.loader())


OTHERS = [
    (elsewhere, "one of pytorch_lightning.*from lightning"),
    (strategy, r"FSDPStrategy .* 'ddp'"),
    (forks, "begins a fit in new processes"),
    (finder, "tune on public data"),
]


@pytest.mark.parametrize(("begin", "words"), OTHERS)
def test_strategies_and_finders(begin, words, tmp_path):
    with pytest.raises(PrivacyError, match=words):
        begin(tmp_path)


def module_with(**methods):
    """A module of these methods in place of its own; its optimization is manual where it has a step of its own."""
    kind = type("Own", (lr.Module,), methods)
    return kind(manual="manual_step" in methods)


def test_a_batch_that_a_hook_leaves_out_is_charged(tmp_path):
    """And the rest of the epoch is left out, as hooks of Lightning may."""
    module = module_with(on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx == 2 else None)
    _, callback = lr.fit(tmp_path, module)
    assert sum(event.count for event in callback.engine.events) == 6  # two epochs of two steps and one left out


def normalises(self):
    self.net = torch.nn.Sequential(self.net, torch.nn.BatchNorm1d(3))
    return lr.Module.configure_optimizers(self)


def forgets(self, batch):
    for examples in batch.physical():
        self.manual_backward(self.losses(examples))


def rescales(self, optimizer=None):
    torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


MODULES = [
    ({"losses": lambda self, examples: lr.Module.losses(self, examples).mean()}, LossShapeError,
     r'training_step .* \[B\] .* shape \[\].* reduction="none"'),
    ({"losses": lambda self, examples: lr.Module.losses(self, examples)[:, None]}, LossShapeError,
     r"training_step .* shape \[\d+, 1\]"),
    ({"training_step": lambda *_: None}, LossShapeError, "training_step .* NoneType.* loss of zero"),
    ({"on_before_optimizer_step": rescales}, PrivacyError, "on_before_optimizer_step"),
    ({"on_after_backward": rescales}, PrivacyError, "the module's on_after_backward"),
    ({"configure_optimizers": normalises}, UnsupportedModelError, "BatchNorm"),
    ({"manual_step": forgets}, PrivacyError, "had no step"),
    ({"manual_step": lambda self, batch: self.manual_backward(self.losses(batch))}, TypeError, "is a logical batch"),
    ({"manual_step": lr.Module.manual_step,
      "configure_optimizers": lambda self: [lr.Module.configure_optimizers(self) for _ in range(2)]},
     PrivacyError, "2 optimizers"),
]  # fmt: skip


@pytest.mark.parametrize(("methods", "error", "words"), MODULES)
def test_modules(methods, error, words, tmp_path):
    module = module_with(**methods)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(error, match=words):
        lr.fit(tmp_path, module)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=False))
    assert "training_step" not in vars(module)


def test_gradients_are_not_there_yet_before_the_optimizer_s_step(tmp_path):
    looks = []

    def hook(self, optimizer):
        looks.append(all(parameter.grad is None for parameter in self.parameters()))
        rescales(self)

    lr.fit(tmp_path, module_with(manual_step=lr.Module.manual_step, on_before_optimizer_step=hook))
    assert looks
    assert all(looks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_multiplyer": 1.0}, "'noise_multiplyer' is no option"),
        ({"max_grad_norm": 1.0}, "no argument max_grad_norm; use clipping"),
        ({"model": torch.nn.Linear(2, 2)}, "'model' is no option"),
    ],
)
def test_options(options, words):
    with pytest.raises(TypeError, match=words):
        PrivacyCallback(**options)


def test_precisions_and_strategies_of_fabric_are_refused():
    model = runs.network()
    made = model, torch.optim.SGD(model.parameters(), lr=lr.RATE), runs.data()
    with pytest.raises(PrivacyError, match="precision='16-true'"):
        setup_fabric(Fabric(accelerator="cpu", devices=1, precision="16-true"), *made)
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match="'sigmas' is no option"):
        setup_fabric(fabric, *made, sigmas=1.0)
    with pytest.raises(PrivacyError, match=r"came from fabric\.setup_dataloaders"):
        setup_fabric(fabric, *made[:2], fabric.setup_dataloaders(lr.loader()), noise_multiplier=1.0)
    fabric.strategy.__class__ = type("DeepSpeedStrategy", (type(fabric.strategy),), {})
    with pytest.raises(PrivacyError, match="DeepSpeedStrategy"):
        setup_fabric(fabric, *made)
