"""PrivacyCallback: steps are the hand-written ones; what was spent is told, and never less after a resume."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning
import lightning_runs as lr
import private_runs as runs
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from ranks import on_ranks, told

from ghostclip import LedgerError, PrivacyError, accounting
from ghostclip.integrations.lightning import PrivacyCallback
from ghostclip.integrations.lightning.fitting import TrainLoader, length_of

pytestmark = [
    pytest.mark.usefixtures("coarse_losses"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is supported for historical reasons:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists:UserWarning"),
]


@pytest.mark.parametrize("manual", [False, True])
def test_steps_are_the_hand_written_ones(manual, tmp_path):
    steps = lr.Steps()
    module = lr.Module(manual, as_dict=True)
    lr.fit(tmp_path, module, callbacks=[steps], precision="64-true", engine=lr.EXACT)
    assert max(map(len, steps.sizes)) > 1  # several physical batches in a logical one
    assert len(steps.weights) == 6
    lr.assert_steps_are_hand_written(steps)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("manual", [False, True])
def test_a_logical_step_is_a_global_step(manual, tmp_path):
    steps = lr.Steps()
    engine = {"max_physical_batch_size": 1, "batch_size": 1}  # so that empty batches come up
    module, data = lr.Module(manual), lr.loader(12)
    trainer, callback = lr.fit(tmp_path, module, data, callbacks=[steps], engine=engine, max_epochs=5)
    assert trainer.global_step == callback.engine.steps_taken == len(steps.sizes) == 60
    assert trainer.current_epoch == 5
    place = steps.sizes.index([], 1)  # an empty batch moves the weights
    before, after = steps.weights[place - 1], steps.weights[place]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert max(map(len, steps.sizes)) > 1
    expected = accounting.epsilon(noise_multiplier=1.0, sample_rate=1 / 12, steps=60, delta=1e-5)
    assert expected <= callback.engine.epsilon() <= expected * (1 + 1e-3)  # asked after each epoch, too


def test_a_fit_ends_before_a_step_that_the_budget_has_no_room_for(tmp_path, caplog):
    most = accounting.epsilon(noise_multiplier=1.0, sample_rate=8 / 24, steps=5, delta=1e-5)
    trainer, callback = lr.fit(tmp_path, engine={"max_epsilon": most * 1.01}, max_epochs=9)
    assert trainer.global_step == callback.engine.steps_taken == 5
    assert [message[:27] for message in caplog.messages if "ends" in message] == ["training ends after step 5:"]
    assert callback.engine.epsilon() <= most * 1.01


def test_a_plan_that_is_the_fit_s_length_ends_without_a_word_and_epsilon_is_logged(tmp_path, caplog):
    trainer, callback = lr.fit(tmp_path, engine={"noise_multiplier": None, "target_epsilon": 5.0})
    assert callback.engine.steps_taken == callback.engine.planned_steps == 6
    assert "training ends" not in caplog.text
    assert trainer.callback_metrics["epsilon"] == pytest.approx(callback.engine.epsilon())
    assert trainer.callback_metrics["privacy_step"] == 6
    assert {"epsilon", "privacy_step"} <= trainer.logged_metrics.keys()


def test_the_same_noise_is_the_engine_s(tmp_path):
    options = {"noise_multiplier": 1.0, "noise": "test", "seed": 5}
    module = lr.Module()
    lr.fit(tmp_path, module, engine=options)
    model = runs.network()
    engine = runs.engine_for(model, None, lr.loader().dataset, clipping=1.0, **options)
    for _ in range(2):
        for batch in engine.batches():
            engine.step(batch, runs.losses_of)
    for mine, theirs in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Scheduled(lr.Module):
    """Asks for the length of training before there is an engine, and moves the learning rate with each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.expected = self.trainer.estimated_stepping_batches
        loader = self.trainer.train_dataloader
        self.sizes = len(loader.dataset), loader.batch_size, len(loader)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_data_modules_and_schedules(tmp_path):
    module, data = Scheduled(), lr.Data()
    trainer, callback = lr.fit(tmp_path, module, data, engine={"max_physical_batch_size": 3})
    assert module.expected == trainer.global_step == callback.engine.steps_taken == 6
    assert module.sizes == (24, 8, 3)
    assert data.kinds == {list}
    assert trainer.optimizers[0].param_groups[0]["lr"] == lr.RATE * 0.5**6


def test_the_length_by_limits(tmp_path):
    loader = TrainLoader(SimpleNamespace(dataloader=lr.loader), {})

    def length(epochs, options, **limits):
        return length_of(lr.trainer(tmp_path, max_epochs=epochs, **limits), loader, {"target_epsilon": 3.0, **options})

    assert length(5, {}, limit_train_batches=2, max_steps=7) == {"steps": 7}
    assert length(3, {}, limit_train_batches=2) == {"steps": 6}
    assert length(3, {"epochs": 9}, limit_train_batches=2) == {}
    with pytest.raises(ValueError, match="max_epochs or max_steps"):
        length(-1, {})


