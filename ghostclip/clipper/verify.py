"""Comparing a clipper with the slow obvious loop through torch's own layers, on the user's own model and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ghostclip.clipper.cutting import cut
from ghostclip.clipper.forwards import forward_of
from ghostclip.clipper.gradient_guard import GradientGuard
from ghostclip.clipper.trial import without_trace
from ghostclip.clipping import Groupwise, Policy
from ghostclip.errors import VerificationError
from ghostclip.wrap import unwrapped

if TYPE_CHECKING:
    from ghostclip.clipper.clipper import GhostClipper

__all__ = ["compare_with_loop"]

SHOWN = 4  # parameters, groups and norms that a message lists


def compare_with_loop(
    clipper: GhostClipper, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, tolerance: float | None
) -> float:
    """Worst relative error of norms and clipped sums against one backward an example; see `GhostClipper.verify`."""
    model = clipper.model
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if tolerance is None:
        tolerance = 1e-9 if all(parameter.dtype == torch.float64 for parameter in trained.values()) else 1e-3
    # In eval mode, so that dropout doesn't differ between the batch and the single examples.
    with without_trace(model), _gradients_aside(clipper, list(trained.values())):
        losses = loss_fn(model.eval(), batch)
        with clipper.passes.running(forward_of(model, loss_fn, batch)):
            norms = clipper.norms(losses, per="parameter", retain_graph=True)
            result = clipper.backward(losses)
        sums = {name: _or_zeros(parameter.grad, parameter) for name, parameter in trained.items()}
        # Through torch's own layers: what is wrong in a wrapper's forward or backward is not wrong in the loop.
        with nullcontext() if clipper.sharding.sharded else unwrapped(model):
            singles = [cut(batch, len(losses), [example]) for example in range(len(losses))]
            loop = [_gradients(loss_fn(model, single).sum(), trained) for single in singles]
    whole = torch.stack([_norm(example.values()) for example in loop])
    weights = _weights(clipper.clipping, loop, whole)
    totals = {
        name: torch.stack([w * each[name].double() for w, each in zip(weights[name], loop, strict=True)]).sum(0)
        for name in trained
    }
    # A parameter whose gradient is zero but for rounding is not held against its own size, but against the whole's.
    clipped, worst = _norm(totals.values()), dict[str, float]()
    for name, total in totals.items():
        expected = torch.stack([_norm([example[name]]) for example in loop])
        worst[name] = max(
            _relative(norms[name].double(), expected, scale=whole.max()),
            _relative(sums[name].double(), total, scale=clipped),
        )
    wrong = {name: error for name, error in worst.items() if not error <= tolerance}
    if wrong:
        listed = [f"{name} ({error:.2g})" for name, error in sorted(wrong.items(), key=lambda w: -w[1])]
        more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
        raise VerificationError(
            f"norms or clipped sums differ from the loop over single examples by more than {tolerance:g} (relative): "
            f"{', '.join(listed[:SHOWN])}{more}\n"
            "Losses depend on other examples, which ghostclip.check(model, loss_fn, batch) finds, or a layer's rule is "
            "wrong; where norms agree, it is how sums are formed: try the other second_pass.\n"
            f"Norms by the clipper: {_first(result.norms)}, of the whole gradients by the loop: {_first(whole)}"
        )
    return max(worst.values(), default=0.0)


def _weights(policy: Policy | Groupwise, loop: list[dict[str, Tensor]], whole: Tensor) -> dict[str, Tensor]:
    """{parameter name: weights [B]} by the policy, for the loop's gradients."""
    names = list(loop[0]) if loop else []
    if not isinstance(policy, Groupwise):
        return dict.fromkeys(names, policy.weights(whole))
    partition = policy.partition({name: grad.numel() for name, grad in loop[0].items()})
    norms = {
        group: torch.stack([_norm([example[name] for name in names if partition[name] == group]) for example in loop])
        for group in dict.fromkeys(partition.values())
    }
    weights = policy.weights(norms)
    return {name: weights[group] for name, group in partition.items()}


def _first(norms: Any) -> Any:
    """A few norms, for a message."""
    if isinstance(norms, dict):
        return {group: _first(norm) for group, norm in list(norms.items())[:SHOWN]}
    return [float(f"{norm:.4g}") for norm in norms.tolist()[:SHOWN]]


def _gradients(loss: Tensor, trained: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: _or_zeros(grad, trained[name]) for name, grad in zip(trained, grads, strict=True)}


def _or_zeros(grad: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if grad is None else grad.detach()


def _norm(tensors: Any) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


def _relative(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Largest deviation, relative to the expected value or a thousandth of ``scale``, whichever is larger."""
    floor = torch.maximum(expected.abs(), 1e-3 * scale).clamp_min(torch.finfo(torch.float64).tiny)
    return float(((found - expected).abs() / floor).max()) if found.numel() else 0.0


@contextmanager
def _gradients_aside(clipper: GhostClipper, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, the p.grads begin as None; afterwards what stood there is put back, and known as before."""
    before, guard = [parameter.grad for parameter in parameters], clipper._guard
    clipper._guard = GradientGuard()
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        clipper._guard = guard
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
