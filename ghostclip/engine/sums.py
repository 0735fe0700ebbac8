"""Where the clipped sums of a logical batch stand until its step. No p.grad holds them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch import Tensor, nn

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.gradient_guard import GradientGuard, refuse_hooks
from ghostclip.clipper.second_pass import Add
from ghostclip.errors import PrivacyError

__all__ = ["ClippedSums"]

log = logging.getLogger("ghostclip")


class ClippedSums:
    """Adds up the clipped sums of physical batches, in float32 or wider, and exchanges them for the private gradient.

    A gradient of someone else's that stands in a p.grad when a logical batch begins is refused. From the first sum on
    every p.grad is None, and what is written there has no effect: `put_in_place` overwrites all of them. ``count`` is
    the number of physical batches that the sums hold.
    """

    def __init__(self, clipper: GhostClipper) -> None:
        self.count = 0
        self._passes = clipper.passes
        # The parameters that layers use, and, where these are others, the shards that the optimizer steps.
        self._named = [(name, p) for name, *pair in clipper.sharding.pairs for p in dict.fromkeys(pair)]
        self._guard = GradientGuard()
        # By a parameter's id, of the physical batches before.
        self._totals = clipper.sharding.totals
        # Held until sums come in their place: freed by zero_grad, memory may go back to the system and come again.
        self._released: list[Tensor] = []
        # Ids of the parameters that the sums are of; none before the first sum.
        self._trained: list[int] = []
        self._warned = False

    @contextmanager
    def physical_batch(self, more: bool) -> Iterator[Add]:
        """A context for the passes over a physical batch; yields the function that adds a clipped sum.

        Where a pass raises, the sums of earlier physical batches stay as they were.

        Args:
            more: what comes next belongs to the same physical batch.

        Raises:
            GradientLeakError: a p.grad holds a gradient of someone else's.
            PrivacyError: a parameter has a hook, or others are trained than in the physical batch before.
        """
        trained = self.check()
        refuse_hooks(trained)
        self._trained = self._trained or _ids(trained)
        self._released = []
        new = self._passes.new_sums()
        try:
            with self._totals.physical_batch(new.add, new.totals) as add:
                yield add
                try:
                    self._totals.add(new.totals)
                    self.drop_gradients()
                    self.count += not more
                except BaseException:  # adding can't be undone
                    self.discard()
                    raise
        finally:  # also while an exception's traceback is kept
            new.totals.clear()

    def check(self) -> list[tuple[str, nn.Parameter]]:
        """(name, Parameter) of those that are trained now.

        Raises:
            GradientLeakError: someone else filled a p.grad before anything was gathered.
            PrivacyError: sums of a sharded model can't be completed, or are of other parameters than are trained now.
        """
        if not self.count and not self._totals:
            self._guard.check(self._named)
        self._totals.check()
        trained = self._passes.index.trained()
        if self._trained and self._trained != _ids(trained):
            raise PrivacyError(
                "other parameters are trained than when the first gradients of this logical batch were clipped; change "
                "requires_grad between two batches of engine.batches()"
            )
        return trained

    def complete(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """See `Totals.complete`."""
        return self._totals.complete(parameters)

    @torch.no_grad()
    def put_in_place(self, parameters: Sequence[nn.Parameter], private: Sequence[Tensor]) -> None:
        """Puts private gradients into the p.grads in place of the sums; every other p.grad becomes None."""
        for name, parameter in self._named if self.count and not self._warned else ():
            if parameter.grad is not None and not self._warned:
                self._warned = True
                log.warning(
                    "a gradient of %r came between engine.backward() and the step and has no effect: the step "
                    "overwrites p.grad. Put what is to be minimised into each example's loss",
                    name,
                )
        self.drop_gradients()
        for parameter, gradient in zip(parameters, private, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.remember_released()
        self.discard()

    def remember_released(self) -> None:
        """Takes what stands in the p.grads for what a step left there, which needs no zero_grad."""
        self._released = self._guard.remember(self._named)

    def is_released(self) -> bool:
        """Whether the p.grads hold nothing but what `put_in_place` put there."""
        return self._guard.knows(self._named)

    def drop_gradients(self) -> None:
        """Makes every p.grad None."""
        for _, parameter in self._named:
            parameter.grad = None

    def discard(self) -> None:
        """Drops what was gathered; the p.grads stay as they are."""
        self._totals.clear()
        self._trained = []
        self.count = 0


def _ids(trained: Sequence[tuple[str, nn.Parameter]]) -> list[int]:
    return [*map(id, map(itemgetter(1), trained))]
