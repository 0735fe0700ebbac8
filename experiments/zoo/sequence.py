"""Models of transformers that read or write other sequences: encoder-decoders, speech, state spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .language import ENDS, from_config
from .subject import CLASSES, TOKENS, Batch, Subject, class_losses, texts, token_losses

__all__ = ["SUBJECTS"]

T5 = {"vocab_size": TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
      "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
BART = {"vocab_size": TOKENS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
        "decoder_start_token_id": 1, "forced_eos_token_id": 2, **ENDS}  # fmt: skip
WHISPER = BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
WAV2VEC2 = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
            "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": CLASSES,
            "classifier_proj_size": 8, "apply_spec_augment": False, "layerdrop": 0.0}  # fmt: skip
MAMBA = {"vocab_size": TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3,
         "expand": 2, "time_step_rank": 3, **ENDS}  # fmt: skip
CLIP_TEXT = {"vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "max_position_embeddings": 16, "eos_token_id": 2}  # fmt: skip
CLIP_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
               "image_size": 16, "patch_size": 8}  # fmt: skip


def pairs(examples: int) -> Batch:
    """Texts to read, and texts to write."""
    found = texts(examples)
    return {"input_ids": found["input_ids"], "decoder_input_ids": found["input_ids"].flip(1)[:, :7]}


def sounds_to_text(examples: int) -> Batch:
    """Spectrograms of 8 bands and 24 steps, and texts to write."""
    generator = torch.Generator().manual_seed(examples)
    features = torch.randn(examples, 8, 24, generator=generator, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": texts(examples)["input_ids"][:, :7]}


def sounds(examples: int) -> Batch:
    """Waves of 200 samples, and a class for each."""
    generator = torch.Generator().manual_seed(examples)
    waves = torch.randn(examples, 200, generator=generator, dtype=torch.float64)
    return {"input_values": waves, "target": torch.arange(examples) % CLASSES}


def captions(examples: int) -> Batch:
    """Images and texts that belong together."""
    generator = torch.Generator().manual_seed(examples)
    pixels = torch.randn(examples, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"input_ids": texts(examples)["input_ids"], "pixel_values": pixels}


def written_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the written tokens, averaged over the example."""
    logits = model(**batch, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["decoder_input_ids"][:, 1:], reduction="none")
    return losses.mean(1)


def contrastive_losses(model: nn.Module, batch: Batch) -> Tensor:
    """How well each image is told from the other texts of the batch: a loss of all examples."""
    logits = model(**batch).logits_per_image
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def clip_losses(model: nn.Module, batch: Batch) -> Tensor:
    """How near each image is to its own text."""
    return -model(**batch).logits_per_image.diagonal()


def clip() -> nn.Module:
    """CLIP of one layer each."""
    import transformers

    config = transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=8)
    return transformers.CLIPModel(config)


RWKV = {"vocab_size": TOKENS, "hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "context_length": 16,
        "rescale_every": 0}  # else it writes to its own weights whenever it goes into eval mode  # fmt: skip
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# name: (what is particular, model, config, its options, batch, losses)
Row = tuple[str, str, str, dict[str, Any], Callable[[int], Batch], Callable[[nn.Module, Batch], Tensor]]
ROWS: dict[str, Row] = {
    "T5": ("RMSNorm, relative position bias, tied embeddings", "T5ForConditionalGeneration", "T5Config", T5,
           pairs, written_losses),
    "T5 v1.1": ("gated, own head", "T5ForConditionalGeneration", "T5Config", GATED, pairs, written_losses),
    "BART": ("encoder-decoder, tied embeddings", "BartForConditionalGeneration", "BartConfig", BART,
             pairs, written_losses),
    "Whisper": ("1-D convolutions, encoder-decoder", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER,
                sounds_to_text, written_losses),
    "Wav2Vec2": ("weight-normalised convolution", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAV2VEC2,
                 sounds, class_losses),
    "HuBERT": ("weight-normalised convolution", "HubertForSequenceClassification", "HubertConfig", WAV2VEC2,
               sounds, class_losses),
    "Mamba": ("state space, depthwise convolution", "MambaForCausalLM", "MambaConfig", MAMBA, texts, token_losses),
    "RWKV": ("linear attention", "RwkvForCausalLM", "RwkvConfig", RWKV, texts, token_losses),
}  # fmt: skip


def _subjects() -> Iterator[Subject]:
    for name, (about, model, config, options, batch, losses) in ROWS.items():
        yield Subject(name, "transformers", about, from_config(model, config, **options), batch, losses)
    yield Subject("CLIP", "transformers", "two towers, a loss for each pair alone", clip, captions, clip_losses)
    yield Subject(
        "CLIP, contrastive", "transformers", "a loss that compares the examples of a batch", clip, captions,
        contrastive_losses, refused="depends on",
    )  # fmt: skip


SUBJECTS = tuple(_subjects())
