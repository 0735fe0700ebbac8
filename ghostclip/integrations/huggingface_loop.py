"""What stands between Trainer's loop and the engine: its arguments, its data loader, its callback, its files."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ghostclip.errors import PrivacyError
from ghostclip.sampling import LogicalBatch

if TYPE_CHECKING:
    from ghostclip.integrations.huggingface import PrivateTrainer

__all__ = ["STATE", "Collated", "Hooks", "LogicalSteps", "for_the_loop", "in_options_of_trainer", "is_whole"]

# Within a checkpoint of Trainer: the folder of `PrivacyEngine.save`, and the file that Trainer writes last.
STATE, LAST = "privacy", "trainer_state.json"


def for_the_loop(args: TrainingArguments) -> TrainingArguments:
    """A copy of ``args`` for Trainer's loop: a logical batch is one batch of it, clipped and resumed by the engine."""
    args = copy.copy(args)
    args.gradient_accumulation_steps, args.max_grad_norm = 1, 0.0
    # A restored engine gives what is left of the epoch, of which nothing is to be skipped.
    args.ignore_data_skip = True
    # The engine compiles; a model that Trainer compiled would hide what happens to each example.
    args.torch_compile, args.torch_compile_backend, args.torch_compile_mode = False, None, None
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, None):
            setattr(args, f"{name}_kwargs", {**(getattr(args, f"{name}_kwargs") or {}), "use_reentrant": False})
    return args


@contextmanager
def in_options_of_trainer() -> Iterator[None]:
    """Around the building of an engine: errors name what Trainer calls its options; its sampler is to be replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the DataLoader's SequentialSampler is replaced")
        try:
            yield
        except ValueError as error:
            error.args = (str(error).replace("max_physical_batch_size", "per_device_train_batch_size"),)
            raise


class LogicalSteps:
    """Logical batches in the place of Trainer's data loader: each is one step of its loop.

    Args:
        loader: of physical batches.
        batch_size: the expected number of examples in a logical batch.
        batches: gives those of an epoch, or of what is left of one.
        units: the number of users; None: each example is a unit.

    Attributes:
        dataset: the loader's.
        batch_size: as given.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batch_size: int,
        batches: Callable[[], Iterator[LogicalBatch]],
        units: int | None = None,
    ) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self.batch_size, self._batches, self._units = batch_size, batches, units

    def __len__(self) -> int:
        """Steps in an epoch, as `LogicalBatches` has them; Trainer asks before there is an engine."""
        size: int = len(self.dataset) if self._units is None else self._units  # type: ignore[arg-type]
        return max(1, round(size / self.batch_size))

    def __iter__(self) -> Iterator[LogicalBatch]:
        return self._batches()


class Collated:
    """A data collator whose batches are plain dicts, which can be divided where memory is short.

    Args:
        collate: a list of examples -> inputs.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        inputs = self._collate(examples)
        return dict(inputs) if isinstance(inputs, Mapping) else inputs


class Hooks(TrainerCallback):
    """Builds the engine once model and optimizer are there, and counts epochs by steps, as a resumed one has fewer.

    Args:
        trainer: whose engine it is.
    """

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After Trainer has loaded its part of a checkpoint.

        Raises:
            PrivacyError: gradient_accumulation_steps was changed, by which Trainer would count no step.
        """
        if args.gradient_accumulation_steps != 1:
            raise PrivacyError(
                "gradient_accumulation_steps was changed after the trainer was built, whose logical batches are made "
                "for what it was then; build a trainer with the new TrainingArguments"
            )
        self._trainer.build_engine(kwargs["train_dataloader"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before anything of the step is logged."""
        state.epoch = state.global_step / len(kwargs["train_dataloader"])


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint of Trainer has an engine's state, and was written to its end."""
    try:
        json.loads((checkpoint / LAST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (checkpoint / STATE).is_dir()
