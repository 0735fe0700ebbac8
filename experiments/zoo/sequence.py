"""Models of transformers that read or write other sequences: encoder-decoders, speech, state spaces, time series."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .language import ENDS, LLAMA, configured
from .subject import CLASSES, LENGTH, LONG, TOKENS, Batch, Subject, class_losses, texts, token_losses

__all__ = ["SUBJECTS", "WAV2VEC2", "sounds"]

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


def pairs(examples: int, length: int = LENGTH) -> Batch:
    """Texts to read, and texts to write."""
    found = texts(examples, length)
    return {"input_ids": found["input_ids"], "decoder_input_ids": found["input_ids"].flip(1)[:, :7]}


def sounds_to_text(examples: int, steps: int = 24) -> Batch:
    """Spectrograms of 8 bands, and texts to write."""
    generator = torch.Generator().manual_seed(examples)
    features = torch.randn(examples, 8, steps, generator=generator, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": texts(examples)["input_ids"][:, :7]}


def sounds(examples: int, samples: int = 200) -> Batch:
    """Waves of so many samples, and a class for each."""
    generator = torch.Generator().manual_seed(examples)
    waves = torch.randn(examples, samples, generator=generator, dtype=torch.float64)
    return {"input_values": waves, "target": torch.arange(examples) % CLASSES}


def series(examples: int, steps: int = 24) -> Batch:
    """What two series were, and what they will be over 6 steps."""
    generator = torch.Generator().manual_seed(examples)
    past, future = (torch.randn(examples, n, 2, generator=generator, dtype=torch.float64) for n in (steps, 6))
    return {"past_values": past, "future_values": future}


def dated_series(examples: int, steps: int = 24) -> Batch:
    """One series with two numbers that tell the time."""
    found = series(examples, steps + 4)
    past, future = found["past_values"], found["future_values"]
    seen = torch.ones_like(past[..., 0])
    return {"past_values": past[..., 0], "past_time_features": past, "past_observed_mask": seen,
            "future_values": future[..., 0], "future_time_features": future}  # fmt: skip


def forecast_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Squared errors of a forecast, averaged over the example."""
    found = model(past_values=batch["past_values"]).prediction_outputs
    return (found - batch["future_values"]).square().mean((1, 2))


def density_losses(model: nn.Module, batch: Batch) -> Tensor:
    """How unlikely a model of densities finds the future, averaged over the example.

    Informer attends to positions that it draws by chance: with one seed, to the same.
    """
    torch.manual_seed(0)
    found = model(**{name: value for name, value in batch.items() if name != "future_values"},
                  future_values=batch["future_values"], use_cache=False)  # fmt: skip
    chances = model.output_distribution(found.params, loc=found.loc, scale=found.scale)
    return -chances.log_prob(batch["future_values"]).mean(1)


