"""The benchmark's image networks, of plain torch layers: the CIFAR CNN, VGG11, ResNets with GroupNorm, ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ghostclip.bench.language import DecoderBlock

__all__ = ["ResNet", "VisionTransformer", "cifar_cnn", "resnet18", "resnet50", "vgg11"]

GROUPS = 32


def cifar_cnn() -> nn.Sequential:
    """605,226 parameters: 3 x 3 convolutions of 32, 32, 64, 64, 128, 128, 256 and 10 channels, then the mean.

    The network of Papernot et al. (2021, "Tempered sigmoid activations", table 2) with ReLU, as it was timed by the
    Opacus white paper and by Subramani et al. (2021): an average pool of 2 x 2 after each of the first three pairs, the
    last convolution's ten channels averaged over positions are the logits.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.AvgPool2d(2))
    layers += [nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 10, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def vgg11() -> nn.Sequential:
    """VGG11 (Simonyan & Zisserman 2015, table 1, A) for 32 x 32 pixels: no batch norm, one linear layer at the end."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, (256, 256), (512, 512), (512, 512)):
        for channels_out in (width,) if isinstance(width, int) else width:
            layers += [nn.Conv2d(channels, channels_out, 3, padding=1), nn.ReLU()]
            channels = channels_out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class _EncoderBlock(nn.Module):
    """A residual block: convolutions with GroupNorm, beside them a shortcut, a 1 x 1 one where shapes change."""

    def __init__(self, channels: int, kernels: list[tuple[int, int]], stride: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inner = channels
        # The 3 x 3 convolution has the stride, as in the ResNets that everyone trains today.
        strided = next(place for place, (size, _) in enumerate(kernels) if size == 3)
        for place, (size, width) in enumerate(kernels):
            step = stride if place == strided else 1
            parts += [_convolution(inner, width, size, step), nn.GroupNorm(GROUPS, width)]
            if place < len(kernels) - 1:
                parts.append(nn.ReLU())
            inner = width
        self.body = nn.Sequential(*parts)
        same = stride == 1 and inner == channels
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(_convolution(channels, inner, 1, stride), nn.GroupNorm(GROUPS, inner))
        )

    def forward(self, maps: Tensor) -> Tensor:
        return torch.relu(self.body(maps) + self.shortcut(maps))


def _convolution(channels: int, width: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)


class ResNet(nn.Module):
    """A residual network (He et al. 2016) with GroupNorm of 32 groups in the place of batch norm.

    Args:
        depths: blocks in each of the four stages.
        bottleneck: blocks of 1 x 1, 3 x 3, 1 x 1 convolutions instead of two 3 x 3.
        classes: number of outputs.
    """

    def __init__(self, depths: tuple[int, ...], bottleneck: bool, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.GroupNorm(GROUPS, 64), nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            kernels = [(1, width), (3, width), (1, 4 * width)] if bottleneck else [(3, width), (3, width)]
            for number in range(depth):
                blocks.append(_EncoderBlock(channels, kernels, 2 if stage and not number else 1))
                channels = kernels[-1][1]
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.output = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, 3, height, width], 32 pixels a side at least."""
        return self.output(self.pool(self.blocks(self.stem(images))).flatten(1))


def resnet18() -> ResNet:
    """ResNet-18 with GroupNorm and ten classes."""
    return ResNet((2, 2, 2, 2), bottleneck=False, classes=10)


def resnet50() -> ResNet:
    """ResNet-50 with GroupNorm and a thousand classes."""
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=1000)


class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021), by default the shape of ViT-B/16.

    The patches' mean is classified; there is no class token, which would be one position of 197.

    Args:
        width, depth, heads: of the blocks.
        side, patch: pixels a side of an image and of a patch.
        classes: number of outputs.
    """

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, side: int = 224, patch: int = 16, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, 3, side, side]."""
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        places = torch.arange(hidden.shape[1], device=images.device).repeat(len(hidden), 1)
        hidden = self.blocks(hidden + self.positions(places))
        return self.output(self.norm(hidden).mean(1))
