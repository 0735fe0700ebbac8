"""Options of Trainer under PrivateTrainer: refusals, precision, activation checkpointing, adapters, ranks."""

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from tiny_trainers import arguments, bert, charged, data, gpt2, labelled_text, repeatable, trainer  # noqa: E402

from ghostclip.errors import PrivacyError, UnsupportedModelError  # noqa: E402
from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer  # noqa: E402


def trainer_with(folder, kind=PrivateTrainer, **options):
    """A trainer of a class, with options set afterwards: TrainingArguments may not take them on this machine."""
    args = arguments(folder)
    for name, value in options.items():
        setattr(args, name, value)
    return kind(model=gpt2(), args=args, train_dataset=data(), privacy=repeatable())


def own(name):
    return type("OwnTrainer", (PrivateTrainer,), {name: lambda self, *args, **options: None})


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data())


OPTIONS = {
    "train_sampling_strategy": "group_by_length", "auto_find_batch_size": True, "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0, "include_num_input_tokens_seen": "all", "use_liger_kernel": True,
    "optim": "schedule_free_adamw",
}  # fmt: skip
UNSET = {"fp16": True, "torch_compile_backend": "eager", "deepspeed": {}, "fsdp": "full_shard", "group_by_length": True}
# What is built from a folder, and words of the error.
REFUSED = [
    *((lambda folder, n=name: trainer(folder, **{n: OPTIONS[n]}), f"{name}=.* of TrainingArguments|optim=")
      for name in OPTIONS),
    *((lambda folder, n=name: trainer_with(folder, **{n: UNSET[n]}), f"{name}={value!r} of TrainingArguments")
      for name, value in UNSET.items()),
    *((lambda folder, n=name: trainer_with(folder, own(n)), f"OwnTrainer.{name} would take the place")
      for name in ("get_train_dataloader", "_get_train_sampler", "training_step")),
    (lambda folder: trainer_with(folder, push_to_hub=True, hub_strategy="all_checkpoints"), "would publish check"),
    (lambda folder: trainer(folder, examples=Stream()), "can't be read at random"),
    (lambda folder: trainer_with(folder, own("compute_loss")), "compute_losses"),
    (lambda folder: trainer(folder, more={"compute_loss_func": lambda *_, **__: None}), "compute_losses"),
    (lambda folder: trainer(folder, bert("QuestionAnswering")), r"BertForQuestionAnswering.*compute_losses"),
    (lambda folder: trainer(folder).hyperparameter_search(n_trials=2), "spends privacy"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "words"), REFUSED)
def test_what_is_not_private_is_refused(build, words, tmp_path):
    with pytest.raises((PrivacyError, UnsupportedModelError), match=words):
        build(tmp_path)


CHECKPOINTING = max(
    ("activation_checkpointing", "gradient_checkpointing"), key=partial(hasattr, transformers.TrainingArguments)
)


