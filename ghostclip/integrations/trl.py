"""TRL's trainers with private steps: `PrivateSFTTrainer`, `PrivateDPOTrainer`, and `private` for classes of one's own.

One example is one conversation (or text) of SFT, or one pair of completions of DPO. TRL prepares data, model and
adapters as ever; `PrivateTrainer` draws logical batches and takes their steps with one loss for each example.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ghostclip.integrations import missing

try:
    from peft import PeftModel
    from transformers import Seq2SeqTrainer, Trainer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
    from trl.trainer.utils import use_adapter
except ModuleNotFoundError as error:
    raise missing(error, "trl") from None

from ghostclip.engine.step import BatchIndexOf
from ghostclip.errors import PrivacyError, UnsupportedModelError
from ghostclip.integrations.huggingface import PrivacyArguments as PrivacyArguments  # for one import in a script
from ghostclip.integrations.huggingface import PrivateTrainer
from ghostclip.integrations.huggingface_losses import ComputeLosses, next_token_losses, refuse_own_loss
from ghostclip.integrations.trl_losses import Pairs, conversation_losses, pair_losses, pair_scores
from ghostclip.integrations.trl_packing import Packed, documents_of, packed_losses
from ghostclip.integrations.trl_refusals import (
    DPO_REFUSED,
    SFT_REFUSED,
    Refused,
    check_documents,
    check_options,
    check_packing,
    refuse_adapters_with_packing,
    refuse_with_packing,
)

__all__ = ["PrivateDPOTrainer", "PrivateSFTTrainer", "private"]


class TRLTrainer(PrivateTrainer):
    """What private trainers of TRL have in common, see `private`."""

    _trainer: ClassVar[type] = Trainer
    _refused: ClassVar[Refused] = {}
    _packs = False

    def __init__(self, *given: Any, **options: Any) -> None:
        names = list(inspect.signature(self._trainer).parameters)
        options = {**dict(zip(names, given, strict=False)), **options}
        args = options.pop("args", None)
        args = self._arguments("tmp_trainer") if args is None else args
        check_options(args, self._refused)
        check_documents(options.get("train_dataset"))
        args = self._for_trl(args)
        if self._packs:
            known = type(self).compute_losses is PrivateTrainer.compute_losses
            own = not known or options.get("compute_losses") is not None
            refuse_with_packing(own, options.get("data_collator"))
        super().__init__(args=args, **options)
        if self._packs:
            refuse_adapters_with_packing(getattr(self.model, "peft_config", {}))
        if getattr(self, "_is_vision_dataset", False):
            raise PrivacyError(
                "train_dataset has images, and TRL's batches of images have no dimension of examples; train on texts, "
                "or give a PrivateTrainer of ghostclip.integrations.huggingface a data_collator of your own"
            )

    def _for_trl(self, args: Any) -> Any:
        """The arguments that TRL's trainer is built with."""
        return args

    def log(self, logs: dict[str, float], *others: Any, **options: Any) -> None:
        """As `PrivateTrainer.log`: what TRL averages over training batches (entropy, accuracy, rewards) is left out."""
        metrics: Any = self._metrics
        metrics["train"].clear()
        super().log(logs, *others, **options)


class PrivateSFT(TRLTrainer):
    """The part of `PrivateSFTTrainer` that stands before TRL's trainer."""

    _trainer, _arguments = SFTTrainer, SFTConfig
    _loss_methods: ClassVar[Mapping[str, type]] = {"compute_loss": SFTTrainer}
    _refused = SFT_REFUSED

    def _for_trl(self, args: Any) -> Any:
        """Without packing: TRL would pack the data set, of which documents could no longer be sampled."""
        check_packing(args)
        # Plain TrainingArguments, of which TRL makes an SFTConfig, have neither.
        self._packs = bool(getattr(args, "packing", False) or getattr(args, "padding_free", False))
        if self._packs:
            args = copy.copy(args)
            args.packing = args.padding_free = args.eval_packing = False
        return args

    def _collated(self, collate: Any) -> Any:
        return Packed(collate) if self._packs else super()._collated(collate)

    @property
    def _batch_index(self) -> BatchIndexOf:
        """The documents of packed tokens, which saves a backward of two; users and compiled steps take none."""
        return documents_of if self._packs and self.privacy.unit_ids is None and not self._compiles else None

    def training_step(self, *given: Any, **options: Any) -> Tensor:
        """See `PrivateTrainer.training_step`."""
        try:
            return super().training_step(*given, **options)
        except UnsupportedModelError as error:
            if not self._packs:
                raise
            crossing = "with packing, or padding_free, examples may meet in attention across documents: leave it out"
            raise UnsupportedModelError(f"{error} ({crossing})") from error

    def _losses_of_task(self) -> ComputeLosses:
        built: Any = self.model
        refuse_own_loss(built, next_token_losses)
        losses = packed_losses if self._packs else conversation_losses
        return partial(losses, loss_type=self.args.loss_type)


