"""Paired sensitivity: the clipped sums of some examples, and of the same with one more, differ by at most the bound.

The one more may be as nasty as floating point allows. Nothing here knows how a sum is made.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from case_types import Case
from torch import Tensor, nn

import ghostclip
from ghostclip.clipping import Automatic, Custom, Grouped, PerLayer
from ghostclip.nn import GhostLayer

OTHERS = 3

# What becomes of the one more example's numbers.
ADVERSARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "zero": torch.zeros_like,
    "constant": torch.ones_like,
    "nearly constant": lambda x: 1 + 1e-3 * x,
    "one-hot": lambda x: (torch.arange(x.numel()) == x.numel() // 2).to(x.dtype).view(x.shape),
    "tiny": lambda x: 1e-6 * x,
    "denormal": lambda x: 1e-40 * x,
    "large": lambda x: 1e3 * x,
    "huge": lambda x: 1e15 * x,
    "1e30": lambda x: 1e30 * x,
    "one entry 1e30": lambda x: _with_first(x, 1e30),
    "inf": lambda x: torch.full_like(x, float("inf")),
    "NaN": lambda x: torch.full_like(x, float("nan")),
    "one entry NaN": lambda x: _with_first(x, float("nan")),
}

# (bound, names of the trained parameters) -> policy.
POLICIES: dict[str, Callable[[float, Sequence[str]], Any]] = {
    "flat": lambda bound, names: bound,
    "per layer": lambda bound, names: PerLayer(bound),
    "grouped": lambda bound, names: Grouped(_halves(names), max_norm=bound),
    "automatic": lambda bound, names: Automatic(bound),
    "custom": lambda bound, names: Custom(lambda norms: 1e3 / (1e-3 + norms).sqrt(), bound),
}
SECOND_PASSES = ("reweight", "cached")
STRATEGIES = ("auto", "gram", "direct")


class Pair:
    """A row of the tables as a model with a batch of four: three examples, and one more.

    Args:
        row: of tests/support/cases.py.
        dtype: of the parameters, and of the numbers that go in.
    """

    def __init__(self, row: Case, dtype: torch.dtype) -> None:
        self.row = row
        self.model = ghostclip.wrap(row.model(dtype=dtype), **row.wrap)
        self.names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.inputs = row.inputs(OTHERS + 1, dtype)
        norms = ghostclip.GhostClipper(self.model).norms(row.losses(self.model(*self.inputs)))
        self.bound = 0.3 * float(norms[-1]) or 1.0

    def clipper(self, policy: str, second_pass: str, strategy: str = "auto") -> ghostclip.GhostClipper:
        """A clipper with a bound that the one more example passes by far."""
        clipping = POLICIES[policy](self.bound, self.names)
        return ghostclip.GhostClipper(self.model, clipping, second_pass=second_pass, norm_strategy=strategy)

    def ratio(self, clipper: ghostclip.GhostClipper, adversary: str) -> float:
        """How far the one more example moves the sum, over the bound; inf where a sum isn't finite.

        0 where saturated gates of a projected LSTM are refused.
        """
        whole = [
            _changed(value, dim, ADVERSARIES[adversary])
            for value, dim in zip(self.inputs, self.row.batch_dims, strict=True)
        ]
        fewer = [
            value if dim is None else value.detach().narrow(dim, 0, OTHERS).requires_grad_(value.requires_grad)
            for value, dim in zip(self.inputs, self.row.batch_dims, strict=True)
        ]
        try:
            moved = float((self._sum(clipper, whole) - self._sum(clipper, fewer)).norm()) / self.bound
        except ghostclip.UnsupportedModelError as error:
            if "gates of this LSTM with proj_size have gradients of zero" not in str(error):
                raise
            return 0.0
        return moved if moved == moved else float("inf")

    def _sum(self, clipper: ghostclip.GhostClipper, inputs: Sequence[Tensor]) -> Tensor:
        self.model.zero_grad()
        clipper.backward(self.row.losses(self.model(*inputs)))
        parts = [p.grad.double().flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(parts) if parts else torch.zeros(0).double()


def family(model: nn.Module) -> str:
    """What a row is counted under: its one kind of wrapper, or that it has several."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, GhostLayer) and any(True for _ in module.parameters(recurse=False))
    }
    if len(kinds) == 1:
        return kinds.pop()
    return "several layers" if kinds else "no layer with a rule"


def _with_first(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = value
    return x


def _halves(names: Sequence[str]) -> dict[str, list[str]]:
    middle = (len(names) + 1) // 2
    return {name: list(own) for name, own in {"first": names[:middle], "rest": names[middle:]}.items() if own}


def _changed(value: Tensor, dim: int | None, adversary: Callable[[Tensor], Tensor]) -> Tensor:
    """The input with the last example's numbers changed; whole numbers become zeros where the example is constant."""
    if dim is None:
        return value
    changed = value.detach().clone(memory_format=torch.preserve_format)
    last = changed.select(dim, -1)
    if value.is_floating_point():
        last.copy_(adversary(last.clone().contiguous()))
    elif adversary in (ADVERSARIES["zero"], ADVERSARIES["constant"]):
        last.zero_()
    return changed.requires_grad_(value.requires_grad)
