"""The slow obvious loop every exactness test compares with: one example at a time through the plain torch model.

It imports nothing of GhostClip, on purpose: what is wrong there cannot be wrong here in the same way.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Grads = dict[str, Tensor]


def _one(value: Tensor, dim: int | None, index: int) -> Tensor:
    """Example ``index`` of one input as a batch of one; an input without a batch dimension goes as it is."""
    if dim is None:
        return value
    example = value.detach().narrow(dim, index, 1).clone()
    return example.requires_grad_(value.requires_grad)


def per_example_grads(
    model: torch.nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    batch_dims: Sequence[int | None] | None = None,
) -> Grads:
    """The gradient of each example's own loss, ``{name: [B, *shape]}``, for every trainable parameter.

    Args:
        model: A plain torch model; it is copied, so neither it nor its gradients change.
        loss_fn: Takes the model's output for a batch of one, returns losses of shape [1].
        inputs: The positional inputs of the whole batch.
        batch_dims: For each input, the dimension holding the examples (0 or 1), None where it has none; default 0.

    Returns:
        Zeros for a parameter that an example did not use; frozen parameters are left out.
    """
    model = copy.deepcopy(model)
    dims = list(batch_dims) if batch_dims is not None else [0] * len(inputs)
    batch = next(value.shape[dim] for value, dim in zip(inputs, dims, strict=True) if dim is not None)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    result = {name: parameter.new_zeros(batch, *parameter.shape) for name, parameter in named.items()}
    for index in range(batch):
        loss = loss_fn(model(*(_one(value, dim, index) for value, dim in zip(inputs, dims, strict=True))))
        assert loss.shape == (1,), f"the oracle's loss must have shape [1] for one example; got {tuple(loss.shape)}"
        gradients = torch.autograd.grad(loss.sum(), list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                result[name][index] = gradient.to_dense()
    return result


def norms_per_parameter(grads: Grads) -> Grads:
    return {name: grad.unsqueeze(-1).flatten(1).norm(dim=1) for name, grad in grads.items()}


def norms_per_layer(grads: Grads) -> Grads:
    """``{module name: [B]}``, where a parameter belongs to the module its first name is in ("" for the root)."""
    squares: Grads = {}
    for name, norm in norms_per_parameter(grads).items():
        layer = name.rpartition(".")[0]
        squares[layer] = squares.get(layer, torch.zeros_like(norm)) + norm**2
    return {layer: square.sqrt() for layer, square in squares.items()}


def norms(grads: Grads) -> Tensor:
    """The norm of each example's whole gradient, [B]."""
    return torch.stack(list(norms_per_parameter(grads).values())).norm(dim=0)


def clip_weights(grads: Grads, max_norm: float) -> Tensor:
    """min(1, C / ||g_i||), [B]; 1 for an example without gradient."""
    return (max_norm / norms(grads)).clamp(max=1.0)


def clipped_sum(grads: Grads, max_norm: float) -> Grads:
    """sum_i min(1, C / ||g_i||) g_i, ``{name: shape}``."""
    weights = clip_weights(grads, max_norm)
    return {name: torch.einsum("i,i...->...", weights, grad) for name, grad in grads.items()}


def grads_of_single_losses(model: torch.nn.Module, losses: Tensor) -> Grads:
    """``{name: [B, *shape]}``, gradients of single losses [B] of the same forward; those are kept for another pass."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    each = [torch.autograd.grad(loss, list(named.values()), **options) for loss in losses]
    return {name: torch.stack(rows) for name, rows in zip(named, zip(*each, strict=True), strict=True)}


def norms_by_single_losses(model: torch.nn.Module, losses: Tensor) -> Tensor:
    """[B], norms of the gradients of single losses of the same forward."""
    return norms(grads_of_single_losses(model, losses))
