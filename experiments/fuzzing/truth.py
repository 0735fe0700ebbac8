"""Gradients of single examples by the plain loop in float64, and how far rounding alone may take them.

No float32 result can be nearer to the float64 one than its conditioning allows. That is measured, for each example and
each parameter, as the largest distance from the float64 loop of

- the same loop in the model's own type;
- the float64 loop after a relative change of every input and parameter by the type's eps: the conditioning;
- where these don't explain a difference, of up to 18 more such changes, of 1 and 4 eps, in float64 and in the own type,
  and of torch's autograd, without GhostClip, on the whole batch in the own type: the rounding of the very kernels
  whose results are judged.

`SPREAD` of these distances are allowed, because a measured rounding error is one draw of a random number. Beyond that
a norm may be off by `RELATIVE` of itself, what the project promises (an eps in narrow types), and a sum by `UNITS` eps
of what was added up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SPREAD", "UNITS", "NotRun", "Truth"]

SPREAD, UNITS = 8.0, {torch.float64: 1024.0, torch.float32: 64.0}
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4}
# Norms whose squares may pass the range of the type that norms are in: above, an example may be left out.
MOST = {torch.float64: 1e140, torch.float32: 1e17}
EXTREME = {torch.float64: 1e60, torch.float32: 1e6, torch.bfloat16: 1e6, torch.float16: 50.0}
# Inputs above it may saturate a function.
LARGE = 10.0
LEAST = {torch.float64: 1e-140, torch.float32: 1e-17}

Losses = Callable[[nn.Module, Sequence[Tensor]], Tensor]


class NotRun(Exception):
    """torch itself can't run the model in that type."""