class PrivateDPO(TRLTrainer):
    """The part of `PrivateDPOTrainer` that stands before TRL's trainer."""

    _trainer, _arguments = DPOTrainer, DPOConfig
    _loss_methods: ClassVar[Mapping[str, type]] = {"compute_loss": DPOTrainer, "_compute_loss": DPOTrainer}
    _refused = DPO_REFUSED
    ref_model: Any
    loss_types: list[str]
    loss_weights: list[float]

    def _losses_of_task(self) -> ComputeLosses:
        return self._pair_losses

    def _pair_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        reference = model if self.ref_model is None else self.ref_model
        scores = pair_scores(model, inputs, reference, self._as_reference())
        return pair_losses(scores, self.args, self.loss_types, self.loss_weights)

    def _as_reference(self) -> AbstractContextManager[Any]:
        """Makes the trained model the reference: without its adapter, or with the one it began with."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if self.ref_model is not None or not isinstance(model, PeftModel):
            return nullcontext()
        return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)

    def _collated(self, collate: Any) -> Any:
        return Pairs(collate)


class PrivateSFTTrainer(PrivateSFT, SFTTrainer):
    """TRL's SFTTrainer with differentially private training; one example is one conversation or text.

    The loss of an example is the mean over its own tokens that have a loss (of the completion, with
    ``completion_only_loss``; of the assistant's turns, with ``assistant_only_loss``). TRL's own loss is the mean over
    the tokens of the batch, which weighs long examples more.

    With ``packing`` or ``padding_free`` documents are sampled first and put into one row after that. Each is an example
    all the same, and no padding is computed. Losses and data collators of one's own don't go with it.

    Args:
        model, args, others, options: as for SFTTrainer; ``args`` is an `SFTConfig`.
        privacy, compute_losses: as for `PrivateTrainer`.

    Attributes: as of `PrivateTrainer`.

    Raises:
        PrivacyError: an option can't be private; the message has its name.
    """


class PrivateDPOTrainer(PrivateDPO, DPOTrainer):
    """TRL's DPOTrainer with differentially private training; one example is one pair of completions.

    Args:
        model, ref_model, args, others, options: as for DPOTrainer; ``args`` is a `DPOConfig`.
        privacy, compute_losses: as for `PrivateTrainer`; a batch's inputs are [B, 2, T], the chosen completion first.

    Attributes: as of `PrivateTrainer`.

    Raises:
        PrivacyError: an option can't be private, or a loss needs other pairs of the batch; the message has its name.
    """


def private(trainer: type) -> type:
    """The private class of a trainer: of SFTTrainer, DPOTrainer, a subclass of them, or one with losses of its own.

    A subclass that computes other losses defines ``compute_losses(self, model, inputs)``, which returns one loss for
    each example, and may call ``self.task_losses(model, inputs)`` for those that the trainer would compute.
    ``compute_loss`` is used for evaluation only.

    Args:
        trainer: a class. Its constructor takes what SFTTrainer's or DPOTrainer's takes, besides its own.

    Returns:
        A class whose constructor takes ``privacy`` (and ``compute_losses``), too.

    Raises:
        TypeError: it is no trainer, or one whose losses of single examples aren't known.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise TypeError(f"private() takes a class of trainers, such as trl.SFTTrainer; got {trainer!r}")
    if issubclass(trainer, PrivateTrainer):
        return trainer
    own = getattr(trainer, "compute_losses", None)
    parts = [part for part in (PrivateSFT, PrivateDPO) if issubclass(trainer, part._trainer)]
    if not parts and own is None and trainer not in (Trainer, Seq2SeqTrainer):
        raise TypeError(
            f"the losses of single examples aren't known for {trainer.__name__}: private() knows SFTTrainer, "
            "DPOTrainer and subclasses of them (KTO's losses contain a mean over the batch); define "
            "compute_losses(self, model, inputs), which returns one loss for each example"
        )
    content = {"__doc__": trainer.__doc__, "__module__": trainer.__module__}
    content |= {} if own is None else {"compute_losses": own}
    return type(f"Private{trainer.__name__}", (parts[0] if parts else PrivateTrainer, trainer), content)
