"""Programs of which a first batch leaves something open: equal lengths, gradients of zeros, one use of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from difficult_programs import last_losses
from einops import rearrange
from free_programs import EXAMPLES, IN_ORDER, ORDERS, SQUARE, TURNS, WIDTH, B, Free, add, squares
from law_programs import Program
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence

__all__ = ["LENGTHS", "OPEN", "STEPS"]

LENGTHS: list[Program] = []
OPEN: list[Program] = []
STEPS: list[Program] = []


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
        _masks = [(mask,) for mask in [DIAGONAL] * 5 + [_later] * 2 + [DIAGONAL]]
        _title = f"{_form.__name__.replace('_', ' ')}, first the diagonal, then {_name}"
        add(OPEN, _form, EXAMPLES, _masks, _title, "EEEEERRE" if _form is rows_and_columns else "")
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


def window_first(m: Free, h: Tensor) -> Tensor:
    """Two rows an example in the batch dimension, which only a gradient tells how they are grouped."""
    rows = m.last(rearrange(h, "b (w t) d -> (w b) t d", w=2))
    return rearrange(rows, "(w b) t d -> b w t d", w=2).flatten(1)


def example_first(m: Free, h: Tensor) -> Tensor:
    return rearrange(m.last(rearrange(h, "b (w t) d -> (b w) t d", w=2)), "(b w) t d -> b w t d", w=2).flatten(1)


def time_first(m: Free, h: Tensor) -> Tensor:
    return m.last(h.transpose(0, 1)).transpose(0, 1).flatten(1)


def centred_below_a_layer(m: Free, h: Tensor) -> Tensor:
    return m.last(h - h.mean(0))


def centred_above_a_layer(m: Free, h: Tensor) -> Tensor:
    return (lambda found: found - found.mean(0))(m.last(h))


for _branch, _shape, _letter in (
    (window_first, SQUARE, "E"), (example_first, SQUARE, "E"), (time_first, SQUARE, "E"),
    (centred_below_a_layer, EXAMPLES, "R"), (centred_above_a_layer, EXAMPLES, "R"),
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
