"""Programs in which operations move rows in some batches only.

A loss may read another example's rows, as long as no row is read by two losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from free_programs import EXAMPLES, IN_ORDER, ORDERS, SQUARE, TIME_FIRST, TURNS, WIDTH, B, Free, add, squares
from law_programs import Program
from torch import Tensor

__all__ = ["MOVES", "PARTS"]

PARTS: list[Program] = []
MOVES: list[Program] = []


# Parts of tensors, put together in another order ---------------------------------------------------------------------


def joined(parts: Sequence[Tensor], by: int, dim: int = 0) -> Tensor:
    return torch.cat([parts[(place + by) % len(parts)] for place in range(len(parts))], dim)


# Each moves rows by one place for a ``by`` of one.
TURNED: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "slices": lambda m, h, by: torch.cat([h[by:], h[:by]]),
    "selected": lambda m, h, by: torch.stack([h[(place + by) % len(h)] for place in range(len(h))]),
    "unbound": lambda m, h, by: torch.stack([h.unbind()[(place + by) % len(h)] for place in range(len(h))]),
    "with an operation between": lambda m, h, by: joined([part.tanh() for part in h.split(1)], by),
    "one of two, into a layer": lambda m, h, by: m.between(torch.stack([h, joined(h.split(1), 1)]).unbind()[by]),
    "time first": lambda m, h, by: joined(h.unsqueeze(0).split(1, 1), by, 1).squeeze(0),
}


def turned_and_back(turn: Callable[[Any, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def form(m: Free, x: Tensor, turns: bool) -> Tensor:
        rows = m.last(turn(m, m.first(x), int(turns)) * m.bare[0])
        return squares(torch.cat([rows[B - turns :], rows[: B - turns]]))

    return form


for _name, _turn in TURNED.items():
    add(PARTS, turned_and_back(_turn), EXAMPLES, [(turn,) for turn in TURNS], _name)


def permuted(m: Free, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh().view(2, 2, WIDTH).permute(*((1, 0, 2) if turn else (0, 1, 2)))
    return squares(m.last(h.clone(memory_format=torch.contiguous_format).view(B, WIDTH)))


def transposed(m: Free, x: Tensor, turn: bool) -> Tensor:
    return squares(m.last(m.first(x).tanh().transpose(*((0, 1) if turn else (1, 1))).contiguous()))


def summed(m: Free, x: Tensor, turn: bool) -> Tensor:
    return m.last(m.first(x).tanh()).tanh().square().sum((0 if turn else 1, 2))


def strided(m: Free, x: Tensor, turn: bool) -> Tensor:
    strides = (WIDTH, 2 * WIDTH, 1) if turn else (2 * WIDTH, WIDTH, 1)
    return squares(m.last(m.first(x).tanh().as_strided((2, 2, WIDTH), strides).reshape(B, WIDTH)))


def padded(m: Free, x: Tensor, turn: bool) -> Tensor:
    """The first example is moved to the second's place, or each position is."""
    return squares(m.last(F.pad(m.first(x).tanh(), (0, 0, 0, 0, 1, -1) if turn else (0, 0, 1, -1, 0, 0))))


def pooled(m: Free, x: Tensor, turn: bool) -> Tensor:
    """Over windows of one example, or of three."""
    return squares(m.last(F.avg_pool1d(m.first(x).tanh().T[None], 1 + 2 * turn, 1, int(turn))[0].T))


def cut_beside_a_multiple(m: Free, x: Tensor, turn: bool) -> Tensor:
    """Along a dimension with one entry more than there are examples."""
    h = m.first(x).tanh()
    h = torch.cat([h, h[:, :1]], 1)
    return m.last(h[:, 1:] if turn else h[:, :-1]).square().sum((0, 2))


def indexed_beside_a_multiple(m: Free, x: Tensor, turn: bool) -> Tensor:
    h = torch.cat([m.first(x).tanh(), x.new_zeros(3, 1, WIDTH)], 1)
    return m.last(h[:, IN_ORDER.roll(int(turn))]).square().sum((0, 2))


def copied_into_slices(m: Free, x: Tensor, turn: bool) -> Tensor:
    h, out = m.first(x).tanh(), torch.zeros_like(x)
    for place in range(B):
        out[(place + turn) % B] = h[place]
    return squares(m.last(out))


def copied_by_positions(m: Free, x: Tensor, turn: bool) -> Tensor:
    h, out = m.first(x).tanh(), torch.zeros_like(x)
    for place in range(B):
        out[place if turn else (slice(None), place)] = h[:, place]
    return squares(m.last(out))


