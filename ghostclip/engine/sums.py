"""Where the clipped sums of a logical batch stand until its step. No p.grad holds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.gradient_guard import GradientGuard, have_hooks
from ghostclip.clipper.second_pass import Add
from ghostclip.errors import PrivacyError

__all__ = ["ClippedSums"]

log = logging.getLogger("ghostclip")

T = TypeVar("T")


class ClippedSums:
    """Adds up the clipped sums of physical batches, in float32 or wider, and exchanges them for the private gradient.

    A gradient of someone else's that stands in a p.grad when a logical batch begins is refused. From the first sum on
    every p.grad is None, and what is written there has no effect: `release` overwrites all of them.

    Args:
        clipper: of the model.

    Attributes:
        count: how many physical batches the sums hold.
    """

    def __init__(self, clipper: GhostClipper) -> None:
        self.count = 0
        self._passes = clipper.passes
        # The parameters that layers use, and, where these are others, the shards that the optimizer steps.
        self._named = [(name, p) for name, *pair in clipper.sharding.pairs for p in dict.fromkeys(pair)]
        self._guard = GradientGuard()
        # By a parameter's id, of the current physical batch (or piece of it); and of those before.
        self._new = self._passes.new_sums()
        self._totals = clipper.sharding.totals
        # Held until sums come in their place: freed by zero_grad, memory may go back to the system and come again.
        self._released: list[Tensor | None] = []
        self._warned = False

    def gather(self, backward: Callable[[Add], T], more: bool = False) -> T:
        """Adds the clipped sums that ``backward`` hands to the function it gets. Where it fails, all is as it was.

        Args:
            backward: its result is returned.
            more: what comes next belongs to the same physical batch.

        Raises:
            GradientLeakError: a p.grad holds a gradient of someone else's.
            PrivacyError: a parameter has a hook.
        """
        self.check()
        self._refuse_hooks()
        self._released = []
        self._new.totals.clear()  # which an interruption may have left
        try:
            with self._totals.physical_batch(self._new.add, self._new.totals) as add:
                result = backward(add)
                self._keep(more)
        finally:
            self._new.totals.clear()
        return result

    def _keep(self, more: bool) -> None:
        """Adds what is new and counts it; where that fails all is discarded, since adding can't be undone."""
        try:
            self._totals.add(self._new.totals)
            self.drop_gradients()
            self.count += not more
        except BaseException:
            self.discard()
            raise

    def check(self) -> None:
        """Raises GradientLeakError where someone else filled a p.grad before anything was gathered.

        PrivacyError where sums of a sharded model can't be completed.
        """
        if not self.count and not self._totals:
            self._guard.check(self._named)
        self._totals.check()

    def _refuse_hooks(self) -> None:
        """Raises PrivacyError for a hook on a parameter, which may change its private gradient, or expect one."""
        trained = self._passes.index.trained()
        if have_hooks([parameter for _, parameter in trained]):
            name = next(name for name, parameter in trained if have_hooks([parameter]))
            raise PrivacyError(
                f"the parameter {name!r} has a hook, which would see no gradient: clipped sums aren't delivered to "
                "p.grad before the noise is added; remove it (to train a part of the model, set requires_grad=False on "
                "the rest)"
            )

    @torch.no_grad()
    def release(
        self,
        held: Collection[nn.Parameter],
        make_private: Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]],
    ) -> None:
        """Puts what ``make_private`` makes of the sums, given their parameters, into the p.grads of ``held``.

        Trained parameters that took no part have zeros for a sum, since optimizers skip None and it would have no
        noise. The p.grad of every other parameter becomes None. All ranks call it together for a sharded model, whose
        sums are this rank's shards.
        """
        self._totals.complete()
        stepped = [parameter for parameter in held if parameter.requires_grad]
        try:
            private = make_private(stepped, self.of(stepped))
            self._warn_of_lost()
            self.drop_gradients()
            for parameter, total in zip(stepped, private, strict=True):
                parameter.grad = total.to(parameter.dtype)
            self.remember_released()
        except BaseException:
            # Some may have their noise by now and some not.
            self.drop_gradients()
            raise
        finally:
            self.discard()

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The sums of some of the parameters, float32 or wider; zeros where a parameter took no part."""
        return [self._totals.of(parameter) for parameter in parameters]

    def _warn_of_lost(self) -> None:
        """Logs once that a gradient came between the backward and the step."""
        if self._warned or not self.count:
            return
        name = next((name for name, parameter in self._named if parameter.grad is not None), None)
        if name is not None:
            self._warned = True
            log.warning(
                "a gradient of %r came between engine.backward() and the step and has no effect: the step overwrites "
                "p.grad. Put what is to be minimised into each example's loss",
                name,
            )

    def remember_released(self) -> None:
        """Takes what stands in the p.grads for what a step left there, which needs no zero_grad."""
        self._guard.remember(self._named)
        self._released = [parameter.grad for _, parameter in self._named]

    def is_released(self) -> bool:
        """Whether the p.grads hold nothing but what `release` put there."""
        return self._guard.knows(self._named)

    def drop_gradients(self) -> None:
        """Makes every p.grad None."""
        for _, parameter in self._named:
            parameter.grad = None

    def discard(self) -> None:
        """Drops what was gathered; the p.grads stay as they are."""
        self._new.totals.clear()
        self._totals.clear()
        self.count = 0
