"""Rows for what has no rule: bare Parameters, position ids without a batch, modules of one's own."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from case_models import Wired
from case_types import Case, indices, normal
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def with_parameters(wiring: Any, shapes: dict[str, tuple[int, ...]], **parts: torch.nn.Module) -> torch.nn.Module:
    """Named parts and bare Parameters of the given shapes, put together by ``wiring(model, *inputs)``."""
    model = Wired(wiring, **parts)
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
    return model


class ScaleAndDouble(torch.autograd.Function):
    """Gives examples times a parameter, and the parameter doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * p, 2 * p

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_double: Tensor) -> tuple[None, Tensor]:
        return None, (grad * ctx.saved_tensors[0]).sum((0, 1)) + 2 * of_double


def _vision_transformer(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(len(x), -1, -1), m.patch(x)], dim=1) + m.place
    h = h + m.scale * m.attention(h, h, h, need_weights=False)[0]
    return m.head(h[:, 0])


def _masked_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    h[x[..., 0] > 0] = m.token
    return m.second(h)


def _positions(where: Any, nn: ModuleType) -> torch.nn.Module:
    parts = {"token": nn.Embedding(7, 5), "place": nn.Embedding(9, 5), "head": nn.Linear(5, 3)}
    return Wired(lambda m, tokens: m.head(m.token(tokens) + m.place(where(tokens))), **parts)


def _positions_through_layers(nn: ModuleType) -> torch.nn.Module:
    def wiring(m: Any, tokens: Tensor) -> Tensor:
        place = m.norm(m.place(torch.arange(tokens.shape[1])[None]))
        return m.head(m.token(tokens) + torch.tanh(m.inner(place)) + 0.1 * place)

    parts = {"token": nn.Embedding(7, 5), "place": nn.Embedding(9, 5), "head": nn.Linear(5, 3)}
    return Wired(wiring, norm=nn.LayerNorm(5), inner=nn.Linear(5, 5), **parts)


