"""Two networks on oriented features, which are right before training: what private training has least time to learn.

Noise is paid for by the step, so a network that starts from good features reaches most with few steps. Features that
need no training at all leave all of the privacy to one layer (Tramer and Boneh 2021, "Differentially private learning
needs better features (or much more data)").
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip import nn

__all__ = ["OrientedCNN", "OrientedLinear"]

# Of the convolutional network.
FILTERS, KERNEL, POOL, STRIDE = 12, 3, 4, 2
# Filters are stored this many times smaller than they act. Stored as they act, their gradients would fill the clipping
# norm as soon as the last layer has grown.
SCALE = 0.003
# Of a filter's share of the norm over filters: how much a strong orientation suppresses the others.
COMPETITION = 7
FLAT = 1e-4
# Of the linear model.
ENLARGED, DIRECTIONS, WINDOWS = 2, 16, 8
# The standard deviation of a window's weights, over the distance between two windows.
WIDTH = 0.6
# How much of the image's mean contrast is added to that of each window before it is divided by it.
MEAN_CONTRAST = 0.5
POWER = 0.4
# Of both.
TINY = 1e-6


class OrientedCNN(nn.Module):
    """A convolution whose first filters are derivatives in 12 directions, then a linear layer that starts at zero.

    Images are enlarged twofold and filtered. Each place keeps its strongest directions. Averages over windows of 4 by 4
    give features of unit norm, as in histograms of oriented gradients (Dalal and Triggs 2005). The filters are trained,
    too. ``centre`` takes a mean off the features: zero, until one is copied there that is public or was released by
    `ghostclip.private_mean`.

    Args:
        input_shape: ``(channels, height, width)``, at least 1 pixel a side.
        classes: number of outputs.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.convolution = nn.Conv2d(channels, FILTERS, KERNEL, bias=False)
        rows, columns = ((2 * (side + 2) - KERNEL + 1 - POOL) // STRIDE + 1 for side in (height, width))
        self.centre = nn.Centre(torch.zeros(FILTERS * rows * columns))
        self.output = nn.Linear(FILTERS * rows * columns, classes, bias=False)
        angles = torch.arange(FILTERS) * (2 * math.pi / FILTERS)
        across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        turned = angles.cos().view(-1, 1, 1) * across + angles.sin().view(-1, 1, 1) * across.t()
        with torch.no_grad():
            self.convolution.weight.copy_(turned[:, None] / (SCALE * channels))
            self.output.weight.zero_()

    def features(self, images: Tensor) -> Tensor:
        """Features ``[B, d]`` of unit norm of images ``[B, *input_shape]``."""
        enlarged = F.interpolate(F.pad(images, (1, 1, 1, 1)), scale_factor=2, mode="bicubic", align_corners=False)
        slopes = (self.convolution(enlarged) * SCALE).relu()
        whole = (slopes.square().sum(1, keepdim=True) + TINY**2).sqrt()
        windows = F.avg_pool2d(slopes * (slopes / whole) ** COMPETITION, POOL, STRIDE)
        windows = (windows + TINY).sqrt()
        windows = windows - windows.mean(1, keepdim=True)
        windows = windows / (windows.square().mean(1, keepdim=True) + FLAT).sqrt()
        return F.normalize(windows.flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of images ``[B, *input_shape]``."""
        return self.output(F.normalize(self.centre(self.features(images))))


class OrientedLinear(nn.Module):
    """A linear layer that starts at zero, on 1,024 histograms of oriented gradients (Dalal and Triggs 2005).

    Images are enlarged twofold. The slope at each pixel counts for the two of 16 directions next to its own, in 8 by 8
    windows with Gaussian weights. Each window is divided by its norm, and the features by theirs. All of that is fixed
    and public. ``centre`` takes a mean off the features: zero, until one is copied there that is public or was released
    by `ghostclip.private_mean`.

    Args:
        input_shape: ``(channels, height, width)``, at least 1 pixel a side.
        classes: number of outputs.
    """

    turned: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        height, width = (ENLARGED * (side + 2) for side in input_shape[1:])
        self.register_buffer("turned", _turned(), persistent=False)
        self.register_buffer("rows", _windows(height), persistent=False)
        self.register_buffer("columns", _windows(width), persistent=False)
        self.centre = nn.Centre(torch.zeros(DIRECTIONS * WINDOWS**2))
        self.output = nn.Linear(DIRECTIONS * WINDOWS**2, classes, bias=False)
        with torch.no_grad():
            self.output.weight.zero_()

    def features(self, images: Tensor) -> Tensor:
        """Features ``[B, 1024]`` of unit norm of images ``[B, *input_shape]``."""
        enlarged = F.interpolate(
            F.pad(images, (1, 1, 1, 1)), scale_factor=ENLARGED, mode="bicubic", align_corners=False
        )
        slopes = _slopes_by_direction(enlarged, self.turned)
        histograms = torch.einsum("bdyx,iy,jx->bdij", slopes, self.rows, self.columns)
        contrast = histograms.norm(dim=1, keepdim=True)
        histograms = histograms / (contrast + MEAN_CONTRAST * contrast.mean((2, 3), keepdim=True) + TINY)
        return F.normalize((histograms + TINY).pow(POWER).flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of images ``[B, *input_shape]``."""
        return self.output(F.normalize(self.centre(self.features(images))))


def _windows(side: int) -> Tensor:
    """Weights [8, side] of pixels: bell curves around evenly spaced places."""
    distance = side / WINDOWS
    places, pixels = distance * (torch.arange(WINDOWS) + 0.5), torch.arange(side) + 0.5
    return torch.exp(-((pixels - places[:, None]) / (WIDTH * distance)).square() / 2)


def _turned() -> Tensor:
    """Filters [16, 1, 3, 3]: |g| sin(direction - angle of g) / sin(2 pi / 16), for the gradient g at a pixel."""
    step = 2 * math.pi / DIRECTIONS
    angles = torch.arange(DIRECTIONS) * step
    across = torch.tensor([[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]])
    turned = angles.sin().view(-1, 1, 1) * across - angles.cos().view(-1, 1, 1) * across.t()
    return turned[:, None] / math.sin(step)


def _slopes_by_direction(images: Tensor, turned: Tensor) -> Tensor:
    """Lengths [B, 16, height, width] of gradients, each shared by the two directions next to its own.

    Direction d gets the smaller of what directions d + 1 and d - 1 give, one with its sign changed: all of the length
    for a gradient along d, half of it midway to a neighbour, nothing from the neighbours on.
    """
    around = F.pad(images, (1, 1, 1, 1), mode="replicate")
    sines = F.conv2d(around.flatten(0, 1)[:, None], turned).unflatten(0, images.shape[:2])
    return torch.minimum(sines.roll(-1, 2), -sines.roll(1, 2)).relu().sum(1)
