"""From clipped sums to the noisy gradient: whose turn it is, checks, the charge, one draw of noise, and the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper import ClippingResult, GhostClipper
from ghostclip.clipping import Composed, GlobalNoise
from ghostclip.engine.adaptation import Adaptation, adapts
from ghostclip.engine.distributed import Ranks
from ghostclip.engine.loss_scaling import LossScaling, show_scaling
from ghostclip.engine.micro_batching import MicroBatches
from ghostclip.engine.optimizers import held_parameters, with_closure
from ghostclip.engine.readable import ReadableExamples
from ghostclip.engine.sums import ClippedSums
from ghostclip.engine.terms import Terms
from ghostclip.engine.update_check import UpdateCheck
from ghostclip.errors import PrivacyError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.noise import Noise
from ghostclip.sampling import LogicalBatch
from ghostclip.self_check import SelfCheck
from ghostclip.traces import StepTrace

__all__ = ["Release", "refuse_second_engine"]

T = TypeVar("T")
NO_STEP = """the logical batch before this one had no step, so nothing of it was charged or released. The loop is

    for batch in engine.batches():
        for examples in batch.physical():    # none in an empty batch, which has its step all the same
            engine.backward(loss_fn(model, examples))
        optimizer.step()
        optimizer.zero_grad()

