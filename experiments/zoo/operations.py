"""Rows of experiments/operations.py: models as large as small studies train, with layers that compute their own way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

from .language import BERT, LLAMA, from_config
from .subject import CLASSES, Batch, class_losses, images, masked_texts, texts, token_losses
from .vision import STAGES, STILL, of_timm, pixel_losses

__all__ = ["ROWS", "Row"]

Model = Callable[[], nn.Module]


@dataclass(frozen=True)
class Row:
    """One model that is timed.

    Attributes:
        name: what the table calls it.
        kind: "parametrization", "in place", "experts" or "layer".
        build: the model, float32, with random weights.
        batch: a batch of so many examples.
        losses: (model, batch) -> [B].
        examples: in a timed batch.
        plain: what builds the same model without the parametrization; None where an ordinary step is the measure.
        library: what has to be importable.
    """

    name: str
    kind: str
    build: Model
    batch: Callable[[int], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]
    examples: int
    plain: Model | None = None
    library: str = "torch"


def perceptron(width: int = 256) -> nn.Module:
    """Three linear layers."""
    layers = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def temporal() -> nn.Module:
    """Dilated convolutions over a sequence, as a temporal convolutional network has them."""
    layers: list[nn.Module] = []
    for number, channels in enumerate((8, 32, 32, 32)):
        padding = 2 * 2**number
        layers += [nn.Conv1d(channels, 32, 3, padding=padding // 2, dilation=2**number), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def pictures() -> nn.Module:
    """Three convolutions over images."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, CLASSES))


def encoder() -> nn.Module:
    """A transformer over sequences of vectors, its attention out of linear layers."""
    return nn.Sequential(nn.Linear(8, 64), Block(64), Block(64), Pooled(64))


class Block(nn.Module):
    """Self-attention with four heads and a hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                   nn.Linear(4 * width, width))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.inner(x)


class Pooled(nn.Linear):
    """A linear layer of the mean over positions."""

    def __init__(self, width: int) -> None:
        super().__init__(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


class LowRank(nn.Module):
    """W + B A, with W frozen by whoever registers it."""

    def __init__(self, shape: torch.Size, rank: int = 4) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, shape[1]) / shape[1] ** 0.5)
        self.up = nn.Parameter(torch.randn(shape[0], rank) / 8)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Rounded(nn.Module):
    """Weights rounded to 16 levels, with the gradient of the identity."""

    def forward(self, weight: Tensor) -> Tensor:
        step = weight.detach().abs().amax() / 8
        return weight + ((weight / step).round() * step - weight).detach()


def with_weights(base: Model, change: Callable[[nn.Module], Any], kinds: tuple[type, ...] = (nn.Linear,)) -> Model:
    """What builds ``base`` with each of its layers of these kinds but the last changed."""

    def build() -> nn.Module:
        model = base()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for layer in [each for each in model.modules() if isinstance(each, kinds)][
                : None if len(kinds) > 1 else -1
            ]:
                change(layer)
        return model

    return build


def low_rank(layer: nn.Module) -> None:
    """LoRA as a parametrization."""
    weight: Any = layer.weight
    weight.requires_grad_(False)
    register_parametrization(layer, "weight", LowRank(weight.shape))


def rounded(layer: nn.Module) -> None:
    """Straight-through quantisation as a parametrization."""
    register_parametrization(layer, "weight", Rounded())


def vectors(examples: int, *shape: int) -> Batch:
    """Random inputs [B, *shape], and a class for each."""
    generator = torch.Generator().manual_seed(examples)
    inputs = torch.randn(examples, *shape, generator=generator)
    return {"pixel_values": inputs, "target": torch.arange(examples) % CLASSES}


def frozen(base: Model) -> Model:
    """What builds ``base`` with trained low-rank products beside frozen weights, as modules in place of layers."""

    def build() -> nn.Module:
        model = base()
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.in_features > 8:
                    child.weight.requires_grad_(False)
                    setattr(parent, name, Beside(child))
        return model

    return build


class Beside(nn.Module):
    """A frozen layer and a low-rank one, each applied to the input."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
