"""Language models in bfloat16 with gradient checkpointing, by LoRA or whole: private and ordinary steps, two losses.

The loss in chunks is that of PrivateTrainer and its kin where the output layer is frozen. Private steps are the
engine's: forward, clipping, noise, charge, Adam.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ghostclip import PrivacyEngine
from ghostclip.bench.contenders import NOISE_MULTIPLIER, Contender, Prepared, adam
from ghostclip.bench.losses import Losses
from ghostclip.bench.workloads import Workload
from ghostclip.integrations.huggingface_losses import next_token_losses

__all__ = ["CONTENDERS", "ORDINARY", "WORKLOADS"]

ORDINARY = "ordinary"
Texts = dict[str, Any]


def whole_llama(words: int, width: int, inner: int, layers: int) -> nn.Module:
    """A random Llama in bfloat16, all of which is trained, its head with its table of words."""
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=width // 64, use_cache=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def llama(words: int, width: int, inner: int, layers: int) -> nn.Module:
    """The same, frozen, with adapters of rank 16 on all of its linear layers but the last."""
    model: Any = whole_llama(words, width, inner, layers)
    model.enable_input_require_grads()
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters).train()


def quantized_llama(words: int, width: int, inner: int, layers: int) -> nn.Module:
    """The same with the frozen linear layers in four bits (QLoRA, Dettmers et al. 2023)."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    model: Any = whole_llama(words, width, inner, layers)
    for block in model.model.layers.modules():
        for name, layer in block.named_children():
            if isinstance(layer, nn.Linear):
                narrow = Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                narrow.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                setattr(block, name, narrow.to("cpu"))  # which quantizes it
    model.requires_grad_(False)
    model.enable_input_require_grads()
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters).train()


def texts(words: int, positions: int, size: int) -> tuple[Tensor, Tensor]:
    """So many random texts, which are their own labels."""
    found = torch.randint(2, words, (size, positions))
    return found, found


def whole_logits(model: nn.Module, inputs: Texts) -> Tensor:
    """[B]: the mean over an example's tokens, of logits [B, T, words] in float32."""
    logits, labels = model(input_ids=inputs["input_ids"]).logits.float()[:, :-1], inputs["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)


def of_transformers(model: nn.Module, inputs: Texts) -> Tensor:
    """The mean over the batch, as the model itself computes it."""
    return model(**inputs).loss


def _ordinary(losses: Callable[[nn.Module, Texts], Tensor], model: nn.Module, _: Losses, max_norm: float) -> Prepared:
    optimizer = adam(model)

    def step(inputs: Tensor, labels: Tensor) -> None:
        losses(model, {"input_ids": inputs, "labels": labels}).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Prepared(step, None)


def _private(losses: Callable[[nn.Module, Texts], Tensor], model: nn.Module, _: Losses, max_norm: float) -> Prepared:
    engines: list[PrivacyEngine] = []
    optimizer = adam(model)

    def step(inputs: Tensor, labels: Tensor) -> None:
        if not engines:
            rows = [{"input_ids": row, "labels": row} for row in inputs]
            options = {"noise_multiplier": NOISE_MULTIPLIER, "clipping": max_norm, "sampling": "without_replacement"}
            engines.append(PrivacyEngine(model, optimizer, rows, batch_size=len(rows), self_check=False, **options))
        for batch in engines[0].batches():  # one, of all rows
            engines[0].step(batch, losses)

    return Prepared(step, None)


CONTENDERS = (
    Contender(ORDINARY, "PEFT's model and transformers' own loss", partial(_ordinary, of_transformers)),
    Contender("ordinary, loss in chunks", "the same with ours", partial(_ordinary, next_token_losses)),
    Contender("private, whole logits", "PrivacyEngine, logits as they are", partial(_private, whole_logits)),
    Contender(
        "private, loss in chunks", "PrivacyEngine, as PrivateTrainer has it", partial(_private, next_token_losses)
    ),
)
RANK_16 = "adapters of rank 16 in float32 on all linear layers but the last"
WORKLOADS = (
    Workload(
        "large", f"Llama: width 1024, 20 layers, 128,000 words, {RANK_16}; texts of 256 tokens", 4,
        lambda: llama(128_000, 1024, 2816, 20), partial(texts, 128_000, 256),
    ),
    Workload(
        "head", "Llama: width 512, 2 layers, 128,000 words, all of it trained; texts of 256 tokens", 4,
        lambda: whole_llama(128_000, 512, 1408, 2), partial(texts, 128_000, 256),
    ),
    Workload(
        "4bit", f"Llama: width 1024, 8 layers in four bits (NF4), 32,000 words, {RANK_16}; texts of 256 tokens", 4,
        lambda: quantized_llama(32_000, 1024, 2816, 8), partial(texts, 32_000, 256),
    ),
    Workload(
        "tiny", f"Llama: width 64, 2 layers, 500 words, {RANK_16}; texts of 16 tokens", 4,
        lambda: llama(500, 64, 128, 2), partial(texts, 500, 16),
    ),
)  # fmt: skip
