"""Checkpoints of PrivateTrainer: a resumed training is the uninterrupted one, and no charge is forgotten."""

import shutil
import types
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from huggingface_hub.utils import filter_repo_objects  # noqa: E402
from tiny_trainers import charged, data, gpt2, repeatable, trainer  # noqa: E402

from ghostclip.errors import BudgetExceededError, LedgerError, PrivacyError  # noqa: E402
from ghostclip.events import SampledGaussian  # noqa: E402
from ghostclip.integrations.huggingface import PrivacyArguments  # noqa: E402
from ghostclip.ledger import Ledger  # noqa: E402

pytestmark = pytest.mark.usefixtures("coarse_losses")


class Stop(transformers.TrainerCallback):
    """Ends the training after a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(folder, resume=None, stop=None, dropout=0.2, count=30, **options):
    """A training of 12 steps, 5 an epoch, from the same weights, with a checkpoint every 2 steps."""
    torch.manual_seed(1)
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", **options}
    privacy = settings.pop("privacy", None) or repeatable()
    subject = trainer(folder, gpt2(dropout), data(count=count), privacy, **settings)
    if stop is not None:
        subject.add_callback(Stop(stop))
        with pytest.raises(KeyboardInterrupt):
            subject.train()
    else:
        subject.train(resume)
    return subject


@pytest.mark.parametrize(("stop", "optim"), [(4, "adamw_torch"), (5, "sgd")])
@pytest.mark.slow
def test_a_resumed_training_is_the_uninterrupted_one(stop, optim, tmp_path):
    whole = run(tmp_path / "whole", optim=optim, learning_rate=0.01)
    run(tmp_path / "parts", stop=stop, optim=optim, learning_rate=0.01)
    resumed = run(tmp_path / "parts", resume=True, optim=optim, learning_rate=0.01)
    assert resumed.state.global_step == 12
    for this, that in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        # Strategies are chosen by measured time and round differently; another batch or noise would differ by 1e-2.
        torch.testing.assert_close(this, that, rtol=0, atol=1e-6)
    rates, others = ([row["learning_rate"] for row in each.state.log_history[:-1]] for each in (whole, resumed))
    assert rates == others
    assert resumed.state.log_history[-2]["epoch"] == whole.state.log_history[-2]["epoch"] == pytest.approx(12 / 5)


@pytest.mark.slow
def test_steps_after_the_last_checkpoint_stay_charged(tmp_path):
    private = PrivacyArguments(noise_multiplier=20.0, self_check=False)
    run(tmp_path, stop=5, privacy=private, logging_strategy="no")
    resumed = run(tmp_path, resume=True, privacy=private, logging_strategy="no")
    assert resumed.state.global_step == 12
    assert charged(tmp_path / "_privacy.ledger") == 13 == sum(event.count for event in resumed.engine.events)


@pytest.mark.slow
def test_a_training_within_a_target_ends_early_for_them(tmp_path, caplog):
    private = PrivacyArguments(target_epsilon=5.0, target_delta=1e-2, self_check=False)
    # Every example in every batch: quickly charged.
    options = {"privacy": private, "logging_strategy": "no", "count": 6}
    run(tmp_path, stop=5, **options)
    resumed = run(tmp_path, resume=True, **options)
    assert resumed.state.global_step == 11
    assert resumed.engine.epsilon() <= 5
    assert "training ends after step 11 of 12" in caplog.text
    with pytest.raises(BudgetExceededError, match="this output_dir was trained before"):
        run(tmp_path, **options)


def test_a_target_that_was_spent_before_is_refused_before_any_work(tmp_path):
    account = Ledger(tmp_path / "_privacy.ledger").account()
    account.charge(SampledGaussian(1.0, 1.0))
    account.close()
    private = PrivacyArguments(target_epsilon=1.0)
    with pytest.raises(BudgetExceededError, match="this output_dir was trained before"):
        trainer(tmp_path, privacy=private)
    (tmp_path / "checkpoint-6").mkdir()  # from which it may go on
    subject = trainer(tmp_path, privacy=private)
    with pytest.raises(BudgetExceededError, match="this output_dir was trained before") as raised:
        subject.train()
    assert subject.engine is None
    assert len(raised.traceback) == 4


def test_a_checkpoint_that_was_not_written_to_its_end_is_left_out(tmp_path, caplog):
    run(tmp_path, stop=7)
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 1')
    shutil.rmtree(tmp_path / "checkpoint-4" / "privacy")
    resumed = run(tmp_path, resume=True, max_steps=8)
    assert resumed.engine.steps_taken == 8
    assert [number for number in (6, 4, 2) if f"checkpoint-{number}" in caplog.text] == [6, 4]


def test_weights_of_a_refused_checkpoint_are_not_trained_further(tmp_path):
    run(tmp_path / "first", stop=3)
    place = str(tmp_path / "first" / "checkpoint-2")
    other = trainer(tmp_path / "second", gpt2(), data(count=30), repeatable(noise_multiplier=2.0), max_steps=2)
    with pytest.raises(PrivacyError, match=r"noise_multiplier is 1\.0 in it and 2\.0 here"):
        other.train(place)
    for again in (other, trainer(tmp_path / "third", other.model, data(count=30), repeatable(), max_steps=2)):
        with pytest.raises(PrivacyError, match=r"weights of the checkpoint .*checkpoint-2 may be in this model"):
            again.train()


@pytest.mark.parametrize(("ledger", "warned"), [("_privacy.ledger", False), ("other.ledger", True)])
def test_steps_that_led_to_loaded_weights_are_missed_in_another_ledger(ledger, warned, tmp_path, caplog):
    run(tmp_path, max_steps=2)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")
    private = repeatable(ledger=str(tmp_path / ledger))
    trainer(tmp_path / "new", model, data(count=30), private, max_steps=1).train()
    assert ("epsilon leaves out the steps that led to the weights of" in caplog.text) == warned


def test_checkpoints_of_something_else_are_refused(tmp_path):
    """Without a privacy state, and without the ledger."""
    run(tmp_path, stop=3)
    shutil.copytree(tmp_path, tmp_path / "copy")
    shutil.rmtree(tmp_path / "checkpoint-2" / "privacy")
    with pytest.raises(PrivacyError, match="has no privacy state"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    with pytest.raises(PrivacyError, match="there is no checkpoint with a privacy state"):
        run(tmp_path, resume=True)
    (tmp_path / "copy" / "_privacy.ledger").unlink()
    with pytest.raises(LedgerError, match="doesn't have what it had"):
        run(tmp_path / "copy", resume=True)


def test_random_states_are_in_the_private_folder_alone_and_come_back(tmp_path):
    """Dropout moves them with the number of examples: after the last step they are those of the uninterrupted run."""
    run(tmp_path / "whole", max_steps=4)
    after = torch.get_rng_state()
    run(tmp_path / "parts", stop=3, max_steps=4)
    assert list(tmp_path.rglob("rng_state*")) == []
    run(tmp_path / "parts", resume=True, max_steps=4)
    assert torch.equal(torch.get_rng_state(), after)


class Hub:
    """Notes which files an upload takes."""

    def __init__(self):
        self.uploaded = []

    def create_repo(self, name, **_):
        return types.SimpleNamespace(repo_id=name)

    def upload_folder(self, folder_path, ignore_patterns, **_):
        names = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploaded += filter_repo_objects(names, ignore_patterns=ignore_patterns)
        return types.SimpleNamespace(done=lambda: True)


def test_an_upload_leaves_the_ledger_out(tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    private = PrivacyArguments(noise_multiplier=20.0, self_check=False)
    subject = run(tmp_path, max_steps=2, privacy=private, push_to_hub=True, hub_strategy="every_save")
    subject.push_to_hub()
    assert "model.safetensors" in hub.uploaded
    assert [name for name in hub.uploaded if "ledger" in name or "private" in name] == []
    assert charged(tmp_path / "_privacy.ledger") == 2


def test_a_ledger_of_another_name_is_continued_and_not_uploaded(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    private = PrivacyArguments(noise_multiplier=20.0, self_check=False)
    run(tmp_path, max_steps=2, privacy=private)
    (tmp_path / "_privacy.ledger").rename(tmp_path / "privacy.ledger")
    subject = run(tmp_path, resume=True, max_steps=3, privacy=private)
    assert (charged(tmp_path / "privacy.ledger"), (tmp_path / "_privacy.ledger").exists()) == (3, False)
    with pytest.raises(PrivacyError, match=r"push_to_hub would publish the ledger .* such as _privacy\.ledger"):
        subject.push_to_hub()
    for ledger in (None, str(tmp_path / "sub" / "_own.ledger")):
        private = PrivacyArguments(noise_multiplier=20.0, self_check=False, ledger=ledger)
        with pytest.raises(PrivacyError, match="push_to_hub would publish the ledger"):
            run(tmp_path, privacy=private, push_to_hub=True)


def test_old_checkpoints_are_removed_and_the_best_model_comes_back(tmp_path, caplog):
    torch.manual_seed(1)
    subject = trainer(
        tmp_path, gpt2(), data(), more={"eval_dataset": data()}, save_strategy="steps", save_steps=1, max_steps=4,
        save_total_limit=2, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, logging_strategy="no",
        learning_rate=3.0,
    )  # fmt: skip
    subject.train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert all((place / "privacy").is_dir() for place in tmp_path.glob("checkpoint-*"))
    assert "load_best_model_at_end: training follows metrics" in caplog.text
    assert subject.evaluate()["eval_loss"] == pytest.approx(subject.state.best_metric)
    assert subject.engine.epsilon() == float("inf")
