"""What of Trainer's options can't be private, each with a remedy."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ghostclip import accounting
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.integrations.huggingface_arguments import PrivacyArguments
from ghostclip.integrations.huggingface_heads import base_model
from ghostclip.integrations.huggingface_loop import STATE
from ghostclip.integrations.huggingface_losses import LIBRARIES
from ghostclip.ledger import Head, Ledger
from ghostclip.validate import flag, positive

__all__ = [
    "check_arguments",
    "check_losses",
    "check_privacy",
    "check_trainer",
    "refuse_published",
    "refuse_spent",
    "warn_of_earlier_steps",
    "warn_of_metrics",
    "warn_of_training_rows",
]

# Share of a target from which a ledger counts as spent: noise is calibrated to less than 1e-4 below it.
SPENT = 0.99

log = logging.getLogger("ghostclip")

# {field of TrainingArguments: (values that are fine, why another one isn't and what to do)}
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "group_by_length": (
        (False,),
        "chooses batches by their examples' lengths, and the guarantee needs random ones; leave it out, or have the "
        "data collator pad to a fixed length",
    ),
    "train_sampling_strategy": (
        ("random",),
        'orders the examples, and the guarantee needs random batches; leave it at "random"',
    ),
    "auto_find_batch_size": (
        (False,),
        "would begin the training anew after it ran out of memory; leave it out: a private step that runs out of "
        "memory goes on in smaller physical batches by itself",
    ),
    "label_smoothing_factor": (
        (0, 0.0),
        "is a mean over the batch in Trainer; smooth the labels in PrivateTrainer(compute_losses=...), for instance by "
        'cross_entropy(..., label_smoothing=0.1, reduction="none")',
    ),
    "fp16": ((False,), "needs a loss scale that the engine owns, and Trainer's follows the gradients; use bf16=True"),
    "torch_compile_backend": (
        (None, "inductor"),
        "isn't one that private steps are compiled by; leave it out: torch_compile=True is enough",
    ),
    "use_liger_kernel": (
        (False,),
        "replaces layers by kernels without a rule for the gradients of single examples; leave it out",
    ),
    "neftune_noise_alpha": (
        (None, 0, 0.0),
        "scales its noise by the length of the longest example of a batch, on which the losses of the others would "
        "depend then; leave it out",
    ),
    "include_num_input_tokens_seen": (
        (False, None, "no"),
        "counts the tokens of the examples that were drawn, which is private; leave it out",
    ),
    "debug": (
        ("", [], None),
        "prints the largest numbers of each layer for private batches, and ends the training because of them; debug on "
        "public data, or leave it out",
    ),
    "skip_memory_metrics": (
        (True,),
        "reports the memory that the training took, which depends on the examples that were drawn; leave it out",
    ),
    "deepspeed": ((None, ""), "shards or replaces the optimizer; use DistributedDataParallel, which torchrun starts"),
    "fsdp": (
        (None, "", [], False),
        "shards the model, and norms need whole layers; use DistributedDataParallel, which torchrun starts, or train "
        "adapters (peft)",
    ),
    "parallelism_config": ((None,), "shards the model or its examples; use DistributedDataParallel only"),
}
# Parts of the names of optimizers that step or change parameters elsewhere than in their step.
OPTIMIZERS = ("lomo", "layerwise", "schedule_free")
# Of learning rates that follow the metrics.
SCHEDULES = ("reduce_lr_on_plateau", "greedy")

# Methods of Trainer that choose examples or take steps; those of LIBRARIES are known.
REPLACED = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples", "training_step", "_inner_training_loop")


def check_arguments(args: TrainingArguments) -> None:
    """Raises PrivacyError for options that can't be private."""
    for name, (fine, reason) in REFUSED.items():
        value = getattr(args, name, fine[0])
        if value not in fine:
            raise PrivacyError(f"{name}={value!r} of TrainingArguments {reason}")
    if any(word in _word(args.optim) for word in OPTIMIZERS):
        raise PrivacyError(
            f"optim={_word(args.optim)!r} changes parameters outside of its step, which has no noise or charge; use "
            '"adamw_torch" or another optimizer that changes them in its step only'
        )
    if args.push_to_hub and "checkpoint" in _word(args.hub_strategy):
        raise PrivacyError(
            f"hub_strategy={_word(args.hub_strategy)!r} would publish checkpoints, whose random states are private; "
            'use "end" or "every_save"'
        )
    name = "activation_checkpointing_kwargs (gradient_checkpointing_kwargs in earlier transformers)"
    for each in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        chosen = getattr(args, each, None) or {}
        if chosen.get("use_reentrant"):
            raise PrivacyError(f'{name}: use_reentrant=True hides the graph; use {{"use_reentrant": False}}')
        if not chosen.get("preserve_rng_state", True):
            raise PrivacyError(
                f"{name}: with preserve_rng_state=False dropout is another when a part is computed again for its "
                "gradients, which belong to no loss then; leave it out"
            )
        if chosen.get("selective"):
            raise PrivacyError(
                f"{name}: what selective=True keeps serves one backward, and clipping needs two; leave it out: "
                "activation_checkpointing=True (gradient_checkpointing=True) saves more memory"
            )
    if "num_steps" in (getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}):
        raise PrivacyError("num_steps of accelerator_config isn't followed; use gradient_accumulation_steps")


