"""What every contender's clipped sum must equal: that of the slow obvious loop, one backward an example."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ghostclip.bench.losses import Losses, loss_function
from ghostclip.bench.naive import single_gradients, trained

__all__ = ["Reference", "flat_weights", "layer_weights", "loop_norms", "loop_sums", "relative_error", "whole_norms"]

GATE = 1e-4  # the relative error of a clipped sum from which on a contender is marked WRONG
# Where rounding alone moves a gradient by more (a ReLU on the other side of its kink, a maximum at another place), the
# gate opens by so much more than that, and no wider than this.
SLACK, WIDEST = 4.0, 1e-2

Norms = Mapping[str, Tensor]


def whole_norms(norms: Norms) -> Tensor:
    """||g_i||, [B], from the norms of its parts."""
    return torch.stack(list(norms.values())).norm(dim=0)


def flat_weights(norms: Norms, max_norm: float) -> dict[str, Tensor]:
    """``min(1, max_norm / ||g_i||)`` for every parameter (Lee & Kifer 2020, equation 2)."""
    return dict.fromkeys(norms, max_norm / whole_norms(norms).clamp(min=max_norm))


def layer_weights(norms: Norms, max_norm: float) -> dict[str, Tensor]:
    """The same for each layer by itself, its bound ``max_norm / sqrt(layers)``.

    A layer is the module that owns a parameter by its first name.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, norm in norms.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = norm
    share = max_norm / math.sqrt(len(layers))
    return {name: weight for parts in layers.values() for name, weight in flat_weights(parts, share).items()}


RULES: dict[str, Callable[[Norms, float], dict[str, Tensor]]] = {
    "flat": flat_weights,
    "layer": layer_weights,
    "sum": lambda norms, _: {name: torch.ones_like(norm) for name, norm in norms.items()},
}


def loop_norms(model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each example's gradient norm by parameter: ``{parameter name: [B] float64}``; arguments as for `loop_sums`."""
    # In float64: torch adds up millions of float32 numbers one after another, and loses 4e-4 of their norm.
    loop = single_gradients(model, loss_function(losses), (inputs, targets))
    rows = [[float(gradient.double().norm()) for gradient in one] for one in loop]
    return dict(zip(trained(model), torch.tensor(rows, dtype=torch.float64).T, strict=True))


def loop_sums(
    model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor, weights: Mapping[str, Norms]
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
    totals = {
        rule: {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trained(model).items()} for rule in weights
    }
    for example, gradients in enumerate(single_gradients(model, loss_function(losses), (inputs, targets))):
        for rule, total in totals.items():
            for (name, value), gradient in zip(total.items(), gradients, strict=True):
                value.add_(gradient, alpha=float(weights[rule][name][example]))
    return totals


class Reference:
    """The loop's sums of one batch under every rule, and how far from them a right contender may be.

    Attributes:
        max_norm: the median norm of the batch, so that clipped and unclipped examples are seen.
        gate: the largest error that is not WRONG; more than GATE where rounding alone moves the batch's gradient more.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, inputs: Tensor, targets: Tensor, max_norm: float | None = None
    ) -> None:
        self._batch = (model, losses, inputs, targets)
        norms = loop_norms(*self._batch)
        self.max_norm = float(whole_norms(norms).median()) if max_norm is None else max_norm
        weights = {rule: weigh(norms, self.max_norm) for rule, weigh in RULES.items()}
        self._sums = loop_sums(*self._batch, weights)
        # sum_i v_i ||g_i||, which says how exactly float32 can sum.
        self._gathered = {
            rule: {name: float((weight * norms[name]).sum()) for name, weight in table.items()}
            for rule, table in weights.items()
        }

    @functools.cached_property
    def gate(self) -> float:
        model, losses, inputs, targets = self._batch
        whole = torch.autograd.grad(losses(model(inputs), targets).sum(), list(trained(model).values()))
        rounding = self._own_error("sum", dict(zip(trained(model), whole, strict=True)))
        return min(max(GATE, SLACK * rounding), WIDEST)

    def error(self, rule: str, found: Mapping[str, Tensor]) -> float:
        """The `relative_error` of sums under a rule.

        In float32 the loop's own rounding may have put a ReLU of a single example on the other side of its kink. So
        sums beyond the gate that are within GATE of the same loop in float64 have their error to that.
        """
        error = self._own_error(rule, found)
        if error > self.gate and self._in_float64 is not None:
            exact = self._in_float64._own_error(rule, found)
            return exact if exact <= GATE else error
        return error

    def _own_error(self, rule: str, found: Mapping[str, Tensor]) -> float:
        return relative_error(found, self._sums[rule], self._gathered[rule])

    @functools.cached_property
    def _in_float64(self) -> Reference | None:
        model, losses, inputs, targets = self._batch
        try:
            inputs = inputs.double() if inputs.is_floating_point() else inputs
            return Reference(copy.deepcopy(model).double(), losses, inputs, targets, self.max_norm)
        except Exception:  # a model may be bound to its type, or too large: the loop in its own type stands then
            return None


def relative_error(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], gathered: Mapping[str, float] | None = None
) -> float:
    """The worst parameter's error as a share of its norm; inf when parameters are missing, NaN or of another shape.

    A thousandth of the whole gradient's norm counts where it is more.

    Args:
        found, expected: sums by parameter name.
        gathered: ``sum_i v_i ||g_i||`` by parameter name. Where the examples' gradients cancel, float32 can't do better
            than a share of what went in, so a tenth of this counts where it is more than the norm of the sum.
    """
    if {name: value.shape for name, value in found.items()} != {name: v.shape for name, v in expected.items()}:
        return math.inf
    least = 1e-3 * math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    errors = []
    for name, value in expected.items():
        entered = 0.1 * gathered[name] if gathered else 0.0
        error = float((found[name].detach().double() - value).norm())
        errors.append(math.inf if math.isnan(error) else error / max(float(value.norm()), least, entered, 1e-300))
    return max(errors, default=0.0)