Take the step that is missing, or call batch.discard() (engine.batches().discard() where it is out of reach), which \
charges it"""


class Release:
    """Comes between the optimizer and its gradients: one release of noisy sums for each logical batch, charged before.

    Args:
        clipper: of the model in training.
        optimizer: gets hooks before and after its step.
        noise: where the noise comes from.
        noise_multiplier: of the engine; 0: no noise in any step.
        terms: from a step's number to its noise, batch size and thresholds.
        charge: called with them once for each step, after all checks and before anything is released; it may refuse.
        self_check: whether the first steps are looked at, see `SelfCheck`.
        scaling: what is known of the scale of losses; None: they come as they are.
        ranks: which train together; None: this process alone.
        micro_batches: how physical batches are divided, on which ranks agree; None: where memory runs out only.

    Attributes:
        clipper, optimizer, charge, scaling, micro_batches: as given.
        terms: of the logical batch handed out last, at first those of the first step.
        sums: what was gathered.
        updates: whether parameters moved in steps only.
        self_check: watches the first steps.
        sensitivity: of what the current logical batch has gathered.
        batch: handed out last; None once it had its step, or was discarded.
        pending: whether the logical batch handed out last has had no step.
        trace: observes steps, or None.
    """

    trace: StepTrace | None = None

    def __init__(
        self,
        clipper: GhostClipper,
        optimizer: Optimizer,
        noise: Noise,
        noise_multiplier: float,
        terms: Callable[[int], Terms],
        charge: Callable[[Terms], None],
        *,
        self_check: bool = True,
        scaling: LossScaling | None = None,
        ranks: Ranks | None = None,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        self.clipper, self.optimizer = clipper, optimizer
        self._noise, self._noise_multiplier = noise, noise_multiplier
        self._terms_at, self.charge = terms, charge
        self.terms = terms(0)
        self.scaling = LossScaling(1.0, optimizer) if scaling is None else scaling
        self.micro_batches = MicroBatches() if micro_batches is None else micro_batches
        self._ranks = Ranks() if ranks is None else ranks
        self._ranks.sharding = clipper.sharding
        self.sums, self.updates = ClippedSums(clipper), UpdateCheck(clipper.model, clipper.sharding)
        self.self_check = SelfCheck(clipper, optimizer, self_check)
        self._readable = ReadableExamples(self._ranks.leads)
        self._owned = set(clipper.model.parameters())
        policy: Any = clipper.clipping
        self._adaptation = Adaptation(policy) if adapts(policy) else None
        self._allocated = isinstance(policy, Composed) and type(policy.noise) is not GlobalNoise
        self.noise_shares()  # which refuses standard deviations that don't fit the noise multiplier
        self.sensitivity = 0.0
        self.batch: LogicalBatch | None = None
        # Whether the optimizer's step is under way, and whether its private gradient was charged and released.
        self.pending = self._stepping = self._released = False
        # Whether all ranks were asked about the current logical batch, so that nobody waits for an answer.
        self._asked = self._refused = False
        self._undo = [
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            show_scaling(optimizer),
        ]

    def ready(self, new_loop: bool) -> None:
        """Raises PrivacyError unless the next logical batch may be taken.

        The one before must have had its step, or have been left by an exception: one that came up in the engine, or one
        by which the loop over its physical batches, and then that over ``engine.batches()``, was left.
        """
        batch = self.batch
        try:
            self.updates.check()
            if batch is not None and not batch.failed and not (new_loop and batch.interrupted):
                raise PrivacyError(NO_STEP)
        except PrivacyError as problem:
            if not self._refused:
                # Other ranks may be in the step of the batch that isn't taken here.
                self._refused = True
                self._ranks.refuse(problem)
            raise

    def begin(self, batch: LogicalBatch | None) -> None:
        """A logical batch starts, or none: what an earlier one gathered and didn't release is discarded."""
        self.discard()
        self.clipper.sharding.reshard()
        self._stepping = self._released = self._asked = self._refused = False
        if batch is not None:
            self._make_whole()
            self.terms = self._terms_at(batch.place)
        self.clipper.passes.threshold_factor = self.terms.threshold_factor
        self.sensitivity = self.clipper.passes.sensitivity
        self.scaling.begin()
        if self.trace is not None:
            self.trace.begin()
        self.batch = batch
        if batch is not None:
            self.pending = True
            self.updates.begin()

    def _make_whole(self) -> None:
        """All ranks begin a logical batch of a sharded model together, in which its layers have whole Parameters."""
        if self.clipper.sharding.sharded:
            self.batch = None  # where another rank refuses
            self._agreed(lambda: None, lambda: {"same": {"whether a logical batch begins": True}})
            self._asked = False
            self.clipper.sharding.unshard()

    def discard(self) -> None:
        """What was gathered is dropped."""
        self.sums.discard()
        self._readable.begin()
        if self._adaptation is not None:
            self._adaptation.discard()

    def failed(self) -> None:
        """An exception came up in the engine: the batch may be left without its step."""
        if self.batch is not None:
            self.batch.failed = True

    def current(self, caller: str) -> LogicalBatch:
        """The current logical batch; raises PrivacyError, which names the caller, when there is none."""
        if self.batch is None:
            raise PrivacyError(
                f"{caller} was called without a logical batch of its own, so nothing could be accounted for; call it "
                "once for each batch (not one of a DataLoader of yours), inside of `for batch in engine.batches()`"
            )
        return self.batch

    def start(self, discarded: bool) -> None:
        """All ranks begin a step, or discard the batch; raises PrivacyError where some do the other, or refuse."""
        if self._ranks.size > 1:
            self._agreed(lambda: None, lambda: {"same": {"whether the batch is discarded": discarded}})
        self._asked = discarded

    def _agreed(self, work: Callable[[], T], facts: Callable[[], dict[str, Any]]) -> tuple[T, list[dict[str, Any]]]:
        """`Ranks.agreed`; nobody waits for an answer of this rank from then on."""
        self._asked = True
        return self._ranks.agreed(work, facts)

    def tell(self, failure: Exception) -> None:
        """Other ranks wait in their step for what this one has to say."""
        if not self._asked:
            self._asked = True
            self._ranks.refuse(failure)

    def detach(self) -> None:
        """Takes the hooks off the optimizer."""
        for undo in self._undo:
            undo()

    def saw(self, result: ClippingResult) -> None:
        """What was clipped of a physical batch that was gathered."""
        self._readable.saw(result, self.clipper.passes.left_out)
        if self._adaptation is not None:
            self._adaptation.saw(self.clipper.passes.scaled(result.norms))
        if self.trace is not None:
            self.trace.saw(result)

    def update(self) -> None:
        """Charges, releases and has the optimizer take its step, even where it has lost the hooks that would do it."""
        self._release()
        self.optimizer.step()
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
            self.failed()
            raise

    @keeping_grad_mode
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's post-hook."""
        if not self._released:
            raise PrivacyError(
                "optimizer.step() came to its end without the engine's noise or charge (its closure was not called, or "
                "the engine's hook before the step was removed), so nothing of this batch was released. Call "
                "optimizer.step() without a closure, and leave its hooks"
            )
        self._stepped()

    def _stepped(self) -> None:
        """The update took place: the parameters are what was released."""
        self._stepping = False
        self.sums.remember_released()
        self.updates.accept()
        self._readable.warn()
        self.self_check.stepped()
        if self.trace is not None:
            self.trace.stepped()

    @keeping_grad_mode
    def _release(self) -> None:
        """Checks everything, charges, and only then turns the clipped sums into the private gradient."""
        # The step of an optimizer's subclass that calls its parent's comes here twice, the release still in place.
        if self._stepping and self.sums.is_released():
            return
        try:
            held, said = self._agreed(self.check, self._facts)
            self.micro_batches.agree([each["most examples that fit"] for each in said])
            self.sensitivity = max([self.sensitivity, *(each["sensitivity"] for each in said)])
            self._readable.agree([each["examples, and whether any was finite"] for each in said])
            self.spend()
            self.put_in_place(held, self._make_private)
        except BaseException:
            self.failed()
            raise

    def _facts(self) -> dict[str, Any]:
        """What ranks tell each other before a step."""
        held = held_parameters(self._owned, self.optimizer)
        same = {
            "whether the batch is discarded": False,
            "the sample (a digest of it)": self.current("optimizer.step()").digest,
            "what is trained": [p.numel() for p in held if p.requires_grad],
        }
        return {
            "sensitivity": self.sensitivity,
            "most examples that fit": self.micro_batches.most,
            "examples, and whether any was finite": self._readable.facts,
            "same": same,
        }

    def check(self, missing: int = 0) -> dict[nn.Parameter, None]:
        """The optimizer's parameters; raises GradientLeakError or PrivacyError unless all is ready for a release.

        Args:
            missing: physical batches that are still to be gathered.
        """
        batch, gathered = self.current("optimizer.step()"), self.sums.count
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
        held = held_parameters(self._owned, self.optimizer)
        self.updates.check_model()
        self.updates.check_written()
        self.scaling.before_step()
        self.sums.check()
        return held

    def spend(self) -> None:
        """Charges the step, by which the parameters may move from now on."""
        self.charge(self.terms)
        self.updates.expect()

    def put_in_place(
        self, held: dict[nn.Parameter, None], make_private: Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]]
    ) -> None:
        """Ends the logical batch, charged, with its private gradient in the p.grads, for the optimizer's own step."""
        self._end()
        self.clipper.sharding.reshard()
        self.sums.release(held, make_private)
        self._stepping, self.pending = True, False
        self.self_check.released(held)

    def _end(self) -> None:
        """The batch is charged, and released."""
        self.current("optimizer.step()").stepped = True
        self.batch, self._released = None, True

    def noise_shares(self) -> dict[nn.Parameter, float]:
        """{parameter: std of the noise in its sum over sigma times the sensitivity}; {} where all of these are 1."""
        if not self._allocated or not self._noise_multiplier:
            return {}
        policy: Any = self.clipper.clipping
        stds, std = policy.noise_stds(self._noise_multiplier), self._noise_multiplier * policy.sensitivity
        group_of = self.clipper.passes.group_of()
        pairs = self.clipper.sharding.pairs
        return {p: stds[group_of[id(pair[1])]] / std for _, *pair in pairs for p in pair if id(pair[1]) in group_of}

    def noise_std(self, parameter: nn.Parameter) -> float:
        """The standard deviation of the noise in each entry of the parameter's private gradient, as it is now."""
        std = self.terms.noise_multiplier * (self.sensitivity or self.clipper.passes.sensitivity)
        return std * self.noise_shares().get(parameter, 1.0) / self.terms.batch_size

    def _make_private(self, parameters: list[nn.Parameter], sums: list[Tensor]) -> list[Tensor]:
        std, batch_size = self.terms.noise_multiplier * self.sensitivity, self.terms.batch_size

        def release(every: list[Tensor]) -> list[Tensor]:
            return self._ranks.released(self._noise, every, std, batch_size, parameters)

        # Divided by their shares of the noise, all sums need the same noise.
        shares = self.noise_shares()
        if self.trace is not None:
            self.trace.released(parameters, sums, [std * shares.get(p, 1.0) for p in parameters])
        found = [total / shares.get(p, 1.0) for p, total in zip(parameters, sums, strict=True)] if shares else sums
        private = (
            release(found) if self._adaptation is None else self._adaptation.release(found, std, batch_size, release)
        )
        if shares:
            private = [each * shares.get(p, 1.0) for p, each in zip(parameters, private, strict=True)]
        return private

    @property
    def draws_ahead(self) -> bool:
        """Whether noise can be had before the sums are there, as an input of a compiled step."""
        return self._adaptation is None and not self._allocated and hasattr(self._noise, "fill")

    def fill_with_noise(self, out: Tensor) -> None:
        """Overwrites ``out`` [n] with the noise of this logical batch's release, divided as its sums will be."""
        fill = self._noise.fill  # type: ignore[attr-defined]
        fill(out, self.terms.noise_multiplier * self.sensitivity / self.terms.batch_size)

    def updated(self) -> None:
        """Ends the logical batch, charged and stepped with, without gradients ever having been in place."""
        self.sums.discard()
        self.sums.drop_gradients()
        self._end()
        self.pending = False
        self.updates.accept()
        self._readable.warn()


def refuse_second_engine(optimizer: Optimizer) -> None:
    """Raises PrivacyError when an engine's hooks are on the optimizer already."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), Release) for hook in hooks):
        raise PrivacyError(
            "another PrivacyEngine is attached to this optimizer, and two would add noise and charge twice; call its "
            "detach(), or build a new optimizer"
        )
