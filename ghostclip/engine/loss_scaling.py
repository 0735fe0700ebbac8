"""Loss scaling, which keeps small float16 gradients from vanishing: by a public number, or around a GradScaler.

The scale that counts is the clipper's own: losses are multiplied before the passes, norms and sums divided after them
in float32. Clipped sums are finite always, since examples whose gradients overflow are left out, so a GradScaler never
finds an infinity, never skips a step and never backs off. Its scale follows from the number of steps alone, which is
public, and cancels: the engine divides the losses by it, and gathers unscaled sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from ghostclip.errors import PrivacyError

__all__ = ["SCALED", "LossScaling", "show_scaling"]

# What a GradScaler leaves on an optimizer that is told of the scale.
SCALED = frozenset(("grad_scale", "found_inf"))

# The most that the passes scale by beside a GradScaler, whose own first scale is meant for means over a batch: the
# loss of one example is hundreds of times as large.
USUAL = 1024.0


class LossScaling:
    """What an engine knows of the scale of its losses; ``loss_scale`` and the calls of a loop as for `PrivacyEngine`.

    ``factor`` is what the clipper scales by.
    """

    def __init__(self, loss_scale: float | GradScaler, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._scaler: GradScaler | None = None
        self.factor: float = 1.0
        if not isinstance(loss_scale, GradScaler):
            self.factor = loss_scale
        elif loss_scale.is_enabled():
            self._scaler = loss_scale
            self.factor = 2.0 ** math.floor(math.log2(min(loss_scale.get_scale(), USUAL)))

    def begin(self) -> None:
        """Tells the GradScaler, for one logical batch, that gradients are unscaled and that none is infinite."""
        if self._scaler is None:
            return
        device = self._optimizer.param_groups[0]["params"][0].device
        if self._scaler._scale is None:
            # It makes its scale on first use, and a batch may have no losses.
            self._scaler.scale(torch.zeros((), device=device))
        state: dict[str, Any] = self._scaler._per_optimizer_states[id(self._optimizer)]
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {device: torch.zeros((), device=device)}

    def unscaled(self, losses: Tensor) -> Tensor:
        """The losses [B] that the user had before ``scaler.scale``.

        Raises:
            PrivacyError: they weren't scaled, or are float16, which a scale takes past its largest number.
        """
        if self._scaler is None or not isinstance(losses, Tensor) or losses.grad_fn is None:
            return losses
        if not self._is_scaled(losses):
            raise PrivacyError(
                "engine.backward() got losses that the GradScaler given as loss_scale didn't scale last, so by how "
                "much isn't known; call engine.backward(scaler.scale(losses)) and change nothing in between"
            )
        if losses.dtype == torch.float16:
            raise PrivacyError(
                "engine.backward() got scaled losses in torch.float16, which may be infinite by their scale; compute "
                "them in float32 (from output.float()) before scaler.scale(losses)"
            )
        return losses * (1.0 / self._scaler.get_scale())

    def refuse_scaled(self, losses: Tensor) -> None:
        """Raises PrivacyError for losses that were scaled where the engine would take them as they are."""
        if self._is_scaled(losses):
            raise PrivacyError(
                "the loss function of engine.step() returned losses that the GradScaler scaled; return them as they "
                "are, engine.step() scales by itself"
            )

    def _is_scaled(self, losses: Tensor) -> bool:
        """Whether the last thing that was done to the losses is a product with the GradScaler's scale."""
        if self._scaler is None or self._scaler._scale is None:
            return False
        node: Any = getattr(losses, "grad_fn", None)
        if node is None or node.name() != "MulBackward0":
            return False
        factors = [node._saved_other, node._saved_self]
        return any(f is not None and f.dim() == 0 and f.item() == self._scaler.get_scale() for f in factors)

    def before_step(self) -> None:
        """Makes sure that nothing scales the private gradient any more; for an optimizer that has one of `SCALED`.

        Raises:
            PrivacyError: a GradScaler that the engine doesn't know called the step.
        """
        marks = vars(self._optimizer)
        if self._scaler is not None and marks.get("grad_scale") is None:
            if "found_inf" in marks:
                # Kernels that skip a step by themselves look here; there is nothing to skip.
                marks["found_inf"] = None
            return
        found = [marks.pop(name, None) for name in SCALED]
        if any(mark is not None for mark in found):
            raise PrivacyError(
                "a GradScaler called this step; it would scale the noise or the clipped sum, not both, and skip steps "
                "depending on private gradients. Give it to the engine, PrivacyEngine(..., loss_scale=scaler), or "
                "leave it out: PrivacyEngine(..., loss_scale=1024.0) scales as well. Call optimizer.step() itself then "
                "(bfloat16 needs no scaling)"
            )


def show_scaling(optimizer: Optimizer) -> Callable[[], None]:
    """Has a GradScaler announce itself on the optimizer instead of scaling gradients unseen; returns what undoes it."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return lambda: None
    # torch's own mark for optimizers that are told of the scale; the kernel that scales otherwise leaves no trace.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return lambda: vars(optimizer).pop("_step_supports_amp_scaling", None)
