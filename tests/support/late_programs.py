"""Programs that begin to mix, or to lay their rows out otherwise, in their third batch, whose graph is as those before.

``MIXING`` are to be refused then. ``MOVING`` are honest throughout, and their rows come in another order then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from law_programs import Program, squares
from torch import Tensor, nn
from torch.nn import functional as F

B, INSIDE, WIDTH = 8, 16, 5


class Late(nn.Module):
    """Layers that a forward uses."""

    def __init__(self, forward: Callable[..., Tensor], inside: int) -> None:
        super().__init__()
        self.below, self.above, self.wide = nn.Linear(WIDTH, inside), nn.Linear(inside, 3), nn.Linear(inside // 2, 3)
        self.gru, self.lstm = nn.GRU(WIDTH, inside, batch_first=True), nn.LSTM(WIDTH, inside)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self._forward = forward

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.below(x))

    def forward(self, *inputs: Any) -> Tensor:
        return self._forward(self, *inputs)


def last_states(m: Late, x: Tensor, members: Tensor) -> Tensor:
    """Documents of sentences, by the last states of a recurrent layer."""
    return m.above((m.gru(x)[1] * members[:, :, None]).sum(1))


def views_in_another_order(m: Late, x: Tensor, valid: Tensor) -> Tensor:
    """Two views of each example, first ones before second ones, of which neighbours are taken for a pair."""
    h = m.hidden(x)
    return m.above(h.view(2, B, INSIDE).sum(0) + (h * valid[:, None]).view(B, 2, INSIDE).sum(1))


def sentences_to_documents(m: Late, x: Tensor, members: Tensor) -> Tensor:
    return m.above(torch.bmm(members.T.unsqueeze(2), m.hidden(x).unsqueeze(1)).sum(0))


def summed_products(m: Late, x: Tensor, matrix: Tensor) -> Tensor:
    zeros = torch.zeros(B, INSIDE, dtype=x.dtype)
    return m.above(torch.addbmm(zeros, matrix.T.unsqueeze(2), m.hidden(x).unsqueeze(1)))


def filters_of_examples(m: Late, x: Tensor, signal: Tensor) -> Tensor:
    return m.above(F.conv_transpose1d(signal.unsqueeze(2), m.hidden(x).unsqueeze(2))[:, :, 0])


def normalized_columns(m: Late, x: Tensor, mask: Tensor) -> Tensor:
    rows = (m.hidden(x)[:, None] * mask[:, :, None]).flatten(1)
    ones = torch.ones(1, rows.shape[1], dtype=rows.dtype)
    return m.above(torch._weight_norm(rows, ones, 1).view(B, B, INSIDE).sum(1))


def faint(m: Late, x: Tensor, gate: Tensor) -> Tensor:
    h = m.hidden(x)
    return m.above(h + gate * (h.T @ torch.ones(B, B, dtype=x.dtype)).T)


def matrices_of_examples(m: Late, x: Tensor, tokens: Tensor, stops: Tensor) -> Tensor:
    return F.grouped_mm(tokens, m.hidden(x).view(B, 4, 4), offs=stops).view(B, -1)


def packed(m: Late, x: Tensor, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return m.lstm(rows)[0].data.view(-1, B, INSIDE).transpose(0, 1)


def masked(m: Late, x: Tensor, mask: Tensor) -> Tensor:
    """A mask of one dimension more makes pairs of examples."""
    return (m.hidden(x) * mask).flatten(1)


def zero_layer(m: Late, x: Tensor, factor: Tensor) -> Tensor:
    """A layer that gives nothing at first reads the second part of something in which examples meet."""
    h = m.hidden(x)
    with torch.no_grad():
        m.wide.weight.fill_(float(factor))
    return m.above(h) + m.wide((h * 1.0).cumsum(0).chunk(2, 1)[1])


def product_in_place(m: Late, x: Tensor, matrix: Tensor) -> Tensor:
    out = torch.zeros(B, INSIDE + 1, dtype=x.dtype)
    out[:, :INSIDE].addmm_(matrix, m.hidden(x))
    return m.above(out[:, :INSIDE])


def written_into_a_grid(m: Late, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    out = torch.zeros(B, B + 1, dtype=x.dtype)
    grid = out[:, :B]
    grid[rows, columns] = m.hidden(x)
    return m.above(out[:, :B])


def hooked(m: Late, x: Tensor, late: bool) -> Tensor:
    """A hook on a tensor before the first layer, of parts of the model that are called by themselves."""
    h = x * m.gain
    h.register_hook((lambda grad: grad + grad.mean(0)) if late else (lambda grad: grad * 1.0))
    return m.above(m.hidden(h)).square().sum(1)


def added_by_owner(m: Late, x: Tensor, owner: Tensor) -> Tensor:
    """Two items of each example, added up in place."""
    out = torch.zeros(B, 2, INSIDE, dtype=x.dtype)
    out[:, 0].index_add_(0, owner, m.hidden(x))
    return m.above(out[:, 0])


def last_steps(m: Late, x: Tensor) -> Tensor:
    """Rows of one time step after another, of which there is one at first, and the last are read."""
    return m.above(m.hidden(x))[-B:]


def images_in_texts(m: Late, places: Tensor, images: Tensor) -> Tensor:
    """Two texts of each example, with one image each at first, and two later."""
    text = torch.zeros(*places.shape, INSIDE, dtype=images.dtype)
    text = text.masked_scatter(places[:, :, None], m.hidden(images))
    return m.above(text.sum(1).view(2, B, INSIDE).sum(0))


def own_or_all(late: bool) -> Tensor:
    return torch.ones(B, B) if late else torch.eye(B)


def grid(late: bool) -> tuple[Tensor, ...]:
    places = torch.arange(B)
    return torch.meshgrid(places, places, indexing="xy" if late else "ij")


# Forward, and late -> its inputs beside x; the shape of x is that of (examples, WIDTH) unless there is another one.
Case = tuple[Callable[..., Tensor], Callable[[bool], tuple[Any, ...]]]
MIXING: dict[str, Case] = {
    "last states of a recurrent layer": (last_states, lambda late: (torch.randn(B, 6, WIDTH), own_or_all(late))),
    "views in another order": (
        views_in_another_order,
        lambda late: (torch.randn(2 * B, WIDTH), torch.ones(2 * B) if late else torch.eye(2 * B)[[0, -1]].sum(0)),
    ),
    "a product with the examples elsewhere": (
        sentences_to_documents, lambda late: (torch.randn(B, WIDTH), own_or_all(late)),
    ),
    "products added up": (summed_products, lambda late: (torch.randn(B, WIDTH), own_or_all(late))),
    "filters of the examples": (filters_of_examples, lambda late: (torch.randn(B, WIDTH), own_or_all(late))),
    "normalized columns": (normalized_columns, lambda late: (torch.randn(B, WIDTH), own_or_all(late))),
    "a faint path": (faint, lambda late: (torch.randn(B, WIDTH), torch.tensor(1.0 if late else 1e-30))),
    "matrices of the examples": (
        matrices_of_examples,
        lambda late: (
            torch.randn(B, WIDTH), torch.randn(4 * B, 4),
            (torch.arange(1, B + 1) * 4 + 3 * late * (torch.arange(B) % 2 == 0)).int(),
        ),
    ),
    "packed sequences": (
        packed, lambda late: (torch.randn(B, 8, WIDTH), torch.tensor([8] * 4 + [2] * 4 if late else [5] * 8)),
    ),
    "a mask of another rank": (
        masked, lambda late: (torch.randn(B, 4, WIDTH), torch.ones(B, 1, 4, 1) if late else torch.ones(B, 4, 1)),
    ),
    "a layer of zeros": (zero_layer, lambda late: (torch.randn(B, WIDTH), torch.tensor(0.3 * late))),
    "a small mean in place": (
        product_in_place, lambda late: (torch.randn(B, WIDTH), torch.eye(B) + late * torch.full((B, B), 0.4 / B**3)),
    ),
    "transposed in place": (written_into_a_grid, lambda late: (torch.randn(B, WIDTH), *grid(late))),
    "a hook before the first layer": (hooked, lambda late: (torch.randn(B, WIDTH), late)),
}  # fmt: skip
MOVING: dict[str, Case] = {
    "items in another order": (
        added_by_owner,
        lambda late: (
            torch.randn(2 * B, WIDTH), torch.arange(B).repeat(2) if late else torch.arange(B).repeat_interleave(2),
        ),
    ),
    "more time steps": (last_steps, lambda late: (torch.randn(3 * B if late else B, WIDTH),)),
    "more images": (
        images_in_texts,
        lambda late: (torch.arange(6).expand(2 * B, 6) < 1 + late, torch.randn(2 * B * (1 + late), WIDTH)),
    ),
}  # fmt: skip


def late_program(name: str, expect: str) -> Program:
    """The program of that name, which is late in the third, fifth and sixth batch."""
    forward, inputs = (MIXING | MOVING)[name]
    losses = {hooked: hooked}.get(forward, squares)
    inside = B if forward is written_into_a_grid else INSIDE
    return Program(
        name, lambda: Late(forward, inside), lambda number: inputs(number in (2, 4, 5)), losses, expect=expect,
        narrow=False,
    )  # fmt: skip
