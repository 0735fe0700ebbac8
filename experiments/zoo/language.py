"""Language models of transformers: decoders and encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .subject import CLASSES, TOKENS, Subject, class_losses, masked_texts, texts, token_losses

__all__ = ["SUBJECTS", "from_config"]


def from_config(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """What builds ``transformers.<model>`` of ``transformers.<config>(**options)``."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


LLAMA = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": TOKENS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, **ENDS}
WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NEOX = {"vocab_size": TOKENS, **WIDTH, "intermediate_size": 24, "max_position_embeddings": 16, **ENDS}
OPT = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "word_embed_proj_dim": 12,
    "pad_token_id": 0,
}
BERT = {"vocab_size": TOKENS, **WIDTH, "intermediate_size": 24, "max_position_embeddings": 16, "num_labels": CLASSES}
DISTILBERT = {"vocab_size": TOKENS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2,
              "max_position_embeddings": 16, "num_labels": CLASSES}  # fmt: skip
MIXTRAL = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}

# name: (what is particular, model, config, its options)
DECODERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "GPT-2": ("Conv1D, tied head, learned positions", "GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPT-Neo": ("local attention", "GPTNeoForCausalLM", "GPTNeoConfig",
                {"vocab_size": TOKENS, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24,
                 "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 16, **ENDS}),
    "GPT-NeoX (Pythia)": ("parallel residual, rotary", "GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX),
    "OPT": ("offset positions, projected embeddings", "OPTForCausalLM", "OPTConfig", OPT),
    "BLOOM": ("ALiBi", "BloomForCausalLM", "BloomConfig",
              {"vocab_size": TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 2, **ENDS}),
    "Llama": ("RMSNorm, grouped-query attention, SwiGLU, rotary", "LlamaForCausalLM", "LlamaConfig", LLAMA),
    "Qwen2": ("biases in attention, tied head", "Qwen2ForCausalLM", "Qwen2Config",
              LLAMA | {"tie_word_embeddings": True}),
    "Qwen3": ("RMSNorm of each head", "Qwen3ForCausalLM", "Qwen3Config", LLAMA),
    "Mistral": ("sliding window", "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 4}),
    "Gemma": ("RMSNorm of 1 + weight, tied head", "GemmaForCausalLM", "GemmaConfig", LLAMA),
    "Gemma 2": ("four norms a block, soft capping", "Gemma2ForCausalLM", "Gemma2Config", LLAMA),
    "Phi": ("partial rotary, parallel residual", "PhiForCausalLM", "PhiConfig", LLAMA | {"partial_rotary_factor": 0.5}),
    "Falcon": ("multi-query attention", "FalconForCausalLM", "FalconConfig",
               {"vocab_size": TOKENS, **WIDTH, **ENDS}),
    "Mixtral": ("mixture of experts", "MixtralForCausalLM", "MixtralConfig", MIXTRAL),
}  # fmt: skip
ENCODERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "BERT": ("[1, T] positions, token types", "BertForSequenceClassification", "BertConfig", BERT),
    "RoBERTa": ("positions from padding", "RobertaForSequenceClassification", "RobertaConfig",
                BERT | {"max_position_embeddings": 18}),
    "DistilBERT": ("", "DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT),
    "ALBERT": ("one block used by all layers", "AlbertForSequenceClassification", "AlbertConfig",
               BERT | {"embedding_size": 8}),
    "ELECTRA": ("projected embeddings", "ElectraForSequenceClassification", "ElectraConfig",
                BERT | {"embedding_size": 8}),
    "DeBERTa-v2": ("disentangled attention", "DebertaV2ForSequenceClassification", "DebertaV2Config",
                   BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8,
                           "position_buckets": 4, "share_att_key": False}),
    "DeBERTa": ("disentangled attention, scaled in place", "DebertaForSequenceClassification", "DebertaConfig",
                BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}),
    "MPNet": ("relative position bias", "MPNetForSequenceClassification", "MPNetConfig",
              BERT | {"max_position_embeddings": 18}),
}  # fmt: skip


def _subjects() -> Iterator[Subject]:
    for name, (about, model, config, options) in DECODERS.items():
        build = from_config(model, config, **options)
        yield Subject(name, "transformers", about, build, texts, token_losses)
    for name, (about, model, config, options) in ENCODERS.items():
        build = from_config(model, config, **options)
        yield Subject(name, "transformers", about, build, masked_texts, class_losses)


SUBJECTS = tuple(_subjects())
