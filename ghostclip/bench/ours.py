"""Ordinary training, ours, and the two naive methods of the paper as contenders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import clipping
from ghostclip.bench import naive
from ghostclip.bench.compiled import compiled_steps
from ghostclip.bench.contenders import Batch, Contender, Fill, Prepared, adam, by_filling_gradients
from ghostclip.bench.losses import Losses
from ghostclip.clipper import GhostClipper

__all__ = ["NAIVE", "NONPRIVATE", "OURS"]


def _nonprivate(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    optimizer = adam(model)

    def step(inputs: Tensor, targets: Tensor) -> None:
        losses(model(inputs), targets, reduction="mean").backward()
        optimizer.step()
        optimizer.zero_grad()

    return Prepared(step, None)


def _nonprivate_compiled(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    """Forward, loss and backward by inductor, Adam by inductor too; on a GPU with CUDA graphs."""
    optimizer = adam(model)
    mode = "reduce-overhead" if next(model.parameters()).is_cuda else None

    @torch.compile(mode=mode)
    def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return losses(model(inputs), targets, reduction="mean")

    update = torch.compile(optimizer.step)

    def step(inputs: Tensor, targets: Tensor) -> None:
        mean_loss(inputs, targets).backward()
        update()
        optimizer.zero_grad()

    return Prepared(step, None)


def _ghost_backward(policy: Callable[[float], Any], options: dict[str, Any]) -> Fill:
    """GhostClipper's `backward` of losses that the caller computed."""

    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        clipper = GhostClipper(model, policy(max_norm), **options)

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            clipper.backward(losses(model(inputs), targets))

        return add_clipped_sum

    return fill


def _ghost(policy: Callable[[float], Any], options: dict[str, Any]) -> Fill:
    """GhostClipper's `clip` with a policy and options."""

    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        clipper = GhostClipper(model, policy(max_norm), **options)

        def of_batch(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            inputs, targets = batch
            return losses(model(inputs), targets)

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            clipper.clip(of_batch, (inputs, targets))

        return add_clipped_sum

    return fill


def _flat(max_norm: float) -> float:
    return max_norm


def _per_layer(max_norm: float) -> Any:
    return clipping.PerLayer(max_norm=max_norm)


def _slow(method: Callable[[nn.Module, naive.LossFunction, Sequence[Tensor], float], Tensor]) -> Fill:
    """One of the two slow ways of the paper's comparison."""

    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        def of_batch(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            inputs, targets = batch
            return losses(model(inputs), targets)

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            method(model, of_batch, (inputs, targets), max_norm)

        return add_clipped_sum

    return fill


NONPRIVATE = (
    Contender("nonprivate", "an ordinary step, nothing clipped", _nonprivate),
    Contender("nonprivate-compiled", "the same under torch.compile, Adam too", _nonprivate_compiled, usual=False),
)
OURS = (
    Contender("reweight", "GhostClipper, a second backward",
              by_filling_gradients(_ghost(_flat, {"second_pass": "reweight"}))),
    Contender("cached", "GhostClipper, no second backward",
              by_filling_gradients(_ghost(_flat, {"second_pass": "cached"}))),
    Contender("per-layer", "GhostClipper, each layer clipped by itself",
              by_filling_gradients(_ghost(_per_layer, {})), clips="layer"),
    Contender("reweight-backward", "a second backward, of losses that the caller computed",
              by_filling_gradients(_ghost_backward(_flat, {"second_pass": "reweight"})), usual=False),
    Contender("cached-backward", "no second backward, of losses that the caller computed",
              by_filling_gradients(_ghost_backward(_flat, {"second_pass": "cached"})), usual=False),
    Contender("per-layer-backward", "each layer clipped by itself, of losses that the caller computed",
              by_filling_gradients(_ghost_backward(_per_layer, {})), clips="layer", usual=False),
    Contender("compiled", "the engine's whole step, noise and Adam too, compiled where that is faster", compiled_steps,
              usual=False),
)  # fmt: skip
NAIVE = (
    Contender("nxbp", "one forward and backward an example", by_filling_gradients(_slow(naive.nxbp))),
    Contender("multiloss", "one forward, one backward an example", by_filling_gradients(_slow(naive.multiloss)),
              usual=False),
)  # fmt: skip
