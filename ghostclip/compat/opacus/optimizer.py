"""Opacus's optimizer: ``step`` clips what ``loss.backward()`` brought, and updates at the end of a logical batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip.compat.opacus.backward import ScalarLosses
from ghostclip.compat.opacus.core import CoreEngine
from ghostclip.errors import PrivacyError
from ghostclip.validate import RefusesNames

__all__ = ["DPOptimizer"]

BEFORE_STEP = """optimizer.step() must come in a loop over the data_loader that make_private returned, once for each \
of its batches: `for inputs, targets in data_loader:` forward, loss.backward(), optimizer.step()"""
NO_SAMPLES = """there are no p.grad_sample: clipped sums are formed without per-example gradients; \
ghostclip.GhostClipper(model).per_example_grads(losses) materialises them, for losses of shape [B]"""
MADE = "PrivacyEngine().make_private(...), which returns one"
FIXED = "is what charges and noise are made for; call privacy_engine.detach() and make_private() again to change it"


class DPOptimizer(RefusesNames, Optimizer):
    """The optimizer that ``make_private`` returns: the user's own, with the attributes of Opacus's.

    ``state``, ``param_groups`` and all other attributes are those of the user's optimizer. No per-example gradient is
    stored, so reading ``grad_samples`` raises AttributeError.

    Args:
        optimizer: the user's own, with the engine's hooks on it.
        engine: clips, charges and adds noise.
        losses: recovers the losses [B] of a physical batch.
        loss_reduction: "mean" or "sum", as given to ``make_private``.
        expected_batch_size: divides the noisy sums if ``loss_reduction`` is "mean".

    Attributes:
        original_optimizer: the user's own.
        handle: removes the ``step_hook`` from it.
        step_hook: called with this optimizer before each update, when noisy gradients are in place; or None.
    """

    refused_names: ClassVar = dict.fromkeys(("noise_multiplier", "max_grad_norm"), MADE)

    # So that torch's GradScaler calls `step` at once, which refuses it.
    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: Optimizer, engine: CoreEngine, losses: ScalarLosses, *,
        loss_reduction: str, expected_batch_size: int,
    ) -> None:  # fmt: skip
        # Optimizer.__init__ isn't called: it would make a second state and second parameter groups.
        self.original_optimizer = optimizer
        self._loss_reduction, self._expected_batch_size = loss_reduction, expected_batch_size
        self.step_hook: Callable[[DPOptimizer], None] | None = None
        self._engine, self._losses = engine, losses
        self._signals: list[bool] = []
        # After the engine's own hook, by which the noise is in place.
        self.handle = optimizer.register_step_pre_hook(self._call_step_hook)

    def __getattr__(self, name: str) -> Any:
        if name == "grad_samples":
            raise AttributeError(NO_SAMPLES)
        return getattr(self.__dict__["original_optimizer"], name)

    def __repr__(self) -> str:
        return repr(self.original_optimizer)

    def __reduce__(self) -> Any:
        """A copy is one of the user's optimizer, since one of the model isn't the engine's either.

        Torch's own way would wrap `step` of this class in the user's hooks, for all optimizers.
        """
        return _itself, (self.original_optimizer,)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the user's optimizer."""
        return self.original_optimizer.param_groups

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters in these groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity. Assigning it raises AttributeError."""
        return self._engine.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        raise AttributeError(f"noise_multiplier {FIXED}, or use ghostclip.PrivacyEngine(schedule=...)")

    @property
    def max_grad_norm(self) -> float:
        """The L2 bound on one example's contribution to the sum. Assigning it raises AttributeError."""
        return self._engine.clipping.sensitivity

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        raise AttributeError(f"max_grad_norm {FIXED}, or use ghostclip.PrivacyEngine(schedule=...)")

    @property
    def loss_reduction(self) -> str:
        """The reduction that ``make_private`` was given: "mean" or "sum"."""
        return self._loss_reduction

    @property
    def expected_batch_size(self) -> int:
        """The size of the data set over the length of its loader, rounded down; at least 1. Fixed as well."""
        return self._expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: int) -> None:
        raise AttributeError(f"expected_batch_size {FIXED}")

    @property
    def accumulated_iterations(self) -> int:
        """Always 1: each logical batch has one step."""
        return 1

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Calls ``fn(optimizer)`` in each step, between noise and update. It doesn't affect the accountant."""
        self.step_hook = fn

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """States whether the next `step` only clips, as Opacus's BatchMemoryManager does; not needed here.

        The next `step` raises PrivacyError if the statement doesn't agree with the end of the logical batch.
        """
        self._signals.append(do_skip)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips the physical batch and adds it to the sum; after the last one charges, adds noise and updates.

        Args:
            closure: called first, with gradients on; it may run forward and ``loss.backward()``.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            PrivacyError: the call is outside of the loop over the data loader, or this batch had no
                ``loss.backward()``.
            LossShapeError: an output of the model has no dimension with a row for each example.
            GradientLeakError: gradients came from elsewhere than the private loss.
            UnsupportedModelError: the model can't be clipped exactly.
        """
        if "grad_scale" in vars(self):
            del self.grad_scale
            raise PrivacyError(
                "GradScaler scales the losses, so that all gradients are clipped; leave it out, and use bfloat16, or "
                "for float16 ghostclip.PrivacyEngine(loss_scale=...)"
            )
        if self._engine.is_detached:
            return self.original_optimizer.step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if (batch := self._engine.batch) is None:
            raise PrivacyError(BEFORE_STEP)
        if batch.sizes:
            self._gather()
        self._losses.drop()
        more = self._engine.gathered < len(batch.sizes)
        if self._signals and self._signals.pop(0) is not more:
            raise PrivacyError(
                f"signal_skip_step({not more}) was called, but the logical batch is {'not ' if more else ''}over; "
                "batches are split by BatchMemoryManager only, which needs no signals, and are never added up"
            )
        if not more:
            self.original_optimizer.step()
        return result

    def _gather(self) -> None:
        try:
            losses = self._losses.take()
            if losses is None:
                raise PrivacyError(
                    "optimizer.step() was called without loss.backward() of this batch, on a loss computed from what "
                    "the model returned (tensors, or tuples, lists and dicts of them); call it once in each turn of "
                    "the loop over data_loader"
                )
            self._engine.backward(losses)
        except BaseException:
            self._losses.drop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last `step`; clipped sums of an unfinished logical batch stay.

        Args:
            set_to_none: as for torch's optimizers.
        """
        self._losses.drop()
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the user's optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the user's optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the user's optimizer."""
        self.original_optimizer.add_param_group(param_group)

    def _call_step_hook(self, *_: Any) -> None:
        if self.step_hook is not None:
            self.step_hook(self)


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer
