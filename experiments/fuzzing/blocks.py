"""Blocks of random models: each maps h [B, T, d] to [B, T, d], with layers, functions and in-place operations."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS", "FIXED_LENGTH", "Block", "nested"]

# (choices, T, d) -> parts by name, and what is made of them and of h [B, T, d].
Made = tuple[dict[str, nn.Module], Callable[[Any, Tensor], Tensor]]
Build = Callable[[random.Random, int, int], Made]


class Block(nn.Module):
    """Named parts, and a forward given as a function of the block and h."""

    def __init__(self, name: str, parts: dict[str, nn.Module], wiring: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.wiring = name, wiring
        for key, part in parts.items():
            self.add_module(key, part)

    def forward(self, h: Tensor) -> Tensor:
        return self.wiring(self, h)

    def extra_repr(self) -> str:
        return self.name


def _linear(choose: random.Random, length: int, width: int) -> Made:
    activation = choose.choice([torch.tanh, torch.relu, F.gelu, F.silu, F.relu_, torch.sigmoid, F.leaky_relu, F.elu_])
    layer = nn.Linear(width, width, bias=choose.random() < 0.8)
    return {"layer": layer}, lambda m, h: activation(m.layer(h))


def _mlp(choose: random.Random, length: int, width: int) -> Made:
    wide = choose.choice([1, 3, 16, 33])
    parts = {"up": nn.Linear(width, wide), "down": nn.Linear(wide, width)}
    return parts, lambda m, h: m.down(F.relu_(m.up(h)))


def _rows(choose: random.Random, length: int, width: int) -> Made:
    return {"layer": nn.Linear(width, width)}, lambda m, h: m.layer(h.reshape(-1, h.shape[2])).view_as(h)


def _flat(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.Linear(length * width, length * width)
    return {"layer": layer}, lambda m, h: m.layer(h.flatten(1)).view_as(h)


def _conv1d(choose: random.Random, length: int, width: int) -> Made:
    groups = choose.choice([1, 1, 2, width])
    mode = choose.choice(["zeros", "zeros", "circular", "replicate"])
    bias, dilation = choose.random() < 0.7, choose.choice([1, 1, 2]) if mode == "zeros" else 1
    options = {"groups": groups, "padding_mode": mode, "bias": bias, "dilation": dilation, "padding": dilation}
    return {"conv": nn.Conv1d(width, width, 3, **options)}, lambda m, h: torch.tanh(m.conv(h.mT)).mT


def _images(choose: random.Random, length: int, width: int) -> Made:
    channels, last = choose.choice([1, 2, 4]), choose.random() < 0.5
    parts = {
        "into": nn.Conv2d(1, channels, 3, padding=1, bias=choose.random() < 0.7),
        "out": nn.Conv2d(channels, 1, choose.choice([1, 3]), padding="same"),
    }

    def wiring(m: Any, h: Tensor) -> Tensor:
        x = h[:, None]
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        return m.out(F.relu_(m.into(x)))[:, 0]

    return parts, wiring


def _volumes(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.Conv3d(1, 1, (3, 1, 3), padding=(1, 0, 1))
    return {"conv": layer}, lambda m, h: m.conv(h[:, None, :, None])[:, 0, :, 0]


def _transposed(choose: random.Random, length: int, width: int) -> Made:
    groups = choose.choice([1, 2])
    layer = nn.ConvTranspose1d(width, width, 3, padding=1, groups=groups, bias=choose.random() < 0.7)
    return {"conv": layer}, lambda m, h: m.conv(h.mT).mT


def _transposed2d(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.ConvTranspose2d(1, 1, 2, stride=2)
    return {"conv": layer}, lambda m, h: m.conv(h[:, None])[:, 0, ::2, ::2]


def _recurrent(choose: random.Random, length: int, width: int) -> Made:
    kind, both = choose.choice(["RNN", "LSTM", "GRU"]), choose.random() < 0.3
    options: dict[str, Any] = {"num_layers": choose.choice([1, 1, 2]), "bias": choose.random() < 0.8}
    if kind == "LSTM" and width > 2 and choose.random() < 0.2:
        options["proj_size"] = width // 2
        both = True
    if kind == "RNN":
        options["nonlinearity"] = choose.choice(["tanh", "relu"])
    size = width if options.get("proj_size") or not both else width // 2
    first = choose.random() < 0.7
    layer = getattr(nn, kind)(width, size, batch_first=first, bidirectional=both, **options)

    def wiring(m: Any, h: Tensor) -> Tensor:
        return m.rnn(h)[0] if first else m.rnn(h.transpose(0, 1))[0].transpose(0, 1)

    return {"rnn": layer}, wiring


def _cell(choose: random.Random, length: int, width: int) -> Made:
    kind = choose.choice(["RNNCell", "LSTMCell", "GRUCell"])

    def wiring(m: Any, h: Tensor) -> Tensor:
        state, seen = None, []
        for step in h.unbind(1):
            state = m.cell(step, state)
            seen.append(state[0] if kind == "LSTMCell" else state)
        return torch.stack(seen, 1)

    return {"cell": getattr(nn, kind)(width, width)}, wiring


def _attention(choose: random.Random, length: int, width: int) -> Made:
    first, causal = choose.random() < 0.7, choose.random() < 0.4
    extra = {"add_bias_kv": choose.random() < 0.15, "add_zero_attn": choose.random() < 0.15}
    options = {"bias": choose.random() < 0.8, "batch_first": first, **extra}
    weights = choose.random() < 0.5

    def wiring(m: Any, h: Tensor) -> Tensor:
        x = h if first else h.transpose(0, 1)
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1) if causal else None
        out = m.attention(x, x, x, attn_mask=mask, need_weights=weights)[0]
        return out if first else out.transpose(0, 1)

    return {"attention": nn.MultiheadAttention(width, choose.choice([1, 2]), **options)}, wiring


def _encoder(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.TransformerEncoderLayer(
        width, 2, choose.choice([3, 8]), 0.0, batch_first=True, norm_first=choose.random() < 0.5,
        bias=choose.random() < 0.7, activation=choose.choice(["relu", "gelu"]),
    )  # fmt: skip
    return {"layer": layer}, lambda m, h: m.layer(h)


def _decoder(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.TransformerDecoderLayer(width, 2, 5, 0.0, batch_first=True)
    return {"layer": layer}, lambda m, h: m.layer(h, h.flip(1))


def _normalization(choose: random.Random, length: int, width: int) -> Made:
    kind = choose.choice(["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d"])
    if kind in ("LayerNorm", "RMSNorm"):
        return {"norm": getattr(nn, kind)(width)}, lambda m, h: m.norm(h)
    if kind == "GroupNorm":
        return {"norm": nn.GroupNorm(choose.choice([1, 2, width]), width)}, lambda m, h: m.norm(h.mT).mT
    norm = nn.InstanceNorm1d(width, affine=choose.random() < 0.8)
    return {"norm": norm}, lambda m, h: m.norm(h.mT).mT if h.shape[1] > 1 else h


def _prelu(choose: random.Random, length: int, width: int) -> Made:
    if choose.random() < 0.5:
        return {"slope": nn.PReLU()}, lambda m, h: m.slope(h)
    return {"slope": nn.PReLU(width)}, lambda m, h: m.slope(h.mT).mT


def _bilinear(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.Bilinear(width, width, width, bias=choose.random() < 0.7)
    return {"layer": layer}, lambda m, h: m.layer(h, torch.tanh(h))


def _tokens(h: Tensor, count: int) -> Tensor:
    """[B, T] whole numbers below ``count`` made of the data; anything that isn't finite is 0."""
    return (7 * h.detach()[..., 0].double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6).abs()).long() % count


