"""transformers' Trainer with private steps: `PrivateTrainer` in the place of Trainer, and `PrivacyArguments`.

Trainer's loop takes one logical batch as if it were one batch: `PrivateTrainer.training_step` hands it to the engine,
which takes the whole step, and the step of Trainer's own that comes after it does nothing.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip.integrations import missing

try:
    from huggingface_hub import ModelCard
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise missing(error, "huggingface") from None

from ghostclip.checkpoint.contents import random_states, set_random_states
from ghostclip.engine import PrivacyEngine
from ghostclip.engine.step import BatchIndexOf
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.integrations.huggingface_arguments import PrivacyArguments, users_in
from ghostclip.integrations.huggingface_loop import (
    STATE,
    Collated,
    Hooks,
    LogicalSteps,
    for_the_loop,
    in_options_of_trainer,
    is_whole,
)
from ghostclip.integrations.huggingface_losses import ComputeLosses, losses_for
from ghostclip.integrations.huggingface_refusals import (
    check_arguments,
    check_losses,
    check_privacy,
    check_trainer,
    refuse_published,
    refuse_spent,
    warn_of_earlier_steps,
    warn_of_metrics,
    warn_of_training_rows,
)
from ghostclip.integrations.refused_weights import accept, note, refuse_noted
from ghostclip.sampling import LogicalBatch
from ghostclip.sampling.loading import size_of

__all__ = ["PrivacyArguments", "PrivateTrainer"]

log = logging.getLogger("ghostclip")

# Rows of the log that hold private data, under the names they get where they are asked for; "": never.
PRIVATE = {"loss": "private_loss", "train_loss": "private_train_loss", "grad_norm": "", "total_flos": ""}


class PrivateTrainer(Trainer):
    """transformers' Trainer with differentially private training (DP-SGD).

    Each step draws a random sample of the data, a logical batch. Its expected size is
    ``per_device_train_batch_size * gradient_accumulation_steps`` times the number of processes. At most
    ``per_device_train_batch_size`` examples are processed at once. ``max_grad_norm`` of TrainingArguments is ignored,
    and the log says so: ``clipping`` of `PrivacyArguments` takes its place. With ``torch_compile=True`` the engine
    compiles the steps, as `PrivacyEngine.compile` does.

    Args:
        model, args, others, options: as for Trainer.
        privacy: noise or target, clipping and ledger.
        compute_losses: (model, inputs) -> losses [B], one per example; a subclass may define the method of that name
            instead. None: the loss of the model's task, which is known for language modelling, sequence to sequence,
            and classification of sequences, tokens, images, audio and video.

    Attributes:
        engine: the `PrivacyEngine` of the current or last training; None before the first.
        privacy: as given.
        batch_size: the expected number of examples in a logical batch.

    Raises:
        PrivacyError: an option of Trainer can't be private; the message says what to do.
        UnsupportedModelError: ``compute_losses`` is None, and the model's task isn't among those above, or the model
            has a forward or ``loss_function`` of its own.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        privacy: PrivacyArguments,
        compute_losses: ComputeLosses | None = None,
        **options: Any,
    ) -> None:
        args = self._arguments("tmp_trainer") if args is None else args
        check_arguments(args)
        check_privacy(privacy)
        if compute_losses is not None and not callable(compute_losses):
            raise TypeError(f"compute_losses must be a function (model, inputs) -> losses [B]; got {compute_losses!r}")
        if options.get("train_dataset") is not None:
            size_of(options["train_dataset"])
        if args.max_grad_norm:
            log.warning(
                "max_grad_norm=%s of TrainingArguments is overridden: each example's gradient is clipped by "
                "clipping=%s of PrivacyArguments", args.max_grad_norm, privacy.clipping,
            )  # fmt: skip
        self.privacy, self._compiles = privacy, bool(args.torch_compile)
        self.engine = None
        self.batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._resume: str | None = None
        # By name, since not all trainers have them in this order.
        options |= dict(zip(list(inspect.signature(Trainer.__init__).parameters)[3:], others, strict=False))
        super().__init__(model=model, args=for_the_loop(args), **options)
        check_trainer(self)
        warn_of_training_rows(options.get("train_dataset"), options.get("eval_dataset"))
        # Who resumes says so in `train`, at the latest.
        if options.get("train_dataset") is not None and not args.resume_from_checkpoint and not self._checkpoints():
            self._refuse_spent()
        if compute_losses is None and type(self).compute_losses is PrivateTrainer.compute_losses:
            check_losses(self, self._loss_methods)
            compute_losses = self._losses_of_task()
        self._compute_losses = compute_losses
        self._followed: set[str] = set()
        self._warn_of_metrics()
        # First of all, so that the callbacks of others find the engine.
        self.callback_handler.callbacks.insert(0, Hooks(self))

    engine: PrivacyEngine | None
    # What a subclass for another trainer has: its arguments, and the methods whose losses are known, with their class.
    _arguments: ClassVar[type] = TrainingArguments
    _loss_methods: ClassVar[Mapping[str, type]] = {"compute_loss": Trainer}

    def compute_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """Losses [B] of a physical batch, one for each example; override it for losses of your own.

        Args:
            model: the trained one.
            inputs: what the data collator made, on the model's device.
        """
        return (self._compute_losses or self.task_losses)(model, inputs)

    def task_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """Losses [B] of the model's task, for a `compute_losses` that changes them; arguments as there."""
        return self._losses_of_task()(model, inputs)

    def _losses_of_task(self) -> ComputeLosses:
        """The losses of the model's task; UnsupportedModelError where it isn't known."""
        built: Any = self.model
        return losses_for(built)

    @property
    def _batch_index(self) -> BatchIndexOf:
        """What says whose the rows of layers are, see `PrivacyEngine.step`; None where that is measured alone."""
        return None

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any) -> Any:
        """Trains as Trainer does, with private steps. It ends early, with a log line, when the budget is spent.

        Args:
            resume_from_checkpoint: a checkpoint of a PrivateTrainer. True: the last whole one in ``output_dir``.
            others, options: as for Trainer.

        Returns:
            As Trainer; ``training_loss`` is nan unless ``log_private_loss`` is set.

        Raises:
            BudgetExceededError: the budget has no room for a single step.
            PrivacyError: the checkpoint has no privacy state or is of another configuration, or `PrivacyEngine` raises
                it.
        """
        self._resume = self._whole_checkpoint(resume_from_checkpoint)
        if self._resume is None:
            self._refuse_spent()
            refuse_noted(self.model)
            warn_of_earlier_steps(self.model, self.privacy.ledger_in(str(self.args.output_dir)))
        self._restored = False
        self._random: dict[str, Any] | None = None
        try:
            output = super().train(self._resume, *others, **options)
        except BaseException:
            if self._resume is not None and not self._restored:
                note(self.model, self._resume)
            raise
        finally:
            # All users of accelerate in this process share it.
            self.accelerator.gradient_state._set_sync_gradients(True)
            if self.engine is not None:
                self.engine.detach()
        return output if self.privacy.log_private_loss else output._replace(training_loss=math.nan)

    def get_train_dataloader(self) -> Any:
        """The logical batches, for Trainer's own loop; ``len()`` is the number of steps in an epoch."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        users = self._users()
        units = None if users is None else len(set(users))
        return LogicalSteps(self._physical_loader(), self.batch_size, self._batches, units)

    def _users(self) -> list[Any] | None:
        """The user of each row of ``train_dataset``, by ``unit_ids`` of `PrivacyArguments`; None: rows are units."""
        return users_in(self.train_dataset, self.privacy.unit_ids)

    def training_step(self, model: nn.Module, inputs: Any, *_: Any) -> Tensor:
        """One private step over a logical batch: both passes, charge, noise and update.

        Args:
            model: is the engine's.
            inputs: a `LogicalBatch`.

        Returns:
            Zero; with ``log_private_loss`` the sum of losses over the expected batch size.
        """
        assert self.engine is not None
        model.train()
        record = self.engine.step(inputs, self._losses, self._batch_index)
        # Trainer's own step follows; without gradients to synchronise accelerate skips it.
        self.accelerator.gradient_state._set_sync_gradients(False)
        if not self.privacy.log_private_loss:
            return torch.zeros((), device=self.args.device)
        # Trainer takes the mean over processes, of which each has a part of the batch.
        return record.losses.sum().to(self.args.device) * self.args.world_size / self.batch_size

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *_: Any) -> tuple[list[LogicalBatch], None]:
        """The next logical batch, if there is one; its labels are not counted."""
        batch = next(epoch_iterator, None)
        return ([] if batch is None else [batch]), None

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0, since the operations of a step depend on the number of examples drawn, which is private."""
        return 0

    def log(self, logs: dict[str, float], *others: Any, **options: Any) -> None:
        """Logs a row with the ``epsilon`` spent, without training loss, gradient norm and operation counts.

        With ``log_private_loss`` the training loss is kept, as ``private_loss`` and ``private_train_loss``.
        """
        for name, kept in PRIVATE.items():
            value = logs.pop(name, None)
            if value is not None and kept and self.privacy.log_private_loss:
                logs[kept] = value
        if self.engine is not None:
            logs["epsilon"] = self.engine.epsilon()
        super().log(logs, *others, **options)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback as Trainer does; warns where it lets training follow metrics of private data."""
        super().add_callback(callback)
        self._warn_of_metrics()

    def _warn_of_metrics(self) -> None:
        # Trainer adds callbacks of its own before it is built.
        if hasattr(self, "_followed") and not self.privacy.public_evaluation:
            warn_of_metrics(self, self._followed)

    def create_model_card(self, *others: Any, **options: Any) -> None:
        """Writes Trainer's model card with what `PrivacyEngine.model_card` says, in its metadata and its text."""
        super().create_model_card(*others, **options)
        if self.engine is not None and self.is_world_process_zero():
            place = Path(str(self.args.output_dir), "README.md")
            self.engine.model_card(ModelCard.load(place)).save(place)

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """Raises PrivacyError: choosing among trainings spends more privacy than each of them."""
        raise PrivacyError(
            "hyperparameter_search trains on the data many times, and each training spends privacy; search on public "
            "data, or train each setting by a PrivateTrainer of its own with the same ledger=..., which adds them up"
        )

    def _physical_loader(self) -> DataLoader[Any]:
        """Trainer's dataset, collator and workers; sampling is the engine's."""
        dataset: Any = self.train_dataset
        collate: Any = self.data_collator
        if hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        args = self.args
        return DataLoader(
            dataset,
            batch_size=self._train_batch_size,
            collate_fn=self._collated(collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _collated(self, collate: Any) -> Any:
        """The data collator whose batches can be divided by examples."""
        return Collated(collate)

    def build_engine(self, steps: LogicalSteps) -> None:
        """Builds the engine over the model and optimizer that Trainer prepared, and restores a checkpoint's state.

        Args:
            steps: the result of `get_train_dataloader`.
        """
        options = self.privacy.for_engine(self.state.max_steps, str(self.args.output_dir))
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        with in_options_of_trainer():
            self.engine = PrivacyEngine(
                self.model_wrapped, optimizer, steps.loader, batch_size=self.batch_size,
                max_physical_batch_size=self._train_batch_size, unit_ids=self._users(), **options,
            )  # fmt: skip
        if self._compiles:
            self.engine.compile()
        if self._resume is not None:
            self.engine.restore(os.path.join(self._resume, STATE))
            self._restored, self._random = True, random_states()
            accept(self.model)
        self._begun_at = self.state.global_step

    def _losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """[B], on the model's device and under Trainer's autocast."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return self.compute_losses(model, inputs)

    def _batches(self) -> Iterator[LogicalBatch]:
        """What is left of the epoch; it ends before a step that the budget has no room for."""
        assert self.engine is not None
        batches = iter(self.engine.batches())
        while self._has_budget(self.engine) and (batch := next(batches, None)) is not None:
            yield batch

    def _has_budget(self, engine: PrivacyEngine) -> bool:
        """Whether a step is left, without which training ends; BudgetExceededError where it hasn't begun."""
        try:
            # Before a batch is drawn, which Trainer would count as a step.
            engine.check_budget()
        except BudgetExceededError as error:
            if self.state.global_step == self._begun_at:
                raise
            log.warning("training ends after step %d of %d: %s", self.state.global_step, self.state.max_steps, error)
            self.control.should_training_stop = True
            return False
        return True

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the engine's state, where random states are private, before Trainer's last file."""
        if self.engine is not None:
            self.engine.save(os.path.join(output_dir, STATE))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Those that the engine restored, at the time at which Trainer takes its own."""
        if self._random is not None:
            set_random_states(self._random)

    def init_hf_repo(self, *others: Any, **options: Any) -> None:
        """As Trainer's, before the first upload; PrivacyError where that would publish the ledger."""
        refuse_published(self.privacy.ledger_in(str(self.args.output_dir)), str(self.args.output_dir))
        super().init_hf_repo(*others, **options)

    def _load_best_model(self) -> None:
        """As Trainer's; the weights were released before."""
        super()._load_best_model()
        if self.engine is not None:
            self.engine.accept_parameters()

    def _refuse_spent(self) -> None:
        """Raises BudgetExceededError where a training before this one spent the target."""
        target = self.privacy.target_epsilon
        if target is not None and self.is_world_process_zero():
            refuse_spent(self.privacy.ledger_in(str(self.args.output_dir)), target, self.privacy.target_delta)

    def _checkpoints(self) -> list[Path]:
        """The folders of checkpoints in ``output_dir``."""
        found = Path(str(self.args.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        return [place for place in found if place.name.rpartition("-")[2].isdigit()]

    def _whole_checkpoint(self, wanted: str | bool | None) -> str | None:
        """The checkpoint to go on from; for True the last one that was written to its end."""
        if not wanted:
            return None
        if wanted is not True:
            if not is_whole(Path(wanted)):
                raise PrivacyError(
                    f"the checkpoint {wanted} has no privacy state ({STATE}/), so what it spent isn't known: it was "
                    "written by another Trainer, with save_only_model, or not to its end; resume from another one"
                )
            return wanted
        for place in sorted(self._checkpoints(), key=lambda place: -int(place.name.rpartition("-")[2])):
            if is_whole(place):
                return str(place)
            log.warning("the checkpoint %s was not written to its end, or not by PrivateTrainer; it is left out", place)
        raise PrivacyError(
            f"there is no checkpoint with a privacy state in {self.args.output_dir}; begin anew, with the same ledger "
            "so that what was spent counts"
        )
