"""Timing contenders against each other in the same minute, and checking their gradients before.

A machine's speed drifts, and other programs come and go. So contenders take turns, one step each, in a new order every
round, and what is reported is the median over rounds of the ratio of two times of the same round.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Spread", "Timings", "loop_norms", "loop_sum", "relative_error", "take_turns"]

# Contenders this many times slower than the baseline sit out some rounds.
SLOW = 4.0
LEAST_TURNS = 3


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements: median and quartiles, and how many there were."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(median(values), low, high, len(values))


@dataclass
class Timings:
    """Seconds of each contender's turns, by round: ``{name: {round: seconds}}``."""

    seconds: dict[str, dict[int, float]] = field(default_factory=dict)

    def milliseconds(self, name: str) -> Spread:
        """The spread of a contender's own times."""
        return Spread.of([1e3 * value for value in self.seconds[name].values()])

    def ratio(self, name: str, over: str) -> Spread:
        """The spread of time over time within each round that both took part in."""
        mine, other = self.seconds[name], self.seconds[over]
        return Spread.of([mine[number] / other[number] for number in mine if number in other])


def take_turns(
    turns: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    baseline: str,
    least: int = LEAST_TURNS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Times all ``turns`` interleaved, for about ``seconds`` or until each had ``least`` of them.

    A contender more than SLOW times slower than ``baseline`` runs in every k-th round only, k such that it takes about
    as much time as the fast ones together. k is a power of two, so that the slowest one's rounds are everyone's.

    Args:
        turns: {name: one step}; a step must end synchronously (on a GPU: with a synchronisation).
        seconds: how long to go on; may be passed to give slow contenders their turns.
        baseline: one of the names.
        least: turns each contender gets at the least.
        clock: seconds; replaceable by tests.

    Returns:
        The times; warm-up steps are not among them.
    """
    costs = {}
    for name, turn in turns.items():
        costs[name] = _timed(turn, clock)
        if costs[name] < 1.0:
            costs[name] = min(_timed(turn, clock) for _ in range(3))
    every = _rounds_between(costs, baseline)
    timings = Timings({name: {} for name in turns})
    order = random.Random(0)
    started, number = clock(), 0
    while clock() - started < seconds or any(len(times) < least for times in timings.seconds.values()):
        present = [name for name in turns if number % every[name] == 0]
        for name in order.sample(present, len(present)):
            timings.seconds[name][number] = _timed(turns[name], clock)
        number += 1
    return timings


def _timed(turn: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    turn()
    return clock() - start


def _rounds_between(costs: Mapping[str, float], baseline: str) -> dict[str, int]:
    """In which rounds each contender takes part: every one, or every k-th when slow."""
    limit = SLOW * costs[baseline]
    fast = sum(cost for cost in costs.values() if cost <= limit)
    return {name: 1 if cost <= limit else 2 ** max(0, round(math.log2(cost / fast))) for name, cost in costs.items()}


def loop_norms(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """||g_i|| of each example, [B] float64, by one backward for each; arguments as for `loop_sum`."""
    found = [_norm(gradients) for gradients in _single_gradients(model, inputs, targets)]
    return torch.tensor(found, dtype=torch.float64)


def loop_sum(model: nn.Module, inputs: Tensor, targets: Tensor, max_norm: float) -> dict[str, Tensor]:
    """The clipped sum by the slow obvious loop, what every contender must equal; summed up in float64.

    The gradients themselves have the model's own precision: in float64 some ReLU would be on the other side of its
    kink, and differ by more than any error of clipping.

    Args:
        model: plain torch layers, without randomness; not changed.
        inputs: [B, ...].
        targets: [B], class numbers.
        max_norm: each example's gradient is scaled down to this L2 norm (Lee & Kifer 2020, section 3).

    Returns:
        ``{parameter name: sum_i min(1, max_norm / ||g_i||) g_i}`` for the parameters that are trained, float64.
    """
    total: dict[str, Tensor] = {}
    for gradients in _single_gradients(model, inputs, targets):
        weight = max_norm / max(_norm(gradients), max_norm)
        for name, gradient in gradients.items():
            total[name] = total[name] + weight * gradient if name in total else weight * gradient
    return total


def _single_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> Iterator[dict[str, Tensor]]:
    """Each example's own gradient, by a forward and a backward of a batch of one."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for example in range(inputs.shape[0]):
        one = slice(example, example + 1)
        loss = F.cross_entropy(model(inputs[one]), targets[one])
        gradients = torch.autograd.grad(loss, list(trained.values()))
        yield {name: gradient.double() for name, gradient in zip(trained, gradients, strict=True)}


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The worst parameter's error as a share of its norm, or of a thousandth of the whole norm where that is more.

    inf when parameters are missing, NaN or of another shape.
    """
    if found.keys() != expected.keys():
        return math.inf
    whole = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    worst = 0.0
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return math.inf
        error = float((found[name].detach().double() - value).norm())
        worst = max(worst, error / max(float(value.norm()), 1e-3 * whole, 1e-300))
        if math.isnan(error):
            return math.inf
    return worst
