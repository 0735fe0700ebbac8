"""TRL's trainers with private steps: against TRL's own loss of single examples, clipped and added up in a loop."""

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("peft")

from datasets import Dataset
from peft import LoraConfig
from tiny_trl import PAIRS, TEXTS, dpo, drawn, gpt2, llama, privacy, sft
from transformers import LlamaModel
from trl import DPOTrainer, RewardTrainer, SFTTrainer

from ghostclip import PrivacyError, UnsupportedModelError, accounting
from ghostclip.integrations.trl import PrivacyArguments, PrivateSFTTrainer, private
from ghostclip.integrations.trl_losses import OF_PAIRS

# What transformers says of TRL's own arguments.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("coarse_losses"),
]

ROWS, MAX_NORM, RATE = 8, 0.3, 0.5
# All examples in one logical batch, in physical ones of three.
WHOLE = {"per_device_train_batch_size": ROWS, "max_steps": 1, "learning_rate": RATE}
LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapter(**changes: Any) -> LoraConfig:
    """An adapter none of whose matrices is zero, so that all of them have gradients."""
    return LoraConfig(**LORA, init_lora_weights=False, **changes)


def clipped_loop(model: Any, losses: Callable[[int], Tensor], rows: int = ROWS) -> dict[str, Tensor]:
    """The sum over examples of their gradients, each cut to MAX_NORM."""
    return oracle.clipped_sum(
        oracle.grads_of_single_losses(model, torch.stack([losses(row) for row in range(rows)])), MAX_NORM
    )


def released(trainer: Any) -> dict[str, Tensor]:
    """The sum that the first step of a trainer without noise was taken with."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    moved = {
        name: before[name] - each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad
    }
    return {name: each * trainer.engine.batch_size / RATE for name, each in moved.items()}


def assert_a_step_is_the_loop(make: Any, plain: Any, data: Any, options: Any, more: Any, folder: Any) -> None:
    """Over the losses of TRL's own trainer, whose weights become the private one's."""
    options = {**WHOLE, **options}
    ours = make(folder, data, more={"privacy": privacy(folder, clipping=MAX_NORM), **built(more)}, **options)
    options = {name: value for name, value in options.items() if name not in PACKS}
    plain = make(folder, data, plain, built(more), **options)
    plain.model.load_state_dict(ours.model.state_dict())
    expected = clipped_loop(plain.model, plain_losses(plain))
    torch.testing.assert_close(released(ours), expected, rtol=1e-4, atol=1e-5)
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3


def plain_losses(trainer: Any) -> Callable[[int], Tensor]:
    model = trainer.model.eval()
    columns = [name for name in trainer.train_dataset.column_names if name not in ("text", "messages")]
    data = trainer.train_dataset.select_columns(columns)
    return lambda row: trainer.compute_loss(model, trainer.data_collator([data[row]]))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("text", {}, {}),
    "small physical batches": ("text", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {}),
    "dft": ("text", {"loss_type": "dft"}, {}),
    "completion": ("prompt and completion", {"completion_only_loss": True}, {}),
    "prompt, too": ("prompt and completion", {"completion_only_loss": False}, {}),
    "answer": ("prompt and answer", {}, {}),
    "assistant": ("conversation", {"assistant_only_loss": True}, {}),
    "whole conversation": ("conversation", {"max_length": 12}, {}),
    "LoRA": ("conversation", {}, {"peft_config": adapter}),
    "DoRA": ("text", {}, {"peft_config": lambda: adapter(use_dora=True)}),
    "rsLoRA": ("text", {}, {"peft_config": lambda: adapter(use_rslora=True)}),
    "checkpointing": ("text", {"gradient_checkpointing": True}, {}),
    "packing": ("text", {"packing": True}, {}),
    "packing, assistant": ("conversation", {"packing": True, "assistant_only_loss": True}, {}),
    "packing, small physical batches": (
        "text", {"packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {}
    ),
    "packing, LoRA": ("prompt and completion", {"packing": True, "loss_type": "dft"}, {"peft_config": adapter}),
    "packing, GPT-2": ("text", {"packing": True}, {"model": gpt2}),
    "padding free": ("text", {"padding_free": True}, {}),
}  # fmt: skip
PACKS = {"packing", "padding_free"}


def built(more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor; adapters are drawn alike each time."""
    return {name: value() if callable(value) else value for name, value in more.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(5)
def test_a_step_of_sft_is_the_clipped_sum_of_a_loop_over_conversations(name: str, tmp_path: Any) -> None:
    kind, options, more = CASES[name]
    assert_a_step_is_the_loop(sft, SFTTrainer, drawn(ROWS, TEXTS[kind]), options, more, tmp_path)


def test_an_empty_document_is_an_example_without_a_loss_in_a_pack(tmp_path: Any) -> None:
    rows = [[5, 6, 7], [], [8, 9], [5, 9, 8, 7]] * 2
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    options = {**WHOLE, "dataset_kwargs": {"skip_prepare_dataset": True}}
    packed, padded = (sft(tmp_path / str(packs), data, packing=packs, **options) for packs in (True, False))
    torch.testing.assert_close(released(packed), released(padded))


PAIR_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reference model": ("texts", {}, {}),
    "conversations": ("conversations", {"loss_type": ["hinge", "ipo"], "loss_weights": [0.5, 2.0]}, {}),
    "precomputed": ("texts", {"precompute_ref_log_probs": True}, {}),
    "LoRA": ("texts", {}, {"peft_config": adapter}),
    "small physical batches": ("texts", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {}),
}