def _table(choose: random.Random, length: int, width: int) -> Made:
    table = nn.Embedding(5, width, padding_idx=choose.choice([None, 0]))
    return {"table": table}, lambda m, h: h + m.table(_tokens(h, 5))


def _bag(choose: random.Random, length: int, width: int) -> Made:
    mode = choose.choice(["sum", "mean", "max"])
    return {"bag": nn.EmbeddingBag(5, width, mode=mode)}, lambda m, h: h + m.bag(_tokens(h, 5))[:, None]


def _scattered(choose: random.Random, length: int, width: int) -> Made:
    def wiring(m: Any, h: Tensor) -> Tensor:
        y = m.first(h)
        y[:, 0] = m.second(h[:, 0])
        y[..., 1] *= 2
        return y

    return {"first": nn.Linear(width, width), "second": nn.Linear(width, width)}, wiring


def _residual_in_place(choose: random.Random, length: int, width: int) -> Made:
    def wiring(m: Any, h: Tensor) -> Tensor:
        y = m.layer(h)
        y += h
        return y.tanh_()

    return {"layer": nn.Linear(width, width)}, wiring


def _chunks(choose: random.Random, length: int, width: int) -> Made:
    layer = nn.Linear(width, 2 * width)
    return {"layer": layer}, lambda m, h: torch.mul(*[part.tanh() for part in m.layer(h).chunk(2, -1)])


