"""Mixtures of experts written in the ways people write them, and what of it goes wrong.

Every model takes numbers [B, T, 4], sends each token to experts by its own numbers, and gives [B, T, 4].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["LATER", "LOSSES", "MISTAKES", "WAYS", "Experts"]

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


def from_a_batch_of_one(m, h, weights, chosen):
    """Rows picked in the second dimension, as Switch picks them."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where(chosen == expert)
        found.index_add_(0, row, layer(h[None, row].reshape(-1, WIDTH)) * weights[row, place, None])
    return found


def masks(m, h, weights, chosen):
    """The best expert of each token, by masks, written over what is there."""
    found = h * 0.5
    for expert, layer in enumerate(m.layers):
        mask = chosen[:, 0] == expert
        found[mask] = layer(h[mask]) * weights[mask, :1]
    return found


def selected(m, h, weights, chosen):
    """By index_select and index_put; a token of which an expert isn't sure enough is dropped."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where((chosen == expert) & (weights > 0.3))
        scaled = layer(h.index_select(0, row)) * weights[row, place, None]
        found = found.index_put((row,), scaled, accumulate=True)
    return found


def in_order_of_experts(h, weights, chosen):
    """Tokens sorted by expert, the inverse of that, how many each expert has, and their weights."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    return h[order // CHOSEN], order.argsort(), counts, weights.flatten()[order].unsqueeze(1)


def splits(m, h, weights, chosen):
    """Sorted, split, joined, and put back by the inverse permutation."""
    rows, inverse, counts, scale = in_order_of_experts(h, weights, chosen)
    parts = [F.relu(F.linear(part, m.up[e], m.bias[e])) @ m.down[e] for e, part in enumerate(rows.split(counts))]
    return (torch.cat(parts) * scale)[inverse].view(len(h), CHOSEN, WIDTH).sum(1)


def slices(m, h, weights, chosen):
    """Sorted and cut by numbers; what the last expert has is dropped, and nothing uses those rows."""
    rows, _, counts, scale = in_order_of_experts(h, weights, chosen)
    row = chosen.flatten().argsort(stable=True) // CHOSEN
    start, parts = 0, []
    for expert, count in enumerate(counts[:-1]):
        parts.append(m.layers[expert](rows[start : start + count]))
        start += count
    return torch.zeros_like(h).index_add(0, row[:start], torch.cat(parts) * scale[:start])


def normed(m, h, weights, chosen):
    """An expert with a normalization and a softmax inside, and tokens counted as a batch of sequences of one."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where(chosen == expert)
        inside = layer(h[row].unsqueeze(1)).softmax(-1)
        inside = inside * inside.square().mean(-1, keepdim=True).add(1e-3).rsqrt()
        found.index_add_(0, row, inside.squeeze(1) * weights[row, place, None])
    return found


def biases(m, h, weights, chosen):
    """Biases looked up by the expert of each row, as grouped products take them."""
    rows, inverse, counts, scale = in_order_of_experts(h, weights, chosen)
    expert = chosen.flatten().sort(stable=True).values
    parts = [part @ m.up[e].T for e, part in enumerate(rows.split(counts))]
    inside = F.silu(torch.cat(parts) + m.bias[expert])
    parts = [part @ m.down[e] for e, part in enumerate(inside.split(counts))]
    return (torch.cat(parts) * scale)[inverse].view(len(h), CHOSEN, WIDTH).sum(1)


def checkpointed(m, h, weights, chosen):
    """A block whose activations are computed again."""
    return checkpoint(matrices, m, h, weights, chosen, use_reentrant=False)


WAYS = {
    way.__name__: way
    for way in (layers, matrices, from_a_batch_of_one, masks, selected, splits, slices, normed, biases, checkpointed)
}


def misplaced(shift: Callable[[Tensor], Tensor], pick: bool = False) -> Callable:
    """Rows put back, or picked, where a mistake in the index says; only where ``model.wrong`` isn't False."""

    def way(m, h, weights, chosen):
        found = torch.zeros_like(h)
        for expert, layer in enumerate(m.layers):
            row, place = torch.where(chosen == expert)
            other = shift(row) % len(h) if getattr(m, "wrong", True) else row
            inside = layer(h[other if pick else row]) * weights[row, place, None]
            found = found.index_add(0, row if pick else other, inside)
        return found

    return way


