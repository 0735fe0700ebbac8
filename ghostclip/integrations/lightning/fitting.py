"""What a private fit has in the place of Lightning's training loader, ``training_step`` and optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip.clipper.trial import is_trial
from ghostclip.engine import PrivacyEngine
from ghostclip.errors import LossShapeError, PrivacyError
from ghostclip.sampling import BatchState, LogicalBatch, users_of_rows

__all__ = ["TrainLoader", "length_of", "methods_for", "replace_methods", "transferred"]

LOSSES = (
    'training_step must return one loss for each example, a tensor [B] or a dict with "loss": [B]; got {}. Compute '
    'them with reduction="none", average several losses of one example, and give one that is left out a loss of zero'
)


class TrainLoader:
    """In the place of the Trainer's training loader: an epoch of logical batches each time it is iterated.

    Attributes:
        given: the user's own loader, fetched when it is asked for first, when the module is set up.
    """

    def __init__(self, source: Any, options: Mapping[str, Any]) -> None:
        self._source, self._options = source, options
        self._engine: PrivacyEngine | None = None
        self._length = 0
        self._last: LogicalBatch | None = None
        self._transfer: Callable[[Any], Any] | None = None

    @functools.cached_property
    def given(self) -> DataLoader[Any]:
        loader = self._source.dataloader()
        if not isinstance(loader, DataLoader):
            raise PrivacyError(
                f"the training data of fit are a {type(loader).__name__}, and logical batches are drawn from one data "
                "set; give one torch.utils.data.DataLoader"
            )
        return loader

    @property
    def dataset(self) -> Any:
        """The user's own, which hooks of a module ask ``trainer.train_dataloader`` for."""
        return self.given.dataset

    @property
    def batch_size(self) -> int:
        """The expected size of a logical batch."""
        return self._options.get("batch_size") or self.given.batch_size or 1

    def start(self, engine: PrivacyEngine, transfer: Callable[[Any], Any]) -> None:
        """From now on there are batches, whose examples go through ``transfer``."""
        self._engine, self._transfer, self._length = engine, transfer, len(engine.batches())

    def __len__(self) -> int:
        """Steps in an epoch; Lightning may ask before there is an engine."""
        if self._length:
            return self._length
        return max(1, round(self._units / self.batch_size))

    @functools.cached_property
    def options(self) -> Mapping[str, Any]:
        """Those of the engine, with the values that a function gives for ``unit_ids``."""
        users = self._options.get("unit_ids")
        return {**self._options, "unit_ids": users(self.given.dataset)} if callable(users) else self._options

    @functools.cached_property
    def _units(self) -> int:
        """How many examples, or users, the data have."""
        rows, users = len(self.given.dataset), self.options.get("unit_ids")  # type: ignore[arg-type]
        return rows if users is None else len(set(users_of_rows(users, rows)))

    def __iter__(self) -> Iterator[LogicalBatch]:
        # Lightning makes an iterator, and takes nothing from it, before the fit begins.
        assert self._engine is not None
        assert self._transfer is not None
        for batch in self._engine.batches():
            batch.pass_through(self._transfer)
            self._last = batch
            yield batch
            self.charge_left_out()

    def charge_left_out(self) -> None:
        """Charges the step of the last batch where a hook had Lightning leave it out, which may depend on the data."""
        batch, self._last = self._last, None
        if batch is not None and batch.state in (BatchState.ACCUMULATING, BatchState.COMPLETE) and not batch.handed:
            batch.discard()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: after a restart in the middle of an epoch batches are drawn anew. Lightning asks for the method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is left to do."""


def transferred(trainer: lightning.Trainer, module: lightning.LightningModule, examples: Any) -> Any:
    """A physical batch by all that Lightning does to a batch before ``training_step``; metrics weigh by its size."""
    examples = trainer.precision_plugin.convert_input(examples)
    examples = module._on_before_batch_transfer(examples, dataloader_idx=0)
    examples = trainer.strategy.batch_to_device(examples, dataloader_idx=0)
    if not is_trial():
        trainer._logger_connector.on_batch_start(examples)
    return examples


def methods_for(
    trainer: lightning.Trainer, module: lightning.LightningModule, engine: PrivacyEngine
) -> dict[str, Callable[..., Any]]:
    """The module's methods in a private fit, by their names."""
    methods: dict[str, Callable[..., Any]] = {
        name: _only_examples(getattr(module, name))
        for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler")
    }
    if not module.automatic_optimization:
        return {**methods, "backward": engine.backward}

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        closure()  # runs training_step, in which the engine takes the whole step

    step = _private_step(trainer, module, engine)
    return {**methods, "training_step": step, "optimizer_step": optimizer_step, "backward": lambda loss: None}


def _only_examples(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for batches, which leaves logical ones as they are."""

    @functools.wraps(method)
    def hook(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch if isinstance(batch, LogicalBatch) else method(batch, *args, **kwargs)

    return hook


class _Turn:
    """The number of the batch, apart from the loss function, for which a compiled step would be another at each."""

    args: tuple[Any, ...] = ()


def _private_step(
    trainer: lightning.Trainer, module: lightning.LightningModule, engine: PrivacyEngine
) -> Callable[..., Any]:
    """``training_step``: for a logical batch a step of the engine, with the user's own on each physical batch.

    For any other batch it is the user's own, as where ``validation_step`` calls it.
    """
    own, turn = module.training_step, _Turn()

    def loss_fn(_: nn.Module, examples: Any) -> Tensor:
        with trainer.precision_plugin.train_step_context(), _quiet(module) if is_trial() else nullcontext():
            return _losses(own(examples, *turn.args))

    @functools.wraps(own)
    def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(batch, LogicalBatch):
            return own(batch, *args, **kwargs)
        turn.args = args
        # Lightning calls it in its own autocast, which is meant for the forward only.
        with torch.autocast(module.device.type, enabled=False):
            return engine.step(batch, loss_fn).losses

    return training_step


def _losses(output: Any) -> Tensor:
    """The losses [B] that ``training_step`` returned."""
    losses = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(losses, Tensor):
        raise LossShapeError(LOSSES.format(type(losses).__name__))
    if losses.dim() != 1:
        raise LossShapeError(LOSSES.format(f"a tensor of shape {list(losses.shape)}"))
    return losses


@contextmanager
def _quiet(module: lightning.LightningModule) -> Iterator[None]:
    """Nothing is logged: the engine tries the loss function."""
    undo = replace_methods(module, {"log": lambda *args, **kwargs: None})
    try:
        yield
    finally:
        undo()


def replace_methods(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Gives the module other methods; returns what undoes it."""
    before = {name: vars(module)[name] for name in methods if name in vars(module)}
    vars(module).update(methods)

    def undo() -> None:
        for name in methods:
            vars(module).pop(name, None)
        vars(module).update(before)

    return undo


def length_of(trainer: lightning.Trainer, loader: TrainLoader, options: Mapping[str, Any]) -> dict[str, int]:
    """How many steps noise is calibrated for: those of the Trainer, where nothing else is said."""
    if options.get("target_epsilon") is None or any(options.get(name) for name in ("epochs", "steps", "schedule")):
        return {}
    limit = trainer.limit_train_batches
    epoch = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
    lengths = [] if trainer.max_steps == -1 else [trainer.max_steps]
    if trainer.max_epochs not in (None, -1):
        lengths.append(trainer.max_epochs * epoch)
    if not lengths:
        raise ValueError("target_epsilon needs the length of training; give the Trainer max_epochs or max_steps")
    return {"steps": min(lengths)}
