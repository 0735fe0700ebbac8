"""Language models of transformers: decoders and encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from .growing import grown
from .subject import (
    CLASSES,
    LONG,
    TOKENS,
    Batch,
    Subject,
    Timed,
    class_losses,
    masked_texts,
    texts,
    token_losses,
)

__all__ = ["SUBJECTS", "configured", "from_config"]


def from_config(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """What builds ``transformers.<model>`` of ``transformers.<config>(**options)``."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def configured(
    name: str, about: str, model: str, config: str, options: dict[str, Any], batch: Callable[[int], Batch],
    losses: Callable[[nn.Module, Batch], Tensor], long_batch: Callable[[int], Batch] | None = None, **more: Any,
) -> Subject:  # fmt: skip
    """A model of transformers, tiny, and grown where it is timed on ``long_batch``."""
    timed = Timed(from_config(model, config, **grown(options)), long_batch or batch)
    build = from_config(model, config, **options)
    return Subject(name, "transformers", about, build, batch, losses, timed=timed, **more)


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
    "Gemma 3": ("norms of queries and keys, local and global layers", "Gemma3ForCausalLM", "Gemma3TextConfig",
                LLAMA | {"sliding_window": 4}),
    "Phi-3": ("one projection of queries, keys and values", "Phi3ForCausalLM", "Phi3Config", LLAMA),
    "StableLM": ("LayerNorm, partial rotary", "StableLmForCausalLM", "StableLmConfig", LLAMA),
    "Cohere": ("parallel residual, scaled logits", "CohereForCausalLM", "CohereConfig", LLAMA),
    "OLMo 2": ("norms after the layers", "Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "Granite": ("scaled residuals and embeddings", "GraniteForCausalLM", "GraniteConfig", LLAMA),
    "StarCoder 2": ("biases, LayerNorm", "Starcoder2ForCausalLM", "Starcoder2Config", LLAMA),
    "SmolLM3": ("layers without positions", "SmolLM3ForCausalLM", "SmolLM3Config", LLAMA),
    "GLM": ("partial rotary in pairs", "GlmForCausalLM", "GlmConfig", LLAMA),
    "Nemotron": ("squared ReLU, LayerNorm of 1 + weight", "NemotronForCausalLM", "NemotronConfig", LLAMA),
    "GPT-J": ("parallel residual, rotary in pairs", "GPTJForCausalLM", "GPTJConfig", GPT2 | {"rotary_dim": 4}),
    "GPTBigCode": ("multi-query attention", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2),
    "MPT": ("ALiBi, no biases", "MptForCausalLM", "MptConfig",
            {"vocab_size": TOKENS, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 16}),
}  # fmt: skip
QWEN_EXPERTS = LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "shared_expert_intermediate_size": 24, "experts_implementation": "eager"}  # fmt: skip
EXPERTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "Mixtral": ("mixture of experts", "MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    "Qwen2-MoE": ("experts, and one that all tokens share", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN_EXPERTS),
    "OLMoE": ("mixture of experts", "OlmoeForCausalLM", "OlmoeConfig", QWEN_EXPERTS),
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
    "ModernBERT": ("rotary, gated, local and global layers", "ModernBertForSequenceClassification", "ModernBertConfig",
                   BERT | {"local_attention": 4, "global_attn_every_n_layers": 2, **ENDS, "cls_token_id": 1,
                           "sep_token_id": 2}),
    "FNet": ("Fourier transforms instead of attention", "FNetForSequenceClassification", "FNetConfig", BERT),
    "Longformer": ("attention within windows", "LongformerForSequenceClassification", "LongformerConfig",
                   BERT | {"attention_window": 4, "max_position_embeddings": 24, **ENDS}),
    "SqueezeBERT": ("grouped convolutions", "SqueezeBertForSequenceClassification", "SqueezeBertConfig",
                    BERT | {"intermediate_size": 32, "embedding_size": 16}),
    "ConvBERT": ("convolutions with weights from the text", "ConvBertForSequenceClassification", "ConvBertConfig",
                 BERT | {"embedding_size": 16, "num_attention_heads": 4, "conv_kernel_size": 3}),
    "LayoutLM": ("positions on a page", "LayoutLMForSequenceClassification", "LayoutLMConfig", BERT),
    "XLNet": ("relative positions", "XLNetForSequenceClassification", "XLNetConfig",
              {"vocab_size": TOKENS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "num_labels": CLASSES}),
    "Funnel": ("pooled positions", "FunnelForSequenceClassification", "FunnelConfig",
               {"vocab_size": TOKENS, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24,
                "num_labels": CLASSES}),
}  # fmt: skip


# Modules of models that have the examples in dimension 1.
POSITIONS_FIRST = {
    "Longformer": {"longformer.encoder.layer.*.attention.self.*": 1},
    "XLNet": {"transformer.layer.*": 1, "transformer.word_embedding": 1},
}


def _subjects() -> Iterator[Subject]:
    long_texts, long_masked = partial(texts, length=LONG), partial(masked_texts, length=LONG)
    for name, row in DECODERS.items():
        yield configured(name, *row, texts, token_losses, long_texts, kind="decoder")
    for name, row in EXPERTS.items():
        yield configured(name, *row, texts, token_losses, long_texts, kind="experts")
    for name, row in ENCODERS.items():
        wrap = {"batch_dim": POSITIONS_FIRST[name]} if name in POSITIONS_FIRST else {}
        yield configured(name, *row, masked_texts, class_losses, long_masked, kind="encoder", wrap=wrap)


SUBJECTS = tuple(_subjects())
