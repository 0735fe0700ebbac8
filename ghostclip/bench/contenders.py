"""The ways to a private step that are timed: one entry each in CONTENDERS.

Every contender takes the same step: the clipped sum of the batch's gradients, noise by one flat normal draw, division
by the batch size, Adam. ``nonprivate`` takes an ordinary step with the mean loss. A new one is a function from
(model, max_norm) to a `Prepared`, and one entry; it may do as it likes inside, in another library too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ghostclip.bench import naive
from ghostclip.clipper import GhostClipper

__all__ = ["CONTENDERS", "NOISE_MULTIPLIER", "Contender", "Prepared", "by_filling_gradients"]

LEARNING_RATE = 1e-3
NOISE_MULTIPLIER = 0.05  # the paper's default (section 6.1); it doesn't change what a step costs

Batch = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Prepared:
    """A contender ready to run on its own copy of a model.

    Attributes:
        step: (inputs, targets) -> one whole training step.
        clipped_sum: (inputs, targets) -> {parameter name: clipped sum}, changing nothing; None if nothing is clipped.
    """

    step: Callable[[Tensor, Tensor], None]
    clipped_sum: Callable[[Tensor, Tensor], dict[str, Tensor]] | None


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: as on the command line.
        about: what it does, in a line.
        prepare: (model, max_norm) -> `Prepared`; the model is the contender's own.
        missing: why it can't run here (a library isn't installed), or None.
    """

    name: str
    about: str
    prepare: Callable[[nn.Module, float], Prepared]
    missing: Callable[[], str | None] = lambda: None


def by_filling_gradients(fill: Callable[[nn.Module, float], Batch]) -> Callable[[nn.Module, float], Prepared]:
    """A ``prepare`` for methods that add the clipped sum to ``p.grad``; noise and Adam are the same for all of them.

    Args:
        fill: (model, max_norm) -> a function (inputs, targets) that adds the clipped sum to ``p.grad``.
    """

    def prepare(model: nn.Module, max_norm: float) -> Prepared:
        add_clipped_sum = fill(model, max_norm)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer = torch.optim.Adam(trained.values(), lr=LEARNING_RATE)
        add_noise = _flat_noise(list(trained.values()), NOISE_MULTIPLIER * max_norm)

        def step(inputs: Tensor, targets: Tensor) -> None:
            add_clipped_sum(inputs, targets)
            add_noise(len(targets))
            optimizer.step()
            optimizer.zero_grad()

        def clipped_sum(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            add_clipped_sum(inputs, targets)
            found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
            optimizer.zero_grad()
            return found

        return Prepared(step, clipped_sum)

    return prepare


def _flat_noise(parameters: list[nn.Parameter], std: float) -> Callable[[int], None]:
    """A function that turns every p.grad into (p.grad + noise) / batch size, drawing all noise at once."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.empty(sum(sizes), device=parameters[0].device)
    noise = [part.view_as(parameter) for part, parameter in zip(flat.split(sizes), parameters, strict=True)]

    def add(batch_size: int) -> None:
        flat.normal_(0.0, std / batch_size)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        torch._foreach_add_(noise, gradients, alpha=1.0 / batch_size)
        for parameter, total in zip(parameters, noise, strict=True):
            parameter.grad = total

    return add


def _nonprivate(model: nn.Module, max_norm: float) -> Prepared:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> None:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Prepared(step, None)


def _ghost(second_pass: str) -> Callable[[nn.Module, float], Batch]:
    """GhostClipper with one of its second passes."""

    def fill(model: nn.Module, max_norm: float) -> Batch:
        clipper = GhostClipper(model, max_norm, second_pass=second_pass)

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            clipper.backward(_losses(model, (inputs, targets)))

        return add_clipped_sum

    return fill


def _slow(
    method: Callable[[nn.Module, naive.LossFunction, Sequence[Tensor], float], Tensor],
) -> Callable[[nn.Module, float], Batch]:
    """One of the two slow ways of the paper's comparison."""

    def fill(model: nn.Module, max_norm: float) -> Batch:
        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            method(model, _losses, (inputs, targets), max_norm)

        return add_clipped_sum

    return fill


def _losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


_ALL = (
    Contender("nonprivate", "an ordinary step, nothing clipped", _nonprivate),
    Contender("reweight", "GhostClipper, a second backward", by_filling_gradients(_ghost("reweight"))),
    Contender("cached", "GhostClipper, no second backward", by_filling_gradients(_ghost("cached"))),
    Contender("nxbp", "one forward and backward an example", by_filling_gradients(_slow(naive.nxbp))),
    Contender("multiloss", "one forward, one backward an example", by_filling_gradients(_slow(naive.multiloss))),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
