"""Programs that begin to mix, or to lay their rows out otherwise, in their third batch, whose graph is as those before.

``MIXING`` are to be refused then. ``MOVING`` are honest throughout, and their rows come in another order then.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from case_fallback import with_parameters
from law_programs import Program, squares
from torch import Tensor, nn
from torch.nn import functional as F

B, INSIDE, WIDTH = 8, 16, 5


def late_model(forward: Callable[..., Tensor], inside: int) -> nn.Module:
    """Layers that a forward uses."""
    layers = {"below": nn.Linear(WIDTH, inside), "above": nn.Linear(inside, 3), "wide": nn.Linear(inside // 2, 3)}
    recurrent = {"gru": nn.GRU(WIDTH, inside, batch_first=True), "lstm": nn.LSTM(WIDTH, inside)}
    return with_parameters(forward, {"gain": (WIDTH,)}, **layers, **recurrent)


def hidden(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.below(x))


def views_in_another_order(m: Any, x: Tensor, valid: Tensor) -> Tensor:
    """Two views of each example, first ones before second ones, of which neighbours are taken for a pair."""
    h = hidden(m, x)
    return m.above(h.view(2, B, INSIDE).sum(0) + (h * valid[:, None]).view(B, 2, INSIDE).sum(1))


def summed_products(m: Any, x: Tensor, matrix: Tensor) -> Tensor:
    return m.above(torch.addbmm(x.new_zeros(B, INSIDE), matrix.T.unsqueeze(2), hidden(m, x).unsqueeze(1)))


def normalized_columns(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = (hidden(m, x)[:, None] * mask[:, :, None]).flatten(1)
    return m.above(torch._weight_norm(rows, x.new_ones(1, rows.shape[1]), 1).view(B, B, INSIDE).sum(1))


def faint(m: Any, x: Tensor, gate: Tensor) -> Tensor:
    h = hidden(m, x)
    return m.above(h + gate * (h.T @ x.new_ones(B, B)).T)


def faint_mean(m: Any, x: Tensor, gate: Tensor) -> Tensor:
    h = hidden(m, x)
    return m.above(h + gate * (h - 2 * h.mean(0, keepdim=True)))


def packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return m.lstm(rows)[0].data.view(-1, B, INSIDE).transpose(0, 1)


def zero_layer(m: Any, x: Tensor, factor: Tensor) -> Tensor:
    """A layer that gives nothing at first reads the second part of something in which examples meet."""
    h = hidden(m, x)
    with torch.no_grad():
        m.wide.weight.fill_(float(factor))
    return m.above(h) + m.wide((h * 1.0).cumsum(0).chunk(2, 1)[1])


def product_in_place(m: Any, x: Tensor, matrix: Tensor) -> Tensor:
    out = x.new_zeros(B, INSIDE + 1)
    out[:, :INSIDE].addmm_(matrix, hidden(m, x))
    return m.above(out[:, :INSIDE])


def written_into_a_grid(m: Any, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    out = x.new_zeros(B, B + 1)
    grid = out[:, :B]
    grid[rows, columns] = hidden(m, x)
    return m.above(out[:, :B])


def hooked(m: Any, x: Tensor, late: bool) -> Tensor:
    """A hook on a tensor before the first layer, of parts of the model that are called by themselves."""
    h = x * m.gain
    h.register_hook((lambda grad: grad + grad.mean(0)) if late else (lambda grad: grad * 1.0))
    return m.above(hidden(m, h)).square().sum(1)


def added_by_owner(m: Any, x: Tensor, owner: Tensor) -> Tensor:
    """Two items of each example, added up in place."""
    out = x.new_zeros(B, 2, INSIDE)
    out[:, 0].index_add_(0, owner, hidden(m, x))
    return m.above(out[:, 0])


def images_in_texts(m: Any, places: Tensor, images: Tensor) -> Tensor:
    """Two texts of each example, with one image each at first, and two later."""
    text = images.new_zeros(*places.shape, INSIDE)
    text = text.masked_scatter(places[:, :, None], hidden(m, images))
    return m.above(text.sum(1).view(2, B, INSIDE).sum(0))


def own_or_all(late: bool) -> tuple[Tensor]:
    return (torch.ones(B, B) if late else torch.eye(B),)


def faint_or_not(late: bool) -> tuple[Tensor]:
    return (torch.tensor(1.0 if late else 1e-30),)


def tokens_and_stops(late: bool) -> tuple[Tensor, Tensor]:
    return torch.randn(4 * B, 4), (torch.arange(1, B + 1) * 4 + 3 * late * (torch.arange(B) % 2 == 0)).int()


# Forward, shape of x unless the other inputs are all, and late -> the other inputs.
Case = tuple[Callable[..., Tensor], tuple[int, ...], Callable[[bool], tuple[Any, ...]]]
MIXING: dict[str, Case] = {
    # Documents of sentences.
    "last states of a recurrent layer": (
        lambda m, x, members: m.above((m.gru(x)[1] * members[:, :, None]).sum(1)), (B, 6, WIDTH), own_or_all),
    "views in another order": (
        views_in_another_order, (2 * B, WIDTH),
        lambda late: (torch.ones(2 * B) if late else torch.eye(2 * B)[[0, -1]].sum(0),)),
    "a product with the examples elsewhere": (
        lambda m, x, members: m.above(torch.bmm(members.T.unsqueeze(2), hidden(m, x).unsqueeze(1)).sum(0)),
        (B, WIDTH), own_or_all),
    "products added up": (summed_products, (B, WIDTH), own_or_all),
    "filters of the examples": (
        lambda m, x, signal: m.above(F.conv_transpose1d(signal[:, :, None], hidden(m, x)[:, :, None])[:, :, 0]),
        (B, WIDTH), own_or_all),
    "normalized columns": (normalized_columns, (B, WIDTH), own_or_all),
    "a faint path": (faint, (B, WIDTH), faint_or_not),
    "a faint path to the mean": (faint_mean, (B, WIDTH), faint_or_not),
    "matrices of the examples": (
        lambda m, x, tokens, stops: F.grouped_mm(tokens, hidden(m, x).view(B, 4, 4), offs=stops).view(B, -1),
        (B, WIDTH), tokens_and_stops),
    "packed sequences": (packed, (B, 8, WIDTH), lambda late: (torch.tensor([8] * 4 + [2] * 4 if late else [5] * 8),)),
    # A mask of one dimension more makes pairs of examples.
    "a mask of another rank": (
        lambda m, x, mask: (hidden(m, x) * mask).flatten(1), (B, 4, WIDTH),
        lambda late: (torch.ones(B, 1, 4, 1) if late else torch.ones(B, 4, 1),)),
    "a layer of zeros": (zero_layer, (B, WIDTH), lambda late: (torch.tensor(0.3 * late),)),
    "a small mean in place": (
        product_in_place, (B, WIDTH), lambda late: (torch.eye(B) + late * torch.full((B, B), 0.4 / B**3),)),
    "transposed in place": (
        written_into_a_grid, (B, WIDTH),
        lambda late: torch.meshgrid(torch.arange(B), torch.arange(B), indexing="xy" if late else "ij")),
    "a hook before the first layer": (hooked, (B, WIDTH), lambda late: (late,)),
}  # fmt: skip
MOVING: dict[str, Case] = {
    "items in another order": (
        added_by_owner, (2 * B, WIDTH),
        lambda late: (torch.arange(B).repeat(2) if late else torch.arange(B).repeat_interleave(2),)),
    # Rows of one time step after another, of which there is one at first, and the last are read.
    "more time steps": (
        lambda m, x: m.above(hidden(m, x))[-B:], (), lambda late: (torch.randn(3 * B if late else B, WIDTH),)),
    "more images": (
        images_in_texts, (),
        lambda late: (torch.arange(6).expand(2 * B, 6) < 1 + late, torch.randn(2 * B * (1 + late), WIDTH))),
}  # fmt: skip


def late_program(name: str, expect: str) -> Program:
    """The program of that name, which is late in the third, fifth and sixth batch."""
    forward, shape, others = (MIXING | MOVING)[name]

    def batch(number: int) -> tuple[Any, ...]:
        return *([torch.randn(shape)] if shape else []), *others(number in (2, 4, 5))

    losses = hooked if forward is hooked else squares
    build = partial(late_model, forward, B if forward is written_into_a_grid else INSIDE)
    return Program(name, build, batch, losses, expect=expect, narrow=False)
