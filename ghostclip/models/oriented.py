"""A convolutional network whose features are right before training: what private training has least time to learn.

Noise is paid for by the step, so a network that starts from good features reaches most with few steps (Tramer and Boneh
2021, "Differentially private learning needs better features (or much more data)").
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip import nn

__all__ = ["OrientedCNN"]

FILTERS, KERNEL, POOL, STRIDE = 12, 3, 4, 2
# Filters are stored this many times smaller than they act. Stored as they act, their gradients would fill the clipping
# norm as soon as the last layer has grown.
SCALE = 0.003
# Of a filter's share of the norm over filters: how much a strong orientation suppresses the others.
COMPETITION = 7
TINY, FLAT = 1e-6, 1e-4


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
