"""When a compiled graph is used: made at the first batch of a shape, tried beside eager, kept if faster."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from ghostclip.compiled.region import Region, trace
from ghostclip.compiled.signature import ModelState, capacity_for, function_key, leaves_of, pad
from ghostclip.compiled.straight import Clipped, eager, learn, straight
from ghostclip.two_passes import TwoPasses

__all__ = ["CompiledClip"]

# Batches on which both ways run before the faster one is taken.
TRIALS = 4
# Relative difference of the clipped sums from which on the graph doesn't do what the eager step does.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
# Graphs are made for so many keys; who needs more passes a function that is another one every time.
MOST_GRAPHS = 16
# Rules that go through time step by step: a graph of every step takes minutes to compile, and is slower.
STEP_BY_STEP = (nn.RNN, nn.LSTM, nn.GRU)

log = logging.getLogger("ghostclip")


@dataclass
class _Plan:
    """One shape's graph, and how its trial goes.

    Attributes:
        region: the graph; None where eager is to be used.
        structure: how a `Clipped` is made of the graph's outputs.
        kept: what the key was made of, so that no id in it is used again.
        held: parameters and buffers, the graph's first inputs.
        eager, compiled: seconds of both ways, best so far.
        left: trials to come.
    """

    region: Region | None
    structure: Any
    kept: list[Any]
    held: list[Tensor]
    eager: float = float("inf")
    compiled: float = float("inf")
    left: int = TRIALS


@dataclass
class CompiledClip:
    """Forward and both passes of a physical batch, compiled where the model allows it and that is faster.

    Args:
        model: wrapped.
        passes: over its graphs.
        expected: about how many examples come in a batch; None when all batches have one size.
        largest: the most that come.

    Attributes:
        graphs: how many were compiled.
        seconds: what compiling took in all.
        refusals: why a graph is not used, for each shape that has none.
    """

    model: nn.Module
    passes: TwoPasses
    expected: int | None = None
    largest: int | None = None
    graphs: int = 0
    seconds: float = 0.0
    refusals: list[str] = field(default_factory=list)
    _plans: dict[tuple, _Plan] = field(default_factory=dict)
    _kept_rows: dict[tuple, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._state = ModelState(self.model)

    def __call__(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> Clipped:
        """The clipped sums of ``loss_fn(model, batch)``, losses [B].

        What ``loss_fn`` and the model's forward do must depend on the batch, the parameters and torch's random numbers
        alone: a graph has every other value built in, until another batch shape, mode or function comes.
        """
        found = leaves_of(batch)
        if found is None or found[2] == 0:
            return self._eager(loss_fn, batch)
        leaves, structure, examples = found
        size = capacity_for(examples, self.expected, self.largest)
        function, kept = function_key(loss_fn)
        shapes = tuple((leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves)
        key = (size, shapes, structure, function, self._state.key())
        padded = [pad(leaf.detach(), size) for leaf in leaves]
        plan = self._plans.get(key)
        if plan is None:
            result = self._eager(loss_fn, batch)
            self._state.refresh()
            key = (*key[:-1], self._state.key())
            if key not in self._plans and len(self._plans) < MOST_GRAPHS:
                self._plans[key] = self._compile(loss_fn, padded, structure, kept)
                if len(self._plans) == MOST_GRAPHS:
                    self._refuse(
                        f"{MOST_GRAPHS} graphs were made, so no more will be: the loss function closes over a value, "
                        "or the model is in a state, that is another one at every step"
                    )
            return result
        if plan.region is None:
            return self._eager(loss_fn, batch)
        if plan.left:
            return self._try(plan, loss_fn, batch, padded, examples)
        return self._run(plan, padded, examples) or self._eager(loss_fn, batch)

    def _eager(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> Clipped:
        return eager(self.passes, loss_fn(self.model, batch))

    def _inputs(self, held: list[Tensor], padded: list[Tensor], examples: int) -> list[Tensor]:
        """Parameters, buffers, the batch, and 1 for rows that are examples, 0 for padding."""
        size = padded[0].shape[0]
        known = (size, examples, padded[0].device)
        if known not in self._kept_rows:
            keep = torch.ones(size, device=padded[0].device)
            keep[examples:] = 0.0
            self._kept_rows[known] = keep
        return [*held, *padded, self._kept_rows[known]]

    def _compile(
        self, loss_fn: Callable[[nn.Module, Any], Tensor], padded: list[Tensor], structure: Any, kept: list[Any]
    ) -> _Plan:
        """A plan with a graph, or without one where that isn't possible."""
        model, made = self.model, _Plan(None, None, kept, self._state.held, left=0)
        reason = _step_by_step(model)
        try:
            with _same_random_numbers(padded):
                if reason is None:
                    losses = loss_fn(model, tree_unflatten(padded, structure))
                    reason = learn(self.passes, losses, self.expected is not None)
                if reason is None:
                    made = self._graph(loss_fn, padded, structure, kept)
        except Exception as error:  # whatever the compiler stumbles over, the eager step is there
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        if reason is not None:
            self._refuse(reason)
        return made

    def _graph(
        self, loss_fn: Callable[[nn.Module, Any], Tensor], padded: list[Tensor], structure: Any, kept: list[Any]
    ) -> _Plan:
        model, names, held = self.model, list[Any](), self._state.held

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            batch = tree_unflatten(list(inputs[len(held) : -1]), structure)
            fine, result = straight(self.passes, loss_fn(model, batch), inputs[-1])
            names[:] = [result.sums, *(list(part) if isinstance(part, dict) else None for part in _both(result))]
            outputs = [fine, result.losses]
            for part in _both(result):
                outputs += part.values() if isinstance(part, dict) else [part]
            outputs += [total for total in result.sums if total is not None]
            return tuple(output.detach() for output in outputs)

        inputs = self._inputs(held, padded, padded[0].shape[0])
        other = self._inputs(held, [leaf.roll(1, 0) for leaf in padded], padded[0].shape[0])
        with torch.enable_grad():
            graph = trace(step, inputs, other)
        region = Region(graph, inputs)
        self.graphs, self.seconds = self.graphs + 1, self.seconds + region.seconds
        log.info("compiled a step for %d rows in %.1f s", padded[0].shape[0], region.seconds)
        present = [total is not None for total in names[0]]
        return _Plan(region, (present, names[1], names[2]), kept, held)

    def _run(self, plan: _Plan, padded: list[Tensor], examples: int) -> Clipped | None:
        """The graph's result; None when an example isn't finite or a short cut of the graph didn't hold."""
        assert plan.region is not None
        fine, losses, *rest = plan.region(*self._inputs(plan.held, padded, examples))
        if not math.isfinite(fine.item()):
            return None
        present, *groups = plan.structure
        count = sum(present)
        vectors, values = [losses, *rest[: len(rest) - count]], iter(rest[len(rest) - count :])
        if examples < len(losses):
            vectors = [vector[:examples] for vector in vectors]
        losses, *rest = vectors
        parts = iter(rest)
        norms, weights = (next(parts) if names is None else {name: next(parts) for name in names} for names in groups)
        return Clipped(losses, norms, weights, [next(values) if there else None for there in present])

    def _try(self, plan: _Plan, loss_fn: Any, batch: Any, padded: list[Tensor], examples: int) -> Clipped:
        """Both ways on one batch from the same random numbers: compares their results, and their times."""
        plan.left -= 1
        before, started = _random_state(padded), clock()
        try:
            with _same_random_numbers(padded):
                found = self._run(plan, padded, examples)
        except Exception as failure:
            plan.region = found = None
            self._refuse(f"{type(failure).__name__}: {failure}")
        plan.compiled = min(plan.compiled, clock() - started)
        started = clock()
        expected = self._eager(loss_fn, batch)
        plan.eager = min(plan.eager, clock() - started)
        # Padding shifts which random number is whose, so that only whole batches of a random model can be compared.
        if found is not None and (examples == len(padded[0]) or torch.equal(before, _random_state(padded))):
            error = _difference(found.sums, expected.sums)
            if not error <= TOLERANCE[torch.float64 if expected.losses.dtype == torch.float64 else torch.float32]:
                plan.region = None
                self._refuse(
                    f"the compiled step's sums differ from eager's by {error:.2g} (relative): the loss or the forward "
                    "depends on something besides the batch, the parameters and torch's random numbers"
                )
        if plan.left == 0 and plan.region is not None and plan.compiled > plan.eager:
            plan.region = None
            self._refuse(f"eager is faster ({1e3 * plan.eager:.3g} ms, compiled {1e3 * plan.compiled:.3g})")
        return expected

    def _refuse(self, reason: str) -> None:
        self.refusals.append(reason)
        log.warning("steps of this shape run without compiling: %s", reason)


def _same_random_numbers(batch: list[Tensor]) -> AbstractContextManager[None]:
    """What comes after draws the same random numbers as what is inside."""
    device = batch[0].device
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _random_state(batch: list[Tensor]) -> Tensor:
    """The state of torch's generator where the batch is."""
    device = batch[0].device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()


def _both(result: Clipped) -> tuple[Any, Any]:
    return result.norms, result.weights


def _step_by_step(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, STEP_BY_STEP) and any(p.requires_grad for p in module.parameters()):
            return f"{name or 'the model'} is a {type(module).__name__}, whose time steps would be compiled one by one"
    return None


def _difference(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The norm of the difference of all sums as a share of the norm of the expected ones."""
    if [total is None for total in found] != [total is None for total in expected]:
        return float("inf")
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True)
             if one is not None and other is not None]  # fmt: skip
    if not pairs:
        return 0.0
    off = torch.stack([(one - other).norm() for one, other in pairs]).norm()
    size = torch.stack([other.norm() for _, other in pairs]).norm()
    return float(off / size) if float(size) else float(off)
