"""The two slow ways to a clipped sum that the paper compares with (Lee & Kifer 2020, section 3): a backward an example.

Both take ``(model, loss_fn, batch, max_norm)`` and add ``sum_i min(1, max_norm / ||g_i||) g_i`` to each ``p.grad``. One
gradient at a time is materialised, so they need little memory and no support from the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LossFunction", "multiloss", "nxbp"]

LossFunction = Callable[[nn.Module, Any], Tensor]


def nxbp(model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor], max_norm: float) -> Tensor:
    """One forward and one backward for every example ("nxBP").

    Args:
        model: any module; it must treat a batch of one as it treats the same example in a larger batch.
        loss_fn: (model, batch) -> losses [B].
        batch: tensors with examples in dimension 0.
        max_norm: each example's gradient is scaled down to this L2 norm.

    Returns:
        [B], the norms before clipping. An example whose loss or gradient is not finite contributes exactly zero.
    """
    parameters = _trained(model)
    ones = ([part[i : i + 1] for part in batch] for i in range(len(batch[0])))
    sums, norms = _clipped_sums(
        (_gradients(loss_fn(model, one).sum(), parameters) for one in ones), parameters, max_norm
    )
    _add(parameters, sums)
    return norms


def multiloss(model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor], max_norm: float) -> Tensor:
    """One forward for the batch, then one backward for every loss of it ("multiLoss"). Arguments, result as for `nxbp`.

    In a shared graph, 0 * inf makes every example's gradient NaN when one is; such a batch goes through `nxbp` instead.
    """
    parameters = _trained(model)
    losses = loss_fn(model, batch).unbind() if len(batch[0]) else ()
    last = len(losses) - 1
    backwards = (_gradients(loss, parameters, again=i < last) for i, loss in enumerate(losses))
    sums, norms = _clipped_sums(backwards, parameters, max_norm)
    if not bool(torch.isfinite(norms).all()):
        return nxbp(model, loss_fn, batch, max_norm)
    _add(parameters, sums)
    return norms


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that take part, each once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _gradients(loss: Tensor, parameters: list[nn.Parameter], *, again: bool = False) -> list[Tensor]:
    """The gradients of one loss, zeros where a parameter took no part; NaN where the loss itself is not finite."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=again, materialize_grads=True)
    return list(gradients) if bool(torch.isfinite(loss.detach())) else [g * torch.nan for g in gradients]


def _clipped_sums(
    gradients: Iterable[list[Tensor]], parameters: list[nn.Parameter], max_norm: float
) -> tuple[list[Tensor], Tensor]:
    """The clipped sum of the examples' gradients by parameter, and their norms [B]."""
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    norms = []
    for example in gradients:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in example]))
        # Zero times infinity is not zero, so an example that isn't finite must be left out altogether.
        if bool(torch.isfinite(norm)):
            weight = min(1.0, max_norm / max(float(norm), 1e-30))
            torch._foreach_add_(sums, example, alpha=weight)
        norms.append(norm)
    return sums, torch.stack(norms) if norms else torch.zeros(0)


def _add(parameters: list[nn.Parameter], sums: list[Tensor]) -> None:
    """p.grad += sum, making it where it is None."""
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