class OwnCell(torch.nn.Module):
    """A recurrent layer of bare Parameters with a learned first state, and outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 4), (4, 4)))
        self.bias, self.start = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))

    def forward(self, x: Tensor, *, scale: float = 0.5) -> dict[str, Tensor]:
        state = self.start
        for step in x.unbind(1):
            state = torch.tanh(scale * (step @ self.inner + state @ self.outer + self.bias))
        return {"last": state, "squared": state**2}


class Gated(torch.nn.Module):
    """Two inputs, a buffer, Parameters beside a layer, and a branch that depends on the data of the batch."""

    def __init__(self, nn: ModuleType) -> None:
        super().__init__()
        self.project = nn.Linear(5, 4)
        self.gate = torch.nn.Parameter(torch.randn(4))
        self.mix = torch.nn.Parameter(torch.randn(3, 5, 5))
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        gated = self.project(x) * torch.sigmoid(self.gate) + self.shift
        if x.dim() == 2 and bool((other != 0).any()):
            gated = gated * (1 + self.gate)
        return gated, torch.einsum("bi,oij,bj->bo", x, self.mix, other)


def _turn(angles: Tensor) -> Tensor:
    """One complex number, of as many angles as there are examples in a batch."""
    return torch.polar(torch.ones_like(angles), angles).prod()


def _recomputed(m: Any, x: Tensor) -> Tensor:
    def inside(x: Tensor) -> Tensor:
        return torch.tanh(m.first(x) @ m.weight + m.bias) * m.scale

    return m.second(checkpoint(inside, x, use_reentrant=False))


BARE: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "added": (lambda m, x: m.layer(x + m.p), {"p": (6, 5)}),
    "added as long as the batch": (lambda m, x: m.layer(x[:, :4] + m.p), {"p": (4, 5)}),
    "added before and after": (lambda m, x: m.layer(x + m.p) - m.p[:, None, :], {"p": (1, 5)}),
    "scale": (lambda m, x: m.layer(x) * m.p, {"p": (5,)}),
    "scale and one": (lambda m, x: m.layer(x) * (1.0 + m.p), {"p": (5,)}),
    "number": (lambda m, x: m.layer(x) * m.p.exp(), {"p": ()}),
    "subtracted from": (lambda m, x: m.p - m.layer(x) / (m.p**2 + 1), {"p": (5,)}),
    "product": (lambda m, x: torch.tanh(m.layer(x) @ m.p), {"p": (5, 3)}),
    "product with transpose": (lambda m, x: F.linear(m.layer(x[:, 0]), m.p, m.q), {"p": (3, 5), "q": (3,)}),
    "einsum": (lambda m, x: torch.einsum("btd,dp->btp", m.layer(x), m.p), {"p": (5, 3)}),
    "einsum of a transpose": (lambda m, x: torch.einsum("bd,pd->bp", m.layer(x[:, 0]), m.p), {"p": (3, 5)}),
    "einsum, matrix first": (lambda m, x: torch.einsum("dp,btd->btp", m.p, m.layer(x)), {"p": (5, 3)}),
    "einsum of one row": (lambda m, x: torch.einsum("btd,dp->btp", m.layer(x), m.p), {"p": (5, 1)}),
    "einsum, computed": (lambda m, x: torch.einsum("btd,dp->btp", m.layer(x), m.p * m.q), {"p": (5, 3), "q": (3,)}),
    "product from the left": (lambda m, x: m.p @ m.layer(x), {"p": (3, 6)}),
    "product with columns": (lambda m, x: (m.p @ m.layer(x[:, 0]).T).T, {"p": (3, 5)}),
    "product with heads": (lambda m, x: torch.einsum("btd,dnh->btnh", m.layer(x), m.p), {"p": (5, 2, 4)}),
    "product in heads": (lambda m, x: torch.einsum("btnd,ndh->btnh", m.layer(x)[..., None, :], m.p), {"p": (1, 5, 4)}),
    "product of each head": (
        lambda m, x: torch.einsum("btnd,ndh->btnh", m.layer(x).unflatten(1, (3, 2)), m.p),
        {"p": (2, 5, 4)},
    ),
    "product of each head, time first": (
        lambda m, x: torch.einsum("tbnd,ndh->tbnh", m.layer(x).unflatten(1, (3, 2)).transpose(0, 1), m.p).transpose(
            0, 1
        ),
        {"p": (2, 5, 4)},
    ),
    "product of each head from the left": (
        lambda m, x: torch.bmm(m.p, m.layer(x)[:, :2].permute(1, 2, 0)).permute(2, 0, 1),
        {"p": (2, 4, 5)},
    ),
    "convolved": (lambda m, x: F.conv1d(m.layer(x), m.p, m.q, padding=1), {"p": (4, 6, 3), "q": (4,)}),
    "convolved in groups": (lambda m, x: F.conv1d(x, m.p, stride=2, groups=3), {"p": (3, 2, 2)}),
    "layer_norm": (lambda m, x: F.layer_norm(m.layer(x), (5,), m.p, m.q), {"p": (5,), "q": (5,)}),
    "layer_norm over two": (lambda m, x: F.layer_norm(m.layer(x), (6, 5), m.p, m.q), {"p": (6, 5), "q": (6, 5)}),
    "layer_norm, time first": (
        lambda m, x: F.layer_norm(m.layer(x).transpose(0, 1), (5,), m.p, m.q).transpose(0, 1),
        {"p": (5,), "q": (5,)},
    ),
    "group_norm": (lambda m, x: F.group_norm(m.layer(x), 2, m.p, m.q), {"p": (6,), "q": (6,)}),
    "group_norm, images": (
        lambda m, x: F.group_norm(m.layer(x).unsqueeze(3) * x.unsqueeze(2), 3, m.p, m.q),
        {"p": (6,), "q": (6,)},
    ),
    "distances": (lambda m, x: torch.cdist(m.layer(x)[:, 0], m.p), {"p": (3, 5)}),
    "bilinear": (lambda m, x: F.bilinear(m.layer(x), x, m.p, m.q), {"p": (3, 5, 5), "q": (3,)}),
    "where": (lambda m, x: m.layer(torch.where(x[..., :1] > 0, m.p, x)), {"p": (5,)}),
    "repeated": (lambda m, x: m.layer(torch.cat([m.p.repeat(len(x), 2, 1), x], 1)), {"p": (1, 5)}),
    "table by position": (lambda m, x: x @ x.mT + m.p[torch.arange(36) % 11].view(6, 6), {"p": (11,)}),
    "used again above": (lambda m, x: F.layer_norm(m.layer(x + m.p), (5,), m.p[0], torch.tanh(m.p[0])), {"p": (6, 5)}),
    "time first": (lambda m, x: (m.layer(x).mT.transpose(0, 1) + m.p).transpose(0, 1), {"p": (5, 1, 6)}),
    "nothing but it": (lambda m, x: (x * m.p).sum(1), {"p": (5,)}),
    "unused": (lambda m, x: m.layer(x), {"p": (5,)}),
    "complex filter": (lambda m, x: (torch.complex(m.layer(x), x) * torch.fft.fft(m.p)).abs(), {"p": (5,)}),
    "complex product": (lambda m, x: (torch.complex(m.layer(x), x) @ torch.fft.fft(m.p)).abs(), {"p": (5, 3)}),
    "complex places": (lambda m, x: (torch.complex(m.layer(x), x) * torch.complex(m.p, m.p**2)).abs(), {"p": (6, 5)}),
    "turned by angles": (lambda m, x: (torch.complex(m.layer(x), x) * _turn(m.p)).real, {"p": (4, 1, 1)}),
    "repeated in blocks": (lambda m, x: m.layer(x) + m.p.repeat(len(x), 3, 1), {"p": (2, 5)}),
    "repeated rows": (lambda m, x: m.layer(x) * m.p.repeat(len(x), 1).view_as(x), {"p": (6, 5)}),
}


def _bare(name: str) -> Any:
    wiring, shapes = BARE[name]
    return lambda nn: with_parameters(wiring, shapes, layer=nn.Linear(5, 5))


def fallback_cases() -> Iterator[Case]:
    """Parameters outside of every rule, and layers that see no examples."""
    x = normal(6, 5)
    for name in BARE:
        yield Case(f"bare {name}", _bare(name), (x,))
    yield Case("bare alone", lambda nn: with_parameters(lambda m, x: x @ m.p, {"p": (5, 3)}), (x,))
    tables = {
        "by index": lambda m, i: m.p[i - 3],
        "by index and place": lambda m, i: m.p[i, i[:, :1] % 5],
        "by embedding": lambda m, i: F.embedding(i, m.p),
        "by embedding, padded": lambda m, i: F.embedding(i, torch.tanh(m.p), padding_idx=2),
        "by selection": lambda m, i: m.p.index_select(0, i.flatten()).view(*i.shape, 5),
    }
    for name, wiring in tables.items():
        yield Case(f"bare {name}", lambda nn, w=wiring: with_parameters(w, {"p": (7, 5)}), (indices(7, 6),))
    shapes = {"token": (1, 1, 8), "place": (1, 7, 8), "scale": (8,)}
    parts = lambda nn: {"patch": nn.Linear(5, 8), "attention": nn.MultiheadAttention(8, 2, batch_first=True)}  # noqa: E731
    vit = lambda nn: with_parameters(_vision_transformer, shapes, **parts(nn), head=nn.Linear(8, 3))  # noqa: E731
    yield Case("vision transformer", vit, (x,))
    put = lambda nn: with_parameters(_masked_in_place, {"token": (4,)}, **_two(nn))  # noqa: E731
    yield Case("mask token put in place", put, (x,))
    latents = lambda m, x: m.attention(m.query.expand(len(x), -1, -1), x, x)[0]  # noqa: E731
    attention = {"kdim": 5, "vdim": 5, "batch_first": True}
    yield Case(
        "learned queries",
        lambda nn: with_parameters(latents, {"query": (3, 8)}, attention=nn.MultiheadAttention(8, 2, **attention)),
        (x,),
    )
    again = {"weight": (4, 4), "bias": (4,), "scale": (4,)}
    yield Case("bare checkpointed", lambda nn: with_parameters(_recomputed, again, **_two(nn)), (x,))
    yield Case("own recurrent layer", lambda nn: OwnCell(), (x,))
    yield Case("own gate", Gated, (normal(5), normal(5)))
    ids: dict[str, Any] = {
        "[1, T]": lambda tokens: torch.arange(tokens.shape[1])[None],
        "[T]": lambda tokens: torch.arange(tokens.shape[1]),
    }
    for name, where in ids.items():
        for length in (4, 6, 8):
            build = lambda nn, w=where: _positions(w, nn)  # noqa: E731
            yield Case(f"position ids {name} of {length}", build, (indices(7, length),))
    yield Case("position ids through layers", _positions_through_layers, (indices(7, 6),))
    tied = lambda m, i: F.linear(torch.tanh(m.body(m.embedding(i))), m.embedding.weight)  # noqa: E731
    for name, shape in {"": (6,), " one position": ()}.items():
        yield Case(
            f"tied by F.linear{name}",
            lambda nn: Wired(tied, embedding=nn.Embedding(7, 5), body=nn.Linear(5, 5)),
            (indices(7, *shape),),
        )


def _two(nn: ModuleType) -> dict[str, torch.nn.Module]:
    return {"first": nn.Linear(5, 4), "second": nn.Linear(4, 3)}
