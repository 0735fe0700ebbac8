"""Losses of tokens behind a frozen output layer, in chunks: no tensor of [B, T, vocabulary] stands in memory.

A head that isn't trained has no gradient of its own, and what it hands down is known as soon as its logits are. So each
chunk of tokens gives losses and the gradients of these at the head's input, and its logits are freed. For 4 texts of
256 tokens, width 1024 and 128,000 words, logits in float32 take 500 MiB, and the gradients that stay 4 MiB.

The idea is that of fused linear cross-entropy (Hsu et al. 2024, "Liger Kernel", section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostclip.nn import Linear

__all__ = ["IGNORED", "frozen_head_losses", "is_frozen_head"]

# The label of a token that has no loss.
IGNORED = -100
# Logits of a chunk, in the type in which losses are computed.
CHUNK_BYTES = 1 << 27


def frozen_head_losses(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Cross-entropy of each token, as ``F.cross_entropy(head(hidden).float(), labels, reduction="none")`` has it.

    Several backwards of one graph give what those of that expression give, within rounding. A gradient of gradients
    (``create_graph=True``) lacks this loss's second derivative; use the expression there.

    Args:
        hidden: what the head reads, [..., d].
        head: a linear layer none of whose parameters requires a gradient. Its hooks don't run.
        labels: [...], int64; tokens with the label -100 have a loss of zero, and no logits are computed for them.

    Returns:
        [...], in float32 or wider.

    Raises:
        ValueError: the head is trained, or something else than a plain linear layer.
    """
    if not is_frozen_head(head):
        raise ValueError(
            f"frozen_head_losses takes a torch.nn.Linear whose parameters don't require gradients; got {head}; freeze "
            "it by head.requires_grad_(False), or use F.cross_entropy(head(hidden), ...)"
        )
    wanted, dtype = hidden.requires_grad and torch.is_grad_enabled(), _dtype(hidden, head)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        losses, slopes = _by_chunks(hidden.detach(), head, labels, dtype, wanted)
    if slopes is None:
        return losses
    # Zero, with the gradient of the losses. Made of torch's own operations, since ownership of rows is measured in
    # every batch behind a function of somebody's own.
    along = (hidden.to(slopes.dtype) * slopes).sum(-1)
    return losses + (along - along.detach())


def is_frozen_head(head: object) -> bool:
    """Whether `frozen_head_losses` takes it: a plain linear layer, not trained, sharded or offloaded."""
    if type(head) not in (nn.Linear, Linear):  # adapters and quantized layers are subclasses, or look alike
        return False
    layer: nn.Linear = head  # type: ignore[assignment]
    plain = "forward" not in vars(layer) and set(layer._parameters) == {"weight", "bias"}
    return plain and all(type(each) is nn.Parameter and not each.requires_grad for each in layer.parameters())


def _dtype(hidden: Tensor, head: nn.Linear) -> torch.dtype:
    """The type in which the head would compute its logits."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype


def _by_chunks(
    hidden: Tensor, head: nn.Linear, labels: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses [...], and their gradients [..., d] at ``hidden`` where they are ``wanted``; float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
    losses = torch.zeros(targets.shape, dtype=wide, device=hidden.device)
    slopes = torch.zeros(flat.shape, dtype=wide, device=hidden.device) if wanted else None
    size = max(1, CHUNK_BYTES // (wide.itemsize * len(weight)))
    chunks: Sequence[Tensor] = (targets != IGNORED).nonzero().squeeze(1).split(size)
    for rows in chunks:
        places = targets[rows].unsqueeze(1)
        logits = F.linear(flat[rows].to(dtype), weight, bias).to(wide)
        logits -= logits.amax(1, keepdim=True)
        own = logits.gather(1, places)
        total = logits.exp_().sum(1, keepdim=True)
        losses[rows] = (total.log() - own).squeeze(1)
        if slopes is not None:
            # softmax(logits) - onehot(labels), in the memory of the logits
            change = logits.div_(total).scatter_add_(1, places, -torch.ones_like(own))
            slopes[rows] = (change.to(dtype) @ weight).to(wide)
    return losses.view(labels.shape), None if slopes is None else slopes.view(hidden.shape)
