"""Programs of parameters that are used outside of layers, or by layers and outside, and of layers that see no examples.

Each has batches of several sizes; where there are positions, there are as many as examples in the first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from case_fallback import with_parameters
from computed_programs import SIZES, projected, sized
from einops import rearrange
from law_programs import Program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Wiring = Callable[..., Any]
OUTSIDE: list[Program] = []
POSITIONS = sized((6, 5))


def add(
    name: str, wiring: Wiring, shapes: dict[str, tuple[int, ...]], parts: Callable[[], dict[str, nn.Module]],
    batch: Callable[[int], Sequence[Any]] = POSITIONS, **options: Any,
) -> None:  # fmt: skip
    """Adds a program of named parts and bare Parameters of the given shapes."""
    build = lambda: with_parameters(wiring, shapes, **parts())  # noqa: E731
    OUTSIDE.append(Program(name, build, batch, projected, **options))


def layer_and_table() -> dict[str, nn.Module]:
    return {"layer": nn.Linear(5, 5), "table": nn.Embedding(6, 5)}


# name: (wiring of a Linear from 5 to 5 called ``layer`` and a table of six rows, shape of the bare Parameter ``p``)
SHARED: dict[str, tuple[Wiring, tuple[int, ...]]] = {
    "scale of what leads to no parameter": (lambda m, x: m.layer(x) * (m.p * x.detach().requires_grad_()), (5,)),
    "scale twice": (lambda m, x: m.layer(x * m.p) * m.p, (5,)),
    "weight in F.linear": (lambda m, x: F.linear(torch.tanh(m.layer(x)), m.layer.weight), (1,)),
    "weight over its norm": (
        lambda m, x: F.linear(torch.tanh(m.layer(x)), m.layer.weight / m.layer.weight.norm()), (1,)),
    "weight read by its layer": (lambda m, x: m.layer(x) + m.layer(m.layer.weight).sum(0), (1,)),
    "table of positions, of which there may be as many as examples": (
        lambda m, x: m.layer(x) + torch.tanh(m.table(torch.arange(6))) * m.p, (1,)),
    "table of a layer that sees positions, a factor too": (
        lambda m, x: torch.tanh(m.layer(x) + m.table(torch.arange(6)[None])) @ m.table.weight.T, (1,)),
    "read by a layer": (lambda m, x: m.layer(x) + m.layer(m.p) * m.layer.bias, (1, 5)),
}  # fmt: skip
for _name, (_wiring, _shape) in SHARED.items():
    add(f"shared: {_name}", _wiring, {"p": _shape}, layer_and_table)


def attention(width: int = 4) -> dict[str, nn.Module]:
    return {"layer": nn.MultiheadAttention(width, 2, batch_first=True), "place": nn.Embedding(9, width)}


# By parts where queries are not the keys.
BY_PARTS: dict[bool, Wiring] = {
    True: lambda m, x, other: m.layer(m.layer(x, x, x)[0], other, other)[0],
    False: lambda m, x, other: (lambda h: m.layer(h, h, h)[0])(m.layer(x, other, other)[0]),
}
for _first, _wiring in BY_PARTS.items():
    add(f"shared: attention as a whole and by parts {_first}", _wiring, {}, attention, sized((5, 4), (6, 4)))
# Layers and tables that see no examples ---


def attended_positions(m: Any, x: Tensor) -> Tensor:
    place = m.place(torch.arange(x.shape[1])[None])
    return x + place + m.layer(place, place, place, need_weights=False)[0]


def first_state(m: Any, x: Tensor) -> Tensor:
    state = m.p.expand(-1, len(x), -1).contiguous()
    return m.rnn(x, (state, torch.tanh(state)))[0]


add("attention over positions", attended_positions, {}, attention, sized((6, 4)))
add("a learned first state", first_state, {"p": (1, 1, 3)}, lambda: {"rnn": nn.LSTM(4, 3, batch_first=True)},
    sized((6, 4)))  # fmt: skip
add("positions of a time first model", lambda m, x: m.rnn(x.transpose(0, 1) + m.p)[0].transpose(0, 1), {"p": (6, 1, 4)},
    lambda: {"rnn": nn.LSTM(4, 3)}, sized((6, 4)))  # fmt: skip
for _wrap in ({}, {"batch_dim": {"head": 1}}):
    add(f"a head on time first outputs{' that is said' * bool(_wrap)}",
        lambda m, x: m.head(m.rnn(x.transpose(0, 1))[0]).transpose(0, 1), {},
        lambda: {"rnn": nn.LSTM(4, 3), "head": nn.Linear(3, 2)}, sized((6, 4)), wrap=_wrap)  # fmt: skip

# name: layout outside of the layer, layout inside, sizes of parts
FOLDS: dict[str, tuple[str, str, dict[str, int]]] = {
    "heads": ("b t (h d)", "(b h) t d", {"h": 2}),
    "windows, window first": ("b (w t) d", "(w b) t d", {"w": 2}),
    "examples in the middle": ("b (v w t) d", "(v b w) t d", {"v": 2, "w": 2}),
    "positions first": ("b t d", "t b d", {}),
}


def in_folds(name: str, bias: bool) -> Wiring:
    """A layer on parts folded into the batch, and a parameter there that all parts share."""
    whole, inside, sizes = FOLDS[name]

    def wiring(m: Any, x: Tensor) -> Tensor:
        h = m.layer(rearrange(x, f"{whole} -> {inside}", **sizes))
        return rearrange(h + m.p * h.tanh() if bias else h, f"{inside} -> {whole}", b=len(x), **sizes)

    return wiring


for _name in FOLDS:
    for _bias in (False, True):
        _width = 2 if _name == "heads" else 4
        add(f"folded: {_name}{', with a bias' * _bias}", in_folds(_name, _bias), {"p": (_width,)},
            lambda width=_width: {"layer": nn.Linear(width, width)}, sized((8, 4)))  # fmt: skip

# A parameter of one dimension read by ids [B].
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda p, ids: p[ids],
    "of several": lambda p, ids: p[ids[:, None].expand(-1, 3)].sum(1),
}
for _name, _read in READ.items():
    add(f"read by ids: {_name}", lambda m, x, ids, read=_read: (m.layer(x)[:, 0] + read(m.p, ids)).square()[:, None],
        {"p": (7,)}, lambda: {"layer": nn.Linear(3, 1)},
        lambda number: (torch.randn(SIZES[number], 3), torch.randint(0, 7, (SIZES[number],))))  # fmt: skip


def computed_again(m: Any, tokens: Tensor) -> Tensor:
    """All above the embedding, whose weight is the head's, and a part of that once more."""

    def outer(h: Tensor) -> Tensor:
        inner = checkpoint(lambda h: torch.tanh(m.body(h)), h, use_reentrant=False)
        return F.linear(m.norm(inner), m.words.weight)

    return checkpoint(outer, m.words(tokens), use_reentrant=False)


add("checkpointed, nested and tied", computed_again, {},
    lambda: {"words": nn.Embedding(7, 5), "body": nn.Linear(5, 5), "norm": nn.LayerNorm(5)},
    lambda number: (torch.randint(7, (SIZES[number], 6)),))  # fmt: skip

add("given twice to one operation", lambda m, x: m.layer(x + torch.stack([m.p] * len(x))), {"p": (6, 5)},
    layer_and_table)  # fmt: skip
add("dropout inside", lambda m, x: F.dropout(x @ m.p, 0.4) @ m.q, {"p": (5, 9), "q": (9, 2)}, dict, sized((5,)))
