"""Norms as other libraries write them: one weight a feature, perhaps a bias, and torch has no class of the kind.

Nearly every language model comes with an RMSNorm of its own, weight * n(x) or (1 + weight) * n(x) with n(x) in this or
that precision; image models bring LayerNorms over channels. What they have in common is

    z = z_0(x) + weight * n(x) + bias,    so that    dL_i/dweight = sum_t dz[i,t] * n[i,t],

along one dimension (Lee & Kifer 2020, section 5.5). Whether a class is of this form is tried out on numbers before the
rule is taken, and n(x) is what its own forward gives for a weight of one, less what it gives for a weight of zero.

Without this file such modules are followed through the graph (`ghostclip.graph.shared.subgraph`), which is as exact;
the rule spares the search, which takes a multiple of a small model's own time.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall

__all__ = ["Scaling", "scaling_of"]

# Inputs on which a class is tried: features in the last dimension, or channels in dimension 1, as in images.
TRIALS: dict[int, Callable[[int], tuple[int, ...]]] = {
    -1: lambda size: (2, size + 1, size),
    1: lambda size: (2, size, size + 1, size + 2),
}
# Some of these modules work in float32 whatever they are given.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Form:
    """What a class was found to be: the dimension of its features, and whether z_0 is zero."""

    dim: int
    starts_at_zero: bool


class Scaling(GhostLayer):
    """A module that multiplies each feature with a weight; made by `scaling_of` for one class and one form of it."""

    rule = "scaling"
    form: ClassVar[Form]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (input,) = (*args, *kwargs.values())
        return self.capture(super().forward(*args, **kwargs), input)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        products = to_float32(grad)
        if name == "weight":
            products = products * self._slope(to_float32(inputs[0]))
        products = products.movedim((call.batch_dim, self.form.dim), (0, -1))
        return Dense(products if products.dim() == 2 else products.flatten(1, -2).sum(1))

    def _slope(self, input: Tensor) -> Tensor:
        """n(x)."""
        weight = torch.ones_like(self._parameters["weight"], dtype=input.dtype)  # type: ignore[arg-type]
        bias = None if self._parameters.get("bias") is None else torch.zeros_like(weight)
        slope = _output(self.wrapped, self, weight, bias, input)
        if self.form.starts_at_zero:
            return slope
        return slope - _output(self.wrapped, self, torch.zeros_like(weight), bias, input)


def scaling_of(module: torch.nn.Module) -> type[Scaling] | None:
    """The wrapper for a norm that has no rule of its own, where it proves to be of the form above; else None."""
    found = type(module)
    own, weight = module._parameters, module._parameters.get("weight")
    if "norm" not in found.__name__.lower() or not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        return None
    if module._modules or module._buffers or not set(own) <= {"weight", "bias"}:
        return None
    if len(inspect.signature(found.forward).parameters) != 2:
        return None
    forms = [_form_along(dim, module, len(weight), own.get("bias") is not None) for dim in TRIALS]
    found_forms = [form for form in forms if form is not None]
    kind: Any = found
    return _wrapper(kind, found_forms[0]) if len(found_forms) == 1 else None


@functools.cache
def _wrapper(found: type, form: Form) -> type[Scaling]:
    content = {"wrapped": found, "form": form, "__module__": found.__module__, "__doc__": found.__doc__}
    return type(found.__name__, (Scaling, found), content)


@torch.no_grad()
def _form_along(dim: int, module: torch.nn.Module, size: int, has_bias: bool) -> Form | None:
    """What the module is, if z = z_0 + weight * n + bias along ``dim``, each example's z its own; else None."""
    generator = torch.Generator().manual_seed(size)
    shape = TRIALS[dim](size)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    input, weight, bias = draw(shape), draw(size), draw(size) if has_bias else None
    zeros = None if bias is None else torch.zeros_like(bias)
    output = functools.partial(_output, type(module), module)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            start = output(torch.zeros_like(weight), zeros, input)
            slope = output(torch.ones_like(weight), zeros, input) - start
            whole, alone = output(weight, bias, input), output(weight, bias, input[1:])
            along = [-1 if place == dim % len(shape) else 1 for place in range(len(shape))]
            expected = start + weight.view(along) * slope + (0 if bias is None else bias.view(along))
            near = functools.partial(torch.allclose, rtol=TOLERANCE, atol=TOLERANCE)
            fits = whole.shape == input.shape and near(whole, expected) and near(alone, whole[1:])
    except Exception:  # a forward that can't take such an input, which it may say in any way
        return None
    return Form(dim, not bool(start.any())) if fits and bool(slope.any()) else None


def _output(
    found: type[torch.nn.Module], module: torch.nn.Module, weight: Tensor, bias: Tensor | None, input: Tensor
) -> Any:
    """What ``found.forward`` makes of ``input`` with other parameters in the place of the module's."""
    stand_in = copy.copy(module)
    parameters = {"weight": weight} if "bias" not in module._parameters else {"weight": weight, "bias": bias}
    stand_in.__dict__["_parameters"] = parameters
    forward: Any = found.forward
    return forward(stand_in, input)
