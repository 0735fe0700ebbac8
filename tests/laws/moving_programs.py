"""Programs in which operations move rows in some batches only, or where a dimension of the batch's size isn't its own.

A loss may read another example's rows, as long as no row is read by two losses. In most programs something turns in one
batch and is back in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from difficult_programs import last_losses
from law_programs import Program
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence

__all__ = ["LENGTHS", "MOVES", "OPEN", "PARTS", "STEPS"]

B, WIDTH = 4, 5
EXAMPLES, SQUARE, TIME_FIRST = (B, WIDTH), (B, B, WIDTH), (3, B, WIDTH)
# The last is turned, or in another order.
TURNS = (False, False, False, True, False)
ORDERS = ((0, 1, 2, 3),) * 3 + ((1, 0, 2, 3), (3, 1, 2, 0), (0, 1, 2, 3))
IN_ORDER = torch.arange(B)
PARTS: list[Program] = []
MOVES: list[Program] = []
LENGTHS: list[Program] = []
OPEN: list[Program] = []
STEPS: list[Program] = []


class Free(nn.Module):
    """Layers and parameters for a forward that is given; returns losses."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.words, self.bag = nn.Embedding(9, WIDTH), nn.EmbeddingBag(9, WIDTH, mode="sum")
        self.bare, self.gain = nn.Parameter(torch.randn(7, WIDTH)), nn.Parameter(torch.tensor(0.7))
        self.table, self.form = nn.Parameter(torch.zeros(B, WIDTH)), form

    def forward(self, *inputs: Any) -> Tensor:
        return self.form(self, *inputs)


def squares(h: Tensor) -> Tensor:
    return h.square().flatten(1).sum(1)


def add(
    table: list[Program], form: Callable[..., Tensor], shape: Sequence[int], given: Sequence[tuple[Any, ...]],
    name: str = "", expect: str = "",
) -> None:  # fmt: skip
    """Adds a program: ``form(model, x, *given[number])``, by default exact in every batch."""
    table.append(
        Program(
            name or form.__name__.replace("_", " "), lambda: Free(form),
            lambda number: (torch.randn(shape), *given[number]), last_losses, expect or "E" * len(given),
        )
    )  # fmt: skip


# Parts of tensors, put together in another order ---------------------------------------------------------------------


def joined(parts: Sequence[Tensor], by: int, dim: int = 0) -> Tensor:
    return torch.cat([parts[(place + by) % len(parts)] for place in range(len(parts))], dim)


# Each moves rows by one place for a ``by`` of one.
TURNED: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "slices": lambda m, h, by: torch.cat([h[by:], h[:by]]),
    "selected": lambda m, h, by: torch.stack([h[(place + by) % len(h)] for place in range(len(h))]),
    "split": lambda m, h, by: joined(h.split(1), by),
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