@dataclass
class Truth:
    """What one batch must give.

    Args:
        model: plain, in its own type; never changed.
        losses_of: (model, inputs) -> [B].
        inputs: of the batch.
        dims: where each has its examples.
        seed: of torch's generator before the forward, for models with Dropout, whose masks the loop is given.
        autocast: whether the own type's forward runs under autocast to bfloat16.
        scale: what losses are multiplied with before the own type's backward.

    Attributes:
        names: of the trained parameters.
        grads: [B, P] in float64.
        errors: [B, parameters], what rounding alone does to each parameter's gradient.
        finite: [B], whether loss and gradient are finite in float64.
        possible: [B], whether they are in the own type, and no square overflows.
        attached: whether any loss depends on a trained parameter.
        extreme: [B], whether an example has numbers whose products may overflow on the way.
        overflows: [B], whether it has some whose squares do.
    """

    model: nn.Module
    losses_of: Losses
    inputs: Sequence[Tensor]
    dims: Sequence[int | None]
    seed: int | None = None
    autocast: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.dtype = next(parameter.dtype for parameter in self.model.parameters())
        self.wide = copy.deepcopy(self.model).double()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.sizes = [name for name, _ in named], [p.numel() for _, p in named]
        self.examples = self.inputs[-1].shape[0]
        self.norm_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.attached = False
        self._draws = 0
        try:
            if self.seed is not None:
                self._record_masks()
            self.losses, self.grads = self._loop(self.wide, self._wide_inputs(self.inputs))
            in_own = self._loop(self.model, self.inputs, self.scale)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotRun(str(error).splitlines()[0]) from error
        own_losses, own = in_own
        sizes = self._by_parameter(self.grads)
        self.finite = self.losses.isfinite() & self.grads.isfinite().all(1)
        most = MOST[self.norm_dtype] / max(1.0, self.scale)
        fits = own_losses.isfinite() & own.isfinite().all(1) & (own.double().norm(dim=1) < most)
        self.possible = fits & ~(sizes > most).any(1)
        largest = self._largest()
        self.extreme = largest > EXTREME[self.dtype]
        self.overflows = largest > 0.1 * torch.finfo(self.norm_dtype).max ** 0.5
        self.errors = torch.zeros_like(sizes)
        # Where a function is saturated, its derivative (1 - y^2) is zero by one kernel and an eps by another.
        self.errors[self.extreme & self.finite] += self.eps
        # Near there an ulp of its value is a share of its derivative, and is multiplied with large inputs.
        self.errors += torch.where(largest > LARGE, self.eps * largest.clamp(max=1e6), 0.0)[:, None]
        # Parts that cancel to exactly zero in one order of sums leave an eps of themselves in another.
        if bool(self.finite.any()):
            self.errors += torch.where(sizes == 0, 0.25 * self.eps * sizes[self.finite].amax(0), 0.0)
        # Where they do so for all examples, nothing else tells how large the parts are.
        held = torch.stack([p.detach().double().norm() for _, p in named]) if named else sizes.new_zeros(0)
        self.errors += torch.where((sizes == 0).all(0), self.eps * held, 0.0)
        self._note(own)
        self._note_perturbed(1, 0, self.wide)

    @property
    def eps(self) -> float:
        """Of the own type."""
        return torch.finfo(torch.bfloat16 if self.autocast else self.dtype).eps

    @property
    def relative(self) -> float:
        """What a norm may be off by, of itself: in narrow types gradients come to it rounded once."""
        return max(RELATIVE[self.norm_dtype], self.eps if self.eps > 1e-6 else 0.0)

    @property
    def floor(self) -> float:
        """A norm below which squares vanish."""
        return LEAST[self.norm_dtype]

    def by_group(self, values: Tensor, group_of: dict[str, str]) -> dict[str, Tensor]:
        """{group: root of the sum of squares [B]} of values [B, parameters]."""
        groups: dict[str, list[int]] = {}
        for place, name in enumerate(self.names):
            groups.setdefault(group_of[name], []).append(place)
        return {group: values[:, places].norm(dim=1) for group, places in groups.items()}

    def norms(self) -> Tensor:
        """[B, parameters]."""
        return self._by_parameter(self.grads)

    def split(self, flat: Tensor) -> list[Tensor]:
        """[..., P] by parameter."""
        return list(flat.split(self.sizes, -1))

    def look_again(self) -> None:
        """More draws of the rounding error, for what the first ones don't explain."""
        if bool((self.finite & self.possible).all()):  # 0 * NaN of one example would be in all others' gradients
            self._note(self._together())
        for model in (self.wide, self.model) * 3:
            self._draws += 1
            self._note_perturbed(1 if self._draws % 4 < 2 else 4, self._draws, model)

    def _note(self, grads: Tensor) -> None:
        found = self._by_parameter(grads.double() - self.grads)
        self.errors = torch.maximum(self.errors, found.nan_to_num(0.0, 0.0, 0.0))

    def _note_perturbed(self, times: int, number: int, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(number)
        step = times * self.eps

        def moved(value: Tensor) -> Tensor:
            signs = torch.randint(0, 2, value.shape, generator=generator).to(torch.float64).mul_(2 * step).sub_(step)
            return value.detach().double() * (1 + signs)

        inputs = self._wide_inputs(self.inputs) if model is self.wide else list(self.inputs)
        scale = 1.0 if model is self.wide else self.scale
        model = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(moved(parameter))
        for place, value in enumerate(inputs[:-2]):
            if value.is_floating_point():
                inputs[place] = moved(value).to(value.dtype).requires_grad_(value.requires_grad)
        self._note(self._loop(model, inputs, scale)[1])

    def _record_masks(self) -> None:
        """Has every Dropout draw what it will draw for the batch, and keep it for single examples."""
        self.model = copy.deepcopy(self.model)
        for model in (self.model, self.wide):
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.__class__ = Masked
                    module.masks, module.calls, module.example = [], 0, None
            torch.manual_seed(self.seed or 0)
            with torch.no_grad():
                self._losses(model, self._wide_inputs(self.inputs) if model is self.wide else self.inputs)

    def _loop(self, model: nn.Module, inputs: Sequence[Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
        masks = [module for module in model.modules() if isinstance(module, Masked)]
        losses, rows = [], []
        for example in range(self.examples):
            for module in masks:
                module.example, module.calls = example, 0
            single = [_one(value, dim, example) for value, dim in zip(inputs, self.dims, strict=True)]
            loss = self._losses(model, single)
            losses.append(loss.detach())
            self.attached |= loss.requires_grad
            rows.append(_gradient(loss[0] * scale, model) / scale)
        if not rows:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, sum(self.sizes), dtype=torch.float64)
        return torch.cat(losses), torch.stack(rows)

    def _together(self) -> Tensor:
        """[B, P] by autograd on the whole batch."""
        for module in self.model.modules():
            if isinstance(module, Masked):
                module.example, module.calls = slice(None), 0
        losses = self._losses(self.model, [value.detach().requires_grad_(value.requires_grad) for value in self.inputs])
        rows = [_gradient(loss * self.scale, self.model) / self.scale for loss in losses.unbind()]
        return torch.stack(rows) if rows else losses.new_zeros(0, sum(self.sizes))

    def _wide_inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]

    def _largest(self) -> Tensor:
        """The largest number of each example, [B]."""
        found = torch.zeros(self.examples, dtype=torch.float64)
        for value, dim in zip(self.inputs, self.dims, strict=True):
            if dim is not None and value.is_floating_point() and value.numel():
                rows = value.detach().double().movedim(dim, 0).unsqueeze(-1).flatten(1)
                found = torch.maximum(found, rows.abs().amax(1).nan_to_num(nan=torch.inf))
        return found

    def _losses(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        # Reduced precision is a property of the own type's forward; float64 never goes through it.
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        cast: Any = torch.autocast("cpu", torch.bfloat16) if self.autocast and not double else nullcontext()
        with cast:
            return self.losses_of(model, inputs)

    def _by_parameter(self, flat: Tensor) -> Tensor:
        if not self.sizes:
            return flat.new_zeros(len(flat), 0)
        return torch.stack([part.double().norm(dim=-1) for part in self.split(flat)], -1)


class Masked(nn.Dropout):
    """Keeps the masks that a Dropout draws for a batch, and applies one example's."""

    masks: list[Tensor]
    calls: int
    example: Any

    def forward(self, h: Tensor) -> Tensor:
        if self.example is None:
            self.masks.append(nn.functional.dropout(torch.ones_like(h), self.p, self.training))
            return h * self.masks[-1]
        mask = self.masks[self.calls % len(self.masks)]
        self.calls += 1
        return h * (mask[self.example] if isinstance(self.example, slice) else mask[self.example : self.example + 1])


def _gradient(loss: Tensor, model: nn.Module) -> Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not loss.requires_grad:
        return torch.cat([torch.zeros_like(p).flatten() for p in trained])
    found = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
    return torch.cat([
        (torch.zeros_like(p) if g is None else g.to_dense()).flatten() for g, p in zip(found, trained, strict=True)
    ])  # fmt: skip


def _one(value: Tensor, dim: int | None, example: int) -> Tensor:
    if dim is None:
        return value.detach()
    single = value.detach().narrow(dim, example, 1).clone()
    return single.requires_grad_(value.requires_grad)
