"""Models that people fine-tune, as workloads: those of transformers, with random weights.

They have no dropout, so that sums can be compared; `with_dropout` makes workloads of those that have some by default.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from ghostclip.bench.losses import class_losses, token_losses
from ghostclip.bench.workloads import Workload, numbers, texts

__all__ = ["WORKLOADS", "with_dropout"]

WORDS, WIDTH, HEADS, LAYERS, POSITIONS, PADDING = 10_000, 256, 4, 4, 128, 0


class _Logits(nn.Module):
    """What a model of transformers answers to a tensor of words or pixels: its logits."""

    def __init__(self, model: nn.Module, takes: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.model, self.takes = model, takes

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, ...] to [B, T, words] or [B, classes]."""
        return self.model(**self.takes(inputs)).logits


def _of_words(inputs: Tensor) -> dict[str, Tensor]:
    return {"input_ids": inputs}


def _of_padded_words(inputs: Tensor) -> dict[str, Tensor]:
    return {"input_ids": inputs, "attention_mask": (inputs != PADDING).long()}


def _of_pixels(inputs: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": inputs}


def _built(name: str, takes: Callable[[Tensor], dict[str, Tensor]], **settings: Any) -> Callable[[], nn.Module]:
    """A function that makes a model of transformers, by the names of its class and of its configuration's."""

    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        return _Logits(model(model.config_class(**settings)).train(), takes)

    return build


def _padded_texts(size: int) -> tuple[Tensor, Tensor]:
    """Texts of 32 to POSITIONS words, padded to POSITIONS, and one of two classes for each."""
    text = torch.randint(1, WORDS, (size, POSITIONS))
    lengths = torch.randint(32, POSITIONS + 1, (size, 1))
    lengths[0] = POSITIONS
    return torch.where(torch.arange(POSITIONS) < lengths, text, PADDING), torch.randint(0, 2, (size,))


def _gpt2(dropout: float) -> Callable[[], nn.Module]:
    return _built(
        "GPT2LMHeadModel", _of_words, vocab_size=WORDS, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS,
        n_head=HEADS, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip


def _bert(dropout: float) -> Callable[[], nn.Module]:
    return _built(
        "BertForSequenceClassification", _of_padded_words, vocab_size=WORDS, hidden_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        max_position_embeddings=POSITIONS, pad_token_id=PADDING, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip


def with_dropout(dropout: float) -> list[Workload]:
    """GPT-2 and BERT with dropout, 0.1 by default, in all of the places where they have it; others have none."""
    builds = {"hf-gpt2": _gpt2(dropout), "hf-bert": _bert(dropout)}
    return [replace(work, model=builds[work.name]) for work in WORKLOADS if work.name in builds]


_LLAMA = _built(
    "LlamaForCausalLM", _of_words, vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=688, use_cache=False,
    num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=POSITIONS,
)  # fmt: skip
_VIT = _built(
    "ViTForImageClassification", _of_pixels, hidden_size=192, num_hidden_layers=12, num_attention_heads=3,
    intermediate_size=768, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
)  # fmt: skip
WORKLOADS = (
    Workload("hf-gpt2", f"GPT-2 of transformers, {LAYERS} layers, width {WIDTH}; texts of {POSITIONS} random words", 8,
             _gpt2(0.0), texts(POSITIONS, WORDS), token_losses, "published"),
    Workload("hf-llama", f"Llama of transformers, {LAYERS} layers, width {WIDTH}; texts of {POSITIONS} random words", 8,
             _LLAMA, texts(POSITIONS, WORDS), token_losses, "published"),
    Workload("hf-bert", f"BERT of transformers, {LAYERS} layers, width {WIDTH}; padded texts of 32 to {POSITIONS} "
             "random words", 16, _bert(0.0), _padded_texts, class_losses, "published"),
    Workload("hf-vit", "ViT of transformers, 12 layers, width 192; random 224 x 224 colour images", 8, _VIT,
             numbers(3, 224, 224), class_losses, "published"),
)  # fmt: skip
