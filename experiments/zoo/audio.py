"""Models of speech and sound: of transformers, and of torchaudio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .language import configured
from .sequence import WAV2VEC2, sounds
from .subject import CLASSES, Batch, Subject, Timed, class_losses

__all__ = ["SUBJECTS"]

SEW = WAV2VEC2 | {"squeeze_factor": 1}
CONFORMER = WAV2VEC2 | {"conv_depthwise_kernel_size": 3, "position_embeddings_type": "relative",
                        "max_source_positions": 400, "conformer_conv_dropout": 0.0}  # fmt: skip
AST = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 4,
       "frequency_stride": 4, "time_stride": 4, "max_length": 24, "num_mel_bins": 8, "num_labels": CLASSES}  # fmt: skip
LONG_SOUNDS = partial(sounds, samples=1600)


def spectra(examples: int, steps: int = 24, bands: int = 8) -> Batch:
    """Spectra [B, steps, bands], and a class for each."""
    generator = torch.Generator().manual_seed(examples)
    values = torch.randn(examples, steps, bands, generator=generator, dtype=torch.float64)
    return {"input_values": values, "target": torch.arange(examples) % CLASSES}


# name: (what is particular, model, config, its options, batch, a batch that is timed)
Batches = Callable[[int], Batch]
TRANSFORMERS: dict[str, tuple[str, str, str, dict[str, Any], Batches, Batches]] = {
    "WavLM": ("gated relative positions", "WavLMForSequenceClassification", "WavLMConfig", WAV2VEC2, sounds,
              LONG_SOUNDS),
    "UniSpeech": ("weight-normalised convolution", "UniSpeechForSequenceClassification", "UniSpeechConfig", WAV2VEC2,
                  sounds, LONG_SOUNDS),
    "SEW": ("positions squeezed and restored", "SEWForSequenceClassification", "SEWConfig", SEW, sounds, LONG_SOUNDS),
    "Data2Vec audio": ("convolutions for positions", "Data2VecAudioForSequenceClassification", "Data2VecAudioConfig",
                       WAV2VEC2 | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}, sounds, LONG_SOUNDS),
    "AST": ("patches of a spectrum", "ASTForAudioClassification", "ASTConfig", AST, spectra, spectra),
}  # fmt: skip


def code_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Squared errors of sounds that went through an encoder and a decoder without the codes between."""
    network: Any = model
    sound = batch["input_values"].unsqueeze(1)
    found = network.decoder(network.encoder(sound))
    return (found[..., : sound.shape[2]] - sound[..., : found.shape[2]]).square().mean((1, 2))


def encodec(filters: int) -> nn.Module:
    """EnCodec of transformers, without the codes, which aren't trained by gradients."""
    import transformers

    return transformers.EncodecModel(
        transformers.EncodecConfig(hidden_size=2 * filters, num_filters=filters, upsampling_ratios=[2, 2],
                                   num_lstm_layers=1, codebook_size=8, audio_channels=1)
    )  # fmt: skip


def frame_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each sound's class by the mean over time of a model of spectra [B, T, bands]."""
    found = model(batch["input_values"])
    return F.cross_entropy(found.mean(1), batch["target"], reduction="none")


def deep_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The same of DeepSpeech, which takes [B, 1, T, bands]."""
    found = model(batch["input_values"].unsqueeze(1))
    return F.cross_entropy(found.mean(1), batch["target"], reduction="none")


def parted_losses(model: nn.Module, batch: Batch) -> Tensor:
    """How far the first of two sounds, that a mixture is parted into, is from the mixture."""
    sound = batch["input_values"].unsqueeze(1)
    return (model(sound)[:, :1] - 0.5 * sound).square().mean((1, 2))


class Conformed(nn.Module):
    """torchaudio's Conformer, with GroupNorm, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from torchaudio.models import Conformer

        self.low = nn.Linear(8, width)
        self.body = Conformer(width, 2, 2 * width, 2, 3, use_group_norm=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, spectrum: Tensor) -> Tensor:
        lengths = torch.full((spectrum.shape[0],), spectrum.shape[1])
        return self.head(self.body(self.low(spectrum), lengths)[0])


def of_torchaudio(name: str, **options: Any) -> nn.Module:
    """A model of torchaudio with random weights."""
    import torchaudio.models

    return getattr(torchaudio.models, name)(**options)


TASNET = {"num_sources": 2, "enc_kernel_size": 8, "enc_num_feats": 8, "msk_kernel_size": 3, "msk_num_feats": 8,
          "msk_num_hidden_feats": 12, "msk_num_layers": 2, "msk_num_stacks": 2}  # fmt: skip
WIDE_TASNET = TASNET | {"enc_num_feats": 64, "msk_num_feats": 64, "msk_num_hidden_feats": 96}
DEEP = {"n_feature": 8, "n_hidden": 16, "n_class": CLASSES, "dropout": 0.0}
# name: (what is particular, small, large, batch, a batch that is timed, losses)
Model = Callable[[], nn.Module]
TORCHAUDIO: dict[str, tuple[str, Model, Model, Batches, Batches, Callable[[nn.Module, Batch], Tensor]]] = {
    "Conformer (torchaudio)": ("attention and depthwise convolutions, GroupNorm", partial(Conformed, 16),
                               partial(Conformed, 96), spectra, partial(spectra, steps=64), frame_losses),
    "DeepSpeech (torchaudio)": ("a bidirectional recurrent layer", partial(of_torchaudio, "DeepSpeech", **DEEP),
                                partial(of_torchaudio, "DeepSpeech", **DEEP | {"n_hidden": 128}), spectra,
                                partial(spectra, steps=64), deep_losses),
    "Conv-TasNet (torchaudio)": ("dilated depthwise convolutions, masks",
                                 partial(of_torchaudio, "ConvTasNet", **TASNET),
                                 partial(of_torchaudio, "ConvTasNet", **WIDE_TASNET), sounds, LONG_SOUNDS,
                                 parted_losses),
}  # fmt: skip


# Modules of models that have the examples in dimension 1.
POSITIONS_FIRST = {
    "Conformer (torchaudio)": {"body.conformer_layers.*.ffn*": 1, "body.conformer_layers.*_layer_norm": 1},
    "DeepSpeech (torchaudio)": {"fc4*": 1, "out": 1},
}


def _subjects() -> Iterator[Subject]:
    for name, (about, model, config, options, batch, long) in TRANSFORMERS.items():
        yield configured(name, about, model, config, options, batch, class_losses, long, kind="speech")
    yield Subject(
        "EnCodec", "transformers", "weight-normalised convolutions, LSTM", partial(encodec, 4), sounds, code_losses,
        kind="speech", timed=Timed(partial(encodec, 16), LONG_SOUNDS),
    )  # fmt: skip
    for name, (about, small, large, batch, long, losses) in TORCHAUDIO.items():
        wrap = {"batch_dim": POSITIONS_FIRST[name]} if name in POSITIONS_FIRST else {}
        yield Subject(name, "torchaudio", about, small, batch, losses, wrap, kind="speech", timed=Timed(large, long))


SUBJECTS = tuple(_subjects())
