"""Models of which an adversary may make all digits of an example's gradient cancel, and the examples that do so.

Between positions, between the uses of a parameter, and between branches of the graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from case_types import Input, indices, normal
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import Block

__all__ = ["KINDS", "Drawn"]

# Recipe, model, inputs, losses, and what becomes of one example's rows of these inputs.
Nasty = Callable[[random.Random, Sequence[Tensor]], list[Tensor]]
Losses = Callable[[nn.Module, Sequence[Tensor]], Tensor]
Drawn = tuple[str, nn.Module, tuple[Input, ...], Losses, Nasty]


def _tied(choose: random.Random) -> Drawn:
    """A frozen antisymmetric layer between an embedding and a head of one weight, which one token's uses cancel."""
    width, words, length = choose.choice([2, 4, 8, 32]), choose.choice([5, 50]), choose.choice([1, 2, 5, 9, 20])
    table, turn, head = nn.Embedding(words, width), nn.Linear(width, width, bias=False), nn.Linear(width, words, False)
    head.weight = table.weight
    with torch.no_grad():
        turn.weight.copy_(turn.weight - turn.weight.T)
    turn.weight.requires_grad_(choose.random() < 0.2)

    def nasty(choose: random.Random, rows: Sequence[Tensor]) -> list[Tensor]:
        tokens, targets = rows
        tokens = tokens[:1].expand_as(tokens).clone()
        noise = 10.0 ** choose.uniform(-7, -1) * torch.randn(targets.shape).to(targets.dtype)
        wanted = F.one_hot(tokens, words).to(targets.dtype) + noise
        return [tokens, 10.0 ** choose.uniform(-2, 8) * wanted]

    model = Block("tied", {"table": table, "turn": turn, "head": head}, lambda m, x: m.head(m.turn(m.table(x))))
    specs = indices(words, length), normal(length, words)
    return "tied uses that cancel", model, specs, lambda m, x: (m(x[0]) * x[1]).sum((1, 2)), nasty


def _positions(choose: random.Random) -> Drawn:
    """The same vector at every position, and errors that add up to about nothing."""
    width, out, length = choose.choice([2, 8, 64, 256]), choose.choice([2, 8, 64]), choose.choice([2, 4, 8, 16])
    kind = choose.choice(["linear", "twice", "mlp", "conv1d", "lstm"])
    parts: dict[str, nn.Module] = {"layer": nn.Linear(width, out)}
    wiring = lambda m, x: m.layer(x)  # noqa: E731
    if kind == "twice":
        parts, wiring = {"layer": nn.Linear(width, width)}, lambda m, x: m.layer(m.layer(x))
    elif kind == "mlp":
        parts = {"layer": nn.Linear(width, 8), "next": nn.Linear(8, out)}
        wiring = lambda m, x: m.next(torch.relu(m.layer(x)))  # noqa: E731
    elif kind == "conv1d":
        parts, wiring = {"layer": nn.Conv1d(width, out, choose.choice([1, 2]))}, lambda m, x: m.layer(x.mT).mT
    elif kind == "lstm":
        parts, wiring = {"layer": nn.LSTM(width, 4, batch_first=True)}, lambda m, x: m.layer(x)[0]
    model = Block(kind, parts, wiring)
    with torch.no_grad():
        shape = model(torch.zeros(1, length, width)).shape[1:]

    def nasty(choose: random.Random, rows: Sequence[Tensor]) -> list[Tensor]:
        x, target = rows
        x = 10.0 ** choose.uniform(-1, 6) * x[:1].expand_as(x)
        with torch.no_grad():
            own = next(model.parameters()).dtype
            there = model(x[None].to(own))[0].to(target.dtype)
        errors = target[:1] * _signs(target) * 10.0 ** choose.uniform(-2, 6)
        errors[-1] += 10.0 ** choose.uniform(-8, -2) * errors[0]
        return [x, there + errors if mse else errors]

    mse = choose.random() < 0.6
    name = "mse" if mse else choose.choice(["linear", "square"])
    losses: dict[str, Losses] = {
        "mse": lambda m, x: F.mse_loss(m(x[0]), x[1], reduction="none").sum((1, 2)),
        "linear": lambda m, x: (m(x[0]) * x[1]).sum((1, 2)),
        "square": lambda m, x: (m(x[0]) - x[1]).square().mean((1, 2)),
    }
    return (
        f"{kind} over positions that cancel, {name}",
        model,
        (normal(length, width), normal(*shape)),
        losses[name],
        nasty,
    )


