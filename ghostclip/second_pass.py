"""The second pass of "reweight": an ordinary backward of the reweighted losses (Lee & Kifer 2020, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import StaleInputError
from ghostclip.graph import let_go
from ghostclip.nn.base import Call
from ghostclip.tail import let_go_below

__all__ = ["in_our_words", "reweighted_backward"]


def reweighted_backward(
    losses: Tensor,
    weights: Tensor,
    left: Sequence[nn.Parameter],
    calls: Sequence[Call],
    *,
    scale: float,
    strays: bool,
    end: Any | None,
    retain_graph: bool,
    repeatable: bool,
) -> bool:
    """Adds ``sum_i weights[i] g_i`` to the p.grads of ``left``; returns False, nothing added, where float16 overflowed.

    No example's own gradient overflowed then, but their sum did, or a large weight's multiple. The graph is kept in
    that case, for a sum of float32 terms.

    Args:
        losses: [B].
        weights: [B].
        left: parameters.
        calls: the uses of layers behind the losses.
        scale: what float16 gradients are multiplied with on the way; the sums are divided by it.
        strays: whether this backward leaves parts of the graph behind, which are freed then.
        end: the node that all these parts are below of, where they are a part of one tail.
        retain_graph: keep the graph for another call.
        repeatable: whether what to do instead is there; without, an overflow goes unseen.
    """
    narrow = scale != 1.0 or any(call.dtype == torch.float16 for call in calls)
    apart = strays and bool(left) and end is not None
    kept = (strays and not apart) or (narrow and repeatable)
    with in_our_words():
        if left:
            seed = weights.to(losses.dtype) * scale
            before = [parameter.grad for parameter in left] if narrow else []
            if narrow:
                _set(left, [None] * len(left))
            # Autograd frees what it comes through, but it doesn't come to layers it has no business with any more.
            torch.autograd.backward(losses, seed, retain_graph=retain_graph or kept, inputs=left)
            if narrow and repeatable and not _are_finite([parameter.grad for parameter in left]):
                _set(left, before)
                return False
            if narrow:
                _add_to(before, left, scale)
        if kept and not retain_graph:
            let_go(losses, calls)
        elif apart and not retain_graph:
            let_go_below(end)
    return True


def _set(parameters: Sequence[nn.Parameter], grads: Iterable[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def _are_finite(grads: Iterable[Tensor | None]) -> bool:
    """One look at the device."""
    found = [grad.isfinite().all() for grad in grads if grad is not None]
    return not found or bool(torch.stack(found).all())


def _add_to(before: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], scale: float) -> None:
    """Each p.grad divided by ``scale``, in the tensor that was there before where there was one."""
    for parameter, earlier in zip(parameters, before, strict=True):
        if parameter.grad is None:
            parameter.grad = earlier
            continue
        if scale != 1.0:
            parameter.grad /= scale
        if earlier is not None:
            earlier += parameter.grad
            parameter.grad = earlier


class in_our_words:
    """torch's errors about changed or freed tensors, said in ours: a context."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: Any) -> None:
        if not isinstance(error, RuntimeError):
            return
        text = str(error)
        if "modified by an inplace operation" in text:
            raise StaleInputError(
                "a tensor that the per-example gradients need was modified in place after a layer had used it; "
                f"clone it before the change. torch says: {text.splitlines()[0]}"
            ) from error
        if "backward through the graph a second time" in text or "freed" in text:
            raise StaleInputError(
                "the graph of these losses was freed by an earlier norms(), backward() or .backward(); run the forward "
                "again, or pass retain_graph=True to the earlier call"
            ) from error