def sliced_in_another_term(m: Free, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh()
    halves = [h[:2], h[2:]]
    return squares(m.last(torch.cat(halves[::-1] if turn else halves))) + 0 * (halves[0] + halves[1]).mean()


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


def split_unequally(m: Free, x: Tensor, turn: bool) -> Tensor:
    first, second = m.first(x).tanh().split([1, 3] if turn else [3, 1])
    return squares(m.last(torch.cat([second, first] if turn else [first.roll(0, 0), second])))


def unbound(m: Free, x: Tensor, turn: bool) -> Tensor:
    return squares(m.last(torch.stack(m.first(x).tanh().unbind(0 if turn else 1), 1)))


def parts_exchanged(m: Free, x: Tensor, turn: bool) -> Tensor:
    """The second and the third part: hashes of -1 and -2 are the same in Python."""
    parts = m.first(x).tanh().unbind(0)
    return squares(m.last(torch.stack([parts[0], parts[2], parts[1], parts[3]] if turn else parts)))


def chunks_with_an_operation_after_each(m: Free, x: Tensor, turn: bool) -> Tensor:
    first, second = (part.tanh() for part in m.first(x).chunk(2))
    return squares(m.last(torch.cat([second, first] if turn else [first, second])))


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
    (sliced_in_another_term, EXAMPLES), (permuted, EXAMPLES), (transposed, SQUARE), (summed, SQUARE),
    (strided, EXAMPLES), (padded, SQUARE), (split_unequally, EXAMPLES), (unbound, SQUARE), (parts_exchanged, EXAMPLES),
    (chunks_with_an_operation_after_each, EXAMPLES), (cut_beside_a_multiple, TIME_FIRST),
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
            add(
                MOVES,
                indexed(_move, _time_first, False),
                (B, _length, WIDTH),
                [(torch.tensor(order),) for order in ORDERS],
                f"{_name}, {_length} positions",
            )
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


def scatter_reduced(m: Free, x: Tensor, order: Tensor) -> Tensor:
    return squares(m.last(x.new_zeros(B, WIDTH).scatter_reduce(0, like(x, order, 0), m.first(x).tanh(), "sum")))


def bags_of_activations(m: Free, x: Tensor, order: Tensor) -> Tensor:
    return squares(m.last(F.embedding_bag(order[:, None], m.first(x).tanh(), mode="sum")))


def rows_of_a_parameter_picked_twice(m: Free, x: Tensor, order: Tensor) -> Tensor:
    return squares(m.last(F.embedding(torch.tensor([1, 6, 3, 4]), m.bare)[order] + 0 * x))


for _form, _shape in (
    (positions_in_an_order, (B, 3, WIDTH)), (an_order_beside_all_positions, SQUARE),
    (positions_and_then_examples, SQUARE), (sorted_by_a_number, EXAMPLES), (put_into_a_parameter, EXAMPLES),
    (scatter_reduced, EXAMPLES), (bags_of_activations, EXAMPLES), (rows_of_a_parameter_picked_twice, EXAMPLES),
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

# Texts of other lengths, with as many rows in all --------------------------------------------------------------------

Texts = list[Tensor]


def with_rows(rows: Tensor, like: PackedSequence) -> PackedSequence:
    return PackedSequence(rows, *like[1:])


def end(m: Free, packed: PackedSequence) -> Tensor:
    return squares(m.lstm(packed)[1][0][-1])


def lengths_of(texts: Texts) -> Tensor:
    return torch.tensor([len(text) for text in texts])


def a_layer_below(m: Free, texts: Texts) -> Tensor:
    whole = pack_sequence(texts, enforce_sorted=False)
    return end(m, with_rows(m.first(whole.data).tanh(), whole))


def a_parameter_below(m: Free, texts: Texts) -> Tensor:
    whole = pack_sequence(texts, enforce_sorted=False)
    return end(m, with_rows(whole.data * m.bare[0], whole))


def a_layer_between(m: Free, texts: Texts) -> Tensor:
    rows = m.first(pad_sequence(texts, batch_first=True)).tanh()
    found, _ = m.gru(pack_padded_sequence(rows, lengths_of(texts), batch_first=True, enforce_sorted=False))
    return end(m, with_rows(m.last(found.data), found))


def a_layer_after_packing(m: Free, texts: Texts) -> Tensor:
    rows = m.first(pad_sequence(texts, batch_first=True))
    whole = pack_padded_sequence(rows, lengths_of(texts), batch_first=True, enforce_sorted=False)
    return end(m, with_rows(m.last(whole.data), whole))


def other_lengths_below(m: Free, texts: Texts) -> Tensor:
    """The rows of one recurrent layer go to another with lengths of its own: in some batches examples mix."""
    found, _ = m.gru(pack_sequence(texts))
    steps = len(found.data) // B
    equal = pack_padded_sequence(texts[0].new_zeros(B, steps, 1), [steps] * B, batch_first=True)
    return end(m, with_rows(found.data, equal))


def bags_with_weights(m: Free, texts: Texts) -> Tensor:
    sizes = lengths_of(texts)
    ids = torch.arange(int(sizes.sum())) % 9
    return squares(m.bag(ids, sizes.cumsum(0) - sizes, per_sample_weights=m.words(ids)[:, 0]))


def bags(m: Free, texts: Texts) -> Tensor:
    sizes = lengths_of(texts)
    return squares(m.bag(torch.arange(int(sizes.sum())) % 9, sizes.cumsum(0) - sizes))


def bags_in_texts(m: Free, texts: Texts) -> Tensor:
    """Words are bags of two letters, whose vectors are the rows of a packed sequence."""
    whole = pack_sequence(texts, enforce_sorted=False)
    return end(
        m, with_rows(m.bag(torch.arange(2 * len(whole.data)) % 9, torch.arange(0, 2 * len(whole.data), 2)), whole)
    )


def nested(m: Free, texts: Texts) -> Tensor:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_of(texts).cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(m.first(torch.cat(texts)).tanh() * m.bare[0], offsets)


def nested_and_padded(m: Free, texts: Texts) -> Tensor:
    return squares(nested(m, texts).to_padded_tensor(0.0).sum(1))


def nested_in_parts(m: Free, texts: Texts) -> Tensor:
    return squares(torch.stack([part.sum(0) for part in nested(m, texts).unbind()]))


def a_packed_order(m: Free, texts: Texts, order: Tensor) -> Tensor:
    rows = m.first(torch.cat(texts)).tanh()
    return end(m, PackedSequence(rows, torch.tensor([B]), order, order.argsort()))


def of_lengths(
    form: Callable[..., Tensor], lengths: Sequence[Sequence[int]], expect: str = "", given: Any = ((),) * 9
) -> None:
    """Adds a program of texts with so many rows each."""
    LENGTHS.append(
        Program(
            form.__name__.replace("_", " "), lambda: Free(form),
            lambda number: ([torch.randn(length, WIDTH) for length in lengths[number]], *given[number]),
            last_losses, expect or "E" * len(lengths),
        )
    )  # fmt: skip


EQUAL, UNEQUAL = (4, 4, 4, 4), (7, 4, 3, 2)
for _form in (a_layer_below, a_parameter_below, a_layer_between, a_layer_after_packing, bags_in_texts,
              nested_and_padded, nested_in_parts):  # fmt: skip
    of_lengths(_form, (EQUAL, EQUAL, UNEQUAL, (2, 6, 1, 7), EQUAL))
for _form in (bags, bags_with_weights):
    of_lengths(_form, (EQUAL, EQUAL, UNEQUAL, (2, 0, 1, 5), (1, 1, 1, 1), (2, 0, 1, 1)))
of_lengths(other_lengths_below, (EQUAL, EQUAL, UNEQUAL, EQUAL), "EERE")
of_lengths(a_packed_order, ((1, 1, 1, 1),) * len(ORDERS), given=[(torch.tensor(order),) for order in ORDERS])

# What gradients leave open at first ----------------------------------------------------------------------------------

DIAGONAL, ALL = torch.eye(B), torch.ones(B, B)
BELOW = torch.diag(torch.ones(B - 1), -1)


def scores(m: Free, x: Tensor) -> Tensor:
    """[B, B]"""
    return m.first(x)[:, :B] * m.gain


def rows(m: Free, x: Tensor, mask: Tensor) -> Tensor:
    return (scores(m, x) * mask).sum(1)


def columns(m: Free, x: Tensor, mask: Tensor) -> Tensor:
    return (scores(m, x).mT * mask).sum(0)


def rows_and_columns(m: Free, x: Tensor, mask: Tensor) -> Tensor:
    """Examples mix but on the diagonal."""
    both = scores(m, x) * mask
    return both.sum(1) + both.sum(0)


def folded(m: Free, x: Tensor, mask: Tensor) -> Tensor:
    """[B * B], of which row-major or column-major may be one example's."""
    return (scores(m, x).flatten() * mask.flatten()).unflatten(0, (B, B)).sum(1)


for _form in (rows, columns, folded, rows_and_columns):
    for _name, _later in {"all": ALL, "below": BELOW}.items():
        _open = _form is rows_and_columns
        add(
            OPEN,
            _form,
            EXAMPLES,
            [(mask,) for mask in [DIAGONAL] * 5 + [_later] * 2 + [DIAGONAL]],
            f"{_form.__name__.replace('_', ' ')}, first the diagonal, then {_name}",
            "EEEEERRE" if _open else "",
        )
for _place in ((0, 0), (0, 1), (2, 1)):
    for _value in (float("nan"), float("inf")):
        _mask = DIAGONAL.clone()
        _mask[_place] = _value
        OPEN.append(
            Program(f"{_value} at {_place} after a diagonal", lambda: Free(rows),
                    lambda number, mask=_mask: (torch.randn(EXAMPLES), mask if number else DIAGONAL), last_losses,
                    "EEE", alone=True)
        )  # fmt: skip


def a_parameter_of_its_own(m: Free, h: Tensor) -> Tensor:
    return h * m.bare[0]


def a_parameter_and_the_mean(m: Free, h: Tensor) -> Tensor:
    return h * m.bare[0] - (h * m.bare[0]).mean(0)


def late(branch: Callable[[Free, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Losses to which a branch adds nothing at first."""

    def form(m: Free, x: Tensor, share: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return squares(h) + share * squares(branch(m, h))

    return form


def positions_in_an_order_of_their_own(m: Free, h: Tensor) -> Tensor:
    return m.last(h.transpose(0, 1)[IN_ORDER.roll(1)].transpose(0, 1))


for _branch, _shape, _letter in (
    (a_parameter_of_its_own, EXAMPLES, "E"), (a_parameter_and_the_mean, EXAMPLES, "R"),
    (positions_in_an_order_of_their_own, SQUARE, "E"),
):  # fmt: skip
    add(OPEN, late(_branch), _shape, [(torch.tensor(float(number > 3)),) for number in range(7)],
        f"late: {_branch.__name__.replace('_', ' ')}", "EEEE" + 3 * _letter)  # fmt: skip


def copies_of_which_the_last_counts_late(m: Free, x: Tensor, weight: Tensor, turn: bool) -> Tensor:
    h, out = m.first(x).tanh(), torch.zeros_like(x)
    for place in range(B - 1):
        out[:, place] = h[:, place]
    out[B - 1 if turn else (slice(None), B - 1)] = h[:, B - 1]
    weights = torch.cat([torch.ones(B - 1).to(x), weight[None]])
    return squares(m.last(out) * weights[:, None])


# The turned copy writes rows of all over the last example's.
add(OPEN, copies_of_which_the_last_counts_late, SQUARE,
    [(torch.tensor(weight), turn) for weight, turn in
     ((0.0, False), (0.0, False), (0.0, False), (1.0, True), (1.0, False), (0.0, False), (1.0, False))],
    expect="EEEREEE")  # fmt: skip


# Several uses of one parameter ---------------------------------------------------------------------------------------


def several_steps(m: Free, x: Tensor, shares: tuple[int, ...]) -> Tensor:
    """No gradient reaches some of them."""
    return sum(squares(torch.tanh(m.first(x)) * share * m.bare[0]) for share in shares)  # type: ignore[return-value]


def rows_grouped_in_two_ways(m: Free, x: Tensor) -> Tensor:
    a = m.first(x.reshape(-1, WIDTH)).view(B, 3, WIDTH)
    b = m.first(x.transpose(0, 1).reshape(-1, WIDTH)).view(3, B, WIDTH).transpose(0, 1)
    return squares(a) + b.sum((1, 2)).square()


def in_two_layouts(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Examples first, and positions first: what is known of one use isn't taken for what the other does."""

    def form(m: Free, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        first, second = use(h, m.bare), use(h.transpose(0, 1), m.bare).transpose(0, 1)
        return squares(first.tanh()) + squares(second.tanh().square())

    return form


def a_matrix_as_long_as_the_batch(m: Free, x: Tensor) -> Tensor:
    """Skew-symmetric, as orthogonal adapters make them."""
    above = torch.triu_indices(B, B, 1)
    skew = x.new_zeros(B, B).index_put((above[0], above[1]), m.bare.flatten()[:6])
    return squares(m.first(x)[:, :B] @ (skew - skew.mT))


class Constant(nn.Module):
    """Multiplies with a matrix of constants, which is neither parameter nor buffer."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, h: Tensor) -> Tensor:
        return self.matrix.to(h) @ h


def an_exchanged_module(m: Free, x: Tensor, turn: bool) -> Tensor:
    return squares(m.last(Constant(DIAGONAL.roll(int(turn), 0))(m.first(x).tanh())))


for _shares in ((1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1)):
    add(STEPS, several_steps, EXAMPLES, [(_shares,)] * 4, f"several steps, {_shares}")
for _name, _use in {
    "added": lambda h, bare: h + bare[0],
    "added to rows": lambda h, bare: (h.reshape(-1, WIDTH) + bare[0]).view(h.shape),
    "multiplied": lambda h, bare: h @ bare[:WIDTH],
}.items():
    for _length in (3, B, 2 * B):
        add(STEPS, in_two_layouts(_use), (B, _length, WIDTH), [()] * 4, f"{_name} in two layouts, {_length} positions")
add(STEPS, rows_grouped_in_two_ways, (B, 3, WIDTH), [()] * 4)
add(STEPS, a_matrix_as_long_as_the_batch, EXAMPLES, [()] * 4)
add(STEPS, an_exchanged_module, EXAMPLES, [(turn,) for turn in TURNS])
