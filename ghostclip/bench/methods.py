"""CONTENDERS, in the order of the tables' columns: ordinary training, ours, and the two naive methods of the paper."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ghostclip import clipping
from ghostclip.bench import naive
from ghostclip.bench.contenders import NOISE_MULTIPLIER, Batch, Contender, Prepare, Prepared, adam, by_filling_gradients
from ghostclip.bench.losses import Losses, LossFunction, loss_function
from ghostclip.bench.workloads import WORKLOADS
from ghostclip.clipper import GhostClipper
from ghostclip.compiled.trial import TRIALS
from ghostclip.engine.release import Release
from ghostclip.engine.step import LogicalStep
from ghostclip.engine.step_plan import StepSettings
from ghostclip.events import SampledGaussian
from ghostclip.noise import noise_source
from ghostclip.sampling.logical import LogicalBatch, Unowned

__all__ = ["BASELINE", "CONTENDERS", "MODULES", "OWN", "register"]

BASELINE = "nonprivate"
# Steps until a graph or the eager way is chosen: one that is measured, one that makes the graph, and the trials.
UNTIL_CHOSEN = TRIALS + 2


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
        if by_backward:
            return lambda *batch: clipper.backward(of_batch(model, batch))
        return lambda *batch: clipper.clip(of_batch, batch)

    return by_filling_gradients(fill)


def _naive(method: Callable[[nn.Module, LossFunction, Sequence[Tensor], float], Tensor]) -> Prepare:
    """One of the two slow methods of the paper."""
    return by_filling_gradients(
        lambda model, losses, max_norm: lambda *batch: method(model, loss_function(losses), batch, max_norm)
    )


class _Given(LogicalBatch):
    """A logical batch of one physical one that is there already."""

    def __init__(self, batch: Any, size: int) -> None:
        super().__init__([([*range(size)], None)], lambda: batch, Unowned())


def _compiled_steps(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    """Steps with torch's fused Adam, which inductor's is for ordinary ones; their clipped sums are read off steps of
    learning rate zero without noise.

    The batch comes in one piece and isn't padded: what a step of so many rows costs. Poisson samples are padded, so
    that they share few graphs: by a tenth of their rows in the mean.
    """
    clipper, of_batch = GhostClipper(model, max_norm, second_pass="cached"), loss_function(losses)
    made: dict[str, LogicalStep] = {}

    def take(name: str, optimizer: Optimizer, noise_multiplier: float, batch: tuple[Tensor, Tensor]) -> None:
        size, untried = len(batch[1]), name not in made
        if untried:
            terms = StepSettings(noise_multiplier, size, SampledGaussian(1.0, noise_multiplier))
            release = Release(clipper, optimizer, noise_source(), noise_multiplier, lambda _: terms, lambda _: None)
            made[name] = LogicalStep(release, self_check=False)
            made[name].compile(largest=size)
        for _ in range(UNTIL_CHOSEN if untried else 1):
            # The other optimizer has stepped, too.
            made[name].updates.accept()
            made[name].begin(logical := _Given(batch, size))
            made[name].step(logical, of_batch)

    training = adam(model, fused=True)
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
    Contender("compiled", "the engine's step, noise and fused Adam too, its passes compiled where that is faster",
              _compiled_steps, usual=False),
)  # fmt: skip
_NAIVE = (
    Contender("nxbp", "one forward and backward an example", _naive(naive.nxbp)),
    Contender("multiloss", "one forward, one backward an example", _naive(naive.multiloss), usual=False),
)
CONTENDERS = {contender.name: contender for contender in (*_NONPRIVATE, *_OURS, *_NAIVE)}
# Those whose failure is a failure of the benchmark, and which have a column of their own in its short table.
OWN = frozenset(CONTENDERS) - {"multiloss"}
MODULES: list[str] = []  # those given to `register`


def register(module: str) -> None:
    """Adds the ``CONTENDERS`` and ``WORKLOADS`` that a module lists, by name; every contender's process does so too."""
    listed = importlib.import_module(module)
    CONTENDERS.update((contender.name, contender) for contender in getattr(listed, "CONTENDERS", ()))
    WORKLOADS.update((workload.name, workload) for workload in getattr(listed, "WORKLOADS", ()))
    if module not in MODULES:
        MODULES.append(module)
