"""Losses that depend on other examples of their batch, mostly by statistics that are not differentiated."""

from collections.abc import Callable
from typing import Any

import torch
from private_runs import losses_of as own
from torch import Tensor, nn


def weights_over_their_sum(model: nn.Module, batch: Any) -> Tensor:
    weights = batch[0].square().sum(1)
    return own(model, batch) * weights / weights.sum()


def class_counts(model: nn.Module, batch: Any) -> Tensor:
    return own(model, batch) / torch.bincount(batch[1], minlength=3)[batch[1]]


def above_the_median(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    return losses * (losses.detach() >= losses.detach().median())


def a_weak_mean(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    return losses * (1 + 0.01 * losses.detach().mean())


def over_their_number(model: nn.Module, batch: Any) -> Tensor:
    return own(model, batch) / len(batch[0])


def mixup(model: nn.Module, batch: Any) -> Tensor:
    """Of other examples' data, by random numbers, and in training mode only."""
    x = batch[0]
    return own(model, [0.7 * x + 0.3 * x[torch.randperm(len(x))] if model.training else x, batch[1]])


def slopes_over_their_mean(model: nn.Module, batch: Any) -> Tensor:
    """It needs a graph of its own."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    steep = slope.detach().square().sum(1)
    return own(model, batch) * steep / steep.mean()


# Gradients that depend on others where losses do not: by the largest feature.


def largest(batch: Any) -> float:
    return float(batch[0].abs().max())


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def by_hook(model: nn.Module, batch: Any) -> Tensor:
    hidden, factor = model[0](batch[0]), largest(batch)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * factor)
    return own(model[1:], [hidden, batch[1]])


def by_function(model: nn.Module, batch: Any) -> Tensor:
    return own(model[1:], [Times.apply(model[0](batch[0]), largest(batch)), batch[1]])


def by_detaching(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    return losses.detach() + largest(batch) * (losses - losses.detach())


MIXING: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    each.__name__: each
    for each in (
        weights_over_their_sum, class_counts, above_the_median, a_weak_mean, over_their_number, mixup,
        slopes_over_their_mean, by_hook, by_function, by_detaching,
    )
}  # fmt: skip
