"""The benchmark's networks that `ghostclip.models` doesn't have, of plain torch layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["cifar_cnn", "embeddings", "gpt", "resnet", "text_lstm", "vgg11", "vision_transformer", "with_adapters"]

GROUPS = 32  # of every GroupNorm
INITIAL_STD = 0.02  # of GPT-2's embeddings (Radford et al. 2019)


class Residual(nn.Module):
    """``body(x) + shortcut(x)``."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut or nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.shortcut(hidden) + self.body(hidden)


class Mean(nn.Module):
    """[B, T, width] to [B, width]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


class States(nn.Module):
    """All states [B, T, units] of an LSTM."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, units, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.recurrent(hidden)[0]


class Positions(nn.Module):
    """Adds a learned vector for each of at most ``count`` positions to [B, T, width]."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, width)
        nn.init.normal_(self.table.weight, std=INITIAL_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        # One row of positions for every example: what the batch shares has no gradient of an example's own.
        places = torch.arange(hidden.shape[1], device=hidden.device).repeat(len(hidden), 1)
        return hidden + self.table(places)


class Patches(nn.Module):
    """Images [B, 3, side, side] to one vector a patch, [B, patches, width]."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention, [B, T, width] to the same; with ``causal`` a position sees itself and those before it only."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs: nn.Module = nn.Linear(width, 3 * width)
        self.outputs: nn.Module = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.inputs(hidden).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.outputs(mixed.transpose(1, 2).flatten(2))


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank one beside it: ``W x + b + U D x`` (Hu et al. 2022).

    U starts at small random numbers, not at LoRA's zeros, under which D's first gradient would be zero.
    """

    def __init__(self, base: nn.Module, width_in: int, width_out: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width_in, rank, bias=False)
        self.up = nn.Linear(rank, width_out, bias=False)
        nn.init.normal_(self.up.weight, std=INITIAL_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def cifar_cnn() -> nn.Sequential:
    """605,226 parameters: 3 x 3 convolutions of 32, 32, 64, 64, 128, 128, 256 and 10 channels, then the mean.

    The network of Papernot et al. (2021, "Tempered sigmoid activations", table 2) with ReLU, as it was timed by the
    Opacus white paper and by Subramani et al. (2021): an average pool of 2 x 2 after each of the first three pairs, the
    last convolution's ten channels averaged over positions are the logits.
    """
    stages = _stages(((32, 32), (64, 64), (128, 128)), nn.AvgPool2d)
    last = (nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 10, 3, padding=1))
    return nn.Sequential(*stages, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def vgg11() -> nn.Sequential:
    """VGG11 (Simonyan & Zisserman 2015, table 1, A) for 32 x 32 pixels: no batch norm, one linear layer at the end."""
    stages = _stages(((64,), (128,), (256, 256), (512, 512), (512, 512)), nn.MaxPool2d)
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(512, 10))


def _stages(stages: tuple[tuple[int, ...], ...], pool: type[nn.Module]) -> list[nn.Module]:
    """3 x 3 convolutions of colour images with ReLU, and a pool after each stage of them."""
    layers: list[nn.Module] = []
    channels = 3
    for widths in stages:
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(pool(2))
    return layers


def resnet(depths: tuple[int, ...], bottleneck: bool, classes: int) -> nn.Sequential:
    """A residual network (He et al. 2016) with GroupNorm of 32 groups in the place of batch norm, for colour images.

    ``depths``: blocks in each stage. ``bottleneck``: of 1 x 1, 3 x 3, 1 x 1 convolutions instead of two 3 x 3.
    """
    layers = [*_normalized(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for number in range(depth):
            stride = 2 if stage and not number else 1
            out = 4 * width if bottleneck else width
            if bottleneck:  # the 3 x 3 convolution has the stride, as in the ResNets that everyone trains today
                parts = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
            else:
                parts = [(channels, width, 3, stride), (width, width, 3, 1)]
            body = [layer for part in parts for layer in (*_normalized(*part), nn.ReLU())][:-1]
            same = stride == 1 and channels == out
            shortcut = nn.Identity() if same else nn.Sequential(*_normalized(channels, out, 1, stride))
            layers += [Residual(nn.Sequential(*body), shortcut), nn.ReLU()]
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _normalized(channels: int, width: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)
    return [convolution, nn.GroupNorm(GROUPS, width)]


def embeddings(words: int) -> nn.Sequential:
    """Word vectors of 16, their mean, two classes (Subramani et al. 2021, appendix): logits [B, 2] of tokens [B, T]."""
    return nn.Sequential(nn.Embedding(words, 16), Mean(), nn.Linear(16, 2))


def text_lstm(words: int) -> nn.Sequential:
    """The LSTM for IMDb of Subramani et al. (2021, section 4), 100 units, with trained word vectors of 100."""
    return nn.Sequential(nn.Embedding(words, 100), States(100, 100), Mean(), nn.Linear(100, 2))


def gpt(width: int, depth: int, heads: int, positions: int, words: int, tied: bool = False) -> nn.Sequential:
    """A language model of GPT-2's form (Radford et al. 2019): learned positions, causal blocks, a norm, a linear head.

    It takes token ids [B, T], T at most ``positions``, to logits [B, T, words]. ``tied``: the head shares its weight
    with the embedding, as GPT-2's does.
    """
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    nn.init.normal_(embedding.weight, std=INITIAL_STD)
    if tied:
        head.weight = embedding.weight
    blocks = (_block(width, heads, causal=True) for _ in range(depth))
    return nn.Sequential(embedding, Positions(positions, width), *blocks, nn.LayerNorm(width), head)


def vision_transformer(width: int, depth: int, heads: int, side: int, patch: int, classes: int) -> nn.Sequential:
    """A vision transformer (Dosovitskiy et al. 2021) for images [B, 3, side, side].

    The patches' mean is classified; there is no class token, which would be one position of 197 in ViT-B/16.
    """
    blocks = (_block(width, heads, causal=False) for _ in range(depth))
    places = Positions((side // patch) ** 2, width)
    return nn.Sequential(Patches(width, patch), places, *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, classes))


def _block(width: int, heads: int, causal: bool) -> nn.Sequential:
    """A transformer block with the norms first."""
    dense = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(
        Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, heads, causal))),
        Residual(nn.Sequential(nn.LayerNorm(width), *dense)),
    )


def with_adapters(model: nn.Module, width: int, rank: int = 8) -> nn.Module:
    """The model, of this width, with everything frozen but adapters at its attentions' two linear layers; in place."""
    model.requires_grad_(False)
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        attention.inputs = LowRank(attention.inputs, width, 3 * width, rank)
        attention.outputs = LowRank(attention.outputs, width, width, rank)
    return model
