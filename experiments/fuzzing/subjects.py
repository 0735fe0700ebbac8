"""Random models with inputs and losses: rows of the tests' tables, and chains of blocks and bare parameters."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from case_types import Input, indices, normal
from cases import CASES
from random_pieces import PIECES, Part
from torch import Tensor, nn
from torch.nn import functional as F

from . import cancelling
from .blocks import BLOCKS, FIXED_LENGTH, Block, nested
from .examples import spoil

__all__ = ["REFUSED", "Subject", "draw_subject"]

# Pieces through which examples meet: refused, or exact where the batch is such that they don't.
MIXING = ("centred", "rolled", "scaled by the batch", "others", "square")
# Pieces that take examples one by one out of their batch, or are in need of `wrap(batch_dim=...)`: refused. So is a
# layer on a bare parameter in a first batch as long as that, and an operation in place on a part of a tensor beside
# numbers that aren't finite (SECURITY.md).
UNTOLD = ("one by one", "layer by examples", "layer time first", "layer on a parameter", "rows in place")
REFUSED = MIXING + UNTOLD
# What these compute of an example depends on whether others of its batch are zero.
BRANCHING = ("own gate",)

Losses = Callable[[nn.Module, Sequence[Tensor]], Tensor]


@dataclass
class Subject:
    """A model, what it reads and its losses; the last two inputs are a factor and a summand of each loss, [B].

    Attributes:
        recipe: in words.
        model: of torch's layers, float32.
        specs: inputs for positions of a given number, without the last two.
        lengths: numbers of positions it may have.
        losses: (model, inputs without the last two) -> [B].
        wrap: options of `ghostclip.wrap`.
        random: whether a forward draws random numbers.
        refused: whether it has a piece of REFUSED; nothing else may be.
        nasty: makes an example's rows of the inputs, without the last two, such that its gradient cancels.
    """

    recipe: str
    model: nn.Module
    specs: Callable[[int], tuple[Input, ...]]
    lengths: Sequence[int]
    losses: Losses
    wrap: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    refused: bool = False
    nasty: cancelling.Nasty | None = None

    def batch_dims(self) -> list[int | None]:
        """Where each input has its examples."""
        return [spec.batch_dim for spec in self.specs(self.lengths[0])] + [0, 0]

    def draw(self, seed: int, examples: int, length: int, dtype: torch.dtype) -> list[Tensor]:
        """The inputs of a batch of well-behaved examples."""
        generator = torch.Generator().manual_seed(seed)
        inputs = [spec.make(examples, dtype, generator) for spec in self.specs(length)]
        return [*inputs, torch.ones(examples, dtype=dtype), torch.zeros(examples, dtype=dtype)]

    def spoil(self, choose: random.Random, inputs: Sequence[Tensor], example: int) -> tuple[list[Tensor], str]:
        """The inputs with one example changed, and how."""
        if self.nasty is None or choose.random() < 0.3:
            return spoil(choose, inputs, self.batch_dims(), example)
        rows = self.nasty(choose, [value[example].clone() for value in inputs[:-2]])
        found = [value.clone() for value in inputs]
        for value, row in zip(found, rows, strict=False):
            value[example] = row
        return found, "cancelling"

    def losses_of(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The losses [B]."""
        *own, factor, added = inputs
        return self.losses(model, own) * factor + added


def draw_subject(choose: random.Random, nasty: float = 0.05) -> Subject:
    """One of all, with that share of those whose gradients cancel; torch's generator decides the parameters."""
    if choose.random() < nasty:
        recipe, model, specs, losses, how = choose.choice(cancelling.KINDS)(choose)
        return Subject(recipe, model, lambda length: specs, [1], losses, nasty=how)
    return _row(choose) if choose.random() < 0.25 else _chain(choose)


def _row(choose: random.Random) -> Subject:
    while (row := choose.choice(CASES)).name in BRANCHING:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = row.model(dtype=torch.float32)
    return Subject(
        f"row {row.name!r}", model, lambda length: row.specs, [1],
        lambda model, inputs: row.losses(model(*inputs)), row.wrap,
    )  # fmt: skip


