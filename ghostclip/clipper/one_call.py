"""Per-example gradient norms of any model in one call, without privacy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip.clipper.clipper import GhostClipper
from ghostclip.clipper.forwards import check_loss_function, forward_of
from ghostclip.clipper.trial import without_trace
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.wrap import wrapped

__all__ = ["per_example_norms"]


@keeping_grad_mode
def per_example_norms(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], data: Any, *, per: str | None = None
) -> Any:
    """Computes the gradient norm of each example, for example to find mislabelled, rare or influential examples.

    Norms have no noise: those of private data are private data. The call changes nothing: layers' classes, gradients,
    modes, buffers and random states are as before. The model's mode applies: call ``model.eval()`` before to disable
    dropout.

    Args:
        model: any torch model, wrapped or not.
        loss_fn: (model, batch) -> losses [B], one for each example; called once for each batch.
        data: a batch or a DataLoader. Norms come in the order of the loader's batches, also if it shuffles.
        per: None for the whole gradient, "layer" or "parameter".

    Returns:
        [N] for N examples in all, or {module name: [N]}, or {parameter name: [N]}; float32, or float64 for float64
        models; empty for a loader without batches.

    Raises:
        UnsupportedModelError, LossShapeError, ValueError, TypeError: as `GhostClipper` and `GhostClipper.norms`.
    """
    check_loss_function(loss_fn, data)
    with wrapped(model), without_trace(model):
        clipper = GhostClipper(model)

        def norms(batch: Any) -> Any:
            with clipper.passes.running(forward_of(model, loss_fn, batch)):
                return clipper.norms(loss_fn(model, batch), per=per)

        parts = [norms(batch) for batch in (data if isinstance(data, DataLoader) else [data])]
    if per is None:
        return torch.cat(parts) if parts else torch.zeros(0)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
