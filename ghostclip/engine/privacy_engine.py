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
from ghostclip.engine.before import Before
from ghostclip.engine.budget import Spending
from ghostclip.engine.charges import generators_in_words
from ghostclip.engine.correlation import refuse_with_correlation
from ghostclip.engine.distributed import keep_unsynchronised, ranks_of
from ghostclip.engine.earlier_engines import how_to_count, next_step_of, warn_of_earlier
from ghostclip.engine.loss_scaling import LossScaling
from ghostclip.engine.mechanism import Mechanism
from ghostclip.engine.micro_batching import MicroBatches, memory_for_trials
from ghostclip.engine.model_card import add_guarantee, new_card
from ghostclip.engine.optimizers import prepare_optimizer, unwrapped
from ghostclip.engine.refusals import Refusals
from ghostclip.engine.release import Release, refuse_second_engine
from ghostclip.engine.snapshots import Restored, Snapshots, Stateful
from ghostclip.engine.step import BatchIndexOf, LogicalStep, LossFunction, StepRecord
from ghostclip.engine.step_plan import StepPlan
from ghostclip.errors import PrivacyError
from ghostclip.events import Event
from ghostclip.ledger import Ledger
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.noise import Correlation, Noise, noise_source
from ghostclip.noise.mean import PrivateMean
from ghostclip.sampling import LogicalBatch, LogicalBatches
from ghostclip.traces import StepTrace
from ghostclip.validate import flag, open_fraction, whole

__all__ = ["PrivacyEngine"]

# AGREED: what a checkpoint must have alike. SAMPLED: arguments of the sampling. TOLD: what ``repr`` shows. FIXED: what
# can't be assigned once the engine is built, since noise and charges follow from it.
AGREED = ("noise_multiplier", "target_epsilon", "planned_steps", "noise")
SAMPLED = ("batch_size", "sample_rate", "sampling", "neighboring")
TOLD = "batch_size", "sample_rate", "noise_multiplier", "clipping", "steps_taken", "planned_steps"
FIXED = "model", "optimizer", "clipping", "target_delta", "max_epsilon", "ledger", "schedule", "correlation", *AGREED