class Chain(nn.Module):
    """An entry, blocks on [B, T, d], and a head."""

    def __init__(self, entry: nn.Module, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = entry, nn.Sequential(*blocks), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.entry(x)))


def _chain(choose: random.Random) -> Subject:
    width, most = choose.choice([2, 4, 4, 6, 8]), choose.choice([1, 2, 3, 4, 5, 8, 16])
    entry, spec, tied = _entry(choose, width)
    names: list[str] = []
    fixed = False
    blocks: list[nn.Module] = []
    for _ in range(choose.choice([0, 1, 1, 2, 2, 3])):
        block, name, keeps_length = _block(choose, most, width)
        fixed |= keeps_length
        names.append(name)
        blocks.append(block)
    head = _head(choose, entry, width, tied)
    if entry.name == "nothing" and not any(True for block in blocks for _ in block.parameters()):
        entry = Block("layer", {"layer": nn.Linear(width, width)}, lambda m, x: m.layer(x))
    model = Chain(entry, blocks, head)
    if blocks and choose.random() < 0.1 and "dropout" not in " ".join(names):
        model.blocks.append(blocks[0])  # one module in two places
        names.append("the first again")
    lengths = [most] if fixed or choose.random() < 0.4 else sorted({most, max(1, most // 2), most + 1})
    if any(isinstance(part, (nn.Embedding, Part)) for part in model.modules()):
        lengths = [length for length in lengths if length <= most]
    frozen = _freeze(choose, model)
    loss, targets, losses = _loss(choose, head.features)
    recipe = f"{entry.name} -> {', '.join(names) or 'nothing'} -> {head.name}; loss {loss}; frozen {frozen}"
    return Subject(
        recipe, model, lambda length: (spec(length), *targets(length)), lengths, losses,
        random="dropout" in recipe, refused=any(name in REFUSED for name in names),
    )  # fmt: skip


def _entry(choose: random.Random, width: int) -> tuple[Block, Callable[[int], Input], bool]:
    """The first layer, its input for a number of positions, and whether a head may share its weight."""
    kind = choose.choices(["numbers", "tokens", "images", "expanded", "nothing"], [5, 3, 2, 1, 1])[0]
    if kind == "tokens":
        table = nn.Embedding(11, width, padding_idx=choose.choice([None, None, 1]))
        return Block("tokens", {"layer": table}, lambda m, x: m.layer(x)), lambda t: indices(11, t), True
    if kind == "images":
        last = choose.random() < 0.5
        layer = nn.Conv2d(2, width, (2, 3), padding=(0, 1), bias=choose.random() < 0.7)
        form = {"memory_format": torch.channels_last} if last else {}
        wiring = lambda m, x: m.layer(x)[:, :, 0].mT  # noqa: E731
        name = "images, channels last" if last else "images"
        return (
            Block(name, {"layer": layer}, wiring),
            lambda t: normal(2, 2, t, lay_out=lambda x: x.contiguous(**form)),
            False,
        )
    if kind == "nothing":
        return Block("nothing", {}, lambda m, x: x), lambda t: normal(t, width), False
    layer = nn.Linear(3, width, bias=choose.random() < 0.8)
    if kind == "expanded":
        spec = lambda t: normal(1, 3, lay_out=lambda x: x.expand(-1, t, -1))  # noqa: E731
        return Block("expanded", {"layer": layer}, lambda m, x: m.layer(x)), spec, False
    leaf = choose.random() < 0.1
    return (
        Block("numbers", {"layer": layer}, lambda m, x: m.layer(x)),
        lambda t: normal(t, 3, requires_grad=leaf),
        False,
    )


def _block(choose: random.Random, length: int, width: int) -> tuple[nn.Module, str, bool]:
    """A block, its name, and whether it takes one number of positions only."""
    if choose.random() < 0.3:
        names = [name for name in PIECES if name not in REFUSED]
        name = choose.choice(REFUSED) if choose.random() < 0.04 else choose.choice(names)
        sizes: dict[Any, int] = {"T": length, "d": width}
        fixed = any("T" in shape for shape in PIECES[name][1].values())
        return Part(name, sizes), name, fixed
    name = choose.choice(list(BLOCKS))
    parts, wiring = BLOCKS[name](choose, length, width)
    inner = Block(name, parts, wiring)
    outer = nested(choose, inner)
    return outer, name if outer is inner else f"{outer.name} {name}", name in FIXED_LENGTH  # type: ignore[union-attr]


class Head(Block):
    """What comes after the blocks; ``features`` is the last size of what it gives."""

    features: int


def _head(choose: random.Random, entry: Any, width: int, tied: bool) -> Head:
    if tied and choose.random() < 0.5:
        layer = nn.Linear(width, 11, bias=choose.random() < 0.3)
        layer.weight = entry.layer.weight
        head = Head("tied head", {"layer": layer}, lambda m, h: m.layer(h))
        head.features = 11
    elif choose.random() < 0.4:
        head = Head("head", {"layer": nn.Linear(width, 3)}, lambda m, h: m.layer(h))
        head.features = 3
    elif choose.random() < 0.3:
        head = Head(
            "mean",
            {"layer": nn.Linear(width, 3)},
            lambda m, h: m.layer(h.mean(1, keepdim=True)).expand(-1, h.shape[1], -1),
        )
        head.features = 3
    else:
        head = Head("no head", {}, lambda m, h: h)
        head.features = width
    return head


def _freeze(choose: random.Random, model: nn.Module) -> list[str]:
    """Freezes some parameters, seldom, and never all of those that take part."""
    named = list(model.named_parameters())
    # Several constants among stacked tensors aren't told from data.
    stacks = {
        id(p) for part in model.modules() if isinstance(part, Part) and part.name == "stack" for p in part.parameters()
    }
    if choose.random() < 0.8 or len(named) < 3:
        return []
    frozen = choose.sample(named, choose.randint(1, len(named) // 2))
    frozen = [(name, parameter) for name, parameter in frozen if id(parameter) not in stacks]
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    return [name for name, _ in frozen]


def _loss(choose: random.Random, features: int) -> tuple[str, Callable[[int], tuple[Input, ...]], Losses]:
    """A name, the targets for a number of positions, and the losses [B]."""
    numbers = lambda t: (normal(t, features),)  # noqa: E731
    nothing: Callable[[int], tuple[Input, ...]] = lambda t: ()  # noqa: E731
    kinds: dict[str, tuple[Callable[[int], tuple[Input, ...]], Losses]] = {
        "square": (nothing, lambda m, x: (torch.tanh(m(x[0])) + 0.1).square().mean((1, 2))),
        "raw square": (nothing, lambda m, x: m(x[0]).square().flatten(1).sum(1)),
        "linear": (numbers, lambda m, x: (m(x[0]) * x[1]).sum((1, 2))),
        "mse": (numbers, lambda m, x: F.mse_loss(m(x[0]), x[1], reduction="none").mean((1, 2))),
        "l1": (numbers, lambda m, x: F.l1_loss(m(x[0]), x[1], reduction="none").flatten(1).mean(1)),
        "huber": (numbers, lambda m, x: F.huber_loss(m(x[0]), x[1], reduction="none").flatten(1).sum(1)),
        "cross entropy": (
            lambda t: (indices(features, t),),
            lambda m, x: F.cross_entropy(m(x[0]).mT, x[1], reduction="none").mean(1),
        ),
        "nll": (
            lambda t: (indices(features),),
            lambda m, x: F.nll_loss(F.log_softmax(m(x[0])[:, 0], 1), x[1], reduction="none"),
        ),
        "logits": (
            numbers,
            lambda m, x: F.binary_cross_entropy_with_logits(m(x[0]), x[1].sigmoid(), reduction="none").sum((1, 2)),
        ),
        "norm": (nothing, lambda m, x: (m(x[0]).square().sum((1, 2)) + 1e-6).sqrt()),
        "last": (numbers, lambda m, x: (m(x[0])[:, -1] * x[1][:, -1]).sum(1)),
    }
    name = choose.choice(list(kinds))
    return name, *kinds[name]
