"""The benchmark's networks for texts, of plain torch layers: word vectors, LSTM, GPT-2's shape, low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "DecoderBlock", "EmbeddingNetwork", "LowRank", "TextLSTM", "with_adapters"]

INITIAL_STD = 0.02  # of GPT-2's embeddings (Radford et al. 2019)


class EmbeddingNetwork(nn.Module):
    """Word vectors of 16, their mean, two classes (Subramani et al. 2021, appendix): 160,034 parameters."""

    def __init__(self, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.output = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, 2] of token ids [B, T]."""
        return self.output(self.embedding(tokens).mean(1))


class TextLSTM(nn.Module):
    """Word vectors of 100, an LSTM of 100 units, its states' mean, two classes: 1,081,002 parameters.

    The LSTM for IMDb of Subramani et al. (2021, section 4); the word vectors are trained too.
    """

    def __init__(self, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 100)
        self.recurrent = nn.LSTM(100, 100, batch_first=True)
        self.output = nn.Linear(100, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, 2] of token ids [B, T]."""
        states, _ = self.recurrent(self.embedding(tokens))
        return self.output(states.mean(1))


class DecoderBlock(nn.Module):
    """A transformer block with the norms first: attention, then two linear layers with GELU.

    Args:
        width: features a position.
        heads: of the attention.
        causal: a position sees itself and those before it only.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.linear_pair: nn.Module = nn.Linear(width, 3 * width)
        self.mixed: nn.Module = nn.Linear(width, width)
        self.dense_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        hidden = hidden + self._attention(self.attention_norm(hidden))
        return hidden + self.contract(F.gelu(self.expand(self.dense_norm(hidden))))

    def _attention(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.linear_pair(hidden).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.mixed(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A language model of GPT-2's form (Radford et al. 2019): learned positions, causal blocks, a norm, a linear head.

    Args:
        width, depth, heads: of the blocks.
        positions: the longest text, in tokens.
        vocabulary: number of token ids.
        tied: the head shares its weight with the embedding, as GPT-2's does.
    """

    def __init__(
        self, width: int, depth: int, heads: int, positions: int, vocabulary: int = 10_000, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=INITIAL_STD)
        nn.init.normal_(self.positions.weight, std=INITIAL_STD)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of token ids [B, T], T at most ``positions``."""
        # One row of positions for every example: what the batch shares has no gradient of an example's own.
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank one beside it: ``W x + b + U D x`` (Hu et al. 2022).

    U starts at small random numbers, not at LoRA's zeros, under which D's first gradient would be zero.
    """

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=INITIAL_STD)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return self.base(hidden) + self.up(self.down(hidden))


def with_adapters(model: GPT, rank: int = 8) -> GPT:
    """The model with everything frozen, and adapters of a rank at each block's two attention layers; in place."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, DecoderBlock)
        block.linear_pair, block.mixed = LowRank(block.linear_pair, rank), LowRank(block.mixed, rank)
    return model