# name: (what is parametrized, how, the layers' kinds, shape of an example, examples)
PARAMETRIZED: dict[str, tuple[Model, Callable[[nn.Module], Any], tuple[type, ...], tuple[int, ...], int]] = {
    "weight_norm, linear": (perceptron, parametrizations.weight_norm, (nn.Linear,), (784,), 64),
    "weight_norm by hooks, linear": (perceptron, nn.utils.weight_norm, (nn.Linear,), (784,), 64),
    "orthogonal, linear": (perceptron, parametrizations.orthogonal, (nn.Linear,), (784,), 8),
    "spectral_norm, linear": (perceptron, parametrizations.spectral_norm, (nn.Linear,), (784,), 64),
    "pruned, linear": (perceptron, partial(prune.l1_unstructured, name="weight", amount=0.5), (nn.Linear,), (784,), 64),
    "straight-through, linear": (perceptron, rounded, (nn.Linear,), (784,), 64),
    "weight_norm, temporal convolutions": (temporal, parametrizations.weight_norm, CONVOLUTIONS, (8, 128), 32),
    "weight_norm by hooks, temporal convolutions": (temporal, nn.utils.weight_norm, CONVOLUTIONS, (8, 128), 32),
    "weight_norm, images": (pictures, parametrizations.weight_norm, CONVOLUTIONS, (3, 32, 32), 32),
    "pruned, images": (pictures, partial(prune.l1_unstructured, name="weight", amount=0.5), CONVOLUTIONS,
                       (3, 32, 32), 32),
    "straight-through, images": (pictures, rounded, CONVOLUTIONS, (3, 32, 32), 32),
    "weight_norm, transformer": (encoder, parametrizations.weight_norm, (nn.Linear,), (64, 8), 32),
    "pruned, transformer": (encoder, partial(prune.l1_unstructured, name="weight", amount=0.5), (nn.Linear,),
                            (64, 8), 32),
    "straight-through, transformer": (encoder, rounded, (nn.Linear,), (64, 8), 32),
}  # fmt: skip
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
DECODER = LLAMA | SMALL | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "vocab_size": 256}
EXPERTS = DECODER | {"intermediate_size": 128}
MIXTRAL = EXPERTS | {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                  "shared_expert_intermediate_size": 128}  # fmt: skip
SWITCH = {"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 2,
          "num_decoder_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 1,
          "num_sparse_decoder_layers": 1, "pad_token_id": 0, "decoder_start_token_id": 0,
          "dropout_rate": 0.0, "router_jitter_noise": 0.0}  # fmt: skip
ENCODER = BERT | SMALL | {"vocab_size": 256, "max_position_embeddings": 64, "num_labels": CLASSES}
DEBERTA = ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 64}
MAMBA = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# name: (kind, model, config, its options, losses)
TEXTS: dict[str, tuple[str, str, str, dict[str, Any], Callable[[nn.Module, Batch], Tensor]]] = {
    "DeBERTa": ("in place", "DebertaForSequenceClassification", "DebertaConfig", DEBERTA, class_losses),
    "Llama": ("layer", "LlamaForCausalLM", "LlamaConfig", DECODER, token_losses),
    "Gemma": ("layer", "GemmaForCausalLM", "GemmaConfig", DECODER, token_losses),
    "Qwen3": ("layer", "Qwen3ForCausalLM", "Qwen3Config", DECODER, token_losses),
    "GPT-2": ("layer", "GPT2LMHeadModel", "GPT2Config",
              {"vocab_size": 256, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
               "eos_token_id": 2, "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
              token_losses),
    "BERT": ("layer", "BertForSequenceClassification", "BertConfig", ENCODER, class_losses),
    "T5": ("layer", "T5ForConditionalGeneration", "T5Config",
           {name: value for name, value in SWITCH.items() if "expert" not in name and "router" not in name}, "seq2seq"),
    "Mamba": ("layer", "MambaForCausalLM", "MambaConfig", MAMBA, token_losses),
    "Mixtral, eager": ("experts", "MixtralForCausalLM", "MixtralConfig",
                       MIXTRAL | {"experts_implementation": "eager"}, token_losses),
    "Mixtral, grouped_mm": ("experts", "MixtralForCausalLM", "MixtralConfig",
                            MIXTRAL | {"experts_implementation": "grouped_mm"}, token_losses),
    "Mixtral with its router's loss": ("experts", "MixtralForCausalLM", "MixtralConfig", MIXTRAL, "balanced"),
    "Qwen2-MoE": ("experts", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN, token_losses),
    "Qwen3-MoE": ("experts", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN, token_losses),
    "OLMoE": ("experts", "OlmoeForCausalLM", "OlmoeConfig", QWEN, token_losses),
    "Switch": ("experts", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", SWITCH, "seq2seq"),
}  # fmt: skip
# Models as large as are trained on one GPU from nothing.
MEDIUM = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 1024,
          "max_position_embeddings": 128, "vocab_size": 4096}  # fmt: skip
MEDIUM_EXPERTS = MEDIUM | {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
                           "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}  # fmt: skip
T5_MEDIUM = {"vocab_size": 4096, "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_heads": 6, "num_layers": 4,
             "num_decoder_layers": 4, "pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}  # fmt: skip
MEDIUM_TEXTS: dict[str, tuple[str, str, dict[str, Any], Callable[[nn.Module, Batch], Tensor]]] = {
    "Llama, larger": ("LlamaForCausalLM", "LlamaConfig",
                      LLAMA | MEDIUM | {"num_key_value_heads": 2, "head_dim": 64}, token_losses),
    "Gemma, larger": ("GemmaForCausalLM", "GemmaConfig",
                      LLAMA | MEDIUM | {"num_key_value_heads": 2, "head_dim": 64}, token_losses),
    "BERT, larger": ("BertForSequenceClassification", "BertConfig", BERT | MEDIUM | {"num_labels": CLASSES},
                     class_losses),
    "T5, larger": ("T5ForConditionalGeneration", "T5Config", T5_MEDIUM, "seq2seq"),
    "Mixtral, eager, larger": ("MixtralForCausalLM", "MixtralConfig",
                               MIXTRAL | MEDIUM_EXPERTS | {"experts_implementation": "eager"}, token_losses),
    "Mixtral, grouped_mm, larger": ("MixtralForCausalLM", "MixtralConfig",
                                    MIXTRAL | MEDIUM_EXPERTS | {"experts_implementation": "grouped_mm"}, token_losses),
    "Qwen3-MoE, larger": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN | MEDIUM_EXPERTS, token_losses),
    "Switch, larger": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
                       SWITCH | T5_MEDIUM | {"d_ff": 512}, "seq2seq"),
}  # fmt: skip
WINDOWS = {"image_size": 64, "patch_size": 4, "embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 8,
           "num_labels": CLASSES, "drop_path_rate": 0.0}  # fmt: skip
WIDE = STAGES | STILL | {"hidden_sizes": [32, 64, 96, 128]}
WIDER = STILL | {"hidden_sizes": [80, 160, 320, 640], "depths": [2, 2, 6, 2], "num_labels": CLASSES}
OF_TIMM = {"img_size": 64, "embed_dim": 48, "depths": (2, 2), "num_heads": (3, 6), "window_size": 8, **STILL}
VIEWS: dict[str, tuple[str, Model, Callable[[nn.Module, Batch], Tensor]]] = {
    "ConvNeXt": ("transformers", from_config("ConvNextForImageClassification", "ConvNextConfig", **WIDE), class_losses),
    "ConvNeXt V2": (
        "transformers", from_config("ConvNextV2ForImageClassification", "ConvNextV2Config", **WIDE), class_losses,
    ),
    "Swin": ("transformers", from_config("SwinForImageClassification", "SwinConfig", **WINDOWS), class_losses),
    "SwinV2": ("transformers", from_config("Swinv2ForImageClassification", "Swinv2Config", **WINDOWS), class_losses),
    "SwinV2 (timm)": ("timm", partial(of_timm, "swinv2_tiny_window8_256", **OF_TIMM), pixel_losses),
    "ConvNeXt V2 (timm)": (
        "timm", partial(of_timm, "convnextv2_atto", depths=(1, 1, 1, 1), dims=(32, 64, 96, 128)), pixel_losses,
    ),
}  # fmt: skip


def pairs_of_texts(examples: int) -> Batch:
    """Texts for an encoder, the same as what its decoder is to say."""
    return texts(examples, 32)


def sequence_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of an encoder-decoder's tokens, averaged over the example."""
    tokens = batch["input_ids"]
    logits = model(input_ids=tokens, decoder_input_ids=tokens[:, :16], use_cache=False).logits
    return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:17], reduction="none").mean(1)


