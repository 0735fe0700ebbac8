"""Language models of transformers with adapters of peft: a frozen base, and few trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .growing import grown
from .language import BERT, GPT2, LLAMA, from_config
from .subject import LONG, Batch, Subject, Timed, class_losses, masked_texts, texts, token_losses

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
    "Llama + P-tuning prompt": ("a prompt made by a perceptron", "Llama", "PromptEncoderConfig",
                                VIRTUAL | {"encoder_hidden_size": 16}),
    "Llama + rsLoRA": ("LoRA scaled by the root of its rank", "Llama", "LoraConfig",
                       LORA | LINEARS | {"use_rslora": True}),
    "Llama + AdaLoRA": ("three factors", "Llama", "AdaLoraConfig",
                        LINEARS | {"init_r": 3, "target_r": 2, "total_step": 100, "lora_dropout": 0.0,
                                   "init_lora_weights": False}),
    "Llama + LoHa": ("elementwise products of low rank", "Llama", "LoHaConfig",
                     LINEARS | {"r": 3, "alpha": 6, "init_weights": False}),
    "Llama + LoKr": ("Kronecker products", "Llama", "LoKrConfig",
                     LINEARS | {"r": 3, "alpha": 6, "init_weights": False}),
    "Llama + VeRA": ("trained scales of random factors", "Llama", "VeraConfig",
                     {"target_modules": ["q_proj"], "r": 3, "init_weights": False}),
    "Llama + OFT": ("orthogonal blocks", "Llama", "OFTConfig",
                    LINEARS | {"oft_block_size": 4, "init_weights": False}),
    "Llama + HRA": ("Householder reflections", "Llama", "HRAConfig", LINEARS | {"r": 2, "init_weights": False}),
    "Llama + LN tuning": ("norms alone", "Llama", "LNTuningConfig",
                          {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
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
    length = batch["input_ids"].shape[1]
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, -length:-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none").mean(1)


def _subjects() -> Iterator[Subject]:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    bases = {
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | still),
        "Llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
        "BERT": ("BertForSequenceClassification", "BertConfig", BERT),
    }
    small = {name: from_config(model, config, **options) for name, (model, config, options) in bases.items()}
    large = {name: from_config(model, config, **grown(options)) for name, (model, config, options) in bases.items()}
    long_texts, long_masked = partial(texts, length=LONG), partial(masked_texts, length=LONG)
    for name, (about, base, config, options) in ROWS.items():
        build, wide = (adapted(of[base], config, **options, task_type="CAUSAL_LM") for of in (small, large))
        losses = prompted_losses if "prompt" in name else token_losses
        yield Subject(name, "peft", about, build, texts, losses, kind="adapter", timed=Timed(wide, long_texts))
    build, wide = (
        adapted(of["BERT"], "LoraConfig", **LORA, target_modules=["query", "value"], task_type="SEQ_CLS")
        for of in (small, large)
    )
    about = "LoRA, and a classifier trained whole"
    yield Subject(
        "BERT + LoRA", "peft", about, build, masked_texts, class_losses, kind="adapter", timed=Timed(wide, long_masked)
    )
    about = "activations computed again in backward"
    yield Subject(
        "GPT-2, checkpointed", "transformers", about, checkpointed(small["GPT-2"]), texts, token_losses, trains=True,
        kind="decoder", timed=Timed(checkpointed(large["GPT-2"]), long_texts),
    )  # fmt: skip


SUBJECTS = tuple(_subjects())
