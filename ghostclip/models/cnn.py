"""The paper's convolutional network."""

from torch import Tensor

from ghostclip import nn

__all__ = ["CNN"]

KERNEL = 5
CHANNELS = (20, 50)
HIDDEN = 128


class CNN(nn.Module):
    """Two 5x5 convolutions of 20 and 50 kernels, a 2x2 max pool after each, 128 hidden units (section 6.1.1).

    The paper pads nothing, which leaves nothing of images under 16 pixels a side: those get two pixels of zeros around
    each convolution's input, so that it keeps its size. The paper does not name the activation of its CNN. This one has
    tanh: bounded activations lose least to clipping and noise (Papernot et al. 2021); with the initial weights that
    suit it (Glorot & Bengio 2010).

    Args:
        input_shape: ``(channels, height, width)``, at least 4 pixels a side.
        classes: number of outputs.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        padding = 0 if _left(_left(min(height, width), 0), 0) >= 1 else KERNEL // 2
        first, second = CHANNELS
        rows, columns = (_left(_left(side, padding), padding) for side in (height, width))
        if min(rows, columns) < 1:
            raise ValueError(f"input_shape must be at least 4 pixels a side for the CNN; got {list(input_shape)}")
        self.convolution1 = nn.Conv2d(channels, first, KERNEL, padding=padding)
        self.convolution2 = nn.Conv2d(first, second, KERNEL, padding=padding)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(second * rows * columns, HIDDEN)
        self.output = nn.Linear(HIDDEN, classes)
        for layer in (self.convolution1, self.convolution2, self.hidden, self.output):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of images ``[B, channels, height, width]``."""
        maps = self.pool(self.convolution1(images).tanh())
        maps = self.pool(self.convolution2(maps).tanh())
        return self.output(self.hidden(maps.flatten(1)).tanh())


def _left(side: int, padding: int) -> int:
    """Pixels a side after one convolution and one pool."""
    return (side + 2 * padding - KERNEL + 1) // 2
