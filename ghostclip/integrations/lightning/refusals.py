"""Settings of a Trainer or of Fabric that a private training can't keep, and what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    SpikeDetection,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessing
from lightning.pytorch.utilities.model_helpers import is_overridden

from ghostclip.engine import PrivacyEngine
from ghostclip.errors import PrivacyError

__all__ = ["check_accumulation", "check_fabric", "check_options", "check_trainer", "check_units", "watchers"]

STRATEGY = "the strategy {} has no exact per-example gradients; use 'auto' on one device, or 'ddp'"
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
# Hooks around the backward pass and the step, which the engine takes itself.
REPLACED = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
)
OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for what `PrivacyEngine` doesn't take."""
    known = [
        name for name, each in inspect.signature(PrivacyEngine).parameters.items() if each.kind is each.KEYWORD_ONLY
    ]
    for name in options:
        if name in PrivacyEngine.refused_names:
            raise TypeError(f"PrivacyEngine has no argument {name}; use {PrivacyEngine.refused_names[name]}")
        if name not in known:
            raise TypeError(f"{name!r} is no option of PrivacyEngine; it takes {', '.join(known)}")


def check_trainer(trainer: Any, module: lightning.LightningModule, options: Mapping[str, Any]) -> None:
    """Raises PrivacyError for settings that a private fit can't keep."""
    if lightning.Trainer not in type(trainer).__mro__:
        raise PrivacyError(
            f"the Trainer is one of {type(trainer).__module__.partition('.')[0]}, a package of its own; take Trainer "
            "and LightningModule from lightning: `import lightning.pytorch as pl`"
        )
    check_accumulation(trainer)
    strategy = type(trainer.strategy)
    hooks = _hooks(trainer, module)
    found = {
        "gradient_clip_val clips the mean gradient, which bounds no example's part; use PrivacyCallback(clipping=...)":
            trainer.gradient_clip_val,
        "overfit_batches takes the same examples in each epoch; use limit_train_batches":
            trainer.overfit_batches,
        "reload_dataloaders_every_n_epochs would change the data set that the guarantee is about; leave it out":
            trainer.reload_dataloaders_every_n_epochs,
        STRATEGY.format(strategy.__name__): strategy not in (SingleDeviceStrategy, DDPStrategy),
        f"{', '.join(hooks)} would see or change gradients without noise, or steps that the engine takes; leave it out":
            hooks,
        "a tuner (lr_find, scale_batch_size, LearningRateFinder, BatchSizeFinder) takes steps on the data and forgets "
        "them; tune on public data, and leave it out of a private fit":
            any(isinstance(each, BatchSizeFinder | LearningRateFinder) for each in trainer.callbacks),
        "SpikeDetection reads private losses, and leaves out batches by them; leave it out":
            any(isinstance(each, SpikeDetection) for each in trainer.callbacks),
        f"the strategy {strategy.__name__} begins a fit in new processes (ddp_spawn, ddp_fork, ddp_notebook), of which "
        "this one doesn't learn what was spent; use 'ddp'": isinstance(trainer.strategy.launcher, MultiProcessing),
        "a compiled LightningModule can't be clipped; give fit the module itself":
            getattr(module, "_compiler_ctx", None) is not None,
    }  # fmt: skip
    for problem, is_there in found.items():
        if is_there:
            raise PrivacyError(problem)
    _check_precision(str(trainer.precision), options, module.automatic_optimization)


def _hooks(trainer: Any, module: lightning.LightningModule) -> list[str]:
    """Hooks around the backward pass and the step that the module or a callback has, in words."""
    taken = REPLACED if module.automatic_optimization else REPLACED[:1]
    found = [f"the module's {name}" for name in taken if is_overridden(name, module)]
    return found + [
        f"{type(each).__name__}'s {name}"
        for each in trainer.callbacks
        for name in OF_CALLBACKS
        if name in taken and getattr(getattr(each, name), "__func__", None) is not getattr(lightning.Callback, name)
    ]


def check_units(source: Any, options: Mapping[str, Any]) -> None:
    """Raises PrivacyError for values of ``unit_ids`` where Lightning has the data made anew in the fit."""
    given = options.get("unit_ids")
    if given is not None and not callable(given) and source.is_module():
        raise PrivacyError(
            f"unit_ids has values for the rows of a data set that {type(source.instance).__name__} makes in the fit, "
            "perhaps in another order; give a function of the training data set: unit_ids=lambda data: [...]"
        )


def check_accumulation(trainer: Any) -> None:
    """Raises PrivacyError where several batches would make a step."""
    schedulers = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]
    if trainer.accumulate_grad_batches != 1 or schedulers:
        raise PrivacyError(
            "accumulate_grad_batches makes a step of several batches, and a private step is one sample of the data; "
            "the batch size of the loader is that of the step, and PrivacyCallback(max_physical_batch_size=...) what "
            "fits into memory"
        )


def watchers(trainer: Any) -> list[str]:
    """What follows a metric that ``training_step`` logged, in words."""
    private = {each.meta.name for each in (trainer._results or {}).values() if each.meta.fx == "training_step"}
    following = [*trainer.callbacks, *(each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau)]
    watched = [(getattr(each, "scheduler", each), str(getattr(each, "monitor", None))) for each in following]
    return [
        f"{type(each).__name__}(monitor={name!r})"
        for each, name in watched
        if {name, name.removesuffix("_step"), name.removesuffix("_epoch")} & private
    ]


def _check_precision(precision: str, options: Mapping[str, Any], engine_steps: bool) -> None:
    """Raises PrivacyError where a scaler would scale noise or sums, or types aren't known to be exact."""
    scaled = precision == "16-mixed" and engine_steps and isinstance(options.get("loss_scale"), int | float)
    if precision not in PRECISIONS and not scaled:
        raise PrivacyError(
            f"precision={precision!r} can't be kept; use one of {', '.join(PRECISIONS)}, or '16-mixed' with automatic "
            "optimization and loss_scale=1024.0, by which the engine scales in place of a GradScaler"
        )


def check_fabric(fabric: lightning.Fabric, options: Mapping[str, Any]) -> None:
    """Raises PrivacyError for a strategy or a precision that a private training can't keep."""
    check_options(options)
    if type(fabric.strategy) not in (FabricSingleDevice, FabricDDP):
        raise PrivacyError(STRATEGY.format(type(fabric.strategy).__name__))
    _check_precision(str(fabric.strategy.precision.precision), options, engine_steps=False)
