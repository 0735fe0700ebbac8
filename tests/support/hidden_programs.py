"""Traps of which the first batch, or a forward on other examples, doesn't show what mixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from difficult_programs import Layers
from law_programs import Program
from torch import Tensor, nn
from trap_programs import IN, OUT, WIDTH, Two, alike, trap, vectors

__all__ = ["HIDDEN"]

HIDDEN: list[Program] = []
FAINT = {torch.float32: 1e-30, torch.float64: 1e-295}


def faint(h: Tensor, opened: bool) -> Tensor:
    """The mean of the batch, along a path that is too faint to be seen until it is opened."""
    gate = 1.0 if opened else FAINT[h.dtype]
    return h + gate * (h - 2 * h.mean(0, keepdim=True))


@trap("EERER", HIDDEN)
def a_faint_path_between_layers() -> tuple[Any, ...]:
    """A graph that reduces over examples is measured in every batch; test_moved_rows.py has what sees it elsewhere."""
    return lambda: Two(lambda m, h, opened: faint(h, opened)), lambda number: (vectors(64), number in (2, 4))


class TwoWays(nn.Module):
    """Reads a statistic of the batch if all examples are different, as they aren't in a forward on others."""

    def __init__(self, different: Callable[..., Tensor], alike: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.context, self.second = nn.Linear(IN, WIDTH), nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.bare, self.different, self.alike = nn.Parameter(torch.ones(WIDTH)), different, alike

    def forward(self, x: Tensor) -> Tensor:
        way = self.different if len(x.unique(dim=0)) == len(x) else self.alike
        return self.second(way(self, torch.tanh(self.first(x)), x))


@trap("RR", HIDDEN)
def a_forward_on_others_takes_another_way_around_a_layer() -> tuple[Any, ...]:
    """It says nothing about what the batch's own forward read."""
    return lambda: TwoWays(lambda m, h, x: h + m.context(x.mean(0, keepdim=True)), lambda m, h, x: h), alike()


@trap("RR", HIDDEN)
def a_forward_on_others_takes_another_way_around_a_parameter() -> tuple[Any, ...]:
    """Its operations are of other kinds."""
    return lambda: TwoWays(lambda m, h, x: h + m.bare * x.mean(), lambda m, h, x: h + (m.bare + 1)), alike()


@trap("RR", HIDDEN)
def a_layer_is_given_what_all_examples_share() -> tuple[Any, ...]:
    """A layer that reads a table of parameters, with as many rows as the batch, is refused."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        given = model.second(model.bare)
        return (model(x) + given).tanh().square().sum(1)

    return lambda: Two(lambda m, h: h, torch.ones(6, WIDTH)), alike(), losses


def in_three(m: Layers, x: Tensor) -> Tensor:
    """A layer on rows [T * B] that are taken for those of three steps."""
    rows = m.first(x).transpose(0, 1).reshape(-1, WIDTH)
    h = m.second(rows.tanh().view(3, -1, WIDTH)).reshape(-1, 2)
    return h.view(x.shape[1], len(x), 2).transpose(0, 1)


@trap("EEEEE", HIDDEN)
def a_reshape_takes_other_rows_together_at_another_size() -> tuple[Any, ...]:
    """Reshapes of another size are looked at."""
    return lambda: Layers(in_three), lambda number: (torch.randn(4, (3, 3, 6, 3, 6)[number], IN),)


@trap("EERER", HIDDEN)
def a_batch_twice_as_large_shows_what_a_small_one_hides() -> tuple[Any, ...]:
    """Sums within quarters of the batch, each an example's own as long as there are four."""

    def quarters(m: nn.Module, h: Tensor) -> Tensor:
        return h.view(4, -1, WIDTH).cumsum(1).view(h.shape)

    return lambda: Two(quarters), lambda number: (torch.randn((4, 4, 8, 4, 8)[number], 2, IN),)


@trap("EER", HIDDEN)
def examples_that_meet_only_where_they_are_close() -> tuple[Any, ...]:
    """Which they aren't in the first batches, of two and three."""
    apart = torch.tensor([[5.0, 0.0, 0.0], [0.0, -5.0, 5.0], [10.0, 0.0, 0.0]])

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        outputs = model(x)
        gaps = (outputs.unsqueeze(1) - outputs.unsqueeze(0)).square().sum(2)
        return outputs.square().sum(1) + (1e-2 - gaps).clamp_min(0).sum(1)

    def batch(number: int) -> tuple[Tensor]:
        return (apart[: 2 + number] if number < 2 else torch.randn(1, 3) + 1e-4 * torch.randn(8, 3),)

    return lambda: nn.Linear(3, 2), batch, losses