class PrivacyEngine(Refusals):
    """Differentially private training (DP-SGD, Abadi et al. 2016) of a torch model with any torch optimizer.

    A step draws a random sample of the data and releases (sum of clipped gradients + noise) / ``batch_size``. The
    engine charges the step before the release. A hook on the optimizer adds the noise when its ``step`` is called.

    Args:
        model: any torch model. The engine wraps its layers in place if they aren't wrapped yet.
        optimizer: over parameters of ``model`` only. The wrappers of Accelerate and Lightning are accepted.
        data: a map-style dataset, or a DataLoader. The engine replaces the sampler and keeps the rest.
        batch_size: the expected size of a logical batch. The sampling rate is ``batch_size / len(dataset)``. None: the
            DataLoader's.
        max_physical_batch_size: the most examples processed at once. None: the whole logical batch. "auto": the first
            `step` finds it by trial passes over batches of growing size; these change nothing.
        noise_multiplier: standard deviation of the noise over the sensitivity. 0 gives no privacy, epsilon = inf.
        target_epsilon: given in place of ``noise_multiplier``. The engine takes the least noise that keeps ``epochs``
            epochs (or ``steps`` steps) within it, and refuses further steps.
        target_delta: the delta of the guarantee; it should be well below 1 / len(dataset).
        max_epsilon: the engine refuses a step that would exceed it, at ``target_delta`` by PLD, the ledger included.
            None: no limit, or ``target_epsilon`` where the ledger holds steps that weren't planned.
        epochs, steps: the length of training, with ``target_epsilon`` or ``correlation`` only.
        clipping: a max norm or a policy of `ghostclip.clipping`.
        second_pass: "auto", "cached" or "reweight", as for `GhostClipper`. It changes time and memory only.
        noise: "standard": unpredictable noise in floating point. "hardened": noise from a cipher, and released numbers
            on a lattice. "test" with ``seed``: repeatable noise, reported as epsilon = inf.
        seed: of noise and sampling, with ``noise="test"`` only.
        ledger: a file (or a `ghostclip.ledger.Ledger`). Each step is charged there before it is released. An existing
            file is continued: its charges count for `epsilon`, ``max_epsilon`` and the planned steps.
        self_check: test gradients against autograd's, losses in batches that are loaded again in the first 6 steps and
            in one of 400 physical batches later, and whether parameters move. A failure raises before the release.
        sampling: "poisson". "without_replacement": ``batch_size`` different examples each time. "truncated": Poisson;
            a sample of more than ``max_batch_size`` examples is cut down to that at random. "cyclic_poisson": groups of
            examples, as many as ``correlation`` has bands, are sampled in turn. "cyclic": each example once an epoch.
        neighboring: how neighbouring data sets differ: by the presence of one example ("add_or_remove_one"), or in
            the content of one example ("replace_one").
        max_batch_size: with "truncated" only. None: ``max_physical_batch_size``, for one physical batch per step.
        unit_ids: for user-level privacy: the user of each row, by value (numbers, names, tensors of one element), or a
            mapping {row: user}. A user's rows are sampled together, and the gradient of the sum of their losses is
            clipped. ``batch_size`` then counts users.
        max_rows_per_unit: with ``unit_ids`` only: a user's first so many rows are used. None: all rows.
        loss_scale: for float16: a power of two such as 1024.0 (see `GhostClipper`), or a GradScaler; the loop then
            calls ``engine.backward(scaler.scale(losses))``, ``scaler.step(optimizer)`` and ``scaler.update()``.
        memory_limit: with ``max_physical_batch_size="auto"``: bytes of this process. None: nine tenths of what is left.
        process_group: torch.distributed processes that train together, each with an engine over the same model, data
            and options. None: those of the model's DistributedDataParallel or FSDP2 mesh, else all.
            ``batch_size`` counts the examples of all ranks; each rank gets its share of a sample.
        schedule: a `Schedule` of noise, thresholds and batch size over the steps; it replaces ``epochs``.
        correlation: of the noise over steps: a `ghostclip.noise.BandedToeplitz` or `BufferedToeplitz`, with
            ``sampling="cyclic_poisson"`` or "cyclic" and planned ``steps`` (or ``epochs``). None: independent noise.
        before: what `ghostclip.private_mean` released: charged first, under its own name, and inside
            ``target_epsilon``. Each ledger is charged once for it, and each engine counts it.

    Attributes:
        planned_steps: the most steps that may be taken; None without ``target_epsilon`` and ``correlation``.
        correlation: the matrix that was chosen, with the table behind ``bands="auto"``: print it. None without.
        sample_rate: the expected share of the data in a logical batch.

    Arguments such as ``batch_size`` and ``noise_multiplier`` are attributes, too, as given or calibrated. Only the
    leading rank has a ``ledger``.

    Raises:
        UnsupportedModelError: the model can't be clipped exactly.
        PrivacyError: the optimizer or the data can't be used privately; the message names the remedy.
        LedgerError: another process uses the ledger, or the file is damaged, isn't a ledger or can't be written.
        ValueError, TypeError: an argument is out of range, or two arguments exclude each other.
    """

    fixed_names = frozenset({*FIXED, *SAMPLED})
    # `ghostclip.compat.opacus` has rates and accountants of its own.
    _sampled_by: ClassVar[type[LogicalBatches]] = LogicalBatches
    _how_to_count = how_to_count

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Any, *,
        batch_size: int | None = None, max_physical_batch_size: int | str | None = None,
        noise_multiplier: float | None = None, target_epsilon: float | None = None, target_delta: float = 1e-5,
        max_epsilon: float | None = None, epochs: int | None = None, steps: int | None = None,
        clipping: Any = 1.0, second_pass: str = "auto", noise: str = "standard", seed: int | None = None,
        ledger: str | os.PathLike[str] | Ledger | None = None, self_check: bool = True,
        sampling: str = "poisson", neighboring: str = "add_or_remove_one", max_batch_size: int | None = None,
        unit_ids: Iterable[Hashable] | None = None, max_rows_per_unit: int | None = None,
        loss_scale: float | GradScaler = 1.0, memory_limit: int | None = None, process_group: Any = None,
        schedule: Schedule | None = None, correlation: Correlation | None = None, before: Iterable[PrivateMean] = (),
    ) -> None:  # fmt: skip
        prepare_optimizer(model, optimizer := unwrapped(optimizer))
        refuse_second_engine(optimizer)
        self._ranks = ranks = ranks_of(model, process_group)
        source, checks = noise_source(noise, seed), flag(self_check=self_check)
        memory = memory_for_trials(model, max_physical_batch_size, memory_limit, unit_ids)
        limit: Any = max_physical_batch_size if memory is None else None
        loader = self._sampled_by(
            data, batch_size=batch_size, max_physical_batch_size=limit, sampling=sampling, neighboring=neighboring,
            max_batch_size=max_batch_size, unit_ids=unit_ids, max_rows_per_unit=max_rows_per_unit, seed=seed,
            generator=ranks.generators(source), share=(ranks.rank, ranks.size),
        )  # fmt: skip
        given = {"sampling": sampling, "schedule": schedule, "noise": noise, "steps": steps, "epochs": epochs}
        policy = policy_for(model, clipping)
        refuse_with_correlation(correlation, given | {"target_epsilon": target_epsilon}, policy)
        self._plan = plan = StepPlan(
            schedule, loader, policy, noise_multiplier, target_epsilon, target_delta, (epochs, steps), correlation,
            Before(before, source.private),
        )  # fmt: skip
        loader.follow(plan.scheme, plan.largest, lambda: next_step_of(self), staged=schedule is not None)
        loader.protect(source.private and plan.noise_multiplier > 0)
        scaling = LossScaling(loss_scale, optimizer)
        clipper = GhostClipper(model, clipping, second_pass=second_pass, loss_scale=scaling.factor)
        micro_batches = MicroBatches(None if memory is None else (memory, loader))
        self._spending = Spending(ranks, plan, max_epsilon, ledger, source, model)
        self._mechanism = None if loader.groups is None else Mechanism(ranks, source, plan, self._spending, loader)
        adding, charging = self._mechanism or source, self._mechanism or self._spending
        release = Release(
            clipper, optimizer, adding, plan.noise_multiplier, plan.at, charging.charge, scaling, ranks, micro_batches
        )
        self._steps = loader.owner = LogicalStep(release, checks)
        self._loader: LogicalBatches | None = loader
        self.model, self.optimizer, self.clipping, self.schedule = model, optimizer, clipper.clipping, schedule
        self.noise, self.sampling, self.neighboring = source.mode, sampling, neighboring
        try:
            self._begin(source, loader, seed)
        except BaseException:  # lest the next engine find this one's hooks and ledger
            release.detach()
            self._spending.close()
            raise

    def _begin(self, source: Noise, loader: LogicalBatches, seed: int | None) -> None:
        """The parts are there: the rest of what users read, the start of all ranks, and warnings."""
        plan, spending = self._plan, self._spending
        self.noise_multiplier, self.planned_steps = plan.noise_multiplier, plan.planned_steps
        self.target_epsilon, self.target_delta = plan.target_epsilon, plan.target_delta
        self.correlation, self.batch_size, self.sample_rate = plan.correlation, loader.batch_size, loader.sample_rate
        self.max_epsilon, self.ledger = spending.max_epsilon, spending.ledger
        agreed = {name: getattr(self, name) for name in AGREED} | {"seed": seed}
        matters = {"schedule": self.schedule, "correlation": self.correlation and self.correlation.matrix}
        agreed |= {name: repr(value) for name, value in matters.items() if value is not None}
        self._snapshots = Snapshots(self._steps, loader, source, spending, agreed, self._mechanism)
        self._snapshots.start_alike()
        self._synchronise = keep_unsynchronised(self.model)
        warn_of_earlier(self)
        if self._ranks.leads and spending.private:
            accounting.warn_of_delta(self.target_delta, loader.units, spending.unit)

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in TOLD)
        return f"PrivacyEngine({type(self.model).__name__}, {type(self.optimizer).__name__}, {told})"

    def batches(self) -> LogicalBatches:
        """The logical batches. One iteration is one epoch of ``len(engine.batches())`` batches.

        Every batch, also an empty one, needs a step or ``batch.discard()`` before the next one is taken. Otherwise the
        loop raises PrivacyError, as it does where parameters moved outside of steps (see `accept_parameters`). An
        exception before the charge discards the batch without one, if it comes from `step`, `backward` or the data
        loader, or leaves both loops.
        """
        if self._loader is None:
            raise PrivacyError("this engine was detached from its optimizer; build a new PrivacyEngine")
        return self._loader

    @keeping_grad_mode
    def backward(self, losses: Tensor, *, batch_index: Any = None, retain_graph: bool = False) -> ClippingResult:
        """Clips the gradients of one physical batch and adds them to the step's sum. Call it once per physical batch.

        The sum stands in the engine: every ``p.grad`` is None until ``optimizer.step()``, which ignores what is there.

        Args:
            losses: [B], one for each example of the current physical batch.
            batch_index, retain_graph: see `GhostClipper.backward`.

        Raises:
            PrivacyError: there is no current physical batch, or an earlier one had no backward.
            GhostClipError: as `GhostClipper.backward`.
        """
        return self._steps.backward(losses, batch_index, retain_graph)

    @keeping_grad_mode
    def step(self, batch: LogicalBatch, loss_fn: LossFunction, batch_index: BatchIndexOf = None) -> StepRecord:
        """One step of training: all physical batches forward and backward, charge, noise, update, ``zero_grad()``.

        Args:
            batch: the current logical batch of `batches`.
            loss_fn: (model, examples) -> losses [B], one for each example.
            batch_index: for ragged examples: examples -> the ``batch_index`` of `GhostClipper.backward`.

        Returns:
            Losses, norms and weights of the examples. They are private data: don't publish them.

        Raises:
            BudgetExceededError: the step would exceed the budget; nothing was computed.
            LedgerError, PrivacyError, and the errors of `backward`: the batch is discarded, nothing was released.
            TypeError: ``loss_fn`` can't be called with (model, examples).
        """
        try:
            self._steps.start(batch, loss_fn, batch_index)
            self._spending.check(self._steps.release.settings)
        except BaseException as failure:
            self._steps.release.failed(failure)
            raise
        return StepRecord.of(self._steps.step(batch, loss_fn, batch_index))

    def compile(self) -> None:
        """Lets later calls of `step` run as a compiled graph, where the model allows it and the graph is faster.

        A graph holds the forward and both passes of a physical batch; `GhostClipper.clip` lists its conditions.
        """
        if self.schedule is not None:
            raise ValueError("compile() and schedule don't go together: a graph is for one threshold; leave one out")
        self._steps.micro_batches.check_found("engine.compile()")
        self._steps.compile(self.batches().largest_physical)

    def trace(self, path: str | os.PathLike[str] | None, every: int = 100) -> StepTrace | None:
        """Records every n-th step in a folder, for debugging; a ``path`` of None ends the trace.

        The records are private data without noise: norms of single examples, cosines, signal to noise. Read them with
        `ghostclip.traces.read`. Raises as `StepTrace`, and ValueError for compiled steps or several ranks.
        """
        return self._steps.trace(path, every, lambda: self.steps_taken)

    def epsilon(self, delta: float | None = None, accountant: str = "pld") -> float:
        """The epsilon spent so far, by this engine and everything in its ledger; inf without private noise.

        Without ``delta`` at ``target_delta``; ``accountant`` is "pld" or "rdp". Raises PrivacyError if trained
        parameters moved outside of steps, see `accept_parameters`.
        """
        return self._spending.epsilon(self._delta(delta), accountant)

    def forecast(self, steps: int, delta: float | None = None, accountant: str = "pld") -> float:
        """The epsilon spent after that many further ``steps``; see `epsilon`."""
        further = self._plan.further(self._snapshots.model_steps, whole(steps=steps))
        spent = accounting.epsilon_of([*self.events, *further], delta=self._delta(delta), accountant=accountant)
        return spent if self._spending.private else math.inf

    def guarantee(self, delta: float | None = None, accountant: str = "pld") -> str:
        """The guarantee in words: epsilon, delta, sampling, noise, its generator, neighbouring data; see `epsilon`.

        It is about the model as the last charged step left it: PrivacyError for another one, after `detach`, too.
        """
        self._steps.updates.check()  # also after `detach`
        found = accounting.guarantee(self.events, delta=self._delta(delta), accountant=accountant)
        found += f"{self._plan.before.words()}{self._steps.untested_words}"
        if not self.steps_taken:
            return found
        if not self._spending.private:
            what = "The noise can be repeated by its seed" if self.noise == "test" else "No noise was added"
            return f"{found} {what}, so nothing is promised."
        found += generators_in_words(self._spending.noises)
        return f"{found} Membership attacks: {accounting.risk_of(self.events)}."

    def risk(self, delta: float | None = None) -> accounting.Risk:
        """Bounds for attacks on one example's membership, by all that `epsilon` counts; its epsilon is at ``delta``."""
        return accounting.risk_of(self.events, delta=self._delta(delta))

    def model_card(self, card: Any = None) -> Any:
        """A huggingface_hub ModelCard (metadata and text) that states the guarantee and what it doesn't cover.

        Args:
            card: a ModelCard to add this to; None: a new one.

        Nothing in it depends on which examples were drawn. Raises as `epsilon`, and ModuleNotFoundError without
        huggingface_hub.
        """
        return add_guarantee(new_card(self) if card is None else card, self, self._spending)

    def accept_parameters(self) -> None:
        """Accepts trained parameters that were changed by no private data, such as a loaded state dict.

        Raises PrivacyError where a logical batch is unfinished, or parameters were replaced or changed their type.
        """
        self._steps.check_between("engine.accept_parameters()")
        self._steps.updates.check_model()
        self._steps.updates.accept()

    def _delta(self, delta: float | None) -> float:
        """``delta``, or ``target_delta`` for None; PrivacyError where parameters moved outside of charged steps."""
        if self._loader is not None:
            self._steps.updates.check()
        return self.target_delta if delta is None else open_fraction(delta=delta)

    def check_budget(self) -> None:
        """Raises BudgetExceededError if one more step would exceed the plan or the budget; all ranks call it."""
        self._spending.check(self._steps.release.settings)

    def noise_std(self, parameter: nn.Parameter) -> float:
        """The current standard deviation of the noise in each entry of a trained parameter's private gradient."""
        return self._steps.release.noise_std(parameter)

    @property
    def events(self) -> list[Event]:
        """All charges, as events for `ghostclip.accounting`."""
        return self._spending.events

    @property
    def steps_taken(self) -> int:
        """How many steps were charged."""
        return self._spending.steps

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful] | None = None) -> None:
        """Saves model, optimizer, privacy spent and position in the epoch. All ranks call it, the leading one writes.

        Args:
            path: of the folder that is written, atomically. A folder that is there is kept as ``<path>.previous``.
                The files ``private.*`` hold random states, ``extra`` and the history of correlated noise: don't
                publish them.
            extra: {name: object with ``state_dict()`` and ``load_state_dict()``}, such as learning rate schedulers.

        Raises:
            PrivacyError: a logical batch is unfinished, a state can't be stored, or trained parameters moved outside
                of steps, see `accept_parameters`.
            OSError: the folder can't be written, for example on a full disk; the last saved one is kept.
        """
        self._snapshots.save(path, extra)

    def state_dict(self) -> dict[str, Any]:
        """Privacy spent and position in the epoch, for checkpoints that others write. `save` stores weights as well."""
        return self._snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the charges of a `state_dict` and begins an epoch; restore the model first. Raises as `restore`."""
        self._snapshots.load_state_dict(state)

    def restore(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful] | None = None) -> Restored:
        """Restores what `save` wrote. If the folder is damaged, restores ``<path>.previous`` and logs a warning.

        Later charges of this engine and of its ledger stay charged. Noise and samples are drawn anew, except with
        ``noise="test"``, which continues its random sequence.

        Args:
            path: as given to `save`.
            extra: the names given to `save`, each with the object to restore.

        Returns:
            Steps and epochs done. The next loop over `batches` gives the rest of the epoch.

        Raises:
            PrivacyError: the checkpoint is of another configuration or version, or damaged without an older one, or a
                logical batch is unfinished. Nothing was changed.
            LedgerError: the ledger is not the checkpoint's.
            OSError: the checkpoint is missing or can't be read.
        """
        return self._snapshots.restore(path, extra)

    def detach(self) -> None:
        """Ends the run: the optimizer's later steps are not private. LedgerError: a reserve can't be given back."""
        self._steps.detach()
        self._synchronise()
        if self._mechanism is not None:
            self._mechanism.end()
        self._loader = None
        self._spending.close()
