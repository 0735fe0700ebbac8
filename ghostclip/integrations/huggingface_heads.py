"""What a model of transformers hands to its output layer, in place of the logits that it would return."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostclip.integrations.frozen_heads import is_frozen_head
from ghostclip.native.custom_ops import is_traced

__all__ = ["base_model", "head_input", "head_of"]

# Output layers whose logits the model scales, caps or masks, found so far.
_not_last: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def base_model(model: nn.Module) -> Any:
    """The model of transformers inside of DistributedDataParallel and peft."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def head_of(model: nn.Module) -> nn.Linear | None:
    """The output layer, if it isn't trained and gives the logits that the model returns; else None."""
    find = getattr(base_model(model), "get_output_embeddings", None)
    head = None if find is None else find()
    # A compiled graph has one number of tokens; so has the forward that is measured for it.
    compiled = is_traced() or torch.compiler.is_compiling()
    return head if is_frozen_head(head) and head not in _not_last and not compiled else None


def head_input(head: nn.Linear, logits_of: Callable[[], Tensor]) -> Tensor | None:
    """What the output layer is given, [B, T, d]; None where the model does something to its logits.

    In its place the layer gets large numbers for one position. What the model returns is compared with the layer's own
    logits of these, which depend on no example.

    Args:
        head: the layer.
        logits_of: calls the model, which calls the layer once; returns the model's logits.
    """
    given, expected = list[Tensor](), list[Tensor]()

    def probed(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != 1 or args[0].dim() != 3:
            return None
        given.append(args[0])
        probe = _probe(args[0])
        expected.append(F.linear(probe, head.weight, head.bias))
        return (probe,)

    # Before the model is called: a hook that is registered after its layers may move rows.
    hook = head.register_forward_pre_hook(probed)
    try:
        logits = logits_of()
    finally:
        hook.remove()
    if len(given) == 1 and logits.shape == expected[0].shape and torch.equal(logits, expected[0].to(logits.dtype)):
        return given[0]
    _not_last.add(head)
    return None


def _probe(hidden: Tensor) -> Tensor:
    """[B, 1, d]: numbers from -3,000 to 3,000, which a cap of logits would show."""
    row = (torch.arange(hidden.shape[2], device=hidden.device) % 7 - 3) * 1000
    return row.to(hidden.dtype).repeat(len(hidden), 1, 1)
