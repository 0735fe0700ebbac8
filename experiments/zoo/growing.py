"""A tiny configuration of transformers in a size that is worth timing."""

from __future__ import annotations

from typing import Any

__all__ = ["grown"]

# By how much options are multiplied: widths, vocabulary, and what bounds the length of texts and the size of images.
WIDTHS = {"hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "intermediate_size",
          "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "attention_hidden_size", "conv_dim",
          "vocab_size", "classifier_proj_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner",
          "projection_dim"}  # fmt: skip
FACTORS = dict.fromkeys(WIDTHS, 8) | {
    "head_dim": 8, "d_kv": 4, "embed_dim": 6, "hidden_sizes": 4, "max_position_embeddings": 4, "n_positions": 4,
    "max_seq_len": 4, "context_length": 4, "image_size": 2, "max_relative_positions": 4,
}  # fmt: skip


def grown(options: dict[str, Any]) -> dict[str, Any]:
    """The options with wider layers, longer texts and larger images."""
    found = {}
    for name, value in options.items():
        factor = FACTORS.get(name, 1)
        if isinstance(value, dict):
            found[name] = grown(value)
        elif isinstance(value, list | tuple) and factor > 1:
            found[name] = type(value)(factor * each for each in value)
        else:
            found[name] = factor * value if factor > 1 else value
    return found
