"""Parameters in odd places, as pieces of random models, and a module that has one piece."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Shapes = dict[str, tuple[int | str, ...]]
# name: (what it makes of h [B, T, d], its Parameters by name; sizes may be "T" and "d")
Piece = tuple[Callable[[Any, Tensor], Tensor], Shapes]


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