@pytest.mark.parametrize("name", PAIR_CASES)
@pytest.mark.one_in(2)
def test_a_step_of_dpo_is_the_clipped_sum_of_a_loop_over_pairs(name: str, tmp_path: Any) -> None:
    kind, options, more = PAIR_CASES[name]
    assert_a_step_is_the_loop(dpo, DPOTrainer, drawn(ROWS, PAIRS[kind]), options, more, tmp_path)


@pytest.mark.parametrize("with_adapter", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_not_every_batch_of_pairs_is_measured(with_adapter: bool, tmp_path: Any) -> None:
    """The output layer gets a hook for each forward, of the reference, too."""
    more = built({"peft_config": adapter}) if with_adapter else {}
    trainer = dpo(tmp_path, drawn(ROWS, PAIRS["texts"]), more=more, **{**WHOLE, "max_steps": 3})
    trainer.train()
    assert not trainer.engine._steps._clipper.passes.is_open


def test_every_loss_of_pairs_is_trl_s_of_a_single_pair(tmp_path: Any) -> None:
    """In batches of pairs of other lengths."""
    data, options = drawn(4, PAIRS["texts"]), {"label_smoothing": 0.1, "beta": 0.5}
    ours = dpo(tmp_path, data, **options)
    plain = dpo(tmp_path, data, DPOTrainer, **options)
    alone, rows = plain_losses(plain), [ours.train_dataset[row] for row in range(4)]
    batch = ours._collated(ours.data_collator)(rows)
    assert batch["input_ids"].shape[:2] == (4, 2)
    for name in OF_PAIRS:
        ours.loss_types = plain.loss_types = [name]
        try:
            expected = torch.stack([alone(row) for row in range(4)])
        except ValueError:  # a loss that an older TRL doesn't have
            continue
        torch.testing.assert_close(ours.compute_losses(ours.model, batch), expected, rtol=1e-4, atol=1e-6)


def test_epsilon_is_that_of_the_engine_and_metrics_of_batches_are_held_back(tmp_path: Any) -> None:
    given = privacy(tmp_path, noise_multiplier=1.5)
    ours = sft(tmp_path, drawn(ROWS, TEXTS["text"]), more={"privacy": given}, per_device_train_batch_size=2)
    ours.train()
    expected = accounting.epsilon(noise_multiplier=1.5, sample_rate=2 / ROWS, steps=3, delta=1e-2)
    assert ours.engine.epsilon() == pytest.approx(expected, rel=2e-3)
    assert ours.state.log_history[-1]["epsilon"] == ours.engine.epsilon()
    seen = {name for row in ours.state.log_history for name in row}
    assert not {name for name in seen if any(word in name for word in ("loss", "entropy", "accuracy", "tokens"))}
    assert ours._metrics["train"] == {}


def test_target_epsilon_and_evaluation(tmp_path: Any) -> None:
    """Metrics of the evaluation data are TRL's own."""
    data, public = drawn(ROWS, PAIRS["texts"]), drawn(4, PAIRS["texts"])
    given = privacy(tmp_path, noise_multiplier=None, target_epsilon=2.0)
    ours = dpo(
        tmp_path, data, more={"privacy": given, "eval_dataset": public}, per_device_train_batch_size=2,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    ours.train()
    assert ours.engine.epsilon() <= 2.0
    rows = [row for row in ours.state.log_history if "eval_loss" in row]
    assert rows
    assert all("eval_rewards/margins" in row for row in rows)
    assert not [name for row in ours.state.log_history for name in row if name.startswith(("rewards", "logps"))]


def test_a_resumed_training_counts_all_steps(tmp_path: Any) -> None:
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1}
    data = drawn(ROWS, TEXTS["prompt and completion"])
    given = {"privacy": PrivacyArguments(noise_multiplier=1.5, target_delta=1e-2), "peft_config": adapter()}
    sft(tmp_path, data, more=given, max_steps=2, **options).train()
    again = sft(tmp_path, data, more=given, max_steps=4, **options)
    again.train(resume_from_checkpoint=True)
    assert again.engine.steps_taken == 4
    expected = accounting.epsilon(noise_multiplier=1.5, sample_rate=2 / ROWS, steps=4, delta=1e-2)
    assert again.engine.epsilon() == pytest.approx(expected, rel=2e-3)
    assert "differential_privacy" in (tmp_path / "README.md").read_text()


def test_unit_ids_names_the_column_of_users(tmp_path: Any) -> None:
    """Users' rows are sampled together, and the gradient of the sum of their losses is cut."""
    data = drawn(ROWS, TEXTS["text"])
    data = data.add_column("author", [f"author {row // 2}" for row in range(ROWS)])
    given = privacy(tmp_path, clipping=MAX_NORM, unit_ids="author")
    users = ROWS // 2
    ours = sft(tmp_path, data, more={"privacy": given}, **{**WHOLE, "per_device_train_batch_size": users})
    plain = sft(tmp_path, data, SFTTrainer)
    alone = plain_losses(plain)
    expected = clipped_loop(plain.model, lambda user: alone(2 * user) + alone(2 * user + 1), users)
    torch.testing.assert_close(released(ours), expected, rtol=1e-4, atol=1e-5)
    assert "one user" in ours.engine.guarantee()
    other = privacy(tmp_path, unit_ids="writer", ledger=str(tmp_path / "other.ledger"))
    with pytest.raises(ValueError, match="unit_ids='writer' of PrivacyArguments must be a column of train_dataset"):
        sft(tmp_path, data, more={"privacy": other}).train()


class Crossing(LlamaModel):
    """Attention over all tokens of a row before one's own, whatever document they are of."""

    def forward(self, *given: Any, position_ids: Any = None, **options: Any) -> Any:
        return super().forward(*given, **options)


def test_attention_that_crosses_documents_is_refused(tmp_path: Any) -> None:
    """In the first step, before its release."""
    model = llama()
    model.model = Crossing(model.config)
    more = {"model": model, "privacy": privacy(tmp_path, self_check=True)}
    ours = sft(tmp_path, drawn(ROWS, TEXTS["text"]), more=more, **WHOLE, packing=True)
    with pytest.raises(UnsupportedModelError):
        ours.train()
    assert ours.engine.steps_taken == 0


class Doubled(SFTTrainer):
    """A loss of its own, for the batch."""

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *others, **options)


