"""`PrivacyCallback`: an engine in the place of a Trainer's training loader and of its optimizer step."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning

from ghostclip.engine import PrivacyEngine
from ghostclip.engine.distributed import keep_unsynchronised
from ghostclip.engine.earlier_engines import forget_earlier
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.integrations.lightning.fitting import TrainLoader, length_of, methods_for, replace_methods, transferred
from ghostclip.integrations.lightning.refusals import (
    check_accumulation,
    check_options,
    check_trainer,
    check_units,
    watchers,
)
from ghostclip.integrations.refused_weights import accept, note, refuse_noted

__all__ = ["PrivacyCallback"]

log = logging.getLogger("ghostclip")


class PrivacyCallback(lightning.Callback):
    """Makes ``trainer.fit`` differentially private training (DP-SGD). Each ``global_step`` is one logical batch.

    ``training_step`` returns one loss per example. With automatic optimization it is called with physical batches. With
    manual optimization it is called with a logical batch, and loops over its ``physical()``. After each epoch
    ``epsilon`` and ``privacy_step`` (the number of steps charged) are logged.

    Args:
        compile: compile steps, as `PrivacyEngine.compile` does, under automatic optimization. ``training_step`` may
            then depend on no ``batch_idx``, and logs something only in the batches that run without the graph.
        options: keyword arguments of `PrivacyEngine`. By default ``batch_size`` is the training loader's, and with
            ``target_epsilon`` the length of training is the Trainer's ``max_epochs`` or ``max_steps``. ``unit_ids`` may
            also be a function of the training data set that gives its values.

    Attributes:
        engine: the `PrivacyEngine` of the current or last fit; None before the first. After a fit it is detached from
            the optimizer.

    Raises:
        TypeError: an option isn't one of `PrivacyEngine`.
        PrivacyError: in ``fit``: a setting of the Trainer or a hook of the module can't be private; the message says
            what to do instead.
        LossShapeError: in ``fit``: ``training_step`` doesn't return one loss per example.
    """

    def __init__(self, *, compile: bool = False, **options: Any) -> None:
        check_options(options)
        self._compiles = compile
        if isinstance(options.get("unit_ids"), Iterator):  # each fit reads them
            options["unit_ids"] = list(options["unit_ids"])
        self.engine: PrivacyEngine | None = None
        self._options = options
        # Of earlier fits and of the checkpoint to go on from, which is the last one.
        self._states: list[dict[str, Any]] = []
        self._restored = False
        self._set_up = False  # from then on a fit that is refused may leave a checkpoint's weights in the module
        self._took_over = False  # the engine knows all that the states say
        self._warned = False
        self._loader = TrainLoader(None, options)
        self._undo: list[Callable[[], None]] = []

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Checks the Trainer and the module, and replaces the training loader."""
        if stage != "fit":
            return
        self._end()
        self._restored = self._set_up = False
        check_trainer(trainer, pl_module, self._options)
        if self._compiles and not pl_module.automatic_optimization:
            raise PrivacyError("compile=True compiles no step of manual optimization; leave one of them out")
        source = trainer.fit_loop._data_source
        check_units(source, self._options)
        self._loader = TrainLoader(copy.copy(source), self._options)
        source.instance = self._loader
        self._set_up = True

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Builds the engine, once optimizers are built and a checkpoint's weights are loaded."""
        if len(trainer.optimizers) != 1:
            raise PrivacyError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers, and a step is private for one; "
                "return one optimizer with several parameter groups; of two networks that train against each other, as "
                "a GAN's, train the one that sees the data by ghostclip.PrivacyEngine, in a loop of your own"
            )
        if trainer.ckpt_path and not self._restored:
            raise PrivacyError(
                f"the checkpoint {trainer.ckpt_path} was saved without PrivacyCallback, so what it spent isn't known; "
                "if its weights are public, load them into a new module and call fit without ckpt_path"
            )
        if not trainer.ckpt_path:
            refuse_noted(pl_module)
        assert trainer.strategy.model is not None
        self._undo.append(keep_unsynchronised(trainer.strategy.model))
        with warnings.catch_warnings():
            # That the sampler is replaced is what the callback is for.
            warnings.filterwarnings("ignore", "the DataLoader's .* is replaced")
            options = {**self._loader.options, **length_of(trainer, self._loader, self._options)}
            forget_earlier(pl_module, self.engine)
            engine = PrivacyEngine(pl_module, trainer.optimizers[0], self._loader.given, **options)
        if self._compiles:
            engine.compile()
        self._undo.append(engine.detach)
        for state in self._states:
            engine.load_state_dict(state)
        self.engine, self._took_over = engine, True
        accept(pl_module)
        self._loader.start(engine, functools.partial(transferred, trainer, pl_module))
        self._undo.append(replace_methods(pl_module, methods_for(trainer, pl_module, engine)))

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refuses gradient accumulation that a hook turned on, and keeps DDP from averaging gradients itself."""
        check_accumulation(trainer)
        if hasattr(trainer.strategy.model, "require_backward_grad_sync"):
            trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[union-attr]

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the fit before a step that ``max_epsilon`` has no room for."""
        assert self.engine is not None
        if self.engine.steps_taken == self.engine.planned_steps:  # the Trainer's own end
            return
        try:
            self.engine.check_budget()
        except BudgetExceededError as error:
            log.warning("training ends after step %d: %s", trainer.global_step, error)
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Logs ``epsilon`` and ``privacy_step``, which are public; warns once of what follows private metrics."""
        assert self.engine is not None
        if not self._warned and (found := watchers(trainer)):
            self._warned = True
            log.warning(
                "%s: training follows metrics of the training data, which epsilon doesn't count; let it watch metrics "
                "of public data", ", ".join(found),
            )  # fmt: skip
        self._loader.charge_left_out()
        spent = {"epsilon": self.engine.epsilon(), "privacy_step": float(self.engine.steps_taken)}
        pl_module.log_dict(spent, sync_dist=trainer.world_size > 1, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Privacy spent and position in the epoch, which Lightning stores in its checkpoints."""
        return {"states": [self.engine.state_dict()] if self.engine is not None and self._took_over else self._states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint's state. The next fit counts its steps beside those of earlier fits of this callback."""
        self._states, self._restored = [*self._states, *state_dict["states"]], bool(state_dict["states"])

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Removes the engine from the module and the optimizer after an error."""
        if trainer.ckpt_path and self._set_up and not self._took_over:
            note(pl_module, trainer.ckpt_path)
        self._end()

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Removes the engine from the module and the optimizer after a fit."""
        if stage == "fit":
            self._end()

    def _end(self) -> None:
        """Gives the module its methods back and takes the engine off the optimizer; what was spent stays known."""
        if self._took_over and self.engine is not None:
            self._loader.charge_left_out()
            self._states = [self.engine.state_dict()]
        self._took_over = False
        while self._undo:
            self._undo.pop()()
