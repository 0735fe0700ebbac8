"""From clipped sums to the noisy gradient: checks, the charge, one draw of noise, and the optimizer's update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper import ClippingResult, GhostClipper
from ghostclip.clipping import Composed, GlobalNoise
from ghostclip.clipping.choice import adapts
from ghostclip.engine.adaptation import Adaptation
from ghostclip.engine.distributed import Ranks
from ghostclip.engine.loss_scaling import SCALED, LossScaling, show_scaling
from ghostclip.engine.micro_batching import MicroBatches
from ghostclip.engine.notices import Notices
from ghostclip.engine.optimizers import hook_first, with_closure
from ghostclip.engine.step_plan import StepSettings
from ghostclip.engine.sums import ClippedSums
from ghostclip.engine.update_check import UpdateCheck, held_parameters
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.noise import Noise
from ghostclip.sampling import BatchState, LogicalBatch
from ghostclip.self_check import SelfCheck
from ghostclip.sharding.plain import is_distributed
from ghostclip.traces import StepTrace

__all__ = ["Release", "refuse_second_engine"]

NO_STEP = (
    "the logical batch before this one had no step: end each turn of `for batch in engine.batches()` with engine.step, "
    "with the step of the engine's own optimizer after `for examples in batch.physical()`, or with batch.discard(), "
    "which charges it (engine.batches().discard() where it is out of reach: an exception's traceback, or a variable, "
    "may hold its loop). To accumulate gradients, give the whole batch as batch_size= and what fits into memory as "
    "max_physical_batch_size="
)
LEFT = (
    "a logical batch was left before its step, by an exception or a break, and is not charged; call batch.discard(), "
    "which charges it, where a batch is left for what is in it"
)
log = logging.getLogger("ghostclip")


class Release:
    """Hooks the optimizer's step: charges the logical batch, adds noise to its sums, fills ``p.grad``.

    Args:
        noise, noise_multiplier: of the engine; 0: no noise in any step.
        settings: from a step's number to its noise, batch size and thresholds.
        charge: called with them once for each step, after all checks and before anything is released; it may refuse.
        scaling, ranks, micro_batches: of the engine; None: losses as they are, in this process alone, in one piece.

    Attributes:
        settings: of the logical batch handed out last, at first those of the first step.
        sums: what was gathered.
        updates: whether parameters moved in steps only.
        sensitivity: of what the current logical batch has gathered.
        batch: the current one, from when it is handed out until its step was taken, or missed; else None.
        self_check: watches the first steps.
        trace: observes steps, or None.
    """

    self_check: SelfCheck
    trace: StepTrace | None = None

    def __init__(
        self,
        clipper: GhostClipper,
        optimizer: Optimizer,
        noise: Noise,
        noise_multiplier: float,
        settings: Callable[[int], StepSettings],
        charge: Callable[[StepSettings], None],
        scaling: LossScaling | None = None,
        ranks: Ranks | None = None,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        self.clipper, self.optimizer = clipper, optimizer
        self._noise, self._noise_multiplier = noise, noise_multiplier
        self._settings_at, self.charge = settings, charge
        self.settings = settings(0)
        self.scaling = LossScaling(1.0, optimizer) if scaling is None else scaling
        self.micro_batches = MicroBatches() if micro_batches is None else micro_batches
        self.ranks = Ranks() if ranks is None else ranks
        self.ranks.sharding = clipper.sharding
        self.sums, self.updates = ClippedSums(clipper), UpdateCheck(clipper.model, clipper.sharding)
        self._notices = Notices(clipper.model, optimizer, self.ranks.leads)
        self._owned = set(clipper.model.parameters())
        policy: Any = clipper.clipping
        self._adaptation = Adaptation(policy) if adapts(policy) else None
        self._allocated = isinstance(policy, Composed) and type(policy.noise) is not GlobalNoise
        self.noise_shares()  # which refuses standard deviations that don't fit the noise multiplier
        self.sensitivity = 0.0
        self.batch: LogicalBatch | None = None
        # How the last one ended, until the next begins. It isn't held itself: it holds the workers of its data loader.
        self._ended: BatchState | None = None
        self._undo = [
            hook_first(optimizer, self._before_step),  # others see what it releases
            optimizer.register_step_post_hook(self._after_step).remove,
            show_scaling(optimizer),
        ]

    # Whose turn it is.

    @property
    def state(self) -> BatchState | None:
        """Of the logical batch handed out last; None before the first one, and after one that was forgotten."""
        return self._ended if self.batch is None else self.batch.state

    def _end(self, state: BatchState) -> None:
        """The logical batch, if there is one, ends in this state."""
        if self.batch is not None:
            self.batch.state = self._ended = state
            self.batch = None

    def ready(self, left: bool) -> None:
        """Raises PrivacyError unless the next logical batch may be taken.

        The one before must have had its step, or have been left by an exception: one that came up in the engine, or one
        by which the loop over its physical batches, and then that over ``engine.batches()``, was ``left``. Nothing
        tells a break from it.
        """
        try:
            self.updates.check()
            if self.state is BatchState.COMPLETE or (self.state is BatchState.ACCUMULATING and not left):
                raise PrivacyError(NO_STEP)
            if self.state is BatchState.ACCUMULATING:
                log.warning(LEFT)
        except PrivacyError as problem:
            # Other ranks may be in the step of the batch that isn't taken here.
            self.ranks.refuse_next(problem)
            raise

    def begin(self, batch: LogicalBatch | None) -> None:
        """Makes ``batch`` the current logical batch, None: no batch. Sums that weren't released are discarded."""
        self.discard()
        self.clipper.sharding.reshard()
        left, charged = self.lacks_step, self.state is BatchState.CHARGED
        self._end(BatchState.LEFT if left else BatchState.CHARGED if charged else BatchState.STEPPED)
        self._ended = BatchState.LEFT if left else None
        self.ranks.begin()
        if batch is not None:
            if self.clipper.sharding.sharded:  # whose layers have whole Parameters from here on, on all ranks
                self.ranks.agree({"same": {"whether a logical batch begins": True}}, last=False)
                self.clipper.sharding.unshard()
            self.batch, self.settings = batch, self._settings_at(batch.step_number)
            self.updates.begin()
        self.clipper.passes.threshold_factor = self.settings.threshold_factor
        self.sensitivity = self.clipper.passes.sensitivity
        self.scaling.begin()
        if self.trace is not None:
            self.trace.begin()

    def forget(self) -> None:
        """Ends the logical batch, whatever its state, without a charge of its own; it doesn't come again."""
        self.begin(None)
        self._ended = None
        self._notices.forget()

    def discard(self) -> None:
        """Drops the sums and counts that were gathered; charges nothing."""
        self.sums.discard()
        self._notices.begin()
        if self._adaptation is not None:
            self._adaptation.discard()

    def renew_settings(self) -> None:
        """Takes the settings of the mechanism that has just begun; they hold until the next logical batch begins."""
        self.settings = self._settings_at(0)

    def failed(self, failure: BaseException) -> None:
        """An exception came up in the engine: the batch may be left without its step.

        Where the budget has no room for it, its sums are dropped: the model can be saved.
        """
        if self.batch is not None and self.batch.state.is_open:
            self.batch.state = BatchState.FAILED
        if isinstance(failure, BudgetExceededError):
            self.discard()
            self.clipper.sharding.reshard()

    @property
    def lacks_step(self) -> bool:
        """Whether the logical batch handed out last was not charged."""
        return self.state is BatchState.LEFT if self.batch is None else self.batch.state.is_open

    def current(self, caller: str) -> LogicalBatch:
        """The logical batch that may have its step; raises PrivacyError, which names the caller, when there is none."""
        if self.batch is None or not self.batch.state.is_open:
            if self.state is BatchState.STEPPED:
                raise PrivacyError(
                    f"{caller} was called twice for one logical batch, or after its step: each batch of "
                    "engine.batches() has one step, and nothing belongs to it after that"
                )
            raise PrivacyError(
                f"{caller} was called without a logical batch of its own, so nothing could be accounted for; call it "
                "once for each batch (not one of a DataLoader of yours), inside of `for batch in engine.batches()`"
            )
        return self.batch

    def start(self, discarded: bool) -> None:
        """All ranks begin a step, or discard the batch; raises PrivacyError where some do the other, or refuse."""
        if self.ranks.size > 1:
            self.ranks.agree({"same": {"whether the batch is discarded": discarded}}, last=discarded)

    def detach(self) -> None:
        """Takes the hooks off the optimizer and the model."""
        self.clipper.calls.detach()
        for undo in self._undo:
            undo()

    def saw(self, result: ClippingResult) -> None:
        """Records the result of a physical batch whose sums were added; a batch that had failed before goes on."""
        if self.batch is not None and self.batch.state is BatchState.FAILED:
            self.batch.state = BatchState.ACCUMULATING
        self._notices.saw(result, self.clipper.passes.left_out)
        if self._adaptation is not None:
            self._adaptation.saw(self.clipper.passes.scaled(result.norms))
        if self.trace is not None:
            self.trace.saw(result)

    # The release.

    def update(self) -> None:
        """Charges, releases and has the optimizer take its step, even where it has lost the hooks that would do it."""
        self._release()
        self.optimizer.step()
        if self.state is BatchState.RELEASED:
            self._stepped()

    @keeping_grad_mode
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's pre-hook: the noise comes now, or right after the closure."""
        if (len(args) > 1 or kwargs) and (replaced := with_closure(args, kwargs, self._release)) is not None:
            return replaced
        self._release()
        return None

    @keeping_grad_mode
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's post-hook."""
        if self.state not in (BatchState.RELEASED, BatchState.STEPPED):
            raise PrivacyError(
                "optimizer.step() came to its end without the engine's noise or charge (its closure was not called, or "
                "the engine's hook before the step was removed), so nothing of this batch was released. Call "
                "optimizer.step() without a closure, and leave its hooks"
            )
        self._stepped()

    def _stepped(self) -> None:
        """The update took place: the parameters are what was released."""
        self._end(BatchState.STEPPED)
        self.sums.remember_released()
        self.updates.accept()
        self._notices.stepped()
        self.self_check.stepped()
        if self.trace is not None:
            self.trace.stepped()

    def _release(self) -> None:
        """Checks everything, charges, and only then turns the clipped sums into the private gradient."""
        # The step of an optimizer's subclass that calls its parent's comes here twice, the release still in place.
        if self.state is BatchState.RELEASED and self.sums.is_released():
            return
        try:
            batch = self.current("optimizer.step()")
            held = self._check(batch)
            # Of what is trained now, whether or not the batch had examples: a group more or less shows in the noise.
            self.clipper.passes.group_of()
            self.noise_shares()  # refused before the charge
            self.sensitivity = max(self.sensitivity, self.clipper.passes.sensitivity)
            if self.ranks.size > 1:
                self._agree(held)
            elif is_distributed():
                self.ranks.check_alone()
            self.charge(self.settings)
            batch.state = BatchState.CHARGED
            self.updates.expect()
            self.clipper.sharding.reshard()
            stepped = [parameter for parameter in held if parameter.requires_grad]
            self._notices.stepping(stepped)
            self.sums.put_in_place(stepped, self._private(stepped, self.sums.complete(stepped)))
            batch.state = BatchState.RELEASED
            self.self_check.released(held)
        except BaseException as failure:
            self._give_up(failure)
            raise

    def _give_up(self, failure: BaseException) -> None:
        """The release failed: where it is charged already, some gradients may have their noise and some not."""
        self.failed(failure)
        if isinstance(failure, Exception):
            self.ranks.report_failure(failure)
        if self.state is BatchState.CHARGED:
            self._end(BatchState.CHARGED)
            self.updates.accept()  # nothing moved
            self.sums.drop_gradients()
            self.sums.discard()

    def _check(self, batch: LogicalBatch) -> dict[nn.Parameter, None]:
        """The optimizer's parameters; raises GradientLeakError or PrivacyError unless all is ready for a release."""
        if (gathered := self.sums.count) != len(batch.sizes):
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
        held = held_parameters(self._owned, self.optimizer)
        self.updates.check_model()
        self.updates.check_written()
        if not SCALED.isdisjoint(vars(self.optimizer)):
            self.scaling.before_step()
        self.sums.check()
        if self._adaptation is not None:
            self._adaptation.check()
        return held

    def _agree(self, held: dict[nn.Parameter, None]) -> None:
        """Ranks tell each other what they must have in common before a step, and take the largest sensitivity."""
        facts = {
            "sensitivity": self.sensitivity,
            "most examples that fit": self.micro_batches.most,
            "examples, and how many were finite": self._notices.facts,
            "same": {
                "whether the batch is discarded": False,
                "the sample (a digest of it)": self.current("optimizer.step()").digest,
                "what is trained": [(number, p.numel()) for number, p in enumerate(held) if p.requires_grad],
                "noise multiplier and batch size": (self.settings.noise_multiplier, self.settings.batch_size),
            },
        }
        said = self.ranks.agree(facts)
        self.sensitivity = max(each["sensitivity"] for each in said)
        self._notices.agree([each["examples, and how many were finite"] for each in said])
        self.micro_batches.agree([each["most examples that fit"] for each in said])

    def _private(self, parameters: list[nn.Parameter], sums: list[Tensor]) -> list[Tensor]:
        """(sum + noise) / batch size, of each parameter."""
        std, batch_size = self.settings.noise_multiplier * self.sensitivity, self.settings.batch_size
        shares = self.noise_shares()
        if self.trace is not None:
            self.trace.released(parameters, sums, [std * shares.get(p, 1.0) for p in parameters])
        if shares:  # divided by which all sums need the same noise
            sums = [total / shares.get(p, 1.0) for p, total in zip(parameters, sums, strict=True)]
        counts = [] if self._adaptation is None else [self._adaptation.counts(std, batch_size, like=sums[0])]
        private = self.clipper.sharding.released(self.ranks, self._noise, sums + counts, std, batch_size, parameters)
        if self._adaptation is not None:
            self._adaptation.update(private.pop(), std, batch_size)
        if shares:
            private = [each * shares.get(p, 1.0) for p, each in zip(parameters, private, strict=True)]
        return private

    def noise_shares(self) -> dict[nn.Parameter, float]:
        """{parameter: std of the noise in its sum over sigma times the sensitivity}; {} where all of these are 1."""
        if not self._allocated or not self._noise_multiplier:
            return {}
        policy: Any = self.clipper.clipping
        group_of = self.clipper.passes.group_of()
        stds, std = policy.noise_stds(self._noise_multiplier), self._noise_multiplier * policy.sensitivity
        pairs = self.clipper.sharding.pairs
        return {p: stds[group_of[id(pair[1])]] / std for _, *pair in pairs for p in pair if id(pair[1]) in group_of}

    def noise_std(self, parameter: nn.Parameter) -> float:
        """The standard deviation of the noise in each entry of the parameter's private gradient, as it is now."""
        if not any(parameter is each for _, *pair in self.clipper.sharding.pairs for each in pair):
            raise ValueError(f"noise_std takes a parameter of the engine's model; got {type(parameter).__name__}")
        std = self.settings.noise_multiplier * (self.sensitivity or self.clipper.passes.sensitivity)
        return std * self.noise_shares().get(parameter, 1.0) * self._noise.growth / self.settings.batch_size


def refuse_second_engine(optimizer: Optimizer) -> None:
    """Raises PrivacyError when an engine's hooks are on the optimizer already."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), Release) for hook in hooks):
        raise PrivacyError(
            "another PrivacyEngine is attached to this optimizer, and two would add noise and charge twice; call its "
            "detach(), or build a new optimizer"
        )
