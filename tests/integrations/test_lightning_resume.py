"""Checkpoints of a private fit: what was spent is never less after a resume."""

import pytest

pytest.importorskip("lightning")

import lightning
import lightning_runs as lr
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ghostclip import LedgerError, PrivacyError
from ghostclip.integrations.lightning import PrivacyCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists:UserWarning"),
]


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
    module = lr.Module()
    again = lr.trainer(tmp_path, first)
    again.fit(module, lr.loader(), ckpt_path=place)
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


def test_checkpoints_of_others_are_refused(tmp_path):
    place, _ = saved(tmp_path, 2)
    with pytest.raises(PrivacyError, match=r"noise_multiplier is 1\.0 in it and 2\.0 here"):
        lr.fit(tmp_path, ckpt_path=place, engine={"noise_multiplier": 2.0})
    state = torch.load(place, weights_only=True)
    del state["callbacks"]["PrivacyCallback"]
    torch.save(state, tmp_path / "plain.ckpt")
    with pytest.raises(PrivacyError, match="saved without PrivacyCallback"):
        lr.fit(tmp_path, ckpt_path=tmp_path / "plain.ckpt")


def with_other_state(place, change):
    """The checkpoint with PrivacyCallback's state changed."""
    state = torch.load(place, weights_only=True)
    change(state["callbacks"])
    torch.save(state, place.with_name("changed.ckpt"))
    return place.with_name("changed.ckpt")


@pytest.mark.parametrize(
    "change",
    [
        lambda callbacks: callbacks.pop("PrivacyCallback"),
        lambda callbacks: callbacks.update(PrivacyCallback={"states": []}),
    ],
)
def test_weights_of_a_refused_checkpoint_are_not_trained_further(change, tmp_path):
    place = with_other_state(saved(tmp_path, 2)[0], change)
    module = lr.Module()
    with pytest.raises(PrivacyError, match="saved without PrivacyCallback"):
        lr.fit(tmp_path, module, ckpt_path=place)
    weights = torch.load(place, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"weights of the checkpoint .*changed\.ckpt may be in this model"):
            lr.fit(tmp_path, module)
    lr.fit(tmp_path, module, ckpt_path=tmp_path / "step=2.ckpt")
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
