"""Random small models of parameters in odd places: each is clipped exactly, or refused; never silently wrong.

Sizes are drawn so that the batch, the positions and the features are often the same or multiples of each other, and
batches of several sizes go through one clipper, so that what was found out in one is used in another.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ghostclip

Shapes = dict[str, tuple[int | str, ...]]
# name: (what it makes of h [B, T, d], its Parameters by name; sizes may be "T" and "d")
Piece = tuple[Callable[[Any, Tensor], Tensor], Shapes]
FRACTION = 0.4  # of the random models may be refused at most, lest the test look at refusals only


def places(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1])


def indices(h: Tensor, count: int) -> Tensor:
    """[B, T] whole numbers below ``count``, made of the data."""
    return (7 * h.detach().abs()).long()[..., 0] % count


def set_rows(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = m.p
    h[:, -1] *= m.p
    return h


def zeros_with_rows(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros_like(h)
    rows[:, 1:] = m.p
    return h + rows * h


PIECES: dict[str, Piece] = {
    "positions": (lambda m, h: h + m.p, {"p": ("T", "d")}),
    "scaled positions": (lambda m, h: h * m.p, {"p": ("T", 1)}),
    "scale": (lambda m, h: h * m.p, {"p": ("d",)}),
    "number": (lambda m, h: h * m.p, {"p": ()}),
    "token": (lambda m, h: torch.cat([m.p.expand(len(h), -1, -1), h[:, 1:]], 1), {"p": (1, 1, "d")}),
    "repeated": (lambda m, h: torch.cat([m.p.repeat(len(h), 1, 1), h[:, 1:]], 1), {"p": (1, 1, "d")}),
    "with zeros": (lambda m, h: h + (m.p + torch.zeros(len(h), 1, h.shape[2])), {"p": (1, 1, "d")}),
    "product": (lambda m, h: h @ m.p, {"p": ("d", "d")}),
    "rows by product": (lambda m, h: (h.flatten(0, 1) @ m.p).view_as(h), {"p": ("d", "d")}),
    "time first product": (lambda m, h: (h.transpose(0, 1).reshape(-1, h.shape[2]) @ m.p)
                           .view(h.shape[1], len(h), -1).transpose(0, 1), {"p": ("d", "d")}),
    "product from the left": (lambda m, h: m.p @ h, {"p": ("T", "T")}),
    "lower triangle": (lambda m, h: m.p.tril() @ h, {"p": ("T", "T")}),
    "by position": (lambda m, h: torch.einsum("btd,tde->bte", h, m.p), {"p": ("T", "d", "d")}),
    "low rank": (lambda m, h: h @ (m.p @ m.q) + (h @ m.p) @ m.q, {"p": ("d", 2), "q": (2, "d")}),
    "weight norm": (lambda m, h: F.linear(h, m.q * m.p / m.p.norm(dim=1, keepdim=True)),
                    {"p": ("d", "d"), "q": ("d", 1)}),
    "matrix exponential": (lambda m, h: h @ torch.linalg.matrix_exp(0.1 * m.p), {"p": ("d", "d")}),
    "diagonal": (lambda m, h: h @ torch.diag(m.p), {"p": ("d",)}),
    "outer product": (lambda m, h: h + torch.outer(m.p, m.q), {"p": ("T",), "q": ("d",)}),
    "stack": (lambda m, h: h + torch.stack([m.p, m.q] * h.shape[1])[: h.shape[1]], {"p": ("d",), "q": ("d",)}),
    "where": (lambda m, h: torch.where(h > 0, h, m.p), {"p": ("T", "d")}),
    "maximum": (lambda m, h: torch.maximum(h, m.p), {"p": ("T", "d")}),
    "table": (lambda m, h: h + m.p[indices(h, 7)], {"p": (7, "d")}),
    "selected": (lambda m, h: h + m.p.index_select(0, indices(h, 7).flatten()).view_as(h), {"p": (7, "d")}),
    "gathered": (lambda m, h: h + torch.gather(m.p.expand(h.shape), 1, indices(h, h.shape[1])[..., None]
                                               .expand(h.shape)), {"p": ("T", "d")}),
    "taken": (lambda m, h: h + m.p.take(indices(h, m.p.numel()))[..., None], {"p": ("T", "d")}),
    "scattered": (lambda m, h: h.scatter_add(1, indices(h, h.shape[1])[..., None].expand(h.shape),
                                             m.p.expand(h.shape)), {"p": ("d",)}),
    "index_add": (lambda m, h: h.index_add(1, places(h).flip(0), m.p.expand(h.shape)), {"p": ("T", "d")}),
    "in place": (lambda m, h: h.clone().mul_(m.p), {"p": ("T", "d")}),
    "rows in place": (set_rows, {"p": ("d",)}),
    "zeros filled": (zeros_with_rows, {"p": ("d",)}),
    "folded": (lambda m, h: (h.reshape(-1, h.shape[2]) * m.p).view_as(h), {"p": ("d",)}),
    "time first": (lambda m, h: (h.transpose(0, 1) * m.p).transpose(0, 1), {"p": ("T", 1, "d")}),
    "convolved": (lambda m, h: F.conv1d(h.mT, m.p, m.q, padding=1, groups=h.shape[2]).mT,
                  {"p": ("d", 1, 3), "q": ("d",)}),
    "normed": (lambda m, h: F.layer_norm(h, h.shape[2:], m.p, m.q), {"p": ("d",), "q": ("d",)}),
    "prelu": (lambda m, h: F.prelu(h, m.p), {"p": ("T",)}),
    "spectrum": (lambda m, h: torch.fft.irfft(torch.fft.rfft(h, dim=2) * torch.fft.rfft(m.p), n=h.shape[2], dim=2),
                 {"p": ("d",)}),
    "complex": (lambda m, h: (torch.complex(h, 0.5 * h) * torch.complex(m.p, m.p.flip(0))).abs(), {"p": ("T", "d")}),
    "turned": (lambda m, h: (torch.complex(h, h) * torch.polar(torch.ones_like(m.p), m.p)).real, {"p": ("d",)}),
    "mask": (lambda m, h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], m.p)[:, 0],
             {"p": ("T", "T")}),
    "keys": (lambda m, h: F.scaled_dot_product_attention(h, m.p.expand(h.shape), m.p.expand(h.shape)),
             {"p": ("T", "d")}),
    "quantized": (lambda m, h: h + m.p[(h.detach()[:, :, None] - m.p.detach()).square().sum(-1).argmin(-1)],
                  {"p": (6, "d")}),
    "one by one": (lambda m, h: torch.stack([row * m.p for row in h]), {"p": ("d",)}),
    "layer": (lambda m, h: torch.tanh(m.layer(h)), {}),
    "layer twice": (lambda m, h: m.layer(torch.tanh(m.layer(h))), {}),
    "layer and its weight": (lambda m, h: m.layer(h) @ m.layer.weight, {}),
    "layer on rows": (lambda m, h: m.layer(h.reshape(-1, h.shape[2])).view_as(h), {}),
    "layer time first": (lambda m, h: m.layer(h.transpose(0, 1)).transpose(0, 1), {}),
    "layer on a parameter": (lambda m, h: h + m.layer(m.p), {"p": ("T", "d")}),
    "weight by a layer": (lambda m, h: h @ m.layer(m.p), {"p": ("d", "d")}),
    "layer by examples": (lambda m, h: torch.cat([m.layer(row[None]) for row in h]), {}),
    "layer backwards": (lambda m, h: m.layer(h.flip(1)), {}),
    "checkpointed": (lambda m, h: checkpoint(lambda x: m.layer(x) * m.p, h, use_reentrant=False), {"p": ("d",)}),
    "embedded positions": (lambda m, h: h + m.table(places(h)), {}),
    "embedded positions [1, T]": (lambda m, h: h + m.table(places(h)[None]), {}),
    "embedded for each": (lambda m, h: h + m.table(places(h).expand(len(h), -1)), {}),
    "embedded, repeated": (lambda m, h: h + m.table(places(h)).repeat(len(h), 1, 1), {}),
    "embedded prompt": (lambda m, h: torch.cat([m.table(places(h)[:1])[None].repeat(len(h), 1, 1), h[:, 1:]], 1), {}),
    "attention with bias": (lambda m, h: h + (h @ h.mT + m.table((places(h)[:, None] - places(h)).abs())[..., 0])
                            .softmax(-1) @ h, {}),
    "centred": (lambda m, h: h - h.mean(0), {}),
    "rolled": (lambda m, h: h.roll(1, 0), {}),
    "scaled by the batch": (lambda m, h: h + m.p * h.std(0, unbiased=False), {"p": ("d",)}),
    "others": (lambda m, h: h + m.p * h[places(h.transpose(0, 1)).flip(0)], {"p": ("d",)}),
    "square": (lambda m, h: h + 0.5 * h.transpose(0, 1) if len(h) == h.shape[1] else h, {}),
}  # fmt: skip


class Part(nn.Module):
    """One piece, with a layer and a table of its own where it uses them."""

    def __init__(self, name: str, sizes: dict[Any, int]) -> None:
        super().__init__()
        self.name = name
        self.wiring, shapes = PIECES[name]
        for key, shape in shapes.items():
            self.register_parameter(key, nn.Parameter(0.5 * torch.randn([sizes.get(size, size) for size in shape])))
        self.layer = nn.Linear(sizes["d"], sizes["d"])
        self.table = nn.Embedding(sizes["T"], sizes["d"])

    def forward(self, h: Tensor) -> Tensor:
        return self.wiring(self, h)


def drawn(seed: int) -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
    """A model with a trained first layer, batches for it, and options of the clipper."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    sizes = {"T": choose.choice([2, 3, 4, 4, 6, 8]), "d": choose.choice([2, 4, 4, 6])}
    names = [choose.choice(list(PIECES)) for _ in range(choose.choice([1, 2, 3]))]
    model = nn.Sequential(nn.Linear(sizes["d"], sizes["d"]), *(Part(name, sizes) for name in names)).double()
    batches = [torch.randn(choose.choice([1, 2, 3, 4, 4, 6, 8]), sizes["T"], sizes["d"]).double() for _ in range(3)]
    return model, batches, {"second_pass": choose.choice(["reweight", "cached"])}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return (torch.tanh(model(x)) + 0.1).square().mean((1, 2))