@pytest.mark.parametrize(("option", "least", "most"), [(CHECKPOINTING, 0.0, 1e-6), ("bf16", 1e-12, 0.02)])
def test_options_that_change_next_to_nothing(option, least, most, tmp_path):
    found = []
    for value in (True, False):
        torch.manual_seed(2)
        subject = trainer(tmp_path / str(value), gpt2(), data(), **{option: value})
        subject.train()
        found.append([parameter.detach() for parameter in subject.model.parameters()])
    assert all(parameter.dtype == torch.float32 for parameter in found[0])
    assert least <= max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)) <= most


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_peft(dora, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], use_dora=dora)
    model = peft.get_peft_model(bert("SequenceClassification"), config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    subject = trainer(
        tmp_path, model, data(labelled_text), repeatable(self_check=True), save_strategy="steps", save_steps=2
    )
    subject.train()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad
    subject.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    subject.train(str(tmp_path / "checkpoint-2"))
    assert subject.state.global_step == 3


def test_the_self_check_compares_losses(tmp_path):
    def mixed(model, inputs):
        labels = inputs.pop("labels")
        losses = nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return losses * (losses.detach() / losses.detach().mean())

    subject = trainer(
        tmp_path, bert("SequenceClassification"), data(labelled_text), PrivacyArguments(noise_multiplier=1.0),
        mixed, per_device_train_batch_size=6, gradient_accumulation_steps=1,
    )  # fmt: skip
    with pytest.raises(PrivacyError.__base__, match=r"other examples|depends"):
        subject.train()


WORK = """
import pathlib, sys, torch
from tiny_trainers import *
torch.manual_seed(4)
folder = pathlib.Path(sys.argv[1])
subject = trainer(folder, gpt2(), data(count=24), save_strategy="steps", save_steps=2, max_steps=4, ddp_backend="gloo")
subject.train()
rank = subject.args.process_index
assert subject.engine.batch_size == 12 and subject.engine.steps_taken == 4
torch.save([p.detach() for p in subject.model.parameters()], folder / f"rank-{rank}.pt")
torch.distributed.barrier()
subject.train(str(folder / "checkpoint-2"))
assert subject.state.global_step == 4
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tests = Path(__file__).resolve().parents[1]
    common = {
        **os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests / 'support'}", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        ) for rank in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-3000:] for text in errors)
    these, those = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    assert all(torch.equal(this, that) for this, that in zip(these, those, strict=True))
    assert charged(tmp_path / "_privacy.ledger") == 6


@pytest.mark.parametrize(
    ("name", "instead"),
    [("max_grad_norm", "clipping"), ("epsilon", "target_epsilon"), ("batch_size", "per_device_train_batch_size")],
)
def test_names_of_others_are_refused_with_ours(name, instead):
    with pytest.raises(TypeError, match=f"PrivacyArguments has no argument {name}; use {instead}"):
        PrivacyArguments(**{name: 1.0})


FOLLOWING = {
    "load_best_model_at_end": {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1},
    "metric_for_best_model='loss'": {"metric_for_best_model": "loss"},
}


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("public", [False, True])
def test_training_that_follows_metrics_is_warned_of_unless_they_are_public(name, public, tmp_path, caplog):
    privacy = PrivacyArguments(noise_multiplier=1.0, public_evaluation=public)
    options = {"eval_strategy": "steps", "eval_steps": 1, **FOLLOWING[name]}
    subject = trainer(tmp_path, privacy=privacy, more={"eval_dataset": data()}, **options)
    said = [record.message for record in caplog.records if "training follows metrics" in record.message]
    assert len(said) == (0 if public else 1)
    assert public or said[0].startswith(f"{name}: training follows metrics of the evaluation data")
    assert public or "PrivacyArguments(public_evaluation=True)" in said[0]
    # Again where something else is added that follows them, and for nothing else.
    subject.add_callback(transformers.ProgressCallback())
    subject.add_callback(transformers.EarlyStoppingCallback())
    later = [record.message for record in caplog.records if "training follows metrics" in record.message][len(said) :]
    assert [message.partition(":")[0] for message in later] == ([] if public else ["EarlyStoppingCallback"])


def test_nothing_is_said_where_training_follows_no_metrics(tmp_path, caplog):
    trainer(tmp_path, more={"eval_dataset": data()}, eval_strategy="steps", eval_steps=1)
    assert "training follows metrics" not in caplog.text


def test_unit_ids_are_values_or_a_column(tmp_path):
    users = [row // 2 for row in range(len(data()))]
    subject = trainer(tmp_path, privacy=repeatable(unit_ids=users), max_steps=1, gradient_accumulation_steps=1)
    subject.train()
    assert "one user" in subject.engine.guarantee()
    assert subject.engine.sample_rate == pytest.approx(subject.batch_size / len(set(users)))
    with pytest.raises(ValueError, match="must be a column of train_dataset; it has no columns"):
        trainer(tmp_path / "other", privacy=repeatable(unit_ids="author")).train()


def test_a_column_of_users_that_a_transform_leaves_out_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    examples = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 6, "author": [*"aabbcc"]})
    examples.set_transform(lambda rows: {"input_ids": torch.tensor(rows["input_ids"])})
    with pytest.raises(ValueError, match=r"the column 'author' of train_dataset, .* transform or format leaves it out"):
        trainer(tmp_path, examples=examples, privacy=repeatable(unit_ids="author")).train()


def test_accumulation_that_is_changed_afterwards_is_refused(tmp_path):
    made = trainer(tmp_path)
    made.args.gradient_accumulation_steps = 4
    with pytest.raises(PrivacyError, match="gradient_accumulation_steps was changed"):
        made.train()


def test_float16_of_accelerate_s_own_configuration_is_refused(tmp_path, monkeypatch):
    built = accelerate.Accelerator
    monkeypatch.setattr(built, "mixed_precision", "fp16")
    with pytest.raises(PrivacyError, match="configured for float16, which needs a loss scale"):
        trainer(tmp_path)