def _masked(choose: random.Random, length: int, width: int) -> Made:
    def wiring(m: Any, h: Tensor) -> Tensor:
        y = m.layer(h).clone()
        y[h[..., 0] > 0.5] = 0.25
        return y

    return {"layer": nn.Linear(width, width)}, wiring


def _expanded(choose: random.Random, length: int, width: int) -> Made:
    return {"layer": nn.Linear(width, width)}, lambda m, h: m.layer(h[:, :1].expand_as(h)) + h


def _fan_out(choose: random.Random, length: int, width: int) -> Made:
    near = 1 - 10.0 ** choose.uniform(-7, -1)

    def wiring(m: Any, h: Tensor) -> Tensor:
        z = m.layer(h)
        return z - near * z

    return {"layer": nn.Linear(width, width)}, wiring


def _dot_products(choose: random.Random, length: int, width: int) -> Made:
    parts = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
    causal = choose.random() < 0.5

    def wiring(m: Any, h: Tensor) -> Tensor:
        heads = [part(h)[:, None] for part in (m.query, m.key, m.value)]
        return F.scaled_dot_product_attention(*heads, is_causal=causal)[:, 0]

    return parts, wiring


def _tied(choose: random.Random, length: int, width: int) -> Made:
    parts = {"first": nn.Linear(width, width), "second": nn.Linear(width, width)}
    parts["second"].weight = parts["first"].weight
    if choose.random() < 0.5:
        return parts, lambda m, h: m.second(torch.tanh(m.first(h)))
    return parts, lambda m, h: m.second(torch.tanh(m.first(h))[:, : max(1, h.shape[1] // 2)]).mean(1, True) + h


def _siblings(choose: random.Random, length: int, width: int) -> Made:
    return {"layer": nn.Linear(width, width)}, lambda m, h: m.layer(h) * m.layer(h.flip(1)) - m.layer(h[:, :1])


def _dropout(choose: random.Random, length: int, width: int) -> Made:
    return {"drop": nn.Dropout(choose.choice([0.1, 0.5]))}, lambda m, h: m.drop(h)


def _buffers(choose: random.Random, length: int, width: int) -> Made:
    def wiring(m: Any, h: Tensor) -> Tensor:
        return m.layer(h * torch.linspace(0.5, 1.5, h.shape[2], dtype=h.dtype))

    return {"layer": nn.Linear(width, width)}, wiring


BLOCKS: dict[str, Build] = {
    "linear": _linear, "mlp": _mlp, "rows": _rows, "flat": _flat, "conv1d": _conv1d, "images": _images,
    "volumes": _volumes, "transposed": _transposed, "transposed2d": _transposed2d, "recurrent": _recurrent,
    "cell": _cell, "attention": _attention, "encoder": _encoder, "decoder": _decoder,
    "normalization": _normalization, "prelu": _prelu, "bilinear": _bilinear, "table": _table, "bag": _bag,
    "index assignment": _scattered, "residual in place": _residual_in_place, "chunks": _chunks, "masked": _masked,
    "expanded": _expanded, "fan-out": _fan_out, "dot products": _dot_products, "tied": _tied, "siblings": _siblings,
    "dropout": _dropout, "buffers": _buffers,
}  # fmt: skip
FIXED_LENGTH = ("flat",)


def nested(choose: random.Random, inner: nn.Module) -> nn.Module:
    """The block as it is, as a residual branch, checkpointed, or used twice."""
    how = choose.choices(["as it is", "residual", "checkpointed", "twice"], [5, 3, 1, 1])[0]
    if how == "residual":
        return Block("residual", {"inner": inner}, lambda m, h: h + m.inner(h))
    if how == "checkpointed":
        return Block("checkpointed", {"inner": inner}, lambda m, h: checkpoint(m.inner, h, use_reentrant=False))
    if how == "twice":
        return Block("twice", {"inner": inner}, lambda m, h: m.inner(torch.tanh(m.inner(h))))
    return inner
