"""What stands in for a layer where there is none: a parameter used outside of every rule, as if by a layer's call.

A class token, a layer scale, a weight made by a parametrization and a table that all examples read alike are such
parameters. `ghostclip.graph.shared` has their per-example gradients. To the rest of a pass, each use is a call like any
layer's. With two examples, a layer scale of three numbers is a call whose output has shape [2, 3].
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.term import Dense, PerExampleGrads

from .base import LayerCall

__all__ = ["FallbackCall", "of_table"]


class FallbackCall(LayerCall):
    """The use of a parameter, or of a part of it, outside of layers.

    Args:
        parameter: the parameter.
        examples: B.
        part: the (start, stop) of its first axis; None for all of it.

    Attributes:
        region: the `ghostclip.graph.shared.subgraph.SharedSubgraph` that gives it its gradients during a first pass.
        found: its per-example gradients, while a sink is told of them.
    """

    __slots__ = ("found", "region")

    def __init__(self, parameter: Tensor, examples: int, part: tuple[int, int] | None = None) -> None:
        self.own = self.parameters = ("",)
        self.owners, self.rows = {"": parameter}, {} if part is None else {"": part}
        size = parameter.shape if part is None else (part[1] - part[0], *parameter.shape[1:])
        self.batch_dim, self.shape = 0, torch.Size((examples, *size))
        self.dtype, self.device, self.sources = parameter.dtype, parameter.device, []
        self.nbytes = math.prod(self.shape) * parameter.itemsize
        self.sink, self.has_saved_tensor_hooks = None, False
        self.region: Any = None
        self.found: PerExampleGrads | None = None

    def linear_pair(self, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """None: a single parameter."""

    def term(self, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        """Its per-example gradients; zeros where none arrived."""
        return self.found or Dense(torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape))


def of_table(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads | None:
    """The gradients of a table that was read once for all examples: by its rule, as if each had read the same rows.

    The rule keeps the rows that were read in place of a whole table for each example. None where several inputs say
    which these are.

    Args:
        call: of a layer that `reads_indices` and saw no examples.
        inputs: what the layer saved.
        grad: [B, *shape of the layer's output].
    """
    if len(inputs) != 1:
        return None
    every, dim, rows = copy.copy(call), call.batch_dim, call.shape[call.batch_dim]
    repeated = torch.stack([inputs[0]] * len(grad), dim).flatten(dim, dim + 1)
    grad = grad.movedim(0, dim).flatten(dim, dim + 1)
    every.shape = grad.shape
    term = every.term(call.parameters[0], (repeated,), grad)
    return term if rows == 1 else term.split_rows(rows, "example")