def one_to_another(row: Tensor) -> Tensor:
    """The last token of the expert comes back in place of the first."""
    return torch.cat([row[:-1], row[:1]])


def all_meet(m, h, weights, chosen):
    """Experts that centre their tokens, whomever these belong to."""
    return layers(m, h - h.mean(0), weights, chosen)


def centred_inside(m, h, weights, chosen):
    """The same with the tokens of one expert."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where(chosen == expert)
        inside = layer(h[row])
        found.index_add_(0, row, (inside - inside.mean(0)) * weights[row, place, None])
    return found


MISTAKES = {
    "put back off by one": misplaced(lambda row: row + 1),
    "picked off by one": misplaced(lambda row: row + 1, pick=True),
    "put back at another example": misplaced(one_to_another),
    "picked from another example": misplaced(one_to_another, pick=True),
    "centred before": all_meet,
    "centred inside": centred_inside,
}


def token_losses(model: nn.Module, x: Tensor) -> Tensor:
    """[B]."""
    return model(x).square().sum(2).mean(1)


def balanced(model: nn.Module, x: Tensor) -> Tensor:
    """With the router's loss over the batch."""
    shares = model.router(model.below(x).tanh()).softmax(2)
    return token_losses(model, x) + shares.mean((0, 1)).square().sum()


LOSSES = {"plain": token_losses, "balanced": balanced}


# Mistakes of some batches, in which ``model.wrong`` is true; in batches of four examples of five tokens ---


def one_token_elsewhere(m, h, weights, chosen):
    """A single row among many comes back at another example's."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where(chosen == expert)
        other = row.clone()
        if m.wrong and expert == 1:
            other[-1] = 0 if row[-1] >= 5 else 19
        found = found.index_add(0, other, layer(h[row]) * weights[row, place, None])
    return found


def met_in_a_product(batched: bool) -> Callable:
    """Four picked tokens of four features are four of both, in whichever dimension."""

    def way(m, h, weights, chosen):
        picked = torch.tensor([0, 6, 11, 16] if m.wrong else [0, 1, 2, 3])
        inside = m.layers[0](h[picked])
        pairs = m.layers[1](h[picked]).softmax(1)
        met = torch.bmm(pairs.unsqueeze(0), inside.unsqueeze(0))[0] if batched else pairs @ inside
        return torch.zeros_like(h).index_add(0, picked, met)

    return way


def back_twice(places: tuple[int, ...], at_once: bool) -> Callable:
    """A token comes back twice, once at another example: the right place may be the first, the last, or the larger."""
    back = torch.tensor(places)

    def way(m, h, weights, chosen):
        inside = m.layers[0](h[[0, 1, 6]])
        if at_once:
            return torch.zeros_like(h).index_add(0, back, inside[[0, 1, 2, 2]])
        return torch.zeros_like(h).index_add(0, back[:3], inside).index_add(0, back[[0, 1, 3]], inside)

    return way


def penalized(m, h, weights, chosen):
    """A penalty on all that an expert says."""
    row, _ = torch.where(chosen == 0)
    inside = m.layers[0](h[row])
    return torch.zeros_like(h).index_add(0, row, inside) + m.wrong * inside.square().mean()


def of_rows_outside(m, h, weights, chosen):
    """Rows that come from outside of the graph."""
    return layers(m, h.detach(), weights, chosen)


# {name: (way, losses, what comes of each batch; those to be refused are the wrong ones)}
LATER: dict[str, tuple[Callable, str, str]] = {
    "one token elsewhere": (one_token_elsewhere, "plain", "ER"),
    "tokens that meet in a product": (met_in_a_product(batched=False), "plain", "SR"),
    "tokens that meet in a batched product": (met_in_a_product(batched=True), "plain", "SR"),
    **{f"a token that comes back at {places}, at once {at_once}": (back_twice(places, at_once), "plain", "R")
       for places in ((0, 1, 6, 12), (0, 1, 6, 2), (0, 1, 2, 6)) for at_once in (True, False)},
    **{f"balanced over the batch: {name}": (WAYS[name], "balanced", "R") for name in ("layers", "matrices", "splits")},
    "a penalty on all that an expert says": (penalized, "plain", "EERER"),
    "rows from outside of the graph": (of_rows_outside, "plain", "E"),
}  # fmt: skip
