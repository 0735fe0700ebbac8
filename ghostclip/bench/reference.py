"""The slow obvious loop: one backward an example. What every contender's clipped sum must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ghostclip.bench.losses import Losses

__all__ = [
    "RULES",
    "flat_weights",
    "layer_weights",
    "loop_norms",
    "loop_sums",
    "relative_error",
    "what_entered",
    "whole_norms",
]

Norms = Mapping[str, Tensor]


def loop_norms(model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each example's gradient norm by parameter: ``{parameter name: [B] float64}``; arguments as for `loop_sums`."""
    rows: dict[str, list[float]] = {}
    for gradients in _single_gradients(model, losses, inputs, targets):
        for name, gradient in gradients.items():
            # In float64: torch adds up millions of float32 numbers one after another, and loses 4e-4 of their norm.
            rows.setdefault(name, []).append(float(gradient.double().norm()))
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}


def whole_norms(norms: Norms) -> Tensor:
    """||g_i||, [B], from the norms of its parts."""
    return torch.stack(list(norms.values())).norm(dim=0)


def flat_weights(norms: Norms, max_norm: float) -> dict[str, Tensor]:
    """``min(1, max_norm / ||g_i||)`` for every parameter (Lee & Kifer 2020, equation 2)."""
    weights = _bounded(whole_norms(norms), max_norm)
    return dict.fromkeys(norms, weights)


def layer_weights(norms: Norms, max_norm: float) -> dict[str, Tensor]:
    """The same for each layer by itself, its bound ``max_norm / sqrt(layers)``.

    A layer is the module that owns a parameter by its first name.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, norm in norms.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = norm
    share = max_norm / math.sqrt(len(layers))
    return {name: _bounded(whole_norms(parts), share) for parts in layers.values() for name in parts}


RULES: dict[str, Callable[[Norms, float], dict[str, Tensor]]] = {"flat": flat_weights, "layer": layer_weights}


def _bounded(norms: Tensor, bound: float) -> Tensor:
    return bound / norms.clamp(min=bound)


def what_entered(norms: Norms, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """``sum_i v_i ||g_i||`` by parameter name."""
    return {name: float((weights[name] * norm).sum()) for name, norm in norms.items()}


def loop_sums(
    model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor, weights: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Weighted sums of the examples' gradients, several at once; summed up in float64.

    The gradients themselves have the model's own precision: in another some ReLU would be on the other side of its
    kink, and differ by more than any error of clipping.

    Args:
        model: plain torch layers, without randomness; not changed.
        losses: (outputs, targets) -> [B].
        inputs, targets: [B, ...].
        weights: ``{rule: {parameter name: [B]}}``.

    Returns:
        ``{rule: {parameter name: sum_i weight_i g_i}}`` for the parameters that are trained, float64.
    """
    totals: dict[str, dict[str, Tensor]] = {rule: {} for rule in weights}
    for example, gradients in enumerate(_single_gradients(model, losses, inputs, targets)):
        for rule, total in totals.items():
            for name, gradient in gradients.items():
                if name not in total:
                    total[name] = torch.zeros_like(gradient, dtype=torch.float64)
                total[name].add_(gradient, alpha=float(weights[rule][name][example]))
    return totals


def _single_gradients(model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor) -> Iterator[dict[str, Tensor]]:
    """Each example's own gradient, by a forward and a backward of a batch of one."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for example in range(inputs.shape[0]):
        one = slice(example, example + 1)
        loss = losses(model(inputs[one]), targets[one]).sum()
        yield dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def relative_error(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], gathered: Mapping[str, float] | None = None
) -> float:
    """The worst parameter's error as a share of its norm; inf when parameters are missing, NaN or of another shape.

    Args:
        found, expected: sums by parameter name.
        gathered: ``sum_i v_i ||g_i||`` by parameter name. Where the examples' gradients cancel, float32 can't do better
            than a share of what went in, so a tenth of this counts where it is more than the norm of the sum.

    A thousandth of the whole gradient's norm counts where it is more.
    """
    if found.keys() != expected.keys():
        return math.inf
    whole = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    worst = 0.0
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return math.inf
        error = float((found[name].detach().double() - value).norm())
        entered = 0.1 * gathered[name] if gathered else 0.0
        worst = max(worst, error / max(float(value.norm()), 1e-3 * whole, entered, 1e-300))
        if math.isnan(error):
            return math.inf
    return worst