def check_privacy(privacy: PrivacyArguments) -> None:
    """Raises TypeError for anything else, and ValueError unless the noise or a target > 0 is given."""
    if not isinstance(privacy, PrivacyArguments):
        raise TypeError(
            "privacy must be PrivacyArguments of ghostclip.integrations.huggingface, such as "
            f"PrivacyArguments(target_epsilon=3.0, target_delta=1e-6); got {type(privacy).__name__}"
        )
    if (privacy.noise_multiplier is None) == (privacy.target_epsilon is None):
        raise ValueError(
            "PrivacyArguments takes either noise_multiplier, or target_epsilon to have it calibrated for the steps "
            f"of the training; got {'neither' if privacy.noise_multiplier is None else 'both'}"
        )
    if privacy.target_epsilon is not None:
        positive(target_epsilon=privacy.target_epsilon)
    flag(log_private_loss=privacy.log_private_loss)
    flag(public_evaluation=privacy.public_evaluation)


def refuse_spent(ledger: Ledger, target_epsilon: float, delta: float) -> None:
    """Raises BudgetExceededError where a training before this one spent the target, before any noise is calibrated."""
    events = ledger.events if ledger.path.exists() else []
    spent = accounting.epsilon_of(events, delta=delta)
    if spent >= SPENT * target_epsilon:
        raise BudgetExceededError(
            f"this output_dir was trained before: {ledger.path} has {sum(event.count for event in events):,} steps, "
            f"which spent epsilon {spent:.4g} of {target_epsilon:g}. Take another output_dir (the same data then spend "
            "both), raise target_epsilon, or load the trained model from its last checkpoint"
        )


def refuse_published(ledger: Ledger, output_dir: str) -> None:
    """Raises PrivacyError where an upload of ``output_dir`` takes the ledger along."""
    path, folder = Path(ledger.path).resolve(), Path(output_dir).resolve()
    if path.is_relative_to(folder) and not path.relative_to(folder).parts[0].startswith(("_", PREFIX_CHECKPOINT_DIR)):
        raise PrivacyError(
            f"push_to_hub would publish the ledger {path}, whose times of single steps may tell how many examples a "
            f'step had; put it outside of output_dir, or give it a name that begins with "_", such as _{path.name}, '
            "which Trainer doesn't upload"
        )


