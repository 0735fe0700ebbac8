"""Programs in which operations move rows in some batches only.

A loss may read another example's rows, as long as no row is read by two losses.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from free_programs import EXAMPLES, IN_ORDER, ORDERS, SQUARE, TURNS, WIDTH, B, Free, add, squares
from law_programs import Program
from torch import Tensor

PARTS: list[Program] = []
MOVES: list[Program] = []


# Parts of tensors, put together in another order, by a number that is no tensor ---------------------------------------


def joined(parts: Sequence[Tensor], by: int) -> Tensor:
    return torch.cat([parts[(place + by) % len(parts)] for place in range(len(parts))])


def strides(crosswise: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (2, 2, WIDTH), ((WIDTH, 2 * WIDTH, 1) if crosswise else (2 * WIDTH, WIDTH, 1))


def copied_into_slices(h: Tensor, by: int) -> Tensor:
    out = torch.zeros_like(h)
    for place in range(B):
        out[(place + by) % B] = h[place]
    return out


# Each moves rows of [B, d] for a ``by`` of one.
TURNED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slices": lambda h, by: torch.cat([h[by:], h[:by]]),
    "selected": lambda h, by: torch.stack([h[(place + by) % len(h)] for place in range(len(h))]),
    "unbound": lambda h, by: torch.stack([h.unbind()[(place + by) % len(h)] for place in range(len(h))]),
    "with an operation between": lambda h, by: joined([part.tanh() for part in h.split(1)], by),
    "permuted": lambda h, by: h.view(2, 2, WIDTH).permute(by, 1 - by, 2).reshape(h.shape),
    "narrow copies": lambda h, by: torch.cat([h.narrow_copy(0, (2 * by + start) % B, 2) for start in (0, 2)]),
    "strided": lambda h, by: h.as_strided(*strides(by)).reshape(h.shape),
    "strided scatter": lambda h, by: torch.zeros_like(h).as_strided_scatter(h.view(2, 2, -1), *strides(by), 0),
    "copied into slices": copied_into_slices,
}
# The same of [B, B, d].
TURNED_SQUARE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transposed": lambda h, by: h.transpose(0, by),
    "padded": lambda h, by: F.pad(h, (0, 0, 0, 0, 1, -1) if by else (0, 0, 1, -1, 0, 0)),
    "half turns": lambda h, by: h.rot90(2 * by, (0, 1)),
}


def turned(turn: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """A layer and a parameter above the moved rows, and a layer below."""
    return lambda m, x, turns: squares(m.last(turn(m.first(x).tanh(), int(turns)).contiguous() * m.bare[0]))


for _shape, _turns in ((EXAMPLES, TURNED), (SQUARE, TURNED_SQUARE)):
    for _name, _turn in _turns.items():
        add(PARTS, turned(_turn), _shape, [(turn,) for turn in TURNS], _name)


def written_step_by_step(m: Free, x: Tensor, turn: bool) -> Tensor:
    """A layer makes each position, as a recurrence does; examples are written in order or in another one."""
    out = torch.zeros_like(x)
    for place in range(x.shape[1]):
        h = m.first(x[:, place]).tanh()
        out[1 + turn :, place] = h[: -1 - turn]
        out[: 1 + turn, place] = h[-1 - turn :]
    return squares(m.last(out))


add(PARTS, written_step_by_step, SQUARE, [(turn,) for turn in TURNS])
# name: (form, shape, what comes of the batches)
TURNING: dict[str, tuple[Callable[..., Tensor], Sequence[int], str]] = {
    "summed": (lambda m, x, turn: m.last(m.first(x).tanh()).tanh().square().sum((0 if turn else 1, 2)), SQUARE, ""),
    "a parameter times pairs": (lambda m, x, turn: (x * m.gain).tanh().sum(int(turn)).square(), (B, B), ""),
    # Over windows of one example, or of three.
    "pooled": (lambda m, x, turn: squares(m.last(F.avg_pool1d(m.first(x).tanh().T[None], 1 + 2 * turn, 1, int(turn))[0]
                                                 .T)), EXAMPLES, "EEERE"),
}  # fmt: skip
for _name, (_form, _shape, _expect) in TURNING.items():
    add(PARTS, _form, _shape, [(turn,) for turn in TURNS], _name, _expect)

# Indices -------------------------------------------------------------------------------------------------------------


def like(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """The order as an index of the shape of ``h``."""
    return order.view([-1 if each == dim else 1 for each in range(h.dim())]).expand_as(h)


def put(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """Into a tensor that no gradient leads to."""
    return torch.zeros_like(h).transpose(0, dim).index_put((order,), h.transpose(0, dim)).transpose(0, dim)


INDEXED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "index": lambda h, order, dim: h[(slice(None),) * dim + (order,)],
    "put": put,
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
    one = h[places, torch.arange(len(x))]
    h = h.index_put((places, torch.arange(len(x))), torch.tanh(one))
    return m.last(h).square().sum((0, 2)) + one.sum(1)


PLACES = [(torch.tensor(places),) for places in ((0, 2, 1, 2), (1, 0, 2, 0))]
for _length in (3, B, 2 * B):
    add(MOVES, a_position_of_each, (B, _length, WIDTH), PLACES, f"a position of each, {_length} positions")


def pictures_in_places(m: Free, x: Tensor, places: int) -> Tensor:
    """As many pictures as a text has places for, as LLaVA puts them there, or more: then the next text has them."""
    mask = (torch.arange(6) < places).view(1, 6, 1).expand(B, 6, WIDTH)
    pictures = x.unsqueeze(1).expand(SQUARE) * torch.arange(1.0, 5.0)[:, None].to(x)
    text = m.first(x.unsqueeze(1).expand(B, 6, WIDTH))
    return squares(m.last(text.masked_scatter(mask, m.between(pictures).tanh())).tanh())


ORDERED = [(torch.tensor(order),) for order in ORDERS]
# All of the examples, the largest first: which is which depends on the batch alone.
add(MOVES, lambda m, x, order: (
    squares(m.last(m.between(m.first(x)[:, :1].topk(len(x), 0).values.tanh().expand(-1, WIDTH))))
), EXAMPLES, ORDERED, "sorted by a number")  # fmt: skip
# What is written into is shared, and what is written isn't.
add(MOVES, lambda m, x, order: squares(m.last(m.table.index_copy(0, order, torch.tanh(m.first(x))))),
    EXAMPLES, ORDERED, "put into a parameter")  # fmt: skip
# Two rows of each example, of which one is picked, or both of half of the examples.
add(MOVES, lambda m, x, order: (
    squares(m.last(m.first(x).tanh().unsqueeze(1).expand(B, 2, WIDTH).reshape(2 * B, WIDTH)[order]))
), EXAMPLES, [(order,) for order in (2 * IN_ORDER, 2 * IN_ORDER, IN_ORDER, 2 * IN_ORDER)],
    "an index of a longer dimension", "EERE")  # fmt: skip
add(MOVES, pictures_in_places, EXAMPLES, [(4,), (4,), (4,), (2,), (4,)], expect="EEERE")
