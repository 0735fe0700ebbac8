"""What a law is tried on: a program, which is a model with batches and losses; and the truth about its gradients.

The truth is the slow loop: one backward for each single loss of the same forward, through a plain copy of the model
that GhostClip never sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Grads = dict[str, Tensor]


def squares(model: nn.Module, *inputs: Any) -> Tensor:
    """Losses [B]: squares of all outputs of an example, added up."""
    return model(*inputs).flatten(1).square().sum(1)


@dataclass(frozen=True, eq=False)
class Program:
    """A model and its batches.

    Attributes:
        name: in test ids.
        build: the model, float32.
        batch: number of the batch -> what the losses read, float32.
        losses: (model, *batch) -> [B].
        expect: a letter a batch: E exact, R refused, S either (safe).
        wrap: options of `ghostclip.wrap`.
        index: (*batch) -> `batch_index`; None where none is given.
        alone: whether the truth comes from batches of one, since examples that aren't finite spoil a whole backward.
        narrow: whether bfloat16 can show what the program is about.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Sequence[Any]]
    losses: Callable[..., Tensor] = squares
    expect: str = "EEE"
    wrap: dict[str, Any] = field(default_factory=dict)
    index: Callable[..., Any] | None = None
    alone: bool = False
    narrow: bool = True

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The plain model, with the same parameters every time."""
        torch.manual_seed(0)
        return self.build().to(dtype)

    def inputs(self, number: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """A batch, with the same numbers every time."""
        torch.manual_seed(1000 + number)
        return tuple(tree_map(lambda leaf: converted(leaf, dtype), self.batch(number)))

    def losses_of(self, model: nn.Module, number: int, dtype: torch.dtype) -> Tensor:
        """Losses of a batch; what the forward draws at random is the same every time."""
        inputs = self.inputs(number, dtype)
        torch.manual_seed(number)
        return self.losses(model, *inputs)

    def options(self, number: int, dtype: torch.dtype) -> dict[str, Any]:
        return {} if self.index is None else {"batch_index": self.index(*self.inputs(number, dtype))}


def converted(leaf: Any, dtype: torch.dtype) -> Any:
    """A leaf of a batch in that type, where it is a tensor of floating point numbers."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)


def truth(program: Program, number: int, dtype: torch.dtype) -> Grads:
    """Per-example gradients of a batch by the slow loop; in float64 whatever the type of the losses."""
    model = program.model(dtype)
    if program.alone:
        inputs = program.inputs(number, dtype)
        ones = [[value[i : i + 1] for value in inputs] for i in range(len(inputs[0]))]
        rows = [oracle.grads_of_single_losses(model, program.losses(model, *one)) for one in ones]
        found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    else:
        found = oracle.grads_of_single_losses(model, program.losses_of(model, number, dtype))
    return {name: grads.double() for name, grads in found.items()}
