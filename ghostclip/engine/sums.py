"""Where the clipped sums of a logical batch wait for its step, and the check that nothing else changed them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ghostclip.clipper.layout import local_part
from ghostclip.errors import GradientLeakError, PrivacyError

__all__ = ["ClippedSums"]

T = TypeVar("T")
# Types in which sums are gathered as they are.
WIDE = (torch.float32, torch.float64)
# Each parameter's p.grad and its version.
Snapshot = list[tuple[Tensor | None, int]]
Named = list[tuple[str, nn.Parameter]]


class ClippedSums:
    """Watches the p.grads of a model by identity and version while clipped sums are gathered in them.

    Sums of float32 and float64 parameters stay in p.grad. Those of narrower ones are gathered in float32 beside it:
    there physical batches are added up, then the noise, and the result is rounded once.

    Args:
        model: whose parameters are watched.
        exact: where a backward leaves its sums for narrow parameters, by id, before they are rounded; emptied before.

    Attributes:
        count: how many physical batches the sums hold.
    """

    def __init__(self, model: nn.Module, exact: dict[int, Tensor] | None = None) -> None:
        self.count = 0
        self._exact = {} if exact is None else exact
        self._named = list(model.named_parameters())
        # Those whose p.grads get what is released: others where layers use whole Parameters in the place of shards.
        self._stepped = self._named
        self._wide: dict[nn.Parameter, Tensor] = {}
        self._known: Snapshot = []
        self._released: Snapshot = []

    def gather(self, backward: Callable[[], T], more: bool = False) -> T:
        """Runs ``backward``, which adds clipped sums to the p.grads. Where it fails, all is as it was.

        Args:
            backward: its result is returned.
            more: what comes next belongs to the same physical batch.

        Raises:
            GradientLeakError: a p.grad is not what it was after the backward before.
            PrivacyError: zero_grad was forgotten after the last step.
        """
        self.check()
        before = [parameter.grad for _, parameter in self._named]
        undo: Callable[[], None] = partial(self._put_back, before)
        try:
            _drop(parameter for _, parameter in self._named)
            # Not every way to the sums leaves them there, and what another backward left is not this one's.
            self._exact.clear()
            result = backward()
            narrow = {
                p: self._exact.get(id(p), p.grad).float()
                for _, p in self._named
                if p.grad is not None and p.dtype not in WIDE
            }
            undo = self._discard_all  # adding can't be undone
            self._add(before, narrow)
            self._known = self._snapshot(self._named)
            self.count += not more
        except BaseException:
            undo()
            raise
        return result

    def _put_back(self, grads: list[Tensor | None]) -> None:
        for (_, parameter), grad in zip(self._named, grads, strict=True):
            parameter.grad = grad

    @torch.no_grad()
    def _add(self, before: list[Tensor | None], narrow: dict[nn.Parameter, Tensor]) -> None:
        """Adds what came now to what stood in the p.grads ``before``, or, for ``narrow`` ones, stands beside them."""
        sums, added = [], []
        for (_, parameter), old in zip(self._named, before, strict=True):
            new = parameter.grad
            if parameter in narrow:
                amount = narrow[parameter]
                self._wide[parameter] = self._wide[parameter].add_(amount) if parameter in self._wide else amount
            elif old is not None:
                parameter.grad = old
                if new is not None:
                    sums.append(old)
                    added.append(new)
        if sums:
            torch._foreach_add_(sums, added)

    def check(self) -> None:
        """Raises GradientLeakError or PrivacyError unless the p.grads hold what was gathered here, and nothing else."""
        if self._known:
            if (name := self._changed_since(self._known, self._named)) is not None:
                raise GradientLeakError(
                    f"the gradient of {name!r} was changed between engine.backward() and the step (by zero_grad, a "
                    "plain .backward(), an assignment, gradient clipping or scaling), so it isn't the clipped sum any "
                    "more; leave p.grad alone there, and call optimizer.zero_grad() after optimizer.step()"
                )
            return
        # Before the first backward, and in a batch without examples, nobody may have put anything there.
        for (name, parameter), (grad, version) in zip(self._stepped, self._released, strict=False):
            if grad is not None and parameter.grad is grad and grad._version == version:
                raise PrivacyError(
                    f"the gradient of {name!r} is still the one of the last step; call optimizer.zero_grad() after "
                    "each optimizer.step()"
                )
        for name, parameter in self._all:
            if parameter.grad is not None and bool(torch.count_nonzero(local_part(parameter.grad))):
                raise GradientLeakError(
                    f"the gradient of {name!r} was filled by something other than per-example clipping (a plain "
                    ".backward() or an assignment), so it isn't bounded for any example; call optimizer.zero_grad(), "
                    "and engine.backward() only"
                )

    @torch.no_grad()
    def release(
        self,
        held: Collection[nn.Parameter],
        make_private: Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]],
    ) -> None:
        """Leaves what ``make_private`` makes of the sums, given their parameters, in the p.grads of ``held``.

        Trained parameters without a gradient get zeros first, since optimizers skip None and it would have no noise;
        sums of parameters that aren't held are dropped.
        """
        stepped = [p for p in held if p.requires_grad or p.grad is not None]
        sums = self.of(stepped)
        try:
            for parameter, total in zip(stepped, make_private(stepped, sums), strict=True):
                parameter.grad = total if total.dtype == parameter.dtype else total.to(parameter.dtype)
            _drop(p for _, p in self._all if p not in held)
            self._forget()
            self._released = self._snapshot(self._stepped)
        except BaseException:
            # Some may have their noise by now and some not.
            self._discard_all()
            raise

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The sums of some of the parameters, float32 or wider; zeros where a parameter took no part."""
        return [self._sum_of(parameter) for parameter in parameters]

    def remember_released(self) -> None:
        """Notes what a step left in the p.grads, by which a forgotten zero_grad is recognised."""
        self._released = self._snapshot(self._stepped)

    def is_released(self) -> bool:
        """Whether the p.grads are what `release` left there."""
        return bool(self._released) and not self._known and self._changed_since(self._released, self._stepped) is None

    def discard(self) -> None:
        """Drops what was gathered; a p.grad that holds something of someone else's is left to be complained about."""
        self._drop_those_in(self._known, self._named)
        self._forget()

    def discard_released(self) -> None:
        """Drops what a step left in the p.grads, as zero_grad would."""
        self._drop_those_in(self._released, self._stepped)
        self._released = []

    def _drop_those_in(self, snapshot: Snapshot, named: Named) -> None:
        _drop(p for (_, p), (grad, _) in zip(named, snapshot, strict=False) if p.grad is grad)

    @property
    def _all(self) -> Named:
        return self._named if self._stepped is self._named else [*self._named, *self._stepped]

    def _discard_all(self) -> None:
        _drop(parameter for _, parameter in self._all)
        self._forget()

    def _forget(self) -> None:
        self._wide.clear()
        self._known = []
        self.count = 0

    def _snapshot(self, named: Named) -> Snapshot:
        grads = [parameter.grad for _, parameter in named]
        return [(grad, 0 if grad is None else grad._version) for grad in grads]

    def _changed_since(self, snapshot: Snapshot, named: Named) -> str | None:
        """The name of a parameter whose p.grad is another, or another version, than in the snapshot."""
        for (name, parameter), (grad, version) in zip(named, snapshot, strict=True):
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                return name
        return None

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        found = parameter.grad if parameter.dtype == wide else self._wide.get(parameter)
        return torch.zeros_like(parameter, dtype=wide) if found is None else found


def _drop(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