def check_trainer(trainer: Trainer) -> None:
    """Raises PrivacyError, or ValueError, for what only a built PrivateTrainer knows: its devices and methods."""
    if getattr(trainer.args, "predict_with_generate", False) and not isinstance(trainer, Seq2SeqTrainer):
        raise ValueError(
            "predict_with_generate=True is an option of Seq2SeqTrainer, without which metrics get logits in the place "
            "of generated texts; train by `class Translation(PrivateTrainer, Seq2SeqTrainer): pass`"
        )
    if trainer.args.n_gpu > 1:
        raise PrivacyError(
            f"Trainer would split batches over {trainer.args.n_gpu} GPUs by DataParallel, which copies the model; "
            "start one process for each GPU by torchrun, or show one GPU only (CUDA_VISIBLE_DEVICES=0)"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise PrivacyError(
            "accelerate was configured to shard the model (DeepSpeed or FSDP), and norms need whole layers; configure "
            "DistributedDataParallel, which torchrun starts"
        )
    if trainer.accelerator.mixed_precision == "fp16":  # as by `accelerate launch --mixed_precision fp16`
        raise PrivacyError(f"accelerate was configured for float16, which {REFUSED['fp16'][1]}")
    if any("ADALORA" in str(each.peft_type) for each in getattr(trainer.model, "peft_config", {}).values()):
        raise PrivacyError(
            "AdaLoRA chooses ranks (update_and_allocate) by the gradients that backward leaves in p.grad, of which a "
            "private step has none; use LoraConfig, with a rank chosen beforehand"
        )
    changed = [(owner, name) for name in REPLACED for owner in type(trainer).__mro__
               if name in vars(owner) and owner.__module__.partition(".")[0] not in LIBRARIES]  # fmt: skip
    for owner, name in changed:
        raise PrivacyError(
            f"{owner.__name__}.{name} would take the place of what draws logical batches and steps with them; leave it "
            "out: give the data set, the data collator, compute_losses=... and optimizers=... instead"
        )


def check_losses(trainer: Trainer, known: Mapping[str, type]) -> None:
    """Raises PrivacyError where losses of a batch were overridden, and none of single examples given.

    Args:
        trainer: a built PrivateTrainer.
        known: {method that computes losses: the class whose losses of single examples are known}.
    """
    given = getattr(trainer, "compute_loss_func", None)
    # TRL sets one of its own for some of its losses, and a text where it is to be skipped.
    theirs = not callable(given) or (getattr(given, "__module__", None) or "").partition(".")[0] in LIBRARIES
    of_batch = [] if theirs else ["compute_loss_func"]
    for name, expected in known.items():
        owner = next(each for each in type(trainer).__mro__ if name in vars(each))
        of_batch += [f"{owner.__name__}.{name}"] if owner is not expected else []
    if of_batch:
        raise PrivacyError(
            f"{of_batch[0]} gives one loss for the batch, which can't be clipped by example; override the method "
            f"compute_losses(self, model, inputs) of {type(trainer).__name__}, or give compute_losses=..., a function "
            "of (model, inputs): both return one loss for each example"
        )


def warn_of_metrics(trainer: Trainer, said: set[str]) -> None:
    """Logs one warning where training follows metrics, which are not charged.

    Args:
        trainer: a PrivateTrainer.
        said: what was warned of before; it gets what this call warns of.
    """
    found = [name for name in _followed(trainer) if name not in said]
    said.update(found)
    if found:
        log.warning(
            "%s: training follows metrics of the evaluation data, which epsilon doesn't count; evaluate on public data "
            "and say so by PrivacyArguments(public_evaluation=True), or on data that the guarantee needn't cover",
            ", ".join(found),
        )


def warn_of_training_rows(trained: Any, evaluated: Any) -> None:
    """Logs one warning where ``eval_dataset`` is, or has among several, the ``train_dataset``."""
    several = list(evaluated.values()) if isinstance(evaluated, dict) else [evaluated]
    if trained is not None and any(each is trained for each in several):
        log.warning(
            "eval_dataset is train_dataset: epsilon doesn't count its metrics, which logs, checkpoints and model cards "
            "show beside it; evaluate on other data, or publish none of these"
        )


def warn_of_earlier_steps(model: Any, ledger: Ledger) -> None:
    """Logs one warning where the weights are a private checkpoint's, whose steps the ledger doesn't have."""
    place = str(getattr(getattr(base_model(model), "config", None), "_name_or_path", ""))
    try:
        manifest = json.loads(Path(place or os.devnull, STATE, "manifest.json").read_text(encoding="utf-8"))
        head = Head(**manifest["manifest"]["state"]["ledger"]["dict"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not (ledger.path.exists() and ledger.contains(head)):
        log.warning(
            "epsilon leaves out the steps that led to the weights of %s, which the ledger %s doesn't have: if the data "
            "are the same, give PrivacyArguments(ledger=...) that training's ledger, or resume from the checkpoint",
            place, ledger.path,
        )  # fmt: skip


def _followed(trainer: Trainer) -> list[str]:
    """The options by which training follows metrics."""
    args = trainer.args
    stops = any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks)
    follows = {
        "load_best_model_at_end": args.load_best_model_at_end,
        'save_strategy="best"': _word(args.save_strategy) == "best",
        f'lr_scheduler_type="{_word(args.lr_scheduler_type)}"': _word(args.lr_scheduler_type) in SCHEDULES,
        "EarlyStoppingCallback": stops,
    }
    found = [name for name, on in follows.items() if on]
    evaluates = _word(args.eval_strategy) != "no"
    # By itself it decides which checkpoint is kept; the options above set it, too.
    alone = evaluates and args.metric_for_best_model is not None and not found
    return [f"metric_for_best_model={args.metric_for_best_model!r}"] if alone else found


def _word(value: Any) -> str:
    """The word that stands for an option, which may be an enum."""
    return str(getattr(value, "value", value))