def written_step_by_step(m: Free, x: Tensor, turn: bool) -> Tensor:
    """A layer makes each position, as a recurrence does; examples are written in order or in another one."""
    out = torch.zeros_like(x)
    for place in range(x.shape[1]):
        h = m.first(x[:, place]).tanh()
        out[1 + turn :, place] = h[: -1 - turn]
        out[: 1 + turn, place] = h[-1 - turn :]
    return squares(m.last(out))


def a_parameter_times_pairs(m: Free, x: Tensor, turn: bool) -> Tensor:
    return (x * m.gain).tanh().sum(int(turn)).square()


class Shifted(torch.autograd.Function):
    """Rows moved by so many places, which no graph tells."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, by: int) -> Tensor:
        ctx.by = by
        return h.roll(by, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.roll(-ctx.by, 0), None


def shifted_by_an_own_function(m: Free, x: Tensor, turn: bool) -> Tensor:
    return squares(m.last(Shifted.apply(m.first(x).tanh(), int(turn))))


for _form, _shape in (
    (permuted, EXAMPLES), (transposed, SQUARE), (summed, SQUARE),
    (strided, EXAMPLES), (padded, SQUARE), (cut_beside_a_multiple, TIME_FIRST),
    (indexed_beside_a_multiple, TIME_FIRST), (copied_into_slices, EXAMPLES), (copied_by_positions, SQUARE),
    (written_step_by_step, SQUARE), (a_parameter_times_pairs, (B, B)), (shifted_by_an_own_function, EXAMPLES),
):  # fmt: skip
    add(PARTS, _form, _shape, [(turn,) for turn in TURNS])
add(PARTS, pooled, EXAMPLES, [(turn,) for turn in TURNS], expect="EEERE")

# Indices -------------------------------------------------------------------------------------------------------------


def like(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """The order as an index of the shape of ``h``."""
    return order.view([-1 if each == dim else 1 for each in range(h.dim())]).expand_as(h)


def put(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """Into a tensor that no gradient leads to."""
    return torch.zeros_like(h).transpose(0, dim).index_put((order,), h.transpose(0, dim)).transpose(0, dim)


def put_with_constants(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """Beside indices of another dimension."""
    rows = h.movedim(dim, -2)
    return torch.zeros_like(rows).index_put((torch.arange(len(rows))[:, None], order), rows).movedim(-2, dim)


INDEXED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "index": lambda h, order, dim: h[(slice(None),) * dim + (order,)],
    "put": put,
    "put with constants": put_with_constants,
    "select": lambda h, order, dim: h.index_select(dim, order),
    "copy": lambda h, order, dim: torch.zeros_like(h).index_copy(dim, order, h),
    "add": lambda h, order, dim: torch.zeros_like(h).index_add(dim, order, h),
    "gather": lambda h, order, dim: h.gather(dim, like(h, order, dim)),
    "scatter": lambda h, order, dim: torch.zeros_like(h).scatter(dim, like(h, order, dim), h),
    "scatter_add": lambda h, order, dim: torch.zeros_like(h).scatter_add(dim, like(h, order, dim), h),
    "roll": lambda h, order, dim: h.roll(int(order[0]), dim),
}


def indexed(move: str, time_first: bool, of_positions: bool) -> Callable[..., Tensor]:
    dim = int(time_first)
    along = 1 - dim if of_positions else dim

    def form(m: Free, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.between(INDEXED[move](torch.tanh(m.first(x.transpose(0, dim))), order, along)))
        back = -order if move == "roll" else order.argsort()
        return squares(m.last(INDEXED[move](h, back, along)).transpose(0, dim))

    return form


for _move in INDEXED:
    for _time_first in (False, True):
        _name = f"{_move}{', time first' * _time_first}"
        for _length in (3, B, 2 * B):
            form, orders = indexed(_move, _time_first, False), [(torch.tensor(order),) for order in ORDERS]
            add(MOVES, form, (B, _length, WIDTH), orders, f"{_name}, {_length} positions")
        add(MOVES, indexed(_move, _time_first, True), SQUARE, [(IN_ORDER.roll(by),) for by in range(4)],
            f"{_name}, of positions")  # fmt: skip


def a_position_of_each(m: Free, x: Tensor, places: Tensor) -> Tensor:
    """As CLIP reads the end of a text, and Longformer the tokens of global attention, in a tensor with time first."""
    h = torch.tanh(m.between(torch.tanh(m.first(x)))).transpose(0, 1)
    one = h[places[:, 0], torch.arange(len(x))]
    h = h.index_put((places[:, 0], torch.arange(len(x))), torch.tanh(one))
    return m.last(h).square().sum((0, 2)) + one.sum(1)


def positions_of_heads(m: Free, x: Tensor, places: Tensor) -> Tensor:
    """As Informer picks the queries that attend, of examples and heads folded together."""
    h = torch.tanh(m.between(torch.tanh(m.first(x))))[..., :4].unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1)
    rows, places = torch.arange(len(h))[:, None], places.repeat_interleave(2, 0)
    h = h.index_put((rows, places), torch.tanh(h[rows, places])).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
    return squares(m.last(F.pad(h, (0, 1))))


PLACES = (((0, 1), (2, 0), (1, 2), (2, 1)), ((1, 2), (0, 1), (2, 0), (0, 2)), ((2, 1), (1, 0), (0, 2), (1, 2)))


def positions_in_an_order(m: Free, x: Tensor, order: Tensor) -> Tensor:
    return squares(m.last(torch.tanh(m.first(x))[order[:, None], torch.tensor(PLACES[0])]))


def an_order_beside_all_positions(m: Free, x: Tensor, order: Tensor) -> Tensor:
    return squares(m.last(torch.tanh(m.between(torch.tanh(m.first(x))))[order, torch.arange(B)]))


def positions_and_then_examples(m: Free, x: Tensor, order: Tensor) -> Tensor:
    """Both are moved along dimension 1."""
    h = torch.tanh(m.between(torch.tanh(m.first(x))[:, IN_ORDER.roll(1)].transpose(0, 1)[:, order]))
    return m.last(h).square().sum((0, 2))


def sorted_by_a_number(m: Free, x: Tensor, order: Tensor) -> Tensor:
    """All of the examples, the largest first: which is which depends on the batch alone."""
    h = m.first(x)[:, :1]
    return squares(m.last(m.between(torch.tanh(h.topk(len(h), 0).values).expand(-1, WIDTH))))


def put_into_a_parameter(m: Free, x: Tensor, order: Tensor) -> Tensor:
    """What is written into is shared, and what is written isn't."""
    return squares(m.last(m.table.index_copy(0, order, torch.tanh(m.first(x)))))


