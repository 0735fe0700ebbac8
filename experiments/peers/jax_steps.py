"""JAX as a contender: ``jit`` of the whole step, per-example gradients by ``vmap(grad)`` (Subramani et al. 2021)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip.bench.contenders import LEARNING_RATE, NOISE_MULTIPLIER, CannotRun, Contender, Prepared
from ghostclip.bench.losses import Losses, class_losses

from .jax_models import Array, Forward, Parameters, forward_of

__all__ = ["JAX"]

DECAYS, EPSILON = (0.9, 0.999), 1e-8  # Adam's, as torch has them
State = tuple[Parameters, Parameters, Parameters, Array, Array]


def _absent() -> str | None:
    found = importlib.util.find_spec("jax")
    return None if found else 'jax is not installed; run in a checkout: pip install ".[bench]"'


def _clipped_sum_of(forward: Forward, max_norm: float) -> Callable[[Parameters, Array, Array], Parameters]:
    """A pure function from (parameters, inputs, class numbers) to the clipped sum."""
    import jax
    from jax import numpy as jnp

    def loss(parameters: Parameters, one: Array, target: Array) -> Array:
        return -jax.nn.log_softmax(forward(parameters, one[None])[0])[target]

    def clipped_sum(parameters: Parameters, inputs: Array, targets: Array) -> Parameters:
        gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(parameters, inputs, targets)
        squares = sum(jnp.square(g).reshape(len(targets), -1).sum(1) for g in gradients.values())
        weights = jnp.minimum(1.0, max_norm / jnp.sqrt(squares))
        return {name: jnp.tensordot(weights, g, 1) for name, g in gradients.items()}

    return clipped_sum


def _step_of(forward: Forward, max_norm: float) -> Callable[[State, Array, Array], State]:
    """The whole step: the clipped sum, one flat draw of noise, division, Adam."""
    import jax
    from jax import numpy as jnp

    clipped_sum = _clipped_sum_of(forward, max_norm)

    def step(state: State, inputs: Array, targets: Array) -> State:
        parameters, means, squares, count, key = state
        key, drawn = jax.random.split(key)
        total = clipped_sum(parameters, inputs, targets)
        noise = jax.random.normal(drawn, (sum(part.size for part in total.values()),))
        ends = np.cumsum([part.size for part in total.values()])
        count = count + 1
        new: tuple[Parameters, Parameters, Parameters] = ({}, {}, {})
        for (name, part), flat in zip(total.items(), jnp.split(noise, ends[:-1]), strict=True):
            gradient = (part + NOISE_MULTIPLIER * max_norm * flat.reshape(part.shape)) / len(targets)
            mean = DECAYS[0] * means[name] + (1 - DECAYS[0]) * gradient
            square = DECAYS[1] * squares[name] + (1 - DECAYS[1]) * gradient**2
            bound = jnp.sqrt(square / (1 - DECAYS[1] ** count)) + EPSILON
            moved = parameters[name] - LEARNING_RATE * mean / (1 - DECAYS[0] ** count) / bound
            for table, value in zip(new, (moved, mean, square), strict=True):
                table[name] = value
        return (*new, count, key)

    return step


def _prepare(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    import jax
    from jax import numpy as jnp

    if losses is not class_losses or not all(parameter.requires_grad for parameter in model.parameters()):
        raise CannotRun("in JAX only classifiers with nothing frozen are defined")
    if next(model.parameters()).is_cuda:
        raise CannotRun("JAX is timed on the processor only")
    forward = forward_of(model)
    parameters = {name: jnp.asarray(value.detach().numpy()) for name, value in model.named_parameters()}
    clipped_sum = jax.jit(_clipped_sum_of(forward, max_norm))
    compiled: Any = jax.jit(_step_of(forward, max_norm), donate_argnums=0)
    zeros = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    held = {"state": (parameters, zeros, dict(zeros), jnp.zeros(()), jax.random.key(0))}
    held = jax.tree.map(jnp.copy, held)  # donated buffers must not be shared

    def step(inputs: Tensor, targets: Tensor) -> None:
        held["state"] = jax.block_until_ready(compiled(held["state"], *_arrays(inputs, targets)))

    def found(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        total = clipped_sum(held["state"][0], *_arrays(inputs, targets))
        return {name: torch.from_numpy(np.array(value)) for name, value in total.items()}

    return Prepared(step, found)


def _arrays(inputs: Tensor, targets: Tensor) -> tuple[Array, Array]:
    """The batch as JAX's arrays, whole numbers in 32 bits."""
    return _array(inputs), _array(targets)


def _array(part: Tensor) -> Array:
    from jax import numpy as jnp

    return jnp.asarray(part.numpy(), jnp.float32 if part.is_floating_point() else jnp.int32)


JAX = (Contender("jax", "JAX: the whole step under jit, vmap(grad)", _prepare, _absent),)
