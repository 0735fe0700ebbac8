"""Mixtures of experts written in the ways people write them, and what of it goes wrong.

Every model takes numbers [B, T, 4], sends each token to experts by its own numbers, and gives [B, T, 4].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, INSIDE, EXPERTS, CHOSEN = 4, 6, 3, 2


class Experts(nn.Module):
    """A layer, experts beside it, and a head.

    Args:
        way: (model, tokens [N, 4], weights [N, k], chosen experts [N, k]) -> [N, 4].
        time_first: whether tokens lie as [T, B] before they are put one after another.
    """

    def __init__(self, way: Callable, time_first: bool = False) -> None:
        super().__init__()
        self.way, self.time_first = way, time_first
        self.below, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        layers = [nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.GELU(), nn.Linear(INSIDE, WIDTH)) for _ in range(EXPERTS)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, INSIDE) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        hidden = self.below(x).tanh()
        tokens = hidden.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(1).topk(CHOSEN, dim=1)
        found = self.head(hidden + self.way(self, tokens, weights, chosen).reshape(hidden.shape))
        return found.transpose(0, 1) if self.time_first else found


def layers(m, h, weights, chosen):
    """A module an expert; added to the rows they came from."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where(chosen == expert)
        found.index_add_(0, row, layer(h[row]) * weights[row, place, None])
    return found


def matrices(m, h, weights, chosen):
    """One parameter for all experts, as Mixtral has it; without those that no token meets."""
    found = torch.zeros_like(h)
    for expert in chosen.unique().tolist():
        row, place = torch.where(chosen == expert)
        inside = F.silu(F.linear(h[row], m.up[expert]) + m.bias[expert])
        found = found.index_add(0, row, inside @ m.down[expert] * weights[row, place].unsqueeze(1))
    return found


def masks(m, h, weights, chosen):
    """The best expert of each token, by masks, written over what is there."""
    found = h * 0.5
    for expert, layer in enumerate(m.layers):
        mask = chosen[:, 0] == expert
        found[mask] = layer(h[mask]) * weights[mask, :1]
    return found


def splits(m, h, weights, chosen):
    """Tokens sorted by expert, split, joined, and put back by the inverse permutation."""
    order = chosen.flatten().argsort(stable=True)
    rows = h[order // CHOSEN].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
    parts = [F.relu(F.linear(part, m.up[e], m.bias[e])) @ m.down[e] for e, part in enumerate(rows)]
    found = torch.cat(parts) * weights.flatten()[order].unsqueeze(1)
    return found[order.argsort()].view(len(h), CHOSEN, WIDTH).sum(1)


def checkpointed(m, h, weights, chosen):
    """A block whose activations are computed again."""
    return checkpoint(matrices, m, h, weights, chosen, use_reentrant=False)


WAYS = {way.__name__: way for way in (layers, matrices, masks, splits, checkpointed)}


def mistaken(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable:
    """``change(rows, what an expert makes of them)`` says where these come back, and what comes back."""

    def way(m, h, weights, chosen):
        found = torch.zeros_like(h)
        for expert, layer in enumerate(m.layers):
            row, place = torch.where(chosen == expert)
            back, inside = change(row, layer(h[row]))
            found = found.index_add(0, back, inside * weights[row, place, None])
        return found

    return way


MISTAKES = {
    "put back at another example": mistaken(lambda row, inside: (torch.cat([row[:-1], row[:1]]), inside)),
    "another example's": mistaken(lambda row, inside: (row, torch.cat([inside[:-1], inside[:1]]))),
    "centred inside": mistaken(lambda row, inside: (row, inside - inside.mean(0))),
}


def token_losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(2).mean(1)


def balanced(model: nn.Module, x: Tensor) -> Tensor:
    """With the router's loss over the batch."""
    shares = model.router(model.below(x).tanh()).softmax(2)
    return token_losses(model, x) + shares.mean((0, 1)).square().sum()


LOSSES = {"plain": token_losses, "balanced": balanced}
