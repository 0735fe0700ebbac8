"""What a row of the table in cases.py is: a model, its inputs, and where the examples lie in them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Build = Callable[[ModuleType], torch.nn.Module]


@dataclass(frozen=True)
class Input:
    """One input: its shape without the batch dimension, where that goes (None: nowhere), how it lies in memory."""

    shape: tuple[int, ...]
    batch_dim: int | None = 0
    below: int = 0  # indices 0 .. below - 1 instead of normal numbers
    lay_out: Callable[[Tensor], Tensor] = Tensor.contiguous
    requires_grad: bool = False

    def make(self, batch: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """The tensor; the same numbers for every dtype."""
        shape = list(self.shape)
        if self.batch_dim is not None:
            shape.insert(self.batch_dim, batch)
        if self.below:
            return self.lay_out(torch.randint(self.below, shape, generator=generator))
        value = self.lay_out(torch.randn(shape, generator=generator).to(dtype))
        return value.detach().requires_grad_(self.requires_grad)


def normal(*shape: int, **options: Any) -> Input:
    return Input(shape, **options)


def indices(below: int, *shape: int, **options: Any) -> Input:
    return Input(shape, below=below, **options)


# Options of a case whose outputs have their examples in dimension 1, in layers that are told so.
TIME_FIRST: dict[str, Any] = {"output_dim": 1, "wrap": {"batch_dim": 1}}


@dataclass(frozen=True)
class Case:
    """One row of the table; ``build`` takes its layers from torch.nn or from ghostclip.nn."""

    name: str
    build: Build
    specs: tuple[Input, ...]
    output_dim: int = 0  # where the outputs have their examples
    wrap: dict[str, Any] = field(default_factory=dict)  # options of ghostclip.wrap

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    @property
    def batch_dims(self) -> list[int | None]:
        return [spec.batch_dim for spec in self.specs]

    def model(self, nn: ModuleType = torch.nn, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        """The model, with the same numbers in its parameters every time."""
        torch.random.default_generator.manual_seed(7)
        model = self.build(nn).to(dtype)
        for parameter in model.parameters():  # norms and biases that start at 0 or 1 would hide mistakes
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape).to(dtype)
        return model

    def inputs(self, batch: int = 4, dtype: torch.dtype = torch.float64, seed: int = 11) -> tuple[Tensor, ...]:
        """The inputs of a batch, with the same numbers every time."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(spec.make(batch, dtype, generator) for spec in self.specs)

    def losses(self, outputs: Any) -> Tensor:
        """One loss per example, [B]."""
        return project(outputs, self.output_dim)


def project(outputs: Any, batch_dim: int = 0) -> Tensor:
    """[B] losses sum_j (a_j z_j + b_j z_j^2 / 2) over all outputs z of an example, with fixed normal a and b."""
    total: Any = 0.0
    for place, leaf in enumerate(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
        rows = leaf.movedim(batch_dim, 0).unsqueeze(-1).flatten(1)
        generator = torch.Generator().manual_seed(100 + place)
        a, b = torch.randn(2, rows.shape[1], generator=generator).to(rows.dtype)
        total = total + (a * rows + 0.5 * b * rows**2).sum(dim=1)
    return total
