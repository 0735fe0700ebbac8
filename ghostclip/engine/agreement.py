"""Whether a clipper's per-example gradients are autograd's own, seen on two examples of a batch.

Autograd differentiates single losses of the graph that is there anyway, so that random layers need no second forward,
and it doesn't matter where in its inputs the model keeps its examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ghostclip.clipper.collector import Keep, NormCollector
from ghostclip.clipper.second_pass import TwoPasses
from ghostclip.errors import VerificationError
from ghostclip.norms.reduce import all_finite

__all__ = ["gradients_agree"]

# Relative: wide enough for any kernel's rounding (products of TF32 too), far below what a wrong rule does.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
TOLERANCE_OF_HALVES = 5e-2
# A gradient that is smaller than this share of the example's whole is held against that share.
FLOOR = 1e-3
NAMES_SHOWN = 5

Trained = Sequence[tuple[str, nn.Parameter]]


def gradients_agree(passes: TwoPasses, losses: Tensor) -> list[str] | None:
    """Names of trained parameters on which the losses don't depend; None where the batch is not fit for comparing.

    Compared are, for the example with the largest gradient and one in the middle, the norm of each parameter's gradient
    and their sums. Keeps the graph.

    Args:
        passes: the engine's own.
        losses: [B]; a batch without examples, or with gradients that aren't finite, isn't fit.

    Raises:
        VerificationError: something differs; the layers are named.
    """
    run = passes.measure(losses, Keep.CHOSEN, retain_graph=True)
    norms, bounds = run.norms_and_bounds()
    if not len(losses) or not all_finite(norms, losses.detach().to(norms.dtype)):
        return None
    trained = passes.index.trained()
    order = norms.argsort(descending=True).tolist()
    chosen = sorted({order[0], order[len(order) // 2]})
    # What rounding may leave of positions, or uses of a parameter, that cancel.
    margins = (bounds - norms).tolist()
    found, _ = run.norms_by_group({id(parameter): name for name, parameter in trained})
    totals: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for example in chosen:
        own = _gradients(losses[example], trained, passes.scale)
        if not all(bool(grad.isfinite().all()) for grad in own.values()):
            return None
        _note_errors(errors, found, example, own, margins[example])
        for name, grad in own.items():
            totals[name] = grad if name not in totals else totals[name] + grad
    picked = torch.zeros_like(norms)
    picked[chosen] = 1.0
    margin = sum(margins[example] for example in chosen)
    for name, error in _errors_of_sums(passes, losses, run, picked, totals, margin).items():
        errors[name] = max(errors[name], error)
    _refuse(errors, _tolerance(losses, run, trained))
    return [name for name, _ in trained if name not in totals]


def _gradients(loss: Tensor, trained: Trained, scale: float) -> dict[str, Tensor]:
    """{name: gradient} of one loss, for the parameters it depends on; ``scale`` keeps float16 from rounding to zero."""
    grads = torch.autograd.grad(loss * scale, [p for _, p in trained], retain_graph=True, allow_unused=True)
    return {name: grad / scale for (name, _), grad in zip(trained, grads, strict=True) if grad is not None}


def _note_errors(
    errors: dict[str, float], norms: Mapping[str, Tensor], example: int, own: Mapping[str, Tensor], margin: float
) -> None:
    """The worst relative error of each parameter's norms, with this example's among them."""
    sizes = {name: _size(own[name]) if name in own else 0.0 for name in norms}
    floor = _floor(sizes.values())
    for name, size in sizes.items():
        error = _relative(abs(float(norms[name][example]) - size) - margin, size, floor)
        errors[name] = max(errors.get(name, 0.0), error)


def _errors_of_sums(
    passes: TwoPasses, losses: Tensor, run: NormCollector, picked: Tensor, totals: Mapping[str, Tensor], margin: float
) -> dict[str, float]:
    """{name: relative error} of the sums over the picked examples."""
    left: dict[str, Tensor] = {}
    for (owner, rows), amount in passes.weighted_sums(losses, picked, run):
        name = passes.index.names[owner]
        if name not in left:
            parameter = next(p for n, p in passes.index.trained() if n == name)
            total = totals[name] if name in totals else torch.zeros_like(parameter)
            left[name] = total.to(amount.dtype, copy=True)
        (left[name] if rows is None else left[name][slice(*rows)]).sub_(amount)
    sizes = {name: _size(total) for name, total in totals.items()}
    floor = _floor(sizes.values())
    return {name: _relative(_size(rest) - margin, sizes.get(name, 0.0), floor) for name, rest in left.items()}


def _size(tensor: Tensor) -> float:
    wide = tensor.detach() if tensor.dtype in (torch.float32, torch.float64) else tensor.detach().float()
    return float(wide.norm())


def _floor(sizes: Iterable[float]) -> float:
    return FLOOR * sum(size**2 for size in sizes) ** 0.5


def _relative(deviation: float, size: float, floor: float) -> float:
    # Where autograd's gradients are all exactly zero, there is nothing to compare rounding errors with.
    if deviation <= 0 or not max(size, floor):
        return 0.0
    return deviation / max(size, floor)


def _tolerance(losses: Tensor, run: NormCollector, trained: Trained) -> float:
    """What rounding may do in the narrowest type that took part."""
    dtypes = {losses.dtype, *(p.dtype for _, p in trained), *(call.dtype for call in run.calls)}
    if any(dtype not in TOLERANCE for dtype in dtypes):
        return TOLERANCE_OF_HALVES
    return max(TOLERANCE[dtype] for dtype in dtypes)


def _refuse(errors: Mapping[str, float], tolerance: float) -> None:
    """Raises VerificationError with the parameters whose error is above the tolerance, the worst first."""
    wrong = sorted(((error, name) for name, error in errors.items() if not error <= tolerance), reverse=True)
    if not wrong:
        return
    listed = ", ".join(f"{name} ({error:.2g})" for error, name in wrong[:NAMES_SHOWN])
    more = f" and {len(wrong) - NAMES_SHOWN} more" if len(wrong) > NAMES_SHOWN else ""
    raise VerificationError(
        f"the first batch's self-check found gradients that aren't autograd's own, off by more than {tolerance:g} "
        f"(relative): {listed}{more}. The layer's gradient rule is wrong (per_example of a GhostLayer), or a backward "
        "in it can't run twice over one graph; GhostClipper.verify(loss_fn, batch) compares every example. Nothing was "
        "released or charged. The errors depend on private data: for debugging, not for release"
    )