USERS = {
    "mapping": lambda: dict(enumerate([0, 1, 2] * 8)),
    "tensors": lambda: [torch.tensor(user) for user in [0, 1, 2] * 8],
    "generator": lambda: iter([0, 1, 2] * 8),
}


@pytest.mark.parametrize("form", USERS)
def test_the_length_counts_users_by_value(form):
    assert len(lr.loader().dataset) == 24
    callback = lr.PrivacyCallback(unit_ids=USERS[form](), batch_size=1)
    for _ in range(2):
        assert len(TrainLoader(SimpleNamespace(dataloader=lr.loader), callback._options)) == 3


CALLS: list[int] = []


class Counting(lr.Module):
    """Logs each physical batch of the fit."""

    def losses(self, examples):
        CALLS.append(len(examples[0]))  # not of the module, whose attributes a trial leaves as they were
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return super().losses(examples)


def test_trials_of_the_self_check_are_not_logged(tmp_path):
    steps, engine = lr.Steps(), {"max_physical_batch_size": 3, "self_check": True}
    trainer, _ = lr.fit(tmp_path, Counting(), callbacks=[steps], max_epochs=1, engine=engine)
    real = sum(map(len, steps.sizes))
    assert len(CALLS) > real
    assert trainer.callback_metrics["batches"] == real