for _form, _shape in (
    (positions_in_an_order, (B, 3, WIDTH)), (an_order_beside_all_positions, SQUARE),
    (positions_and_then_examples, SQUARE), (sorted_by_a_number, EXAMPLES), (put_into_a_parameter, EXAMPLES),
):  # fmt: skip
    add(MOVES, _form, _shape, [(torch.tensor(order),) for order in ORDERS])
for _form in (a_position_of_each, positions_of_heads):
    for _length in (3, B, 2 * B):
        add(MOVES, _form, (B, _length, WIDTH), [(torch.tensor(places),) for places in PLACES],
            f"{_form.__name__.replace('_', ' ')}, {_length} positions")  # fmt: skip


def an_index_of_a_longer_dimension(m: Free, x: Tensor, order: Tensor) -> Tensor:
    """Two rows of each example, of which one is picked, or both of half of the examples."""
    return squares(m.last(m.first(x).tanh().unsqueeze(1).expand(B, 2, WIDTH).reshape(2 * B, WIDTH)[order]))


def an_index_that_is_broadcast(m: Free, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    h = m.first(x.unsqueeze(1).expand(SQUARE) * torch.arange(1.0, 5.0)[:, None].to(x)).tanh()
    return squares(m.last(h[rows, columns].cumsum(1)[:, -1]))


def pictures_in_places(m: Free, x: Tensor, places: int) -> Tensor:
    """As many pictures as a text has places for, or more: then the next text has them."""
    mask = (torch.arange(6) < places).view(1, 6, 1).expand(B, 6, WIDTH)
    pictures = x.unsqueeze(1).expand(SQUARE) * torch.arange(1.0, 5.0)[:, None].to(x)
    text = m.first(x.unsqueeze(1).expand(B, 6, WIDTH))
    return squares(m.last(text.masked_scatter(mask, m.between(pictures).tanh())).tanh())


def pictures_in_texts(m: Free, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """As LLaVA puts them into the places of a text that a mask says."""
    words = torch.arange(1, 6).expand(B, 5).clone()
    for row, count in zip(words, counts, strict=True):
        row[1 : 1 + count] = 0
    h, mask = m.words(words), (words == 0)[:, :, None]
    return squares(m.last(h.masked_scatter(mask.expand_as(h), m.first(x))).tanh().mean(1))


add(MOVES, an_index_of_a_longer_dimension, EXAMPLES,
    [(order,) for order in (2 * IN_ORDER, 2 * IN_ORDER, IN_ORDER, 2 * IN_ORDER)], expect="EERE")  # fmt: skip
_pair = IN_ORDER[:, None], IN_ORDER[None]
add(MOVES, an_index_that_is_broadcast, EXAMPLES, [_pair, _pair, _pair[::-1], _pair])
add(MOVES, pictures_in_places, EXAMPLES, [(4,), (4,), (4,), (2,), (4,)], expect="EEERE")
add(MOVES, pictures_in_texts, EXAMPLES, [((1, 1, 1, 1),)] * 3 + [((2, 0, 1, 1),), ((0, 3, 0, 1),)])
