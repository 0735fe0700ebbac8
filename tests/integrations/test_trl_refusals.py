"""What of TRL's options can't be private is refused when the trainer is built, by its name."""

from typing import Any

import pytest

pytest.importorskip("trl")

from tiny_trl import PAIRS, TEXTS, dpo, drawn, sft

from ghostclip import PrivacyError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`.*gradient_checkpointing` is deprecated:FutureWarning", "ignore:`label_smoothing_factor`:FutureWarning"
)

SFT = [
    ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped' of SFTConfig cuts documents apart"),
    ({"activation_offloading": True}, "activation_offloading=True of SFTConfig"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 of TrainingArguments"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 of TrainingArguments"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True of TrainingArguments"),
]
DPO = [
    ({"loss_type": ["aot"]}, "loss_type='aot' of DPOConfig isn't a sum over pairs"),
    (
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]},
        "loss_type='sft' of DPOConfig isn't a sum over pairs",
    ),
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


def test_data_that_are_no_texts_are_trl_s_to_refuse(tmp_path: Any) -> None:
    with pytest.raises(KeyError, match="text"):
        sft(tmp_path, drawn(2, lambda some: {"story": some()}))


def test_streams_are_refused(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match="can't be read at random"):
        sft(tmp_path, drawn(2, TEXTS["text"]).to_iterable_dataset())