def balanced_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Token losses, and the router's loss over the batch, which depends on all of its examples."""
    found: Any = model(
        input_ids=batch["input_ids"], use_cache=False, output_router_logits=True, labels=batch["input_ids"]
    )
    return token_losses(model, batch) + found.aux_loss


def _subjects() -> Iterator[Row]:
    for name, (base, change, kinds, shape, examples) in PARAMETRIZED.items():
        batch = partial(_vectors, shape=shape)
        yield Row(name, "parametrization", with_weights(base, change, kinds), batch, _pixels, examples, base)
    lora = with_weights(encoder, low_rank)
    yield Row(
        "LoRA, transformer", "parametrization", lora, partial(_vectors, shape=(64, 8)), _pixels, 32, frozen(encoder)
    )
    special: dict[Any, Any] = {"seq2seq": sequence_losses, "balanced": balanced_losses}
    for name, (kind, model, config, options, losses) in TEXTS.items():
        batch = masked_texts if losses is class_losses else texts
        yield Row(name, kind, from_config(model, config, **options), partial(_of_length, batch),
                  special.get(losses, losses), 16, library="transformers")  # fmt: skip
    for name, (model, config, options, losses) in MEDIUM_TEXTS.items():
        batch = partial(_of_length, masked_texts if losses is class_losses else texts, length=128)
        kind = "experts" if "num_experts_per_tok" in options or "num_experts" in options else "layer"
        yield Row(name, kind, from_config(model, config, **options), batch, special.get(losses, losses), 8,
                  library="transformers")  # fmt: skip
    for name, (library, build, losses) in VIEWS.items():
        yield Row(name, "layer", build, partial(_small_images, side=64), losses, 16, library=library)
    larger = from_config("ConvNextForImageClassification", "ConvNextConfig", **WIDER)
    yield Row("ConvNeXt, larger", "layer", larger, partial(_small_images, side=128), class_losses, 8,
              library="transformers")  # fmt: skip


def _vectors(examples: int, shape: tuple[int, ...]) -> Batch:
    return vectors(examples, *shape)


def _of_length(batch: Callable[..., Batch], examples: int, length: int = 32) -> Batch:
    return batch(examples, length)


def _small_images(examples: int, side: int) -> Batch:
    batch = images(examples, side)
    return batch | {"pixel_values": batch["pixel_values"].float()}


def _pixels(model: nn.Module, batch: Batch) -> Tensor:
    return pixel_losses(model, batch)


ROWS = tuple(_subjects())
