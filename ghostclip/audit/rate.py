"""How often the engine's sampling takes an example, counted over the training's own batch size and data set size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from ghostclip.audit.bounds import error_bound
from ghostclip.audit.training import Training, endless

__all__ = ["SampledShare", "sampled_share"]


@dataclass(frozen=True)
class SampledShare:
    """Coins thrown by the sampling and how many of them took their example.

    Attributes:
        batches: logical batches drawn.
        coins: one for each example and batch.
        taken: how many examples were in their batch.
    """

    batches: int
    coins: int
    taken: int

    def lower_bound(self, failure: float) -> float:
        """The sampling rate is at least this, but with that probability (Clopper, Pearson 1934); 0 when none was taken.

        It is the mean over all examples, which the rate of the example that is sampled most can't be below. Where all
        were taken every time nothing was left to chance, and it is 1.
        """
        left_out = self.coins - self.taken
        return 1.0 - float(error_bound(left_out, self.coins, failure)) if left_out else 1.0


def sampled_share(training: Training, batches: int, watch: Callable[[], None] = lambda: None) -> SampledShare:
    """Draws ``batches`` logical batches of the engine's over a data set of the training's size, and counts.

    The examples are their own numbers, so that loading costs nothing; no step is taken and nothing released.
    """
    model = nn.Linear(1, 1, device="cpu")
    numbers = TensorDataset(torch.arange(training.size, device="cpu"))
    engine = training.engine(model, SGD(model.parameters(), lr=0.0), numbers, training.batch_size, self_check=False)
    drawn = endless(engine)
    taken = 0
    for _ in range(batches):
        batch = next(drawn)
        for (examples,) in batch.physical():
            taken += len(examples)
        batch.discard()
        watch()
    engine.detach()
    return SampledShare(batches, batches * training.size, taken)
