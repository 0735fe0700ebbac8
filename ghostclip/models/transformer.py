"""The paper's Transformer for texts: one encoder block on word embeddings."""

import math

import torch
from torch import Tensor

from ghostclip import nn

__all__ = ["TransformerClassifier", "positional_encoding"]

WIDTH = 200
HEADS = 8
FEED_FORWARD = 512
PADDING = 0


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
        self.embedding = nn.Embedding(vocabulary, WIDTH, padding_idx=PADDING)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, FEED_FORWARD)
        self.contract = nn.Linear(FEED_FORWARD, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, classes)
        self.register_buffer("encoding", positional_encoding(positions, WIDTH), persistent=False)

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
