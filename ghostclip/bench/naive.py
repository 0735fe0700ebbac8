"""The two slow ways to a clipped sum that the paper compares with (Lee & Kifer 2020, section 3): a backward an example.

Both take ``(model, loss_fn, batch, max_norm)`` and add ``sum_i min(1, max_norm / ||g_i||) g_i`` to each ``p.grad``. One
gradient at a time is materialised, so they need little memory and no support from the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ghostclip.bench.losses import LossFunction

__all__ = ["LossFunction", "multiloss", "nxbp", "single_gradients", "trained"]


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
    sums, norms = _clipped_sums(single_gradients(model, loss_fn, batch), model, max_norm)
    _add(model, sums)
    return norms


def multiloss(model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor], max_norm: float) -> Tensor:
    """One forward for the batch, then one backward for every loss of it ("multiLoss"). Arguments, result as for `nxbp`.

    In a shared graph, 0 * inf makes every example's gradient NaN when one is; such a batch goes through `nxbp` instead.
    """
    losses = loss_fn(model, batch).unbind() if len(batch[0]) else ()
    parameters, last = list(trained(model).values()), len(losses) - 1
    backwards = (_gradients(loss, parameters, again=i < last) for i, loss in enumerate(losses))
    sums, norms = _clipped_sums(backwards, model, max_norm)
    if not bool(torch.isfinite(norms).all()):
        return nxbp(model, loss_fn, batch, max_norm)
    _add(model, sums)
    return norms


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that take part, each once, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def single_gradients(model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Each example's gradient, in the order of `trained`, by a forward and a backward of a batch of one."""
    parameters = list(trained(model).values())
    for i in range(len(batch[0])):
        yield _gradients(loss_fn(model, [part[i : i + 1] for part in batch]).sum(), parameters)


def _gradients(loss: Tensor, parameters: list[nn.Parameter], *, again: bool = False) -> list[Tensor]:
    """The gradients of one loss, zeros where a parameter took no part; NaN where the loss itself is not finite."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=again, materialize_grads=True)
    return list(gradients) if bool(torch.isfinite(loss.detach())) else [g * torch.nan for g in gradients]


def _clipped_sums(gradients: Iterable[list[Tensor]], model: nn.Module, max_norm: float) -> tuple[list[Tensor], Tensor]:
    """The clipped sum of the examples' gradients by parameter, and their norms [B]."""
    sums = [torch.zeros_like(parameter) for parameter in trained(model).values()]
    norms = []
    for example in gradients:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in example]))
        # Zero times infinity is not zero, so an example that isn't finite must be left out altogether.
        if bool(torch.isfinite(norm)):
            weight = min(1.0, max_norm / max(float(norm), 1e-30))
            torch._foreach_add_(sums, example, alpha=weight)
        norms.append(norm)
    return sums, torch.stack(norms) if norms else torch.zeros(0)


def _add(model: nn.Module, sums: list[Tensor]) -> None:
    """p.grad += sum, making it where it is None."""
    for parameter, total in zip(trained(model).values(), sums, strict=True):
        parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
