"""The five networks of Lee & Kifer (2020, section 6.1.1)."""

import math

import torch
from torch import Tensor

from ghostclip import nn

__all__ = ["CNN", "MLP", "LSTMClassifier", "RNNClassifier", "TransformerClassifier", "positional_encoding"]

MLP_HIDDEN = (128, 256)
CNN_KERNEL, CNN_CHANNELS, CNN_HIDDEN = 5, (20, 50), 128
RECURRENT_HIDDEN = 128
TRANSFORMER_WIDTH, HEADS, FEED_FORWARD = 200, 8, 512
PADDING = 0


class MLP(nn.Module):
    """Two hidden layers of 128 and 256 units with sigmoid activations (Lee & Kifer 2020, section 6.1.1).

    Args:
        input_shape: shape of one input; it is flattened.
        classes: number of outputs.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        first, second = MLP_HIDDEN
        self.hidden1 = nn.Linear(math.prod(input_shape), first)
        self.hidden2 = nn.Linear(first, second)
        self.output = nn.Linear(second, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of inputs ``[B, *input_shape]``."""
        hidden = self.hidden1(inputs.flatten(1)).sigmoid()
        return self.output(self.hidden2(hidden).sigmoid())


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
        padding = 0 if _left(_left(min(height, width), 0), 0) >= 1 else CNN_KERNEL // 2
        first, second = CNN_CHANNELS
        rows, columns = (_left(_left(side, padding), padding) for side in (height, width))
        if min(rows, columns) < 1:
            raise ValueError(f"input_shape must be at least 4 pixels a side for the CNN; got {list(input_shape)}")
        self.convolution1 = nn.Conv2d(channels, first, CNN_KERNEL, padding=padding)
        self.convolution2 = nn.Conv2d(first, second, CNN_KERNEL, padding=padding)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(second * rows * columns, CNN_HIDDEN)
        self.output = nn.Linear(CNN_HIDDEN, classes)
        for layer in (self.convolution1, self.convolution2, self.hidden, self.output):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of images ``[B, channels, height, width]``."""
        maps = self.pool(self.convolution1(images).tanh())
        maps = self.pool(self.convolution2(maps).tanh())
        return self.output(self.hidden(maps.flatten(1)).tanh())


def _left(side: int, padding: int) -> int:
    """Pixels a side after one convolution and one pool."""
    return (side + 2 * padding - CNN_KERNEL + 1) // 2


class RNNClassifier(nn.Module):
    """One tanh recurrent layer of 128 units, then a fully connected one on its last state (section 6.1.1).

    An image is a sequence of its rows.

    Args:
        input_shape: ``(channels, height, width)`` of an image, read as ``height`` steps of ``channels * width``
            numbers, or ``(steps, features)`` of a sequence.
        classes: number of outputs.
    """

    layer: type[nn.Module] = nn.RNN

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        features = input_shape[0] * input_shape[2] if len(input_shape) == 3 else input_shape[-1]
        self.recurrent = self.layer(features, RECURRENT_HIDDEN, batch_first=True)
        self.output = nn.Linear(RECURRENT_HIDDEN, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of inputs ``[B, *input_shape]``."""
        rows = inputs.transpose(1, 2).flatten(2) if inputs.dim() == 4 else inputs
        states, _ = self.recurrent(rows)
        return self.output(states[:, -1])


class LSTMClassifier(RNNClassifier):
    """One LSTM layer of 128 units, then a fully connected one on its last state (section 6.1.1), as `RNNClassifier`."""

    layer = nn.LSTM


class TransformerClassifier(nn.Module):
    """Embedding of 200 dimensions, positional encoding, one encoder block, mean over positions, dense (section 6.1.1).

    The block is multi-head attention and a feed-forward network, each with a residual connection and layer
    normalisation after it. Token id 0 pads: it is not attended to and does not enter the mean. The paper starts from
    GloVe embeddings; here they are trained from scratch.

    Args:
        vocabulary: number of token ids.
        positions: the longest text, in tokens.
        classes: number of outputs.
    """

    encoding: Tensor

    def __init__(self, vocabulary: int, positions: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, TRANSFORMER_WIDTH, padding_idx=PADDING)
        self.attention = nn.MultiheadAttention(TRANSFORMER_WIDTH, HEADS, batch_first=True)
        self.attention_norm = nn.LayerNorm(TRANSFORMER_WIDTH)
        self.expand = nn.Linear(TRANSFORMER_WIDTH, FEED_FORWARD)
        self.contract = nn.Linear(FEED_FORWARD, TRANSFORMER_WIDTH)
        self.feed_forward_norm = nn.LayerNorm(TRANSFORMER_WIDTH)
        self.output = nn.Linear(TRANSFORMER_WIDTH, classes)
        self.register_buffer("encoding", positional_encoding(positions, TRANSFORMER_WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of token ids ``[B, T]``, T at most ``positions``; no text is all padding."""
        padding = tokens == PADDING
        hidden = self.embedding(tokens) + self.encoding[: tokens.shape[1]]
        attended, _ = self.attention(hidden, hidden, hidden, key_padding_mask=padding, need_weights=False)
        hidden = self.attention_norm(hidden + attended)
        hidden = self.feed_forward_norm(hidden + self.contract(self.expand(hidden).relu()))
        real = (~padding).unsqueeze(-1)
        return self.output((hidden * real).sum(1) / real.sum(1))


def positional_encoding(positions: int, width: int) -> Tensor:
    """Sines and cosines ``[positions, width]``, width even (Vaswani et al. 2017, section 3.5)."""
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(positions).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
