"""What becomes of single examples: zero, tiny, huge, constant, cancelling, not finite; in data, targets or losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from paired import ADVERSARIES
from torch import Tensor

__all__ = ["NUMBERS", "SCALARS", "spoil"]

Change = Callable[[random.Random, Tensor], Tensor]


def _cancelling(choose: random.Random, x: Tensor) -> Tensor:
    """Positions that add up to about nothing."""
    if x.dim() < 2:
        return x
    size, rest = 10.0 ** choose.uniform(0, 8), 10.0 ** choose.uniform(-8, -2)
    return size * (x - x.mean(0, keepdim=True) + rest * x)


def _alike(choose: random.Random, x: Tensor) -> Tensor:
    """The same at all positions, of any size."""
    return 10.0 ** choose.uniform(-2, 6) * x[:1].expand_as(x) if x.dim() else x


def _sized(choose: random.Random, x: Tensor) -> Tensor:
    return 10.0 ** choose.uniform(-30, 30) * x


def _one_position(choose: random.Random, x: Tensor) -> Tensor:
    y = x.clone()
    if x.dim():
        y[-1] *= 10.0 ** choose.uniform(-10, 20)
    return y


def _alternating(choose: random.Random, x: Tensor) -> Tensor:
    """Each second position the opposite of the first, but for a little."""
    if x.dim() < 2:
        return -x
    signs = 1 - 2 * (torch.arange(len(x)) % 2).to(x.dtype)
    sign = signs.view(-1, *[1] * (x.dim() - 1)) * (1 + 10.0 ** choose.uniform(-8, -3))
    return 10.0 ** choose.uniform(0, 6) * x[:1] * sign


# Of an example's numbers, without their batch dimension.
NUMBERS: dict[str, Change] = {
    **{name: lambda _, x, make=make: make(x) for name, make in ADVERSARIES.items()},
    "3e4": lambda _, x: 3e4 * x,
    "1e8": lambda _, x: 1e8 * x,
    "constant 1e5": lambda _, x: torch.full_like(x, min(1e5, torch.finfo(x.dtype).max)),
    "any size": _sized,
    "cancelling": _cancelling,
    "alternating": _alternating,
    "alike": _alike,
    "one position": _one_position,
    "negative": lambda _, x: -100 * x,
}
# Of an example's factor or summand.
SCALARS = (0.0, 1e-30, 1e-6, 1e3, 1e4, 1e12, 1e30, -1.0, float("nan"), float("inf"), float("-inf"))


def spoil(
    choose: random.Random, inputs: Sequence[Tensor], dims: Sequence[int | None], example: int
) -> tuple[list[Tensor], str]:
    """The inputs with one example changed, and how; the last two are factors and summands of losses."""
    found = list(inputs)
    own = [place for place, dim in enumerate(dims[:-2]) if dim is not None]
    if not own or choose.random() < 0.2:
        place, value = choose.choice([-1, -2]), choose.choice(SCALARS)
        found[place] = found[place].clone()
        found[place][example] = value
        return found, f"{'summand' if place == -1 else 'factor'} {value:g}"
    places = own if choose.random() < 0.5 else [choose.choice(own)]
    name = choose.choice(list(NUMBERS))
    for place in places:
        found[place] = _changed(choose, found[place], dims[place], example, name)
    return found, f"{name} in {places}"


def _changed(choose: random.Random, value: Tensor, dim: int | None, example: int, name: str) -> Tensor:
    """The input with that example's numbers changed; of whole numbers, all are the first one or zero."""
    assert dim is not None
    changed = value.detach().clone(memory_format=torch.preserve_format)
    row = changed.select(dim, example)
    if value.is_floating_point():
        row.copy_(NUMBERS[name](choose, row.clone().contiguous()))
    elif row.dim() and choose.random() < 0.7:
        row.copy_(row.reshape(-1)[0].expand_as(row).clone())
    elif row.dim():
        row.zero_()
    return changed.requires_grad_(value.requires_grad)