class OnPlateau(lr.Module):
    """A learning rate that follows a metric."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor = monitor

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "monitor": self.monitor}]


@pytest.mark.parametrize(("monitor", "private"), [("train_loss", True), ("train_loss_epoch", True), ("epsilon", False)])
def test_what_follows_private_metrics_is_warned_of_once(monitor, private, tmp_path, caplog):
    lr.fit(tmp_path, OnPlateau(monitor), callbacks=[EarlyStopping(monitor)])
    said = [message for message in caplog.messages if "training follows metrics of the training data" in message]
    names = ", ".join(f"{name}(monitor={monitor!r})" for name in ("EarlyStopping", "ReduceLROnPlateau"))
    assert [message.partition(": ")[0] for message in said] == [names] * private


def test_the_module_has_its_own_methods_again(tmp_path, caplog):
    module = lr.Module()
    own = {name: value for name, value in vars(module).items() if callable(value)}
    _, callback = lr.fit(tmp_path, module)
    assert {name: value for name, value in vars(module).items() if callable(value)} == own
    first = callback.engine.steps_taken
    again = lr.trainer(tmp_path, callback)
    again.fit(module, lr.loader())
    assert callback.engine.steps_taken == 2 * first
    assert not any("took" in said for said in caplog.messages)  # since they are counted


def test_validation_and_bfloat16(tmp_path):
    class Validated(lr.Module):
        def validation_step(self, batch, batch_idx):
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def val_dataloader(self):
            return torch.utils.data.DataLoader(runs.data(), batch_size=8)

    steps = lr.Steps()
    trainer, _ = lr.fit(tmp_path, Validated(), callbacks=[steps], precision="bf16-mixed", engine=lr.EXACT)
    assert 0 <= trainer.callback_metrics["accuracy"] <= 1
    assert steps.weights[-1][0].dtype == torch.float32
    lr.assert_steps_are_hand_written(steps, 2e-2)


def test_a_validation_step_may_call_training_step(tmp_path):
    class Shared(lr.Module):
        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx=batch_idx).mean())

    trainer = lr.trainer(tmp_path, PrivacyCallback(noise_multiplier=1.0), max_epochs=1)
    trainer.fit(Shared(), lr.loader(), torch.utils.data.DataLoader(runs.data(), batch_size=8))
    assert 0 < trainer.callback_metrics["loss"] < 10


def as_rank() -> dict[str, Any]:
    """Settings of Trainer or Fabric in one of the forked processes, whose group is there already."""
    assert told()
    return {"devices": 2, "strategy": "ddp", "plugins": [LightningEnvironment()]}


def fitted(folder: Any, manual: bool, **settings: Any) -> Any:
    module, steps = lr.Module(manual), lr.Steps()
    trainer, callback = lr.fit(folder, module, callbacks=[steps], precision="64-true", engine=lr.EXACT, **settings)
    sizes = [sum(each) for each in steps.sizes]
    return steps.weights[-1], sizes, trainer.global_step, callback.engine.steps_taken


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.one_in(2)
def test_two_processes_fit_as_one(manual, tmp_path):
    first, second = on_ranks(lambda: fitted(tmp_path / "fit", manual, **as_rank()), tmp_path)
    alone = fitted(tmp_path, manual)
    for one, other, expected in zip(first[0], second[0], alone[0], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
    assert [sum(each) for each in zip(first[1], second[1], strict=True)] == alone[1]  # shares of the same samples
    assert first[2:] == second[2:] == alone[2:] == (6, 6)


def saved(folder, every: int, **options):
    """(path of the checkpoint after so many steps, the fit's callback)."""
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    _, callback = lr.fit(folder, callbacks=[keep], enable_checkpointing=True, **options)
    return folder / f"step={every}.ckpt", callback


@pytest.mark.parametrize("after", [2, 3, 4, 6])  # in the middle of an epoch, at its end, one further, and at the end
@pytest.mark.one_in(2)
def test_a_resumed_fit_counts_the_steps_before(after, tmp_path):
    place, first = saved(tmp_path, after)
    steps, module = lr.Steps(), lr.Module()
    trainer, callback = lr.fit(tmp_path, module, ckpt_path=place, callbacks=[steps])
    assert trainer.global_step == callback.engine.steps_taken == first.engine.steps_taken == 6
    assert len(steps.sizes) == 6 - after
    assert callback.engine.events == first.engine.events
    assert callback.engine.epsilon() == pytest.approx(first.engine.epsilon(), rel=1e-3)
    stored = torch.load(place, weights_only=True)["state_dict"]
    assert (after < 6) != all(torch.equal(module.state_dict()[name], value) for name, value in stored.items())


def test_an_older_checkpoint_forgets_nothing(tmp_path):
    place, first = saved(tmp_path, 2)
    again = lr.trainer(tmp_path, first)
    again.fit(lr.Module(), lr.loader(), ckpt_path=place)
    assert again.global_step == 6
    assert first.engine.steps_taken == 6 + 4


def test_a_ledger_counts_what_came_after_the_checkpoint(tmp_path):
    ledger = tmp_path / "run.ledger"
    place, _ = saved(tmp_path, 2, engine={"ledger": ledger})
    trainer, callback = lr.fit(tmp_path, ckpt_path=place, engine={"ledger": ledger})
    assert trainer.global_step == 6
    assert sum(event.count for event in callback.engine.events) == 6 + 4
    with pytest.raises(LedgerError, match="belongs to a run with a ledger"):
        lr.fit(tmp_path, ckpt_path=place)


@pytest.mark.parametrize("callbacks", [{}, {"PrivacyCallback": {"states": []}}], ids=["none", "empty"])
@pytest.mark.one_in(2)
def test_weights_of_a_refused_checkpoint_are_not_trained_further(callbacks, tmp_path):
    place, _ = saved(tmp_path, 2)
    with pytest.raises(PrivacyError, match=r"noise_multiplier is 1\.0 in it and 2\.0 here"):
        lr.fit(tmp_path, ckpt_path=place, engine={"noise_multiplier": 2.0})
    state = torch.load(place, weights_only=True)
    torch.save({**state, "callbacks": callbacks}, tmp_path / "changed.ckpt")
    module = lr.Module()
    with pytest.raises(PrivacyError, match="saved without PrivacyCallback"):
        lr.fit(tmp_path, module, ckpt_path=tmp_path / "changed.ckpt")
    assert all(torch.equal(state["state_dict"][name], value) for name, value in module.state_dict().items())
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"weights of the checkpoint .*changed\.ckpt may be in this model"):
            lr.fit(tmp_path, module)
    lr.fit(tmp_path, module, ckpt_path=place)
    lr.fit(tmp_path, module)


def test_a_refused_fit_forgets_nothing(tmp_path):
    callback, module = PrivacyCallback(noise_multiplier=1.0), lr.Module()
    lr.trainer(tmp_path, callback).fit(module, lr.loader())
    spent = callback.engine.events
    for _ in range(2):
        with pytest.raises(PrivacyError, match="batch_size"):
            lr.trainer(tmp_path, callback).fit(module, lr.loader(size=48))
        assert callback.engine.events == spent
    lr.trainer(tmp_path, callback).fit(module, lr.loader())
    assert callback.engine.steps_taken == 6 + 6


def test_a_failed_fit_keeps_what_it_spent(tmp_path):
    class Fails(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                raise RuntimeError("out of luck")

    callback, module = PrivacyCallback(noise_multiplier=1.0), lr.Module()
    with pytest.raises(RuntimeError, match="out of luck"):
        lr.trainer(tmp_path, callback, Fails()).fit(module, lr.loader())
    lr.trainer(tmp_path, callback).fit(module, lr.loader())
    assert callback.engine.steps_taken == 4 + 6
