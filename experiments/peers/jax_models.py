"""The small workloads' networks as functions of JAX arrays, read off the torch modules; the weights are theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ghostclip import models
from ghostclip.bench.contenders import CannotRun
from ghostclip.bench.networks import Mean, States

__all__ = ["forward_of"]

Array = Any  # a jax.Array; JAX may be absent
Parameters = dict[str, Array]
Forward = Callable[[Parameters, Array], Array]


def forward_of(module: nn.Module, prefix: str = "") -> Forward:
    """A function (parameters by torch's names, inputs [B, ...]) -> outputs that computes what ``module`` does.

    Args:
        module: built of the layers and networks in this file's tables.
        prefix: of the parameters' names.

    Raises:
        CannotRun: there is no definition of such a module here.
    """
    if isinstance(module, nn.Sequential):
        return _sequence([forward_of(child, f"{prefix}{name}.") for name, child in module.named_children()])
    for table in (_LAYERS, _NETWORKS):
        if (rule := table.get(type(module))) is not None:
            return rule(module, prefix)
    raise CannotRun(f"no definition of {type(module).__name__} in JAX")


def _sequence(parts: list[Forward]) -> Forward:
    def run(parameters: Parameters, inputs: Array) -> Array:
        for part in parts:
            inputs = part(parameters, inputs)
        return inputs

    return run


def _linear(layer: nn.Linear, prefix: str) -> Forward:
    return lambda parameters, inputs: inputs @ parameters[f"{prefix}weight"].T + parameters[f"{prefix}bias"]


def _convolution(layer: nn.Conv2d, prefix: str) -> Forward:
    from jax import lax

    if isinstance(layer.padding, str) or layer.groups != 1 or layer.bias is None:
        raise CannotRun("JAX convolutions are defined for numeric padding, one group and a bias only")
    padding = [(side, side) for side in layer.padding]

    def run(parameters: Parameters, maps: Array) -> Array:
        found = lax.conv_general_dilated(
            maps, parameters[f"{prefix}weight"], layer.stride, padding, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return found + parameters[f"{prefix}bias"][:, None, None]

    return run


def _pool(layer: nn.MaxPool2d | nn.AvgPool2d, prefix: str) -> Forward:
    """A pool of squares, cut off at the end as torch does."""
    size = int(layer.kernel_size)  # type: ignore[arg-type]
    if layer.stride != layer.kernel_size:
        return _overlapping(layer, size)

    def run(_: Parameters, maps: Array) -> Array:
        batch, channels, height, width = maps.shape
        rows, columns = height // size, width // size
        squares = maps[:, :, : rows * size, : columns * size].reshape(batch, channels, rows, size, columns, size)
        return squares.max((3, 5)) if isinstance(layer, nn.MaxPool2d) else squares.mean((3, 5))

    return run


def _overlapping(layer: nn.MaxPool2d | nn.AvgPool2d, size: int) -> Forward:
    """A maximum of squares that overlap."""
    from jax import lax
    from jax import numpy as jnp

    if not isinstance(layer, nn.MaxPool2d) or layer.padding:
        raise CannotRun("of pools that overlap only maxima without padding are defined in JAX")
    step = int(layer.stride)

    def run(_: Parameters, maps: Array) -> Array:
        return lax.reduce_window(maps, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, step, step), "VALID")

    return run


def _relu(layer: nn.ReLU, prefix: str) -> Forward:
    import jax

    return lambda _, inputs: jax.nn.relu(inputs)


def _mean_of_maps(layer: nn.AdaptiveAvgPool2d, prefix: str) -> Forward:
    if layer.output_size != 1:
        raise CannotRun("no definition of AdaptiveAvgPool2d in JAX but to one position")
    return lambda _, maps: maps.mean((2, 3), keepdims=True)


def _embedding(layer: nn.Embedding, prefix: str) -> Forward:
    return lambda parameters, tokens: parameters[f"{prefix}weight"][tokens]


def _flatten(layer: nn.Flatten, prefix: str) -> Forward:
    return lambda _, inputs: inputs.reshape(inputs.shape[0], -1)


def _recurrent(layer: nn.RNN | nn.LSTM, prefix: str) -> Forward:
    """One layer, batch first: all states [B, T, units]; the inputs' products of all steps at once, then a scan."""
    import jax
    from jax import numpy as jnp

    if layer.num_layers != 1 or layer.bidirectional:
        raise CannotRun("no definition of stacked or bidirectional recurrent layers in JAX")
    gated = isinstance(layer, nn.LSTM)

    def run(parameters: Parameters, inputs: Array) -> Array:
        weights = [parameters[f"{prefix}{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        driven = inputs @ weights[0].T + weights[2] + weights[3]

        def step(carry: tuple[Array, Array], now: Array) -> tuple[tuple[Array, Array], Array]:
            hidden, cell = carry
            gates = now + hidden @ weights[1].T
            if gated:
                enter, forget, candidate, out = jnp.split(gates, 4, axis=-1)
                cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
                hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
            else:
                hidden = jnp.tanh(gates)
            return (hidden, cell), hidden

        start = jnp.zeros((inputs.shape[0], layer.hidden_size), inputs.dtype)
        _, states = jax.lax.scan(step, (start, start), driven.swapaxes(0, 1))
        return states.swapaxes(0, 1)

    return run


def _mlp(network: nn.Module, prefix: str) -> Forward:
    import jax

    first, second, last = (forward_of(network.get_submodule(n), f"{n}.") for n in ("hidden1", "hidden2", "output"))

    def run(parameters: Parameters, inputs: Array) -> Array:
        hidden = jax.nn.sigmoid(first(parameters, inputs.reshape(inputs.shape[0], -1)))
        return last(parameters, jax.nn.sigmoid(second(parameters, hidden)))

    return run


def _cnn(network: nn.Module, prefix: str) -> Forward:
    from jax import numpy as jnp

    names = ("convolution1", "convolution2", "pool", "hidden", "output")
    one, two, pool, hidden, output = (forward_of(network.get_submodule(name), f"{name}.") for name in names)

    def run(parameters: Parameters, images: Array) -> Array:
        maps = pool(parameters, jnp.tanh(one(parameters, images)))
        maps = pool(parameters, jnp.tanh(two(parameters, maps)))
        flat = maps.reshape(maps.shape[0], -1)
        return output(parameters, jnp.tanh(hidden(parameters, flat)))

    return run


def _on_rows(network: nn.Module, prefix: str) -> Forward:
    recurrent, output = (forward_of(network.get_submodule(name), f"{name}.") for name in ("recurrent", "output"))

    def run(parameters: Parameters, images: Array) -> Array:
        rows = images.swapaxes(1, 2)
        states = recurrent(parameters, rows.reshape(*rows.shape[:2], -1))
        return output(parameters, states[:, -1])

    return run


def _states(network: nn.Module, prefix: str) -> Forward:
    return forward_of(network.get_submodule("recurrent"), f"{prefix}recurrent.")


def _mean(network: nn.Module, prefix: str) -> Forward:
    return lambda _, hidden: hidden.mean(1)


_LAYERS: dict[type, Callable[[Any, str], Forward]] = {
    nn.Linear: _linear, nn.Conv2d: _convolution, nn.MaxPool2d: _pool, nn.AvgPool2d: _pool, nn.ReLU: _relu,
    nn.AdaptiveAvgPool2d: _mean_of_maps, nn.Flatten: _flatten, nn.Embedding: _embedding, nn.RNN: _recurrent,
    nn.LSTM: _recurrent,
}  # fmt: skip
_NETWORKS: dict[type, Callable[[Any, str], Forward]] = {
    models.MLP: _mlp, models.CNN: _cnn, models.RNNClassifier: _on_rows, models.LSTMClassifier: _on_rows,
    States: _states, Mean: _mean,
}  # fmt: skip
