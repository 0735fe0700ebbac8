"""What a timed way to a private step is, and what all of them share: noise, division by the batch size, Adam.

Every contender takes the same step: the clipped sum of the batch's gradients, noise by one flat normal draw, division
by the batch size, Adam. They differ in how they come to the clipped sum. A new one is a function from (model, losses,
max_norm) to a `Prepared`, and one entry in `ghostclip.bench.methods`, or in a module given to its `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ghostclip.bench.losses import Losses
from ghostclip.noise import noise_source

__all__ = ["LEARNING_RATE", "NOISE_MULTIPLIER", "CannotRun", "Contender", "Prepared", "adam", "by_filling_gradients"]

LEARNING_RATE = 1e-3
NOISE_MULTIPLIER = 0.05  # the paper's default (section 6.1); it doesn't change what a step costs

Batch = Callable[[Tensor, Tensor], object]
Fill = Callable[[nn.Module, Losses, float], Batch]


class CannotRun(Exception):
    """A contender doesn't support a model, or a library is absent; the message says which and why."""


@dataclass(frozen=True)
class Prepared:
    """A contender ready to run on its own copy of a model.

    Attributes:
        step: (inputs, targets) -> one whole training step.
        clipped_sum: (inputs, targets) -> {parameter name: clipped sum}, changing nothing; None if nothing is clipped.
    """

    step: Batch
    clipped_sum: Callable[[Tensor, Tensor], dict[str, Tensor]] | None

    def turn(self, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
        """One step on this batch that has ended when it returns, on a GPU too."""

        def turn() -> None:
            self.step(inputs, targets)
            if inputs.is_cuda:
                torch.cuda.synchronize()

        return turn


Prepare = Callable[[nn.Module, Losses, float], Prepared]


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: as on the command line.
        about: what it does, in a line.
        prepare: (model, losses, max_norm) -> `Prepared`; the model is the contender's own. Raises `CannotRun`.
        missing: why it can't run here (a library isn't installed), or None.
        clips: the rule its clipped sum follows, of `ghostclip.bench.reference.RULES`.
        usual: runs unless the caller chooses; False where a step or its compilation takes very long.
    """

    name: str
    about: str
    prepare: Prepare
    missing: Callable[[], str | None] = lambda: None
    clips: str = "flat"
    usual: bool = True


def adam(model: nn.Module, fused: bool | None = None) -> torch.optim.Adam:
    """The optimizer of all contenders, over the parameters that are trained; ``fused`` is as torch's."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=fused)


def by_filling_gradients(fill: Fill) -> Prepare:
    """A ``prepare`` for methods that add the clipped sum to ``p.grad``; noise and Adam are the same for all of them.

    Args:
        fill: (model, losses, max_norm) -> a function (inputs, targets) that adds the clipped sum to ``p.grad``.
    """

    def prepare(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
        # Before the method gets the model, whose parameters some methods switch off.
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer, noise = adam(model), noise_source()
        add_clipped_sum = fill(model, losses, max_norm)

        def gradients() -> list[Tensor]:
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in trained.values()]

        def step(inputs: Tensor, targets: Tensor) -> None:
            add_clipped_sum(inputs, targets)
            released = noise.release(gradients(), NOISE_MULTIPLIER * max_norm, len(targets))
            for parameter, gradient in zip(trained.values(), released, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

        def clipped_sum(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            add_clipped_sum(inputs, targets)
            found = dict(zip(trained, gradients(), strict=True))
            optimizer.zero_grad()
            return found

        return Prepared(step, clipped_sum)

    return prepare
