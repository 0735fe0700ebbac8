"""Step after step: from a logical batch through its clipped sums to the noisy gradient that is stepped with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper import ClippingResult, GhostClipper
from ghostclip.clipping import Adaptive
from ghostclip.engine.adaptation import Adaptation
from ghostclip.engine.compiled_steps import CompiledSteps, DrawsAhead, LossFunction
from ghostclip.engine.optimizers import held_parameters, show_scaling, with_closure
from ghostclip.engine.pieces import Pieces
from ghostclip.engine.ranks import Alone
from ghostclip.engine.scaling import LossScaling
from ghostclip.engine.self_check import SelfCheck
from ghostclip.engine.sums import ClippedSums
from ghostclip.engine.turns import Turns
from ghostclip.engine.update_check import UpdateCheck
from ghostclip.engine.weighing import refuse_joint_weights
from ghostclip.errors import LossShapeError, PrivacyError, UnsupportedModelError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.noise import Noise
from ghostclip.sampling import LogicalBatch, UserRows

__all__ = ["LogicalStep", "refuse_second_engine"]

OF_USERS = (
    "with unit_ids, a user's rows lie side by side in the batch, and a layer over [positions x rows, features] parts "
    "them: give it [positions, rows, features] with batch_dim=1, or [rows x positions, features]"
)


class LogicalStep:
    """Follows the logical batches, gathers their clipped sums, and comes between the optimizer and its gradients.

    Args:
        clipper: of the model in training.
        optimizer: gets hooks before and after its step.
        noise: where the noise comes from.
        noise_multiplier: standard deviation of the noise over the sensitivity.
        batch_size: what the noisy sum is divided by; public.
        charge: called once for each step, after all checks and before anything is released; it may refuse by raising.
        self_check: whether the first steps are looked at, see `SelfCheck`.
        scaling: what is known of the scale of losses; None: they come as they are.
        ranks: which train together; None: this process alone.

    Attributes:
        turns: which logical batch is in the making.
        updates: whether parameters moved in steps only.
    """

    def __init__(
        self,
        clipper: GhostClipper,
        optimizer: Optimizer,
        noise: Noise,
        noise_multiplier: float,
        batch_size: int,
        charge: Callable[[], None],
        self_check: bool = True,
        scaling: LossScaling | None = None,
        ranks: Alone | None = None,
    ) -> None:
        self._clipper, self._optimizer, self._noise = clipper, optimizer, noise
        self._noise_multiplier, self.batch_size, self.charge = noise_multiplier, batch_size, charge
        self.owned = set(clipper.model.parameters())
        self._sums = ClippedSums(clipper.model, clipper.passes.reduce_apart())
        policy = clipper.clipping
        self._adaptation = Adaptation(policy, batch_size) if isinstance(policy, Adaptive) else None
        self._self_check = SelfCheck(clipper, optimizer, self_check)
        self._scaling = LossScaling(1.0, optimizer) if scaling is None else scaling
        self._sensitivity = 0.0
        self._stepping = False
        self.updates = UpdateCheck(clipper.model)
        self.turns = Turns(self.updates, Alone() if ranks is None else ranks)
        self.ready, self.current = self.turns.ready, self.turns.current
        self._compiled: CompiledSteps | None = None
        self._pieces = Pieces()
        # Of the physical batch in the making: (first unit, the one after the last, units in all).
        self._piece: tuple[int, int, int] | None = None
        self._undo = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            show_scaling(optimizer),
        ]

    def begin(self, batch: LogicalBatch | None) -> None:
        """A logical batch starts, or none: what an earlier one gathered and didn't release is discarded."""
        self._discard()
        self._stepping = False
        self.turns.begin(batch)
        self._sensitivity = self._clipper.sensitivity
        self._scaling.begin()

    def left(self, batch: LogicalBatch) -> None:
        """A logical batch was left before its last physical one: its sums are discarded, its step will be refused."""
        if batch is self.turns.batch:
            self._discard()

    def abandon(self, failure: BaseException) -> None:
        """Ends the logical batch after a failure wherever in its step: nothing stands in the way of the next one."""
        if isinstance(failure, Exception):
            self.turns.tell(failure)
        self.begin(None)
        self._sums.discard_released()

    def discard(self, batch: LogicalBatch | None) -> None:
        """Ends the logical batch without a release, and charges it; None: whichever had no step."""
        if batch is not None:
            self.turns.refuse_over(batch)
        if self.turns.batch is not None:
            try:
                self.turns.start(discarded=True)
                self.charge()
            finally:
                self.begin(None)
                self.turns.pending = False

    def _discard(self) -> None:
        self._sums.discard()
        if self._adaptation is not None:
            self._adaptation.discard()

    def detach(self) -> None:
        """Discards what was gathered and takes the hooks off the optimizer."""
        self.begin(None)
        for undo in self._undo:
            undo()

    def compile(self, largest: int | None) -> None:
        """Lets `step` compile, for physical batches of at most ``largest`` examples."""
        self._clipper.compile(expected=self.batch_size, largest=largest)
        self._compiled = CompiledSteps(self, self._clipper, self._optimizer)

    def check_between(self, caller: str) -> None:
        """Raises PrivacyError when a logical batch is half done."""
        if self._sums.count:
            raise PrivacyError(
                f"{caller} was called inside of a logical batch, with private sums of {self._sums.count} of its "
                "physical batches gathered, which may not be stored; call it after optimizer.step() or batch.discard()"
            )

    def backward(self, losses: Tensor, retain_graph: bool) -> ClippingResult:
        """Gathers the clipped sum of the physical batch that was handed out last; see `PrivacyEngine.backward`."""
        try:
            self.check_turn()
            losses = self._scaling.unscaled(losses)
            self._check_count(losses)
            self._self_check.backward(losses)
            return self._gather(lambda: self._clipper.backward(self._by_unit(losses), retain_graph=retain_graph))
        except BaseException:
            self.turns.failed()
            raise

    def clip(self, loss_fn: Callable[[nn.Module, Any], Tensor], examples: Any) -> ClippingResult:
        """Forward and `backward` of the physical batch that was handed out last, compiled where that was asked for."""
        self.check_turn()
        if self._users is not None:
            return self.clip_eagerly(loss_fn, examples)

        def checked(model: nn.Module, examples: Any) -> Tensor:
            return self._self_check.forward(loss_fn, examples, self._check_count)

        # A compiled graph is made for the user's own function, and its batches are padded.
        self._self_check.rehearse(checked, examples, compiled=self._clipper.compiled is not None)
        return self._gather(lambda: self._clipper.clip(loss_fn, examples, whole=checked))

    def step(self, batch: LogicalBatch, loss_fn: Callable[[nn.Module, Any], Tensor]) -> list[ClippingResult]:
        """Clips all physical batches, steps the optimizer, ``zero_grad()``; compiled where that was asked for."""
        if self._compiled is not None:
            return self._compiled.step(batch, loss_fn)
        seen = []
        for examples in batch.physical():
            self.compare(loss_fn, examples)
            seen += self.in_pieces(self.clip, loss_fn, examples)
        self.update()
        self._optimizer.zero_grad()
        return seen

    def compare(self, loss_fn: LossFunction, examples: Any) -> None:
        """Compares losses of the physical batch that was handed out last among other examples, if its turn has come."""
        batch = self.current("engine.step()")
        self._clipper.check_whole()  # ranks draw their comparisons themselves, and those of a sharded model would wait
        rows, users = batch.sizes[batch.handed - 1], batch.users[batch.handed - 1]
        self._self_check.compare(loss_fn, examples, rows, rows if users is None else users.users, batch)

    def update(self) -> None:
        """Charges, releases and has the optimizer take its step, even where it has lost the hooks that would do it."""
        self._release()
        self._optimizer.step()
        if self._stepping:
            self._stepped()

    def in_pieces(
        self, clip: Callable[[LossFunction, Any], ClippingResult], loss_fn: LossFunction, examples: Any
    ) -> list[ClippingResult]:
        """``clip`` of the physical batch that was handed out last, in pieces that fit into memory."""
        batch = self.current("engine.step()")
        rows, users = batch.sizes[batch.handed - 1], batch.users[batch.handed - 1]
        units = rows if users is None else users.users

        def work(piece: Any, start: int, stop: int) -> ClippingResult:
            self._piece = start, stop, units
            return clip(loss_fn, piece)

        try:
            return self._pieces.run(work, examples, units, rows)
        finally:
            self._piece = None

    def clip_eagerly(self, loss_fn: Callable[[nn.Module, Any], Tensor], examples: Any) -> ClippingResult:
        """`clip` without compiling."""
        self.check_turn()

        def clip() -> ClippingResult:
            losses = self._by_unit(self._self_check.forward(loss_fn, examples, self._check_count))
            return replace(self._clipper.backward(losses), losses=losses.detach())

        return self._gather(clip)

    def check_turn(self) -> None:
        """Raises PrivacyError unless the physical batch that was handed out last is the next to be gathered."""
        batch = self.current("engine.backward()")
        self._clipper.check_whole()
        if batch.handed != self._sums.count + 1:
            raise PrivacyError(
                f"engine.backward() ran for {self._sums.count} of the {batch.handed} physical batches handed out so "
                "far, so this call is not the one that the last of them needs; call it exactly once in each turn of "
                "`for examples in batch.physical()` (add up several losses of one example first)"
            )
        self.updates.check_within(self._sums.count)

    def _check_count(self, losses: Tensor) -> None:
        """Raises LossShapeError unless there is a loss for each example of the physical batch, as large as it is."""
        self._scaling.refuse_scaled(losses)
        batch = self.current("engine.backward()")
        expected = batch.sizes[batch.handed - 1]
        if self._piece is not None:
            start, stop, units = self._piece
            expected = expected // units * (stop - start)
        if isinstance(losses, Tensor) and losses.dim() == 1 and losses.shape[0] != expected:
            raise LossShapeError(
                f"losses must have one entry for each of the {expected} examples of this physical batch; got "
                f"{losses.shape[0]}. Average or add up several losses of one example, and give examples that are left "
                "out a loss of zero"
            )

    @property
    def _users(self) -> UserRows | None:
        """Whose rows the physical batch that was handed out last has; None where every row is a unit of its own."""
        batch = self.current("engine.backward()")
        users = batch.users[batch.handed - 1]
        return users if users is None or self._piece is None else users.part(*self._piece[:2])

    def _by_unit(self, losses: Tensor) -> Tensor:
        """The losses of the units of privacy, [examples] or [users]."""
        return losses if self._users is None else self._users.add_up(losses)

    def _gather(self, clip: Callable[[], ClippingResult]) -> ClippingResult:
        def clipped() -> ClippingResult:
            try:
                result = clip()
            except UnsupportedModelError as error:
                raise error if self._users is None else UnsupportedModelError(f"{error}; {OF_USERS}") from error
            refuse_joint_weights(self._clipper.clipping, result.norms)
            # Before the sums count as gathered, lest an interruption part them from their noise.
            self._sensitivity = max(self._sensitivity, result.sensitivity)
            return result

        piece = self._piece
        result = self._sums.gather(clipped, apart=piece is not None, more=piece is not None and piece[1] < piece[2])
        if result.losses is not None and self._users is None:
            self._check_count(result.losses)
        if self._adaptation is not None:
            self._adaptation.saw(result.norms)
        self.current("engine.backward()").failed = False
        return result

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
        self._sums.remember_released()
        self.updates.accept()
        self._self_check.stepped()

    @keeping_grad_mode
    def _release(self) -> None:
        """Checks everything, charges, and only then turns the clipped sums into the private gradient."""
        # The step of an optimizer's subclass that calls its parent's comes here twice, the release still in place.
        if self._stepping and self._sums.is_released():
            return
        try:
            held, said = self.turns.agreed(self.check, self._facts)
            self._sensitivity = max([self._sensitivity, *(each["sensitivity"] for each in said)])
            self.spend()
            self.put_in_place(held, self._make_private)
        except BaseException:
            self.turns.failed()
            raise

    def spend(self) -> None:
        """Charges the step, by which the parameters may move from now on."""
        self.charge()
        self.updates.expect()

    def _facts(self) -> dict[str, Any]:
        """What ranks tell each other before a step."""
        held = held_parameters(self.owned, self._optimizer)
        sizes = [p.numel() for p in held if p.requires_grad or p.grad is not None]
        same: dict[str, Any] = {"whether the batch is discarded": False}
        same["the sample (a digest of it)"] = self.current("optimizer.step()").digest
        same["what is trained"] = sizes
        return {"sensitivity": self._sensitivity, "same": same}

    def check(self, missing: int = 0) -> dict[nn.Parameter, None]:
        """The optimizer's parameters; raises GradientLeakError or PrivacyError unless all is ready for a release.

        Args:
            missing: physical batches that are still to be gathered.
        """
        batch = self.current("optimizer.step()")
        if self._sums.count + missing != len(batch.sizes):
            if batch.handed < len(batch.sizes):
                raise PrivacyError(
                    f"optimizer.step() was called after {batch.handed} of the {len(batch.sizes)} physical batches of "
                    "this logical batch; call it after engine.backward() for each one of `batch.physical()` (a "
                    "logical batch that is left early is discarded)"
                )
            raise PrivacyError(
                f"optimizer.step() was called, but engine.backward() ran for {self._sums.count} of the "
                f"{len(batch.sizes)} physical batches of this logical batch; call it for each of them (a plain "
                ".backward() doesn't count)"
            )
        held = held_parameters(self.owned, self._optimizer)
        self.updates.check_model()
        self.updates.check_within(self._sums.count)
        self._scaling.before_step()
        self._sums.check()
        return held

    def put_in_place(
        self, held: dict[nn.Parameter, None], make_private: Callable[[list[Tensor]], list[Tensor]]
    ) -> None:
        """Ends the logical batch, charged, with its private gradient in the p.grads, for the optimizer's own step."""
        self.turns.end()
        self._sums.release(held, make_private)
        self._stepping, self.turns.pending = True, False
        self._self_check.released(held)

    def _make_private(self, sums: list[Tensor]) -> list[Tensor]:
        std = self._noise_multiplier * self._sensitivity
        if self._adaptation is not None:
            return self._adaptation.release(sums, std, self._noise)
        return self._noise.release(sums, std, self.batch_size)

    def fill_with_noise(self, out: Tensor) -> None:
        """Overwrites ``out`` [n] with the noise of this logical batch's release, divided as its sums will be."""
        fill = self._noise.fill  # type: ignore[attr-defined]
        fill(out, self._noise_multiplier * self._sensitivity / self.batch_size)

    def sums_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """What was gathered for the parameters."""
        return self._sums.of(parameters)

    @property
    def draws_ahead(self) -> bool:
        """Whether noise can be had before the sums are there."""
        return self._adaptation is None and isinstance(self._noise, DrawsAhead)

    @property
    def sensitivity(self) -> float:
        """Of what the logical batch in the making has gathered."""
        return self._sensitivity

    @property
    def watched(self) -> bool:
        """Whether the first steps were looked at, and found right."""
        return self._self_check.over

    def updated(self) -> None:
        """Ends the logical batch, charged and stepped with, without gradients ever having been in place."""
        self._sums.discard()
        self.turns.end()
        self.turns.pending = False
        self._sums.remember_released()
        self.updates.accept()


def refuse_second_engine(optimizer: Optimizer) -> None:
    """Raises PrivacyError when an engine's hooks are on the optimizer already."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), LogicalStep) for hook in hooks):
        raise PrivacyError(
            "another PrivacyEngine is attached to this optimizer, and two would add noise and charge twice; call its "
            "detach(), or build a new optimizer"
        )
