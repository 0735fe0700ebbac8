"""From clipped sums to the noisy gradient: checks, the charge, one draw of noise, and the optimizer's own update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipping import Adaptive, Policy
from ghostclip.engine.adaptation import Adaptation
from ghostclip.engine.micro_batching import MicroBatches
from ghostclip.engine.optimizers import held_parameters, show_scaling, with_closure
from ghostclip.engine.scaling import LossScaling
from ghostclip.engine.self_check import SelfCheck
from ghostclip.engine.sums import ClippedSums
from ghostclip.engine.turns import Turns
from ghostclip.engine.update_check import UpdateCheck
from ghostclip.errors import PrivacyError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.noise import Noise

__all__ = ["Release"]


@runtime_checkable
class DrawsAhead(Protocol):
    """Noise that can be had before the sums are there, as an input of a compiled step."""

    def fill(self, out: Tensor, std: float) -> None:
        """Overwrites ``out`` [n], contiguous, with the noise of one release; zeros when ``std`` is 0."""


class Release:
    """Comes between the optimizer and its gradients: one release of noisy sums for each logical batch, charged before.

    Args:
        model: in training.
        optimizer: gets hooks before and after its step.
        policy: of clipping.
        noise: where the noise comes from.
        noise_multiplier: standard deviation of the noise over the sensitivity.
        batch_size: what the noisy sum is divided by; public.
        charge: called once for each step, after all checks and before anything is released; it may refuse by raising.
        sums: what was gathered.
        turns: which logical batch is in the making.
        updates: whether parameters moved in steps only.
        self_check: watches the first update.
        scaling: what is known of the scale of losses.
        micro_batches: of which ranks agree on the size.

    Attributes:
        batch_size, charge, sums, turns, updates: as given.
        sensitivity: of what the logical batch in the making has gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: Any,
        noise: Noise,
        noise_multiplier: float,
        batch_size: int,
        charge: Callable[[], None],
        *,
        sums: ClippedSums,
        turns: Turns,
        updates: UpdateCheck,
        self_check: SelfCheck,
        scaling: LossScaling,
        micro_batches: MicroBatches,
    ) -> None:
        self._optimizer, self._noise, self._noise_multiplier = optimizer, noise, noise_multiplier
        self.batch_size, self.charge = batch_size, charge
        self.sums, self.turns, self.updates = sums, turns, updates
        self._self_check, self._scaling, self._micro_batches = self_check, scaling, micro_batches
        self._owned = set(model.parameters())
        self._adaptation = Adaptation(policy, batch_size) if isinstance(policy, Adaptive) else None
        self.sensitivity = 0.0
        self._stepping = False
        self._undo = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            show_scaling(optimizer),
        ]

    def begin(self, policy: Policy | Any) -> None:
        """A logical batch starts, or none."""
        self.discard()
        self._stepping = False
        self.sensitivity = policy.sensitivity
        self._scaling.begin()

    def discard(self) -> None:
        """What was gathered is dropped."""
        self.sums.discard()
        if self._adaptation is not None:
            self._adaptation.discard()

    def detach(self) -> None:
        """Takes the hooks off the optimizer."""
        for undo in self._undo:
            undo()

    def saw(self, norms: Tensor) -> None:
        """The norms [B] of a physical batch that was gathered."""
        if self._adaptation is not None:
            self._adaptation.saw(norms)

    def update(self) -> None:
        """Charges, releases and has the optimizer take its step, even where it has lost the hooks that would do it."""
        self._release()
        self._optimizer.step()
        if self._stepping:
            self._stepped()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's pre-hook: the noise comes now, or right after the closure."""
        try:
            replaced = with_closure(args, kwargs, self._release)
            if replaced is None:
                self._release()
            return replaced
        except BaseException:
            self.turns.failed()
            raise

    @keeping_grad_mode
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's post-hook."""
        self.turns.check_released()
        self._stepped()

    def _stepped(self) -> None:
        """The update took place: the parameters are what was released."""
        self._stepping = False
        self.sums.remember_released()
        self.updates.accept()
        self._self_check.stepped()

    @keeping_grad_mode
    def _release(self) -> None:
        """Checks everything, charges, and only then turns the clipped sums into the private gradient."""
        # The step of an optimizer's subclass that calls its parent's comes here twice, the release still in place.
        if self._stepping and self.sums.is_released():
            return
        try:
            held, said = self.turns.agreed(self.check, self._facts)
            self._micro_batches.agree([each["most examples that fit"] for each in said])
            self.sensitivity = max([self.sensitivity, *(each["sensitivity"] for each in said)])
            self.spend()
            self.put_in_place(held, self._make_private)
        except BaseException:
            self.turns.failed()
            raise

    def _facts(self) -> dict[str, Any]:
        """What ranks tell each other before a step."""
        held = held_parameters(self._owned, self._optimizer)
        sizes = [p.numel() for p in held if p.requires_grad or p.grad is not None]
        same: dict[str, Any] = {"whether the batch is discarded": False}
        same["the sample (a digest of it)"] = self.turns.current("optimizer.step()").digest
        same["what is trained"] = sizes
        most = self._micro_batches.most
        return {"sensitivity": self.sensitivity, "most examples that fit": most, "same": same}

    def check(self, missing: int = 0) -> dict[nn.Parameter, None]:
        """The optimizer's parameters; raises GradientLeakError or PrivacyError unless all is ready for a release.

        Args:
            missing: physical batches that are still to be gathered.
        """
        batch, gathered = self.turns.current("optimizer.step()"), self.sums.count
        if gathered + missing != len(batch.sizes):
            if batch.handed < len(batch.sizes):
                raise PrivacyError(
                    f"optimizer.step() was called after {batch.handed} of the {len(batch.sizes)} physical batches of "
                    "this logical batch; call it after engine.backward() for each one of `batch.physical()` (a "
                    "logical batch that is left early is discarded)"
                )
            raise PrivacyError(
                f"optimizer.step() was called, but engine.backward() ran for {gathered} of the {len(batch.sizes)} "
                "physical batches of this logical batch; call it for each of them (a plain .backward() doesn't count)"
            )
        held = held_parameters(self._owned, self._optimizer)
        self.updates.check_model()
        self.updates.check_within(gathered)
        self._scaling.before_step()
        self.sums.check()
        return held

    def spend(self) -> None:
        """Charges the step, by which the parameters may move from now on."""
        self.charge()
        self.updates.expect()

    def put_in_place(
        self, held: dict[nn.Parameter, None], make_private: Callable[[list[Tensor]], list[Tensor]]
    ) -> None:
        """Ends the logical batch, charged, with its private gradient in the p.grads, for the optimizer's own step."""
        self.turns.end()
        self.sums.release(held, make_private)
        self._stepping, self.turns.pending = True, False
        self._self_check.released(held)

    def _make_private(self, sums: list[Tensor]) -> list[Tensor]:
        std = self._noise_multiplier * self.sensitivity

        def release(every: list[Tensor]) -> list[Tensor]:
            return self.turns.ranks.released(lambda totals: self._noise.release(totals, std, self.batch_size), every)

        return release(sums) if self._adaptation is None else self._adaptation.release(sums, std, release)

    @property
    def draws_ahead(self) -> bool:
        """Whether noise can be had before the sums are there."""
        return self._adaptation is None and isinstance(self._noise, DrawsAhead)

    def fill_with_noise(self, out: Tensor) -> None:
        """Overwrites ``out`` [n] with the noise of this logical batch's release, divided as its sums will be."""
        fill = self._noise.fill  # type: ignore[attr-defined]
        fill(out, self._noise_multiplier * self.sensitivity / self.batch_size)

    def updated(self) -> None:
        """Ends the logical batch, charged and stepped with, without gradients ever having been in place."""
        self.sums.discard()
        self.turns.end()
        self.turns.pending = False
        self.sums.remember_released()
        self.updates.accept()
