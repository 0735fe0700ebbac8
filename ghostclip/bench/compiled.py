"""The engine's compiled step as a contender: all between a batch and the new parameters, as `LogicalStep` does it.

The batch comes in one piece and isn't padded: what a step of so many rows costs. Poisson sampling pads batches by about
three roots of their size, so that they share one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ghostclip.bench.contenders import NOISE_MULTIPLIER, Prepared, adam
from ghostclip.bench.losses import Losses, loss_function
from ghostclip.clipper import GhostClipper
from ghostclip.compiled.trial import TRIALS
from ghostclip.engine.release import Release
from ghostclip.engine.step import LogicalStep
from ghostclip.noise import noise_source
from ghostclip.sampling.logical import LogicalBatch, Unowned

__all__ = ["compiled_steps"]

# Steps until a graph or the eager way is chosen: one that makes the optimizer's state, and the trials.
UNTIL_CHOSEN = TRIALS + 2


class _Given(LogicalBatch):
    """A logical batch of one physical one that is there already."""

    def __init__(self, batch: Any, size: int) -> None:
        super().__init__([], lambda: batch, Unowned())
        self.sizes, self.users = [size], [None]


def compiled_steps(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    """Whole steps with Adam; their clipped sums are read off whole steps of learning rate zero without noise."""

    clipper, of_batch = GhostClipper(model, max_norm, second_pass="cached"), loss_function(losses)
    made: dict[str, LogicalStep] = {}

    def take(name: str, optimizer: Optimizer, noise_multiplier: float, batch: tuple[Tensor, Tensor]) -> None:
        size, untried = len(batch[1]), name not in made
        if untried:
            release = Release(
                clipper, optimizer, noise_source(), noise_multiplier, size, charge=lambda: None, self_check=False
            )
            made[name] = LogicalStep(release)
            made[name].compile(largest=size)
        for _ in range(UNTIL_CHOSEN if untried else 1):
            # The other optimizer has stepped, too.
            made[name].updates.accept()
            made[name].begin(logical := _Given(batch, size))
            made[name].step(logical, of_batch)

    training = adam(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    standing = SGD(trained.values(), lr=0.0, momentum=0.5)

    def step(inputs: Tensor, targets: Tensor) -> None:
        take("training", training, NOISE_MULTIPLIER, (inputs, targets))

    def clipped_sum(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        take("standing", standing, 0.0, (inputs, targets))
        for state in standing.state.values():
            torch.zero_(state["momentum_buffer"])
        take("standing", standing, 0.0, (inputs, targets))
        return {name: standing.state[p]["momentum_buffer"] * len(targets) for name, p in trained.items()}

    return Prepared(step, clipped_sum)