class DoubledLosses(Doubled):
    """And for single examples."""

    def compute_losses(self, model: Any, inputs: Any) -> Tensor:
        return 2 * self.task_losses(model, inputs)


class Watched(SFTTrainer):
    """An argument and a method of its own."""

    def __init__(self, *given: Any, watched: list[str], **options: Any) -> None:
        self.watched = watched
        super().__init__(*given, **options)

    def _save_checkpoint(self, *given: Any) -> None:
        self.watched.append("saved")
        super()._save_checkpoint(*given)


def test_private_gives_the_class_of_a_subclass(tmp_path: Any) -> None:
    watched: list[str] = []
    kind = private(Watched)
    saving = {"save_strategy": "steps", "save_steps": 3}
    ours = sft(tmp_path, drawn(ROWS, TEXTS["text"]), kind, more={"watched": watched}, **saving)
    ours.train()
    assert watched == ["saved"]
    assert kind.__name__ == "PrivateWatched"
    assert isinstance(ours, Watched)
    assert private(PrivateSFTTrainer) is PrivateSFTTrainer


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (sft, Doubled, r"Doubled.compute_loss gives one loss for the batch.*override the method compute_losses\(self"),
        (
            dpo,
            type("Stepping", (DPOTrainer,), {"training_step": lambda *_: None}),
            "Stepping.training_step would take the place",
        ),
    ],
)
def test_what_a_subclass_must_override_is_named(make: Any, kind: Any, message: str, tmp_path: Any) -> None:
    data = drawn(2, TEXTS["text"] if make is sft else PAIRS["texts"])
    with pytest.raises(PrivacyError, match=message):
        make(tmp_path, data, private(kind))


def test_a_subclass_may_have_losses_of_its_own(tmp_path: Any) -> None:
    data = drawn(4, TEXTS["text"])
    ours, plain = sft(tmp_path, data, private(DoubledLosses)), sft(tmp_path, data)
    batch = plain.data_collator([plain.train_dataset[row] for row in range(4)])
    losses = ours.compute_losses(ours.model, dict(batch))
    torch.testing.assert_close(losses, 2 * plain.compute_losses(ours.model, dict(batch)))
    assert losses.shape == (4,)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.nn.Linear, "takes a class of trainers"),
        (3, "takes a class of trainers"),
        (RewardTrainer, r"aren't known for RewardTrainer.*define compute_losses\(self"),
    ],
)
def test_only_trainers_whose_losses_are_known_have_a_private_class(kind: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        private(kind)
