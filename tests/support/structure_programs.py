"""Programs that move rows by a number that a node of the graph saves, and that is another one from batch three on.

The operations, the shapes and the strides of all batches are the same. A second layer reads the moved rows; its outputs
are moved back, so each row has one owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from law_programs import Program
from torch import Tensor, nn

__all__ = ["STRUCTURES"]

IN, WIDTH, EXAMPLES = 5, 6, 6
Move = Callable[[Tensor, Any], Tensor]


class Moved(nn.Module):
    """Rows are moved between the layers, and back behind them."""

    def __init__(self, there: Move, back: Move) -> None:
        super().__init__()
        self.first, self.second, self.there, self.back = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, 2), there, back

    def forward(self, x: Tensor, number: Any) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.back(self.second(self.there(h, number).contiguous()), number)


def turned(h: Tensor, times: int) -> Tensor:
    """[B, T, d] with as many positions as examples, turned by quarters."""
    return h.rot90(times, (0, 1))


def in_parts(h: Tensor, first: int) -> Tensor:
    """Three parts of two examples, copied in an order that starts with another one."""
    return torch.cat([h.narrow_copy(0, (first + start) % EXAMPLES, 2) for start in (0, 2, 4)])


def strides(h: Tensor, crosswise: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows as 3 x 2, in order or crosswise."""
    width = h.shape[1]
    return (3, 2, width), ((width, 3 * width, 1) if crosswise else (2 * width, width, 1))


def scattered(h: Tensor, crosswise: bool) -> Tensor:
    return torch.zeros_like(h).as_strided_scatter(h.view(3, 2, -1), *strides(h, crosswise), 0)


def gathered(h: Tensor, crosswise: bool) -> Tensor:
    return h.as_strided(*strides(h, crosswise)).reshape(h.shape)


def _program(name: str, there: Move, back: Move, before: Any, after: Any, *shape: int) -> Program:
    numbers = (before, before, after, after, before)
    return Program(
        name, lambda: Moved(there, back), lambda number: (torch.randn(EXAMPLES, *shape, IN), numbers[number]),
        expect="EEEEE",
    )  # fmt: skip


STRUCTURES = (
    _program("half turns", turned, lambda h, times: turned(h, -times), 0, 2, EXAMPLES),
    _program("quarter turns", turned, lambda h, times: turned(h, -times), 1, 3, EXAMPLES),
    _program("narrow copies", in_parts, lambda h, first: in_parts(h, EXAMPLES - first), 0, 2),
    _program("strided scatter", scattered, gathered, False, True),
)