def written_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the written tokens, averaged over the example."""
    logits = model(**batch, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["decoder_input_ids"][:, 1:], reduction="none")
    return losses.mean(1)


RWKV = {"vocab_size": TOKENS, "hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "context_length": 16,
        "rescale_every": 0}  # else it writes to its own weights whenever it goes into eval mode  # fmt: skip
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SWITCH = T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0,
               "router_jitter_noise": 0.0}  # fmt: skip
MARIAN = BART | {"decoder_start_token_id": 0, "pad_token_id": 0}
MAMBA2 = {"vocab_size": TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3,
          "expand": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8, **ENDS}  # fmt: skip
GRIFFIN = LLAMA | {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4, "conv1d_width": 3}
PATCHES = {"num_input_channels": 2, "context_length": 24, "prediction_length": 6, "patch_length": 4, "patch_stride": 4,
           "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "loss": "mse",
           "attention_dropout": 0.0, "scaling": None}  # fmt: skip
MIXER = {"num_input_channels": 2, "context_length": 24, "prediction_length": 6, "patch_length": 4, "patch_stride": 4,
         "d_model": 16, "num_layers": 2, "expansion_factor": 2, "dropout": 0.0, "scaling": None}  # fmt: skip
DATED = {"prediction_length": 6, "context_length": 24, "lags_sequence": [1, 2, 4], "num_time_features": 2,
         "input_size": 1, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "scaling": False}  # fmt: skip
# name: (kind, what is particular, model, config, its options, batch, losses, what is timed: a batch)
Row = tuple[
    str, str, str, str, dict[str, Any], Callable[[int], Batch], Callable[[nn.Module, Batch], Tensor],
    Callable[[int], Batch],
]  # fmt: skip
LONG_PAIRS, LONG_TEXTS = partial(pairs, length=LONG), partial(texts, length=LONG)
LONG_SOUNDS, LONG_SERIES = partial(sounds, samples=1600), partial(series, steps=96)
ROWS: dict[str, Row] = {
    "T5": ("encoder-decoder", "RMSNorm, relative position bias, tied embeddings", "T5ForConditionalGeneration",
           "T5Config", T5, pairs, written_losses, LONG_PAIRS),
    "T5 v1.1": ("encoder-decoder", "gated, own head", "T5ForConditionalGeneration", "T5Config", GATED, pairs,
                written_losses, LONG_PAIRS),
    "BART": ("encoder-decoder", "tied embeddings", "BartForConditionalGeneration", "BartConfig", BART, pairs,
             written_losses, LONG_PAIRS),
    "Pegasus": ("encoder-decoder", "sinusoidal positions", "PegasusForConditionalGeneration", "PegasusConfig", MARIAN,
                pairs, written_losses, LONG_PAIRS),
    "Marian": ("encoder-decoder", "tied embeddings", "MarianMTModel", "MarianConfig", MARIAN, pairs, written_losses,
               LONG_PAIRS),
    "LED": ("encoder-decoder", "attention within windows", "LEDForConditionalGeneration", "LEDConfig",
            {("max_encoder_position_embeddings" if n == "max_position_embeddings" else n): v for n, v in BART.items()}
            | {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
            pairs, written_losses, LONG_PAIRS),
    "Switch": ("experts", "a capacity that the tokens of a batch share", "SwitchTransformersForConditionalGeneration",
               "SwitchTransformersConfig", SWITCH, pairs, written_losses, LONG_PAIRS),
    "Whisper": ("speech", "1-D convolutions, encoder-decoder", "WhisperForConditionalGeneration", "WhisperConfig",
                WHISPER, sounds_to_text, written_losses, sounds_to_text),
    "Wav2Vec2": ("speech", "weight-normalised convolution", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
                 WAV2VEC2, sounds, class_losses, LONG_SOUNDS),
    "HuBERT": ("speech", "weight-normalised convolution", "HubertForSequenceClassification", "HubertConfig", WAV2VEC2,
               sounds, class_losses, LONG_SOUNDS),
    "Mamba": ("state space", "scan, depthwise convolution", "MambaForCausalLM", "MambaConfig", MAMBA, texts,
              token_losses, LONG_TEXTS),
    "Mamba-2": ("state space", "scan in chunks", "Mamba2ForCausalLM", "Mamba2Config", MAMBA2, texts, token_losses,
                LONG_TEXTS),
    "RecurrentGemma": ("state space", "gated recurrence, local attention", "RecurrentGemmaForCausalLM",
                       "RecurrentGemmaConfig", GRIFFIN, texts, token_losses, LONG_TEXTS),
    "RWKV": ("state space", "linear attention", "RwkvForCausalLM", "RwkvConfig", RWKV, texts, token_losses, LONG_TEXTS),
    "PatchTST": ("time series", "patches of each channel; BatchNorm left out", "PatchTSTForPrediction",
                 "PatchTSTConfig", PATCHES | {"norm_type": "layernorm"}, series, forecast_losses, LONG_SERIES),
    "PatchTSMixer": ("time series", "perceptrons across patches and channels", "PatchTSMixerForPrediction",
                     "PatchTSMixerConfig", MIXER, series, forecast_losses, LONG_SERIES),
    "TimeSeriesTransformer": ("time series", "encoder-decoder of densities", "TimeSeriesTransformerForPrediction",
                              "TimeSeriesTransformerConfig", DATED, dated_series, density_losses,
                              partial(dated_series, steps=96)),
    "Informer": ("time series", "sparse attention", "InformerForPrediction", "InformerConfig",
                 DATED | {"distil": False}, dated_series, density_losses, partial(dated_series, steps=96)),
    "Autoformer": ("time series", "delays picked by the batch's mean correlation", "AutoformerForPrediction",
                   "AutoformerConfig",
                   DATED | {"label_length": 6, "moving_average": 3}, dated_series, density_losses,
                   partial(dated_series, steps=96)),
}  # fmt: skip


# Modules that have the examples in dimension 1.
POSITIONS_FIRST = {"LED": {"led.encoder.layers.*.self_attn.longformer_self_attn.*": 1}}


def _subjects() -> Iterator[Subject]:
    for name, (kind, about, model, config, options, batch, losses, long) in ROWS.items():
        wrap = {"batch_dim": POSITIONS_FIRST[name]} if name in POSITIONS_FIRST else {}
        refused = "depends on" if name == "Autoformer" else ""  # while it trains, all examples have the same delays
        yield configured(
            name, about, model, config, options, batch, losses, long, kind=kind, wrap=wrap, refused=refused
        )


SUBJECTS = tuple(_subjects())
