"""Programs whose forward is given as a function, over batches of four examples; most are turned in some batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from difficult_programs import last_losses
from law_programs import Program
from torch import Tensor, nn

B, WIDTH = 4, 5
EXAMPLES, SQUARE = (B, WIDTH), (B, B, WIDTH)
# The last is turned, or in another order.
TURNS = (False, False, False, True, False)
ORDERS = ((0, 1, 2, 3),) * 3 + ((1, 0, 2, 3), (3, 1, 2, 0), (0, 1, 2, 3))
IN_ORDER = torch.arange(B)


class Free(nn.Module):
    """Layers and parameters for a forward that is given; returns losses."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.words, self.bag = nn.Embedding(9, WIDTH), nn.EmbeddingBag(9, WIDTH, mode="sum")
        self.bare, self.gain = nn.Parameter(torch.randn(7, WIDTH)), nn.Parameter(torch.tensor(0.7))
        self.table, self.form = nn.Parameter(torch.zeros(B, WIDTH)), form

    def forward(self, *inputs: Any) -> Tensor:
        return self.form(self, *inputs)


def squares(h: Tensor) -> Tensor:
    return h.square().flatten(1).sum(1)


def add(
    table: list[Program], form: Callable[..., Tensor], shape: Sequence[int], given: Sequence[tuple[Any, ...]],
    name: str = "", expect: str = "",
) -> None:  # fmt: skip
    """Adds a program: ``form(model, x, *given[number])``, by default exact in every batch."""
    table.append(
        Program(
            name or form.__name__.replace("_", " "), lambda: Free(form),
            lambda number: (torch.randn(shape), *given[number]), last_losses, expect or "E" * len(given),
        )
    )  # fmt: skip