def loop(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of single examples, [B, parameters]."""
    trained = list(model.parameters())
    rows = []
    for one in x.split(1):
        grads = torch.autograd.grad(losses_of(model, one)[0], trained, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


@functools.cache
def outcome(seed: int) -> str:
    """ "exact" or "refused"; raises where a batch is clipped otherwise than by the loop."""
    model, batches, options = drawn(seed)
    clipper = ghostclip.GhostClipper(model, 0.05, **options)
    for x in batches:
        model.zero_grad()
        expected = loop(model, x)
        try:
            result = clipper.backward(losses_of(model, x))
        except ghostclip.GhostClipError:
            return "refused"
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        assert_close(result.norms, expected.norm(dim=1), 1e-9)
        weights = (0.05 / expected.norm(dim=1)).clamp(max=1.0)
        assert_close(torch.cat([grad.flatten() for grad in found]), weights @ expected, 1e-8)
    return "exact"


QUICK, ALL = range(60), range(1500)


@pytest.mark.parametrize("block", range(0, len(QUICK), 20))
def test_random_models_are_exact_or_refused(block: int) -> None:
    for seed in QUICK[block : block + 20]:
        outcome(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(0, len(ALL), 100))
def test_many_random_models_are_exact_or_refused(block: int) -> None:
    for seed in ALL[block : block + 100]:
        outcome(seed)


def test_most_random_models_train() -> None:
    refused = sum(outcome(seed) == "refused" for seed in QUICK)
    assert refused < FRACTION * len(QUICK)
