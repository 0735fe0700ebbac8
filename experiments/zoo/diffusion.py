"""Networks of diffusers: denoisers of images and latents, and an autoencoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .subject import Batch, Subject, Timed

__all__ = ["SUBJECTS"]


def noisy(examples: int, side: int = 8, channels: int = 3, words: int = 0) -> Batch:
    """Noisy images, how noisy they are, and the noise; with ``words``, what they show as vectors [B, words, 16]."""
    generator = torch.Generator().manual_seed(examples)
    shape = (examples, channels, side, side)
    image, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    found = {"sample": image, "timestep": torch.arange(examples) * 7 % 100, "noise": noise,
             "label": torch.arange(examples) % 3}  # fmt: skip
    if words:
        found["words"] = torch.randn(examples, words, 16, generator=generator, dtype=torch.float64)
        found["pooled"] = torch.randn(examples, 16, generator=generator, dtype=torch.float64)
    return found


def denoising(model: nn.Module, batch: Batch, **more: Any) -> Tensor:
    """Squared errors of the noise, averaged over the example; of a model that gives variances, too, of its half."""
    found = model(batch["sample"], timestep=batch["timestep"], **more).sample
    return (found[:, : batch["noise"].shape[1]] - batch["noise"]).square().mean((1, 2, 3))


def with_words(model: nn.Module, batch: Batch) -> Tensor:
    """`denoising` by what the image shows."""
    return denoising(model, batch, encoder_hidden_states=batch["words"])


def with_both(model: nn.Module, batch: Batch) -> Tensor:
    """`denoising` by what the image shows, in words and as one vector."""
    return denoising(model, batch, encoder_hidden_states=batch["words"], pooled_projections=batch["pooled"])


def with_label(model: nn.Module, batch: Batch) -> Tensor:
    """`denoising` by the image's class."""
    return denoising(model, batch, class_labels=batch["label"])


def autoencoded(model: nn.Module, batch: Batch) -> Tensor:
    """Squared errors of an image that went through the mean of its code."""
    network: Any = model
    code = network.encode(batch["sample"]).latent_dist
    found = network.decode(code.mean).sample
    return (found - batch["sample"]).square().mean((1, 2, 3)) + 0.01 * code.kl()


def flowing(model: nn.Module, batch: Batch) -> Tensor:
    """`denoising` of an image that is given as rows of patches."""
    rows, noise = (batch[name].flatten(2).transpose(1, 2) for name in ("sample", "noise"))
    network: Any = model
    found = network(
        hidden_states=rows, timestep=batch["timestep"] / 100, encoder_hidden_states=batch["words"],
        pooled_projections=batch["pooled"], txt_ids=torch.zeros(batch["words"].shape[1], 3),
        img_ids=torch.arange(rows.shape[1])[:, None].expand(-1, 3).float(),
    ).sample  # fmt: skip
    return (found - noise).square().mean((1, 2))


def of_diffusers(name: str, **options: Any) -> nn.Module:
    """A network with random weights, those that start at zero not."""
    import diffusers

    model = getattr(diffusers, name)(**options)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(0, 0.02)
    return model


def unet(width: int) -> dict[str, Any]:
    """Options of an unconditional UNet with attention in its lower stage."""
    return {"sample_size": 8, "block_out_channels": (width, 2 * width), "layers_per_block": 1, "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": width,
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}  # fmt: skip


def conditional(width: int) -> dict[str, Any]:
    """Options of a UNet with cross-attention to words."""
    return {"sample_size": 8, "in_channels": 3, "out_channels": 3, "block_out_channels": (width, 2 * width),
            "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 16, "attention_head_dim": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip


def dit(width: int) -> dict[str, Any]:
    """Options of a transformer over patches of latents, its norms by class and time."""
    return {"num_attention_heads": 2, "attention_head_dim": width // 2, "in_channels": 3, "out_channels": 6,
            "num_layers": 2, "sample_size": 8, "patch_size": 2, "norm_num_groups": 1,
            "num_embeds_ada_norm": 3}  # fmt: skip


def pixart(width: int) -> dict[str, Any]:
    """Options of a transformer over patches with cross-attention to words and shared norms."""
    return {"num_attention_heads": 2, "attention_head_dim": width // 2, "in_channels": 3, "out_channels": 6,
            "num_layers": 2, "sample_size": 8, "patch_size": 2, "cross_attention_dim": width, "caption_channels": 16,
            "use_additional_conditions": False}  # fmt: skip


def sd3(width: int) -> dict[str, Any]:
    """Options of a transformer over patches and words together."""
    return {"sample_size": 8, "patch_size": 2, "in_channels": 3, "out_channels": 3, "num_layers": 2,
            "attention_head_dim": width // 2, "num_attention_heads": 2, "joint_attention_dim": 16,
            "caption_projection_dim": width, "pooled_projection_dim": 16, "pos_embed_max_size": 8}  # fmt: skip


def flux(width: int) -> dict[str, Any]:
    """Options of a transformer with double and single streams."""
    return {"patch_size": 1, "in_channels": 3, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": width // 2, "num_attention_heads": 2, "joint_attention_dim": 16,
            "pooled_projection_dim": 16, "axes_dims_rope": (width // 8, width // 8, width // 4)}  # fmt: skip


def autoencoder(width: int) -> dict[str, Any]:
    """Options of a variational autoencoder."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return blocks | {"block_out_channels": (width, 2 * width), "layers_per_block": 1, "norm_num_groups": 4,
                     "latent_channels": 2}  # fmt: skip


Losses = Callable[[nn.Module, Batch], Tensor]
# name: (what is particular, class, options by width, losses, words)
ROWS: dict[str, tuple[str, str, Callable[[int], dict[str, Any]], Losses, int]] = {
    "UNet2D": ("GroupNorm, attention, time embedding", "UNet2DModel", unet, denoising, 0),
    "UNet2D, conditional": ("cross-attention to words", "UNet2DConditionModel", conditional, with_words, 5),
    "DiT": ("norms by class and time", "DiTTransformer2DModel", dit, with_label, 0),
    "PixArt": ("norms shared by blocks", "PixArtTransformer2DModel", pixart, with_words, 5),
    "SD3 transformer": ("patches and words together", "SD3Transformer2DModel", sd3, with_both, 5),
    "Flux transformer": ("double and single streams, rotary", "FluxTransformer2DModel", flux, flowing, 5),
    "VAE": ("encoder, decoder, divergence", "AutoencoderKL", autoencoder, autoencoded, 0),
}  # fmt: skip


def _subjects() -> Iterator[Subject]:
    for name, (about, model, options, losses, words) in ROWS.items():
        small = partial(of_diffusers, model, **options(16))
        side = {"DiT": 16, "PixArt": 16, "SD3 transformer": 16}.get(name, 8)
        wide = partial(of_diffusers, model, **(options(64) | ({"sample_size": side} if side > 8 else {})))
        yield Subject(
            name, "diffusers", about, small, partial(noisy, words=words), losses, kind="diffusion",
            timed=Timed(wide, partial(noisy, side=side, words=words)),
        )  # fmt: skip


SUBJECTS = tuple(_subjects())
