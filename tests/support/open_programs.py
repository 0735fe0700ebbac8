"""Programs of which a first batch leaves something open: equal lengths, gradients of zeros, one use of several."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from case_models import By
from difficult_programs import last_losses
from einops import rearrange
from free_programs import EXAMPLES, ORDERS, SQUARE, TURNS, WIDTH, B, Free, add, squares
from law_programs import Program
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence

LENGTHS: list[Program] = []
OPEN: list[Program] = []
STEPS: list[Program] = []


# Texts of other lengths, with as many rows in all --------------------------------------------------------------------

Texts = list[Tensor]


def end(m: Free, rows: Tensor, like: PackedSequence) -> Tensor:
    return squares(m.lstm(PackedSequence(rows, *like[1:]))[1][0][-1])


def lengths_of(texts: Texts) -> Tensor:
    return torch.tensor([len(text) for text in texts])


def a_layer_below(m: Free, texts: Texts) -> Tensor:
    whole = pack_sequence(texts, enforce_sorted=False)
    return end(m, m.first(whole.data).tanh() * m.bare[0], whole)


def a_layer_between(m: Free, texts: Texts) -> Tensor:
    rows = m.first(pad_sequence(texts, batch_first=True)).tanh()
    found, _ = m.gru(pack_padded_sequence(rows, lengths_of(texts), batch_first=True, enforce_sorted=False))
    return end(m, m.last(found.data), found)


def other_lengths_below(m: Free, texts: Texts) -> Tensor:
    """The rows of one recurrent layer go to another with lengths of its own: in some batches examples mix."""
    found, _ = m.gru(pack_sequence(texts))
    steps = len(found.data) // B
    equal = pack_padded_sequence(texts[0].new_zeros(B, steps, 1), [steps] * B, batch_first=True)
    return end(m, found.data, equal)


def bags_with_weights(m: Free, texts: Texts) -> Tensor:
    sizes = lengths_of(texts)
    ids = torch.arange(int(sizes.sum())) % 9
    return squares(m.bag(ids, sizes.cumsum(0) - sizes, per_sample_weights=m.words(ids)[:, 0]))


def nested(m: Free, texts: Texts) -> Tensor:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_of(texts).cumsum(0)])
    rows = torch.nested.nested_tensor_from_jagged(m.first(torch.cat(texts)).tanh() * m.bare[0], offsets)
    return squares(rows.to_padded_tensor(0.0).sum(1))


def a_packed_order(m: Free, texts: Texts, order: Tensor) -> Tensor:
    rows = m.first(torch.cat(texts)).tanh()
    return end(m, rows, PackedSequence(rows, torch.tensor([B]), order, order.argsort()))


def of_lengths(
    form: Callable[..., Tensor], lengths: Sequence[Sequence[int]], expect: str = "", given: Any = ((),) * 9
) -> None:
    LENGTHS.append(
        Program(
            form.__name__.replace("_", " "), lambda: Free(form),
            lambda number: ([torch.randn(length, WIDTH) for length in lengths[number]], *given[number]),
            last_losses, expect or "E" * len(lengths),
        )
    )  # fmt: skip


EQUAL, UNEQUAL = (4, 4, 4, 4), (7, 4, 3, 2)
for _form in (a_layer_below, a_layer_between, nested):
    of_lengths(_form, (EQUAL, EQUAL, UNEQUAL, (2, 6, 1, 7), EQUAL))
of_lengths(bags_with_weights, (EQUAL, EQUAL, UNEQUAL, (2, 0, 1, 5), (1, 1, 1, 1), (2, 0, 1, 1)))
of_lengths(other_lengths_below, (EQUAL, EQUAL, UNEQUAL, EQUAL), "EERE")
of_lengths(a_packed_order, ((1, 1, 1, 1),) * len(ORDERS), given=[(torch.tensor(order),) for order in ORDERS])

# What gradients leave open at first ----------------------------------------------------------------------------------

DIAGONAL, ALL = torch.eye(B), torch.ones(B, B)
BELOW = torch.diag(torch.ones(B - 1), -1)


def scores(m: Free, x: Tensor) -> Tensor:
    return m.first(x)[:, :B] * m.gain


def rows(m: Free, x: Tensor, mask: Tensor) -> Tensor:
    return (scores(m, x) * mask).sum(1)


# Sums under a mask, of which the last mix examples but on the diagonal.
MASKED: dict[str, Callable[[Free, Tensor, Tensor], Tensor]] = {
    "rows": rows,
    "columns": lambda m, x, mask: (scores(m, x).mT * mask).sum(0),
    "rows and columns": lambda m, x, mask: (lambda both: both.sum(1) + both.sum(0))(scores(m, x) * mask),
}
for _kind, _form in MASKED.items():
    for _name, _later in {"all": ALL, "below": BELOW}.items():
        _masks = [(mask,) for mask in [DIAGONAL] * 5 + [_later] * 2 + [DIAGONAL]]
        _title = f"{_kind}, first the diagonal, then {_name}"
        add(OPEN, _form, EXAMPLES, _masks, _title, "EEEEERRE" if _kind == "rows and columns" else "")
# 0 * NaN is NaN in the backward, which a look sees that makes the right half of the examples NaN.
for _place, _expect in (((0, 0), "ERR"), ((2, 1), "EEE")):
    _mask = DIAGONAL.clone()
    _mask[_place] = float("nan")
    OPEN.append(
        Program(f"nan at {_place} after a diagonal", lambda: Free(rows),
                lambda number, mask=_mask: (torch.randn(EXAMPLES), mask if number else DIAGONAL), last_losses,
                _expect, alone=True)
    )  # fmt: skip


def late(branch: Callable[[Free, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Losses to which a branch adds nothing at first."""

    def form(m: Free, x: Tensor, share: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return squares(h) + share * squares(branch(m, h))

    return form


def window_first(m: Free, h: Tensor) -> Tensor:
    """Two rows an example in the batch dimension, which only a gradient tells how they are grouped."""
    rows = m.last(rearrange(h, "b (w t) d -> (w b) t d", w=2))
    return rearrange(rows, "(w b) t d -> b w t d", w=2).flatten(1)


def centred(m: Free, h: Tensor) -> Tensor:
    return h - h.mean(0)


# name: (branch, shape of its input, what comes of a batch in which it counts)
BRANCHES: dict[str, tuple[Callable[[Free, Tensor], Tensor], Sequence[int], str]] = {
    "window first": (window_first, SQUARE, "E"),
    "time first": (lambda m, h: m.last(h.transpose(0, 1)).transpose(0, 1).flatten(1), SQUARE, "E"),
    "centred below a layer": (lambda m, h: m.last(centred(m, h)), EXAMPLES, "R"),
    "a parameter of its own": (lambda m, h: h * m.bare[0], EXAMPLES, "E"),
    "a parameter and the mean": (lambda m, h: centred(m, h * m.bare[0]), EXAMPLES, "R"),
}
for _name, (_branch, _shape, _letter) in BRANCHES.items():
    _shares = [(torch.tensor(float(number > 3)),) for number in range(7)]
    add(OPEN, late(_branch), _shape, _shares, f"late: {_name}", "EEEE" + 3 * _letter)


# Several uses of one parameter ---------------------------------------------------------------------------------------


def several_steps(m: Free, x: Tensor, shares: tuple[int, ...]) -> Tensor:
    """No gradient reaches some of them."""
    return sum(squares(torch.tanh(m.first(x)) * share * m.bare[0]) for share in shares)  # type: ignore[return-value]


def rows_grouped_in_two_ways(m: Free, x: Tensor) -> Tensor:
    a = m.first(x.reshape(-1, WIDTH)).view(B, 3, WIDTH)
    b = m.first(x.transpose(0, 1).reshape(-1, WIDTH)).view(3, B, WIDTH).transpose(0, 1)
    return squares(a) + b.sum((1, 2)).square()


def a_parameter_in_two_layouts(m: Free, x: Tensor) -> Tensor:
    """Examples first, and positions first: what is known of one use isn't taken for what the other does."""
    h = m.first(x).tanh()
    first, second = h @ m.bare[:WIDTH], (h.transpose(0, 1) @ m.bare[:WIDTH]).transpose(0, 1)
    return squares(first.tanh()) + squares(second.tanh().square())


# A matrix of constants, which is neither parameter nor buffer.
add(STEPS, lambda m, x, turn: squares(m.last(By(lambda h: DIAGONAL.roll(int(turn), 0).to(h) @ h)(m.first(x).tanh()))),
    EXAMPLES, [(turn,) for turn in TURNS], "an exchanged module")  # fmt: skip
for _shares in ((1, 0, 1), (0, 1, 1)):
    add(STEPS, several_steps, EXAMPLES, [(_shares,)] * 4, f"several steps, {_shares}")
for _length in (3, B, 2 * B):
    add(STEPS, a_parameter_in_two_layouts, (B, _length, WIDTH), [()] * 4, f"two layouts, {_length} positions")
add(STEPS, rows_grouped_in_two_ways, (B, 3, WIDTH), [()] * 4)