def _branches(choose: random.Random) -> Drawn:
    """z - a z with a near 1, and inputs of any size."""
    width, out = choose.choice([2, 8, 64]), choose.choice([2, 8])
    near = 1 - choose.choice([-1, 1]) * 10.0 ** choose.uniform(-7, -2)
    layer = choose.choice(["linear", "lstm", "prelu"])
    parts: dict[str, nn.Module] = {"layer": nn.Linear(width, out)}
    if layer == "lstm":
        parts = {"layer": nn.LSTM(width, out, batch_first=True)}
    if layer == "prelu":
        parts["slope"] = nn.PReLU()

    def wiring(m: nn.Module, x: Tensor) -> Tensor:
        z = m.layer(x)[0] if layer == "lstm" else m.layer(x)  # type: ignore[operator]
        z = m.slope(z) if layer == "prelu" else z  # type: ignore[operator]
        return z - near * z

    def nasty(choose: random.Random, rows: Sequence[Tensor]) -> list[Tensor]:
        size = 10.0 ** choose.uniform(0, 12)
        return [size * rows[0], rows[1]]

    specs = normal(choose.choice([1, 3]), width), normal(out)
    losses: Losses = lambda m, x: (m(x[0]) * x[1][:, None]).sum((1, 2))  # noqa: E731
    return f"{layer} in branches that cancel", Block(layer, parts, wiring), specs, losses, nasty


def _attention(choose: random.Random) -> Drawn:
    """Saturated or nearly constant inputs below attention and normalization."""
    width, length = choose.choice([4, 8]), choose.choice([2, 5, 8])
    norm = choose.choice([nn.LayerNorm(width), nn.RMSNorm(width), nn.Identity()])
    parts = {"first": nn.Linear(width, width), "norm": norm,
             "attention": nn.MultiheadAttention(width, 2, batch_first=True)}  # fmt: skip

    def wiring(m: nn.Module, x: Tensor) -> Tensor:
        h = m.norm(m.first(x))  # type: ignore[operator]
        return m.attention(h, h, h, need_weights=False)[0]  # type: ignore[operator]

    def nasty(choose: random.Random, rows: Sequence[Tensor]) -> list[Tensor]:
        x = rows[0] if choose.random() < 0.4 else rows[0][:1] + 10.0 ** choose.uniform(-8, 0) * rows[0]
        return [10.0 ** choose.uniform(-2, 15) * x, rows[1]]

    losses: Losses = lambda m, x: (m(x[0]) * x[1]).sum((1, 2))  # noqa: E731
    return "saturated attention", Block("attention", parts, wiring), (normal(length, width),) * 2, losses, nasty


def _images(choose: random.Random) -> Drawn:
    """A convolution over constant images below a normalization over positions."""
    kind = choose.choice(["instance", "group", "none"])
    channels = choose.choice([2, 4])
    norms = {
        "instance": nn.InstanceNorm2d(channels, affine=True),
        "group": nn.GroupNorm(1, channels),
        "none": nn.Identity(),
    }
    model = Block(kind, {"conv": nn.Conv2d(2, channels, 3, padding=choose.choice([0, 1])), "norm": norms[kind]},
                  lambda m, x: m.norm(m.conv(x)))  # fmt: skip

    def nasty(choose: random.Random, rows: Sequence[Tensor]) -> list[Tensor]:
        constant = rows[0].flatten(1)[:, :1, None].expand_as(rows[0])
        return [10.0 ** choose.uniform(0, 10) * (constant + choose.choice([0.0, 1e-6, 1e-3]) * rows[0]), rows[1]]

    losses: Losses = lambda m, x: (m(x[0]).flatten(2).mean(2) * x[1]).sum(1) + m(x[0]).square().mean((1, 2, 3))  # noqa: E731
    return f"constant images, {kind} norm", model, (normal(2, 6, 6), normal(channels)), losses, nasty


def _signs(value: Tensor) -> Tensor:
    signs = 1 - 2 * (torch.arange(len(value)) % 2).to(value.dtype)
    return signs.view(-1, *[1] * (value.dim() - 1))


KINDS: tuple[Callable[[random.Random], Drawn], ...] = (_tied, _positions, _positions, _branches, _attention, _images)
