"""PrivacyEngine: sampling, clipping, noise and accounting put together around the user's own model and optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ghostclip import accounting
from ghostclip.clipper import ClippingResult, GhostClipper
from ghostclip.clipping import Schedule
from ghostclip.engine.adaptation import policy_for
from ghostclip.engine.budget import Spending
from ghostclip.engine.compiled_steps import check_compilable
from ghostclip.engine.distributed import keep_unsynchronised, ranks_of
from ghostclip.engine.loss_scaling import LossScaling
from ghostclip.engine.micro_batching import MicroBatches, is_auto, micro_batches_of
from ghostclip.engine.old_names import OpacusNames
from ghostclip.engine.optimizers import check_optimizer, unwrapped
from ghostclip.engine.plan import plan_for
from ghostclip.engine.release import Release, refuse_second_engine
from ghostclip.engine.snapshots import Restored, Snapshots, Stateful
from ghostclip.engine.step import BatchIndexOf, LogicalStep, LossFunction, StepRecord
from ghostclip.engine.terms import StepTerms
from ghostclip.engine.update_check import warn_of_earlier
from ghostclip.errors import PrivacyError
from ghostclip.events import Event
from ghostclip.ledger import Ledger
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.noise import Noise, noise_source
from ghostclip.sampling import LogicalBatch, LogicalBatches
from ghostclip.traces import StepTrace
from ghostclip.validate import open_fraction, whole

__all__ = ["PrivacyEngine"]

# What must be the same where a run is taken up again; what can't be changed, since noise and charges follow from it.
AGREED = ("noise_multiplier", "target_epsilon", "planned_steps", "noise")
SAMPLED = ("batch_size", "sample_rate", "sampling", "neighboring")
TOLD = "batch_size", "sample_rate", "noise_multiplier", "clipping", "steps_taken", "planned_steps"
FIXED = {"model", "optimizer", "clipping", "target_delta", "max_epsilon", "ledger", "schedule", *AGREED, *SAMPLED}


class PrivacyEngine(OpacusNames):
    """Differentially private training (DP-SGD, Abadi et al. 2016) of a torch model with any torch optimizer.

    Every step releases (sum of clipped gradients + noise) / ``batch_size`` over a random sample of the data, and is
    charged before. A hook of the user's optimizer adds the noise when its ``step`` is called.

    Args:
        model: built of any torch layers; wrapped in place if it isn't yet.
        optimizer: over parameters of ``model`` only; of Accelerate's and Lightning's wrappers the optimizer inside.
        data: a map-style dataset, or a DataLoader, of which all but the sampling is kept.
        batch_size: the expected size of a logical batch; the sampling rate is ``batch_size / len(dataset)``. None takes
            the DataLoader's.
        max_physical_batch_size: the most examples processed at once; None: the whole logical batch; "auto": found at
            the first `step`, by passes over batches of growing size, which leave no trace.
        noise_multiplier: standard deviation of the noise over the sensitivity; 0 gives no privacy, epsilon = inf.
        target_epsilon: instead of ``noise_multiplier``: the least noise that keeps ``epochs`` epochs (or ``steps``
            steps) within it; a step past them is refused.
        target_delta: the delta of the guarantee; it should be well below 1 / len(dataset).
        max_epsilon: a step that would pass it, at ``target_delta`` by PLD and with everything in the ledger counted, is
            refused; None: no limit, or ``target_epsilon`` where the ledger holds other steps than the planned ones.
        epochs, steps: the length of training, with ``target_epsilon`` only.
        clipping: a max norm or a policy of `ghostclip.clipping`.
        second_pass: "auto", "cached" or "reweight", as for `GhostClipper`; it changes time and memory only.
        noise: "standard": unpredictable, added in floating point; "hardened": from a cipher, every released number on a
            lattice (needs `cryptography`); "test" with ``seed``: repeatable, and reported as epsilon = inf.
        seed: of noise and sampling, with ``noise="test"`` only.
        ledger: a file (or a `ghostclip.ledger.Ledger`) that every step is charged to before it is released. One that
            exists is continued: what it holds counts for `epsilon`, ``max_epsilon`` and the planned steps.
        self_check: whether gradients are autograd's own, a loss depends on other examples (`step` calls the loss
            function 5 to 7 times more in each of the first 6 steps, and in one of 400 physical batches later), and
            parameters move. What is wrong is a VerificationError before a release, or a warning.
        sampling: "poisson"; "without_replacement": ``batch_size`` different examples each time; "truncated": Poisson,
            cut down at random to ``max_batch_size`` where it is more.
        neighboring: data sets that are hard to tell apart differ by one example ("add_or_remove_one"), or in what one
            example is ("replace_one").
        max_batch_size: with "truncated" only; None: ``max_physical_batch_size``, so that a batch is one physical one.
        unit_ids: for user-level privacy, each row's user (hashable): a user's rows are sampled together, the gradient
            of the sum of their losses is clipped. ``batch_size`` counts users then, ``max_physical_batch_size`` rows.
        max_rows_per_unit: with ``unit_ids`` only: of users with more rows the first so many are used; None: all.
        loss_scale: for float16: a power of two such as 1024.0 (see `GhostClipper`), or the loop's GradScaler, for
            ``engine.backward(scaler.scale(losses))``, ``scaler.step(optimizer)`` and ``scaler.update()``.
        memory_limit: bytes for this process, where that is found ("auto"); None: nine tenths of what is left.
        process_group: of torch.distributed: who trains together, each with an engine over the same model, data and
            options; None: that of the model's DistributedDataParallel or FSDP2 mesh, or else all processes.
            ``batch_size`` is that of all ranks together; each gets its share of every sample.
        schedule: of noise, thresholds and batch size over the steps, see `Schedule`; then no ``epochs`` are needed.

    Attributes:
        planned_steps: the most steps that may be taken; None without a ``target_epsilon``.
        sample_rate: the expected share of the data in a logical batch.
        ledger, model, optimizer, clipping, batch_size, noise_multiplier, ...: as given, taken over or calibrated; a
            ledger only on the rank that leads.

    Raises:
        UnsupportedModelError: the model can't be clipped exactly.
        PrivacyError: the optimizer or the data can't be used privately; the message says what to do.
        LedgerError: the ledger is in use by another process, damaged, no ledger, or can't be written.
        ValueError, TypeError: an argument is out of range, or some don't go together.
        ModuleNotFoundError: ``noise="hardened"`` without the `cryptography` package.
    """

    _sampled_by: ClassVar[type[LogicalBatches]] = LogicalBatches  # `ghostclip.compat.opacus` has rates of its own

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Any,
        *,
        batch_size: int | None = None,
        max_physical_batch_size: int | str | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        max_epsilon: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        clipping: Any = 1.0,
        second_pass: str = "auto",
        noise: str = "standard",
        seed: int | None = None,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        self_check: bool = True,
        sampling: str = "poisson",
        neighboring: str = "add_or_remove_one",
        max_batch_size: int | None = None,
        unit_ids: Iterable[Hashable] | None = None,
        max_rows_per_unit: int | None = None,
        loss_scale: float | GradScaler = 1.0,
        memory_limit: int | None = None,
        process_group: Any = None,
        schedule: Schedule | None = None,
    ) -> None:
        check_optimizer(model, optimizer := unwrapped(optimizer))
        refuse_second_engine(optimizer)
        auto = is_auto(max_physical_batch_size, memory_limit, unit_ids)
        self._ranks = ranks = ranks_of(model, process_group)
        source = noise_source(noise, seed)
        largest = None if isinstance(max_physical_batch_size, str) else max_physical_batch_size
        loader = self._sampled_by(
            data, batch_size=batch_size, max_physical_batch_size=largest, sampling=sampling, neighboring=neighboring,
            max_batch_size=max_batch_size, unit_ids=unit_ids, max_rows_per_unit=max_rows_per_unit, seed=seed,
            generator=ranks.generators(source), share=(ranks.rank, ranks.size),
        )  # fmt: skip
        policy, delta = policy_for(model, clipping), open_fraction(target_delta=target_delta)
        self.schedule, self._terms = schedule, StepTerms(schedule, loader, policy)
        plan = plan_for(
            self._terms.events, len(loader), noise_multiplier, target_epsilon, delta, epochs, steps, schedule
        )
        charged = self._terms.fix(plan, source.private)
        loader.follow(self._terms.scheme, self._terms.largest, lambda: self._snapshots.model_steps)
        scaling = LossScaling(loss_scale, optimizer)
        clipper = GhostClipper(model, clipping, second_pass=second_pass, loss_scale=scaling.factor)
        self.model, self.optimizer, self.clipping = model, optimizer, clipper.clipping
        self.noise_multiplier, self.planned_steps = plan.noise_multiplier, plan.steps
        self.target_epsilon, self.target_delta = plan.target_epsilon, plan.target_delta
        self.batch_size, self.sample_rate = loader.batch_size, loader.sample_rate
        self.noise, self.sampling, self.neighboring = source.mode, sampling, neighboring
        micro_batches = micro_batches_of(model, loader, auto, memory_limit)
        self._spending = Spending(ranks, charged, plan, max_epsilon, ledger, noise)
        self.max_epsilon, self.ledger = self._spending.max_epsilon, self._spending.ledger
        self._loader: LogicalBatches | None = loader
        self._attach(clipper, source, scaling, micro_batches, self_check, seed)

    def _attach(
        self, clipper: GhostClipper, source: Noise, scaling: LossScaling, micro_batches: MicroBatches,
        self_check: bool, seed: int | None,
    ) -> None:  # fmt: skip
        """Puts the engine between the optimizer and its gradients, and between the loader and its batches."""
        model, optimizer, loader, ranks = self.model, self.optimizer, self.batches(), self._ranks
        release = Release(
            clipper, optimizer, source, self.noise_multiplier, self._terms.at, self._spending.charge,
            self_check=self_check, scaling=scaling, ranks=ranks, micro_batches=micro_batches,
        )  # fmt: skip
        self._steps = loader.owner = LogicalStep(release)
        agreed = {name: getattr(self, name) for name in AGREED} | {"seed": seed}
        if self.schedule is not None:
            agreed["schedule"] = repr(self.schedule)
        self._snapshots = Snapshots(
            model, optimizer, self.clipping, loader, source, self._spending, self._steps, agreed, ranks
        )
        self._snapshots.start_alike()
        self._synchronise = keep_unsynchronised(model)
        warn_of_earlier(self)

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in TOLD)
        return f"PrivacyEngine({type(self.model).__name__}, {type(self.optimizer).__name__}, {told})"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and name in vars(self):
            raise AttributeError(
                f"{name} of a PrivacyEngine can't be changed: noise and charges are made for what it was built with; "
                "call detach() and build a new engine, with the same ledger=... so that both count"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PrivacyError: torch's optimizers lose their hooks in a copy."""
        raise PrivacyError(
            "a PrivacyEngine can't be copied or pickled: its optimizer's copy would train without noise; build a new "
            "engine over copies, with the same ledger=... so that both count, or use save() and restore()"
        )

    def batches(self) -> LogicalBatches:
        """An epoch of logical batches each time it is iterated, ``len()`` of them; take them one at a time.

        Each, empty ones too, needs its step or ``batch.discard()``; taking the next one, and the end of the epoch,
        raise PrivacyError otherwise, and where trained parameters moved outside of steps (see `accept_parameters`).
        An exception discards the batch, without a charge, where it comes from `step`, `backward`, the optimizer's step
        or the data loader, or leaves both the loop over ``batch.physical()`` and that over the batches.
        """
        if self._loader is None:
            raise PrivacyError("this engine was detached from its optimizer; build a new PrivacyEngine")
        return self._loader

    @keeping_grad_mode
    def backward(self, losses: Tensor, *, batch_index: Any = None, retain_graph: bool = False) -> ClippingResult:
        """Clips the gradients of a physical batch and gathers their sum; to be called once for each physical batch.

        Args:
            losses: [B], one for each example of the physical batch that was handed out last.
            batch_index, retain_graph: see `GhostClipper.backward`.

        Raises:
            PrivacyError: no physical batch was handed out for this call, or an earlier one was left out.
            GhostClipError: for the reasons that `GhostClipper.backward` gives.
        """
        return self._steps.backward(losses, batch_index, retain_graph)

    @keeping_grad_mode
    def step(self, batch: LogicalBatch, loss_fn: LossFunction, batch_index: BatchIndexOf = None) -> StepRecord:
        """One step of training: all physical batches forward and backward, charge, noise, update, ``zero_grad()``.

        Args:
            batch: the logical batch that `batches` gave last.
            loss_fn: (model, examples) -> losses [B], one for each example.
            batch_index: for ragged examples, examples -> what `GhostClipper.backward` takes as ``batch_index``.

        Returns:
            Losses, norms and weights of the examples. They are private data, not for release.

        Raises:
            BudgetExceededError: the step is one too many; nothing was computed.
            LedgerError, PrivacyError, and all that `backward` raises: the batch is discarded, nothing was released.
            TypeError: ``loss_fn`` can't be called with (model, examples), as losses or a criterion can't.
        """
        try:
            self._steps.start(batch, loss_fn, batch_index)
            self._spending.check(self._steps.release.terms)
        except BaseException:
            self._steps.release.failed()
            raise
        try:
            seen = self._steps.step(batch, loss_fn)
        except BaseException as failure:
            self._steps.abandon(failure)
            raise
        return StepRecord.of(seen)

    def compile(self) -> None:
        """From now on `step` runs as one compiled graph, where the model allows it and it is faster.

        Of a logical batch in one piece all from forward to update (by torch's SGD, Adam or AdamW without hooks of
        others), else each physical batch's passes. See `GhostClipper.clip` for what a loss may depend on.
        """
        check_compilable(self._spending.unit, self._ranks, self.schedule)
        self._steps.micro_batches.check_found()
        self._steps.compile(self.batches().limit)

    def trace(self, path: str | os.PathLike[str] | None, every: int = 100) -> StepTrace | None:
        """Writes what every n-th step looked like without noise to a folder, for debugging; None ends it.

        Norms of single examples, cosines, signal to noise: raw private data, not for release; `ghostclip.traces.read`
        reads it. Raises what `StepTrace` does, ValueError for compiled steps or several ranks.
        """
        if path is not None and self._ranks.size > 1:
            raise ValueError("trace() isn't there for several processes that train together; leave it out")
        return self._steps.trace(path, every, lambda: self.steps_taken)

    def epsilon(self, delta: float | None = None, accountant: str = "pld") -> float:
        """The privacy spent so far, by all that is in the ledger where there is one; inf without private noise.

        Args:
            delta: where to report it; None: at ``target_delta``.
            accountant: "pld" or "rdp".

        Raises PrivacyError where trained parameters moved outside of steps, see `accept_parameters`.
        """
        return self._spending.epsilon(self._delta(delta), accountant)

    def forecast(self, steps: int, delta: float | None = None, accountant: str = "pld") -> float:
        """Epsilon after so many further ``steps``, with everything spent so far; see `epsilon`."""
        further = self._terms.further(self._snapshots.model_steps, whole(steps=steps))
        spent = accounting.epsilon_of([*self.events, *further], delta=self._delta(delta), accountant=accountant)
        return spent if self._spending.private else math.inf

    def guarantee(self, delta: float | None = None, accountant: str = "pld") -> str:
        """`epsilon` in words: how examples were drawn, which data sets are neighbours."""
        return accounting.guarantee(self.events, delta=self._delta(delta), accountant=accountant)

    def accept_parameters(self) -> None:
        """Takes the trained parameters as they are, after they were set from outside by public means.

        A loaded state dict, steps on public data, averages of released weights: never what private data taught.

        Raises:
            PrivacyError: inside of a logical batch; or parameters are others, or of another type, than at first.
        """
        self._steps.check_between("engine.accept_parameters()")
        self._steps.updates.check_model()
        self._steps.updates.accept()

    def _delta(self, delta: float | None) -> float:
        """Where to report; PrivacyError where what was spent doesn't cover the model."""
        if self._loader is not None:
            self._steps.updates.check()
        return self.target_delta if delta is None else open_fraction(delta=delta)

    def check_budget(self) -> None:
        """Raises BudgetExceededError where one more step would pass the planned ones or the budget."""
        self._spending.check(self._steps.release.terms)

    def noise_std(self, parameter: nn.Parameter) -> float:
        """The standard deviation of the noise in each entry of a trained parameter's private gradient, as it is now."""
        return self._steps.release.noise_std(parameter)

    @property
    def events(self) -> list[Event]:
        """Everything that was charged."""
        return self._spending.events

    @property
    def steps_taken(self) -> int:
        """How many steps were charged."""
        return self._spending.steps

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful] | None = None) -> None:
        """Saves model, optimizer, what was spent and where training stands; all ranks call it, the leading one writes.

        Args:
            path: becomes a folder, whole or not at all; the one before is kept as ``<path>.previous``. Its files
                ``private.*`` hold random states and ``extra``, and must not be published. Noise is never among it.
            extra: {name: object with ``state_dict()`` and ``load_state_dict()``}, such as learning rate schedulers.

        Raises:
            PrivacyError: inside of a logical batch, with a state that can't be stored, or after trained parameters
                moved outside of the engine's steps, see `accept_parameters`.
            OSError: the disk is full, or the like; what was saved before is still there.
        """
        self._snapshots.save(path, extra)

    def state_dict(self) -> dict[str, Any]:
        """What was spent and where training stands, for checkpoints of others; `save` has weights and all else, too."""
        return self._snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds what a `state_dict` spent, begins an epoch; restore model and optimizer first. Raises as `restore`."""
        self._snapshots.load_state_dict(state)

    def restore(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful] | None = None) -> Restored:
        """Goes back to what `save` wrote, or to the one before where that is damaged, which the log tells.

        What was spent is never less afterwards: the steps this engine was charged since, and those in its ledger, stay.
        Noise and samples to come are fresh, but with ``noise="test"``, where the run goes on as if never interrupted.

        Args:
            path: as given to `save`.
            extra: the same names as were saved, each with an object that takes its state back.

        Returns:
            Steps and epochs done. The next loop over `batches` gives what is left of the epoch.

        Raises:
            PrivacyError: it is of another configuration or version, damaged with no older one beside it, or this is
                called inside of a logical batch. Nothing was changed.
            LedgerError: the ledger isn't the one that the checkpoint goes with.
            OSError: there is none, or it can't be read.
        """
        return self._snapshots.restore(path, extra)

    def detach(self) -> None:
        """Takes the engine off the optimizer, whose steps are unprotected from then on; ends the data's workers.

        LedgerError: what was reserved there can't be given back.
        """
        self._steps.detach()
        self._synchronise()
        self._loader = None
        self._spending.close()
