"""Options of Trainer under PrivateTrainer: refusals, precision, activation checkpointing, adapters, ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny_trainers import arguments, bert, charged, data, gpt2, labelled_text, repeatable, trainer  # noqa: E402

from ghostclip.errors import PrivacyError, UnsupportedModelError  # noqa: E402
from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer  # noqa: E402

REFUSED = {
    "train_sampling_strategy": "group_by_length",
    "auto_find_batch_size": True,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "include_num_input_tokens_seen": "all",
    "use_liger_kernel": True,
    "optim": "schedule_free_adamw",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(PrivacyError, match=f"{name}=.* of TrainingArguments|optim="):
        trainer(tmp_path, **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("torch_compile_backend", "eager"),
        ("deepspeed", {}),
        ("fsdp", "full_shard"),
        ("group_by_length", True),
    ],
)
def test_what_this_machine_or_version_can_t_set_is_refused_too(name, value, tmp_path):
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(PrivacyError, match=f"{name}={value!r} of TrainingArguments"):
        PrivateTrainer(model=gpt2(), args=args, train_dataset=data(), privacy=repeatable())


@pytest.mark.parametrize("name", ["get_train_dataloader", "_get_train_sampler", "training_step"])
def test_methods_that_choose_examples_or_step_are_refused(name, tmp_path):
    own = type("OwnTrainer", (PrivateTrainer,), {name: lambda self, *args: None})
    with pytest.raises(PrivacyError, match=f"OwnTrainer.{name} would take the place"):
        own(model=gpt2(), args=arguments(tmp_path), train_dataset=data(), privacy=repeatable())


def test_publishing_checkpoints_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.push_to_hub, args.hub_strategy = True, "all_checkpoints"
    with pytest.raises(PrivacyError, match="would publish checkpoints"):
        PrivateTrainer(model=gpt2(), args=args, train_dataset=data(), privacy=repeatable())


def test_a_stream_is_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data())

    with pytest.raises(PrivacyError, match="can't be read at random"):
        trainer(tmp_path, examples=Stream())


def test_losses_of_a_batch_are_refused(tmp_path):
    class Mine(PrivateTrainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs).loss

    with pytest.raises(PrivacyError, match="compute_losses"):
        Mine(model=gpt2(), args=arguments(tmp_path), train_dataset=data(), privacy=repeatable())
    with pytest.raises(PrivacyError, match="compute_losses"):
        trainer(tmp_path, more={"compute_loss_func": lambda outputs, labels, **_: outputs.logits.mean()})


def test_an_unknown_task_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"BertForQuestionAnswering.*compute_losses"):
        trainer(tmp_path, bert("QuestionAnswering"))


def test_a_search_of_hyperparameters_is_refused(tmp_path):
    with pytest.raises(PrivacyError, match="spends privacy"):
        trainer(tmp_path).hyperparameter_search(n_trials=2)


def moved(model, before):
    """The largest change of a parameter, by name."""
    return {n: float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters()}


def trained_alike(folder, build, **options):
    """Parameters after a training with options, and the same one without them; noise is repeatable."""
    found = []
    for name, more in (("with", options), ("without", {})):
        torch.manual_seed(2)
        subject = trainer(folder / name, build(), data(), **more)
        subject.train()
        found.append({name: parameter.detach() for name, parameter in subject.model.named_parameters()})
    return found


def test_gradient_checkpointing_changes_nothing(tmp_path):
    name = "activation_checkpointing" if hasattr(arguments(tmp_path), "activation_checkpointing") else None
    these, those = trained_alike(tmp_path, gpt2, **{name or "gradient_checkpointing": True})
    for name, parameter in these.items():
        torch.testing.assert_close(parameter, those[name], rtol=0, atol=1e-6)


def test_bfloat16_trains_nearly_alike(tmp_path):
    these, those = trained_alike(tmp_path, gpt2, bf16=True)
    differences = {name: float((parameter - those[name]).abs().max()) for name, parameter in these.items()}
    assert all(parameter.dtype == torch.float32 for parameter in these.values())
    assert 0 < max(differences.values()) < 0.02


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
    changes = moved(model, before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, change in changes.items() if change} == trained
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
    assert charged(tmp_path / "privacy.ledger") == 6


@pytest.mark.parametrize(
    ("name", "instead"),
    [("max_grad_norm", "clipping"), ("epsilon", "target_epsilon"), ("batch_size", "per_device_train_batch_size")],
)
def test_names_of_others_are_refused_with_ours(name, instead):
    with pytest.raises(TypeError, match=f"PrivacyArguments has no argument {name}; use {instead}"):
        PrivacyArguments(**{name: 1.0})
