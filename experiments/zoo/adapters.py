"""Language models of transformers with adapters of peft: a frozen base, and few trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .language import BERT, GPT2, LLAMA, from_config
from .subject import LENGTH, Batch, Subject, class_losses, masked_texts, texts, token_losses

__all__ = ["SUBJECTS"]

LORA = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "init_lora_weights": False}
LINEARS = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"],
       "init_ia3_weights": False}  # fmt: skip
VIRTUAL = {"num_virtual_tokens": 3}
# name: (what is particular, base, config of peft, its options)
ROWS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "GPT-2 + LoRA": ("LoRA on Conv1D", "GPT-2", "LoraConfig",
                     LORA | {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "Llama + LoRA": ("LoRA on attention and SwiGLU", "Llama", "LoraConfig", LORA | LINEARS),
    "Llama + LoRA on embeddings": ("LoRA's bare Parameters", "Llama", "LoraConfig",
                                   LORA | {"target_modules": ["embed_tokens", "q_proj"]}),
    "Llama + DoRA": ("magnitudes of whole weights", "Llama", "LoraConfig", LORA | LINEARS | {"use_dora": True}),
    "Llama + IA3": ("learned scales", "Llama", "IA3Config", IA3),
    "Llama + prefix tuning": ("learned keys and values", "Llama", "PrefixTuningConfig", VIRTUAL),
    "Llama + prompt tuning": ("one prompt before every text", "Llama", "PromptTuningConfig", VIRTUAL),
}  # fmt: skip


def adapted(base: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    """What builds ``base`` with the adapter that ``peft.<config>(**options)`` describes."""

    def build() -> nn.Module:
        import peft

        return peft.get_peft_model(base(), getattr(peft, config)(**options))

    return build


def checkpointed(base: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """What builds ``base`` with activation checkpointing, the non-reentrant one, in train mode."""

    def build() -> nn.Module:
        model = base()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return build


def prompted_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The token losses of a model whose prompt comes before the text."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, -LENGTH:-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none").mean(1)


def _subjects() -> Iterator[Subject]:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = from_config("GPT2LMHeadModel", "GPT2Config", **GPT2 | still)
    llama = from_config("LlamaForCausalLM", "LlamaConfig", **LLAMA)
    bert = from_config("BertForSequenceClassification", "BertConfig", **BERT)
    for name, (about, base, config, options) in ROWS.items():
        build = adapted(gpt2 if base == "GPT-2" else llama, config, **options, task_type="CAUSAL_LM")
        losses = prompted_losses if "prompt" in name else token_losses
        yield Subject(name, "peft", about, build, texts, losses)
    heads = adapted(bert, "LoraConfig", **LORA, target_modules=["query", "value"], task_type="SEQ_CLS")
    yield Subject("BERT + LoRA", "peft", "LoRA, and a classifier trained whole", heads, masked_texts, class_losses)
    again = "activations computed again in backward"
    yield Subject("GPT-2, checkpointed", "transformers", again, checkpointed(gpt2), texts, token_losses, trains=True)


SUBJECTS = tuple(_subjects())
