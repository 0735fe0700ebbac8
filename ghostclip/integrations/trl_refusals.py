"""What of TRL's options can't be private, each with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ghostclip.errors import PrivacyError
from ghostclip.integrations.trl_losses import OF_PAIRS

__all__ = [
    "DPO_REFUSED",
    "SFT_REFUSED",
    "Refused",
    "check_documents",
    "check_options",
    "check_packing",
    "refuse_adapters_with_packing",
    "refuse_with_packing",
]

# {field of the arguments: (values that are fine, why another one isn't and what to do)}
Refused: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]

BOTH: Refused = {
    "activation_offloading": (
        (False,),
        "moves what the gradients of single examples are computed from to the CPU; leave it out: "
        "gradient_checkpointing=True saves memory, too",
    ),
    "router_aux_loss_coef": (
        (None, 0, 0.0),
        "weighs a loss that balances experts over the batch, which depends on all examples; set it to 0.0",
    ),
}
SFT_REFUSED: Refused = {
    **BOTH,
    "shuffle_dataset": (
        (False,),
        "moves the rows of train_dataset, so that values of unit_ids and turns of a resumed training would be those of "
        "other rows; leave it out: batches are drawn at random anyway",
    ),
    "loss_type": (("nll", "chunked_nll", "dft"), 'has no losses of single examples here; use "nll" or "dft"'),
}
DPO_REFUSED: Refused = {
    **BOTH,
    "padding_free": (
        (False,),
        "puts all pairs of a batch into one row, which has no dimension of examples; leave it out: padding costs time, "
        "and changes no loss",
    ),
    "use_weighting": ((False,), "isn't known for single pairs here; leave it out"),
    "ld_alpha": ((None,), "isn't known for single pairs here; leave it out"),
    "f_divergence_type": (("reverse_kl",), 'isn\'t known for single pairs here; use "reverse_kl"'),
    "sync_ref_model": (
        (False,),
        "moves the reference model during the training, which a resumed training wouldn't find; leave it out",
    ),
}


def check_options(args: Any, refused: Refused) -> None:
    """Raises PrivacyError for options of ``args`` that can't be private, and for losses that need the whole batch."""
    kind = type(args).__name__
    for name, (fine, reason) in refused.items():
        value = getattr(args, name, fine[0])
        if value not in fine:
            raise PrivacyError(f"{name}={_plain(value)!r} of {kind} {reason}")
    names = getattr(args, "loss_type", None)
    for name in names if isinstance(names, list) else []:
        if name not in OF_PAIRS:
            raise PrivacyError(
                f"loss_type={name!r} of {kind} isn't known as a sum over pairs (one that sorts or averages over the "
                f"batch makes a pair's loss depend on others); use one of {', '.join(OF_PAIRS)}"
            )


def check_packing(args: Any) -> None:
    """Raises PrivacyError for packs that cut documents apart, each of which is one example."""
    if getattr(args, "packing", False) and args.packing_strategy != "bfd":
        raise PrivacyError(
            f"packing_strategy={args.packing_strategy!r} of {type(args).__name__} cuts documents apart, and each is "
            'one example; use "bfd": documents are sampled first and packed whole, up to max_length tokens of each'
        )


def refuse_with_packing(own_losses: bool, data_collator: Any) -> None:
    """Raises PrivacyError for what can't know whose a token is where all documents of a batch are one row."""
    if own_losses:
        raise PrivacyError(
            "packing (or padding_free) and a compute_losses of your own don't go together: its inputs would be one row "
            "[1, all tokens], whose sums and counts are of all documents; leave one of them out"
        )
    if data_collator is not None:
        raise PrivacyError(
            "packing (or padding_free) and a data_collator of your own don't go together: it may pad on the left, or "
            "leave out the attention_mask by which documents end; leave one of them out"
        )


def refuse_adapters_with_packing(configs: Mapping[str, Any]) -> None:
    """Raises PrivacyError for adapters that compute something for all examples of a batch at once.

    Args:
        configs: {adapter: configuration of peft}.
    """
    for config in configs.values():
        kind = str(_plain(config.peft_type))
        chosen = [name for name in ("use_dora", "trainable_token_indices") if getattr(config, name, None)]
        if chosen or kind == "IA3" or config.is_prompt_learning:
            raise PrivacyError(
                f"packing (or padding_free) and adapters by {', '.join(chosen) or kind} don't go together: what they "
                "compute for all examples at once can't be tested document by document; leave packing out, or take "
                "plain LoRA"
            )


def check_documents(rows: Any) -> None:
    """Raises PrivacyError for a data set whose rows are packs of documents, as TRL's ``pack_dataset`` makes them."""
    names = getattr(rows, "column_names", None) or []
    lengths = rows["seq_lengths"] if "seq_lengths" in names else []
    positions = rows["position_ids"] if "position_ids" in names else []
    several = any(len(each) > 1 for each in lengths if isinstance(each, list))
    if several or any(list(each).count(0) > 1 for each in positions if each is not None):
        raise PrivacyError(
            "train_dataset was packed beforehand: each of its rows holds several documents, so that epsilon would be "
            "about whole packs; give the documents, one in each row, and packing=True, which samples them first and "
            "packs them after that"
        )


def _plain(value: Any) -> Any:
    """The word of an enum; anything else as it is."""
    return getattr(value, "value", value)
