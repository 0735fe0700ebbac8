"""CONTENDERS, in the order of the tables' columns: ordinary training, ours, and the two naive methods of the paper."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import clipping
from ghostclip.bench import naive
from ghostclip.bench.compiled import compiled_steps
from ghostclip.bench.contenders import Batch, Contender, Prepare, Prepared, adam, by_filling_gradients
from ghostclip.bench.losses import Losses, LossFunction, loss_function
from ghostclip.clipper import GhostClipper

__all__ = ["BASELINE", "CONTENDERS", "OWN", "register", "registered"]

BASELINE = "nonprivate"


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


def _ghost(policy: Callable[[float], Any] = float, *, by_backward: bool = False, **options: Any) -> Prepare:
    """GhostClipper with a policy, made of max_norm: its `clip`, or `backward` of losses that the caller computed."""

    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        clipper, of_batch = GhostClipper(model, policy(max_norm), **options), loss_function(losses)

        def clip(inputs: Tensor, targets: Tensor) -> None:
            clipper.clip(of_batch, (inputs, targets))

        def backward(inputs: Tensor, targets: Tensor) -> None:
            clipper.backward(losses(model(inputs), targets))

        return backward if by_backward else clip

    return by_filling_gradients(fill)


def _naive(method: Callable[[nn.Module, LossFunction, Sequence[Tensor], float], Tensor]) -> Prepare:
    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        of_batch = loss_function(losses)

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            method(model, of_batch, (inputs, targets), max_norm)

        return add_clipped_sum

    return by_filling_gradients(fill)


_NONPRIVATE = (
    Contender(BASELINE, "an ordinary step, nothing clipped", _nonprivate),
    Contender("nonprivate-compiled", "the same under torch.compile, Adam too", _nonprivate_compiled, usual=False),
)
_OURS = (
    Contender("reweight", "GhostClipper, a second backward", _ghost(second_pass="reweight")),
    Contender("cached", "GhostClipper, no second backward", _ghost(second_pass="cached")),
    Contender("per-layer", "GhostClipper, each layer clipped by itself", _ghost(clipping.PerLayer), clips="layer"),
    Contender("reweight-backward", "a second backward, of losses that the caller computed",
              _ghost(second_pass="reweight", by_backward=True), usual=False),
    Contender("cached-backward", "no second backward, of losses that the caller computed",
              _ghost(second_pass="cached", by_backward=True), usual=False),
    Contender("per-layer-backward", "each layer clipped by itself, of losses that the caller computed",
              _ghost(clipping.PerLayer, by_backward=True), clips="layer", usual=False),
    Contender("compiled", "the engine's whole step, noise and Adam too, compiled where that is faster", compiled_steps,
              usual=False),
)  # fmt: skip
_NAIVE = (
    Contender("nxbp", "one forward and backward an example", _naive(naive.nxbp)),
    Contender("multiloss", "one forward, one backward an example", _naive(naive.multiloss), usual=False),
)
CONTENDERS = {contender.name: contender for contender in (*_NONPRIVATE, *_OURS, *_NAIVE)}
# Those whose failure is a failure of the benchmark, and which have a column of their own in its short table.
OWN = frozenset(CONTENDERS) - {"multiloss"}
_MODULES: list[str] = []


def register(module: str) -> None:
    """Adds the contenders that a module lists as its ``CONTENDERS``, by name; every contender's process does so too."""
    CONTENDERS.update((contender.name, contender) for contender in importlib.import_module(module).CONTENDERS)
    if module not in _MODULES:
        _MODULES.append(module)


def registered() -> tuple[str, ...]:
    """The modules given to `register`."""
    return tuple(_MODULES)
