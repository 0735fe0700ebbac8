"""Checks that p.grads hold clipped sums only, and finds parameters with gradient hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ghostclip.errors import GradientLeakError, PrivacyError
from ghostclip.sharding.plain import local_part

__all__ = ["GradientGuard", "refuse_hooks", "with_hook"]


class GradientGuard:
    """Knows each p.grad it has seen filled, by identity and version, and refuses any other that isn't zero.

    Attributes:
        excess: how much rounding adds to one example's share of clipped sums in p.grads narrower than float32. A
            backward rounds its float32 sum to the parameter's type once, and adding it to what stands in p.grad rounds
            once more. Each error is at most half a unit in the last place (eps / 2) of a sum of at most n gradients of
            norm C. With and without one of n examples, k backwards leave p.grads that differ by at most C (1 + excess),
            to first order, for an excess of k n eps; 0 where no p.grad is narrow.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.excess = 0.0
        self._backwards = self._examples = 0

    def _is_known(self, grad: Tensor) -> bool:
        """Whether ``grad`` is exactly what `remember` last saw, untouched since."""
        known = self._known.get(id(grad))
        return known is not None and known[0]() is grad and known[1] == grad._version

    def knows(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> bool:
        """Whether every p.grad is None or as `remember` last saw it."""
        for _, parameter in parameters:  # asked in each step, so without a call for each
            if (grad := parameter.grad) is not None:
                reference, version = self._known.get(id(grad), (None, 0))
                if reference is None or reference() is not grad or version != grad._version:
                    return False
        return True

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raises GradientLeakError when a p.grad holds anything but zeros that this guard doesn't know."""
        for name, parameter in parameters:
            if (
                (grad := parameter.grad) is not None
                and not self._is_known(grad)
                and bool(torch.count_nonzero(local_part(grad)))
            ):
                raise GradientLeakError(
                    f"the gradient of {name!r} was filled or changed by something other than per-example clipping (a "
                    "plain .backward(), an assignment, gradient clipping or scaling), so no example's part is bounded; "
                    "call optimizer.zero_grad() and use the clipper's or engine's backward only (a penalty on the "
                    "weights belongs in each example's loss, or is the optimizer's weight_decay; the loss of another "
                    "network that goes through this one, as a generator's through its discriminator, wants this one "
                    "frozen meanwhile)"
                )

    def remember(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Tensor]:
        """Takes every p.grad as it is now for known, and returns those there are."""
        self._known, grads = {}, []
        for _, parameter in parameters:
            if (grad := parameter.grad) is not None:
                self._known[id(grad)] = (weakref.ref(grad), grad._version)
                grads.append(grad)
        return grads

    def note_rounding(self, parameters: Iterable[tuple[str, nn.Parameter]], examples: int) -> None:
        """Before a backward of so many examples: what rounding to narrow p.grads may add to an example's share."""
        narrow = [parameter for _, parameter in parameters if torch.finfo(parameter.dtype).bits < 32]
        if not narrow:
            return
        if not any(parameter.grad is not None and self._is_known(parameter.grad) for parameter in narrow):
            self._backwards = self._examples = 0
        self._backwards, self._examples = self._backwards + 1, self._examples + examples
        self.excess = self._backwards * self._examples * max(torch.finfo(parameter.dtype).eps for parameter in narrow)


def with_hook(parameters: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """The name of the first parameter with a gradient hook; None where there is none."""
    for name, parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return name
    return None


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises PrivacyError where a parameter has a hook, which might change its private gradient."""
    if (name := with_hook(parameters)) is not None:
        raise PrivacyError(
            f"the parameter {name!r} has a hook, which would see no gradient: clipped sums aren't delivered to p.grad "
            "before the noise is added; remove it (to train a part of the model, set requires_grad=False on the rest)"
        )
