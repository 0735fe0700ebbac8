"""A linear model on fixed histograms of oriented gradients: nothing but its last layer is trained.

Features that need no training leave all of the privacy to one layer (Tramer and Boneh 2021, "Differentially private
learning needs better features (or much more data)").
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip import nn

__all__ = ["OrientedLinear"]

ENLARGED, DIRECTIONS, WINDOWS = 2, 16, 8
# The standard deviation of a window's weights, over the distance between two windows.
WIDTH = 0.6
# How much of the image's mean contrast is added to that of each window before it is divided by it.
MEAN_CONTRAST = 0.5
POWER = 0.4
TINY = 1e-6


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
