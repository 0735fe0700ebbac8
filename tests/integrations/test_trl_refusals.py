"""What of TRL's options can't be private is refused when the trainer is built, by its name."""

from typing import Any

import pytest

pytest.importorskip("trl")

from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig
from tiny_trl import PAIRS, TEXTS, dpo, drawn, llama, privacy, sft, tokenizer
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.data_utils import pack_dataset

from ghostclip import PrivacyError, UnsupportedModelError
from ghostclip.integrations.huggingface_losses import next_token_losses
from ghostclip.integrations.trl import PrivateSFTTrainer, private
from ghostclip.integrations.trl_refusals import check_documents

pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")

SFT = [
    ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped' of SFTConfig cuts documents apart"),
    ({"activation_offloading": True}, "activation_offloading=True of SFTConfig"),
    ({"shuffle_dataset": True}, "shuffle_dataset=True of SFTConfig moves the rows"),
    (
        {"gradient_checkpointing_kwargs": {"selective": True}},
        r"checkpointing_kwargs .*: what selective=True keeps",
    ),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 of TrainingArguments"),  # as PrivateTrainer refuses others
]
DPO = [
    ({"loss_type": ["aot"]}, "loss_type='aot' of DPOConfig isn't known as a sum over pairs"),
    ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}, "loss_type='sft' of DPOConfig isn't known as"),
    ({"use_weighting": True}, "use_weighting=True of DPOConfig"),
    ({"ld_alpha": 0.5}, "ld_alpha=0.5 of DPOConfig"),
    ({"f_divergence_type": "js_divergence"}, "f_divergence_type='js_divergence' of DPOConfig"),
    ({"sync_ref_model": True}, "sync_ref_model=True of DPOConfig moves the reference model"),
    ({"padding_free": True}, "padding_free=True of DPOConfig"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"), [*((sft, *case) for case in SFT), *((dpo, *case) for case in DPO)]
)
def test_options_that_cannot_be_private_are_refused_by_name(
    make: Any, options: dict[str, Any], message: str, tmp_path: Any
) -> None:
    data = drawn(2, TEXTS["text"] if make is sft else PAIRS["texts"])
    with pytest.raises(PrivacyError, match=message):
        make(tmp_path, data, **options)


def test_a_loss_of_the_batch_is_refused(tmp_path: Any) -> None:
    more = {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.mean()}
    with pytest.warns(FutureWarning), pytest.raises(PrivacyError, match="compute_loss_func gives one loss"):
        sft(tmp_path, drawn(2, TEXTS["text"]), more=more)


def test_a_loss_of_the_model_s_own_is_refused(tmp_path: Any) -> None:
    """But for pairs, whose losses are of log-probabilities alone."""
    model = llama()
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM has a loss_function of its own .* next_token_"):
        sft(tmp_path, drawn(2, TEXTS["text"]), more={"model": model})
    sft(tmp_path, drawn(2, TEXTS["text"]), more={"model": model, "compute_losses": next_token_losses})
    dpo(tmp_path, drawn(2, PAIRS["texts"]), more={"model": model})


@pytest.mark.parametrize(
    ("make", "row", "message"),
    [
        (sft, lambda some: {"story": some()}, "text"),
        (dpo, lambda some: {"prompt": some(), "chosen": some()}, "rejected"),
    ],
)
def test_data_without_texts_or_pairs_are_trl_s_to_refuse(make: Any, row: Any, message: str, tmp_path: Any) -> None:
    with pytest.raises(KeyError, match=message):
        make(tmp_path, drawn(2, row))


@pytest.mark.parametrize("by", ["seq_lengths", "position_ids"])
def test_a_data_set_that_was_packed_beforehand_is_refused(by: str, tmp_path: Any) -> None:
    """Epsilon would be about the presence of a whole pack."""
    documents = [{"input_ids": [5, 6, 7, 1]}, {"input_ids": [8, 9, 1]}]
    if by == "seq_lengths":
        data = pack_dataset(Dataset.from_list(documents), 16, "bfd")
    else:
        data = Dataset.from_list([{"input_ids": [5, 6, 7, 1, 8, 9, 1], "position_ids": [0, 1, 2, 3, 0, 1, 2]}])
    assert by in data.column_names
    with pytest.raises(PrivacyError, match=r"packed beforehand: .* about whole packs; give the documents"):
        sft(tmp_path, data, packing=True)
    assert len(sft(tmp_path, Dataset.from_list(documents), packing=True).train_dataset) == 2


class Weighted(SFTTrainer):
    """Short texts count less."""

    def compute_losses(self, model: Any, inputs: Any) -> Any:
        return self.task_losses(model, inputs) * (inputs["labels"] != -100).sum(1)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (private(Weighted), {}, "a compute_losses of your own"),
        (PrivateSFTTrainer, {"compute_losses": lambda model, inputs: None}, "a compute_losses of your own"),
        (PrivateSFTTrainer, {"data_collator": lambda rows: rows}, "a data_collator of your own"),
        (PrivateSFTTrainer, {"peft_config": LoraConfig(use_dora=True, task_type="CAUSAL_LM")}, "adapters by use_dora"),
        (PrivateSFTTrainer, {"peft_config": IA3Config(task_type="CAUSAL_LM")}, "adapters by IA3"),
        (
            PrivateSFTTrainer, {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")},
            "adapters by PROMPT_TUNING",
        ),
    ],
    ids=["overridden", "given", "collator", "DoRA", "IA3", "prompt"],
)  # fmt: skip
@pytest.mark.parametrize("option", ["packing", "padding_free"])
def test_what_cannot_tell_documents_apart_is_refused_with_packing(
    kind: Any, more: Any, message: str, option: str, tmp_path: Any
) -> None:
    data = drawn(2, TEXTS["text"])
    with pytest.raises(PrivacyError, match=rf"packing \(or padding_free\) and {message}.* don't go together"):
        sft(tmp_path, data, kind, more, **{option: True})
    if option == "packing" and "data_collator" not in more:
        sft(tmp_path, data, kind, more)


def test_plain_training_arguments_are_made_an_sft_config(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = PrivateSFTTrainer(llama(), args, train_dataset=drawn(2, TEXTS["text"]), privacy=privacy(tmp_path),
                                processing_class=tokenizer())  # fmt: skip
    assert isinstance(trainer.args, SFTConfig)


def test_columns_of_these_names_that_hold_no_packs_are_let_be() -> None:
    check_documents(Dataset.from_list([{"text": "a", "seq_lengths": 1, "position_ids": None}]))


def test_an_empty_completion_is_what_trl_makes_of_it(tmp_path: Any) -> None:
    """The token that ends it."""
    rows = Dataset.from_list([{"prompt": "the cat", "completion": " sat"}, {"prompt": "the dog", "completion": ""}])
    plain = sft(tmp_path, rows, SFTTrainer)
    trainer = sft(tmp_path, rows, per_device_train_batch_size=2)
    assert trainer.train_dataset.to_list() == plain.train_dataset.to_list()
    assert trainer.train().global_step == 3


def test_streams_are_refused(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match="can't be read at random"):
        sft(tmp_path, drawn(2, TEXTS["text"]).to_iterable_dataset())
