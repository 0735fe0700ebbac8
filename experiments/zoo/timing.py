"""What private steps of a model take: time over ordinary steps, by turns, and the most memory that is held."""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.bench.contenders import adam, by_filling_gradients
from ghostclip.bench.measure import take_turns, timed

from .measuring import prepared, replaced
from .subject import Batch, Subject, Timed, as_floats

__all__ = ["SECOND_PASSES", "memory", "ordinary", "private", "times"]

MAX_NORM, WARM_UP = 1.0, 4
SECOND_PASSES = ("auto", "cached")

Losses = Callable[[nn.Module, Batch], Tensor]
Step = Callable[[Batch], object]
Index = Callable[[Batch], Any] | None


def private(model: nn.Module, losses: Losses, second_pass: str = "auto", index: Index = None) -> Step:
    """A step of clipping, noise and Adam; ``index`` says of a batch whose each row is."""

    def fill(model: nn.Module, _: Any, max_norm: float) -> Callable[[Any, Any], object]:
        clipper = GhostClipper(model, max_norm, second_pass=second_pass)
        if index:
            return lambda batch, _: clipper.backward(losses(model, batch), batch_index=index(batch))
        return lambda batch, _: clipper.clip(losses, batch)

    found: Any = by_filling_gradients(fill)(model, None, MAX_NORM).step  # type: ignore[arg-type]
    return lambda batch: found(batch, next(iter(batch.values())))


def ordinary(model: nn.Module, losses: Losses) -> Step:
    """A step of the mean loss and Adam."""
    optimizer = adam(model)

    def step(batch: Batch) -> None:
        losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _steps(subject: Subject) -> tuple[dict[str, Callable[[], Step]], Batch, nn.Module]:
    """What makes each contender's step, the batch, and the model."""
    size = subject.timed or Timed(subject.build, subject.batch)
    torch.manual_seed(7)
    model = replaced(subject, size.build()).train(subject.trains)
    steps: dict[str, Callable[[], Step]] = {"ordinary": lambda: ordinary(copy.deepcopy(model), subject.losses)}
    for second_pass in SECOND_PASSES:
        steps[second_pass] = lambda second_pass=second_pass: private(  # type: ignore[misc]
            prepared(subject, model), subject.losses, second_pass, subject.index
        )
    return steps, as_floats(size.batch(size.examples)), model


def times(subject: Subject, seconds: float) -> dict[str, Any]:
    """Milliseconds of an ordinary step, and ratios over it by {second pass: ratio}; in the processor's time."""
    steps, batch, model = _steps(subject)
    turns = {name: partial(make(), batch) for name, make in steps.items()}
    for turn in turns.values():
        for _ in range(WARM_UP):
            turn()
    timings = take_turns(
        {name: timed(turn, time.process_time) for name, turn in turns.items()}, seconds, baseline="ordinary",
        clock=time.process_time,
    )  # fmt: skip
    return {
        "examples": (subject.timed or Timed(subject.build, subject.batch)).examples,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "milliseconds": timings.milliseconds("ordinary").median,
        "over": {name: timings.ratio(name, "ordinary").median for name in SECOND_PASSES},
        "rounds": timings.ratio("auto", "ordinary").rounds,
    }


def memory(subject: Subject) -> dict[str, float]:
    """Bytes that a step holds at most beside model and optimizer, counted by ghostclip/native's allocation counter.

    The counter has to be preloaded. By contender's name, the ordinary step's in bytes and the others over it.
    """
    counter = ctypes.CDLL(None)
    held, highest = counter.ghostclip_allocated, counter.ghostclip_most_allocated
    held.restype = highest.restype = ctypes.c_long
    steps, batch, _ = _steps(subject)
    found: dict[str, float] = {}
    for name, make in steps.items():
        step = make()
        for _ in range(WARM_UP):
            step(batch)
        gc.collect()
        floor, _ = held(), highest()
        for _ in range(2):
            step(batch)
        found[name] = highest() - floor
        del step
        gc.collect()
    return {"bytes": found["ordinary"], **{name: found[name] / found["ordinary"] for name in SECOND_PASSES}}
