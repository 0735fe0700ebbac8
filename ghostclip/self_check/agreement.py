"""Whether a clipper's per-example gradients are autograd's own, seen on two examples of a batch.

Autograd differentiates single losses of the graph that is there anyway, so that random layers need no second forward,
and it doesn't matter where in its inputs the model keeps its examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ghostclip.clipper.collector import Keep, NormCollector
from ghostclip.clipper.second_pass import TwoPasses
from ghostclip.errors import VerificationError
from ghostclip.norms.reduce import all_finite

__all__ = ["gradients_agree", "listed"]

# Relative: wide enough for any kernel's rounding (products of TF32 too), far below what a wrong rule does.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
TOLERANCE_OF_HALVES = 5e-2
# A gradient that is smaller than this share of the example's whole is held against that share.
FLOOR = 1e-3
NAMES_SHOWN = 5


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
    norms = run.norms()
    if not len(losses) or not all_finite(norms, losses.detach().to(norms.dtype)):
        return None
    trained = dict(passes.index.trained())
    order = norms.argsort(descending=True).tolist()
    chosen = sorted({order[0], order[len(order) // 2]})
    # What rounding may leave of positions, or uses of a parameter, that cancel, also of gradients kept materialised.
    measured, bounds = passes.measure(losses, Keep.NOTHING, retain_graph=True).norms_and_bounds()
    margins = (bounds - measured)[chosen].tolist()
    by_name, _ = run.norms_by_group({id(parameter): name for name, parameter in trained.items()})
    errors: dict[str, float] = {}
    totals: dict[str, Tensor] = {}
    for example, margin in zip(chosen, margins, strict=True):
        grads = _gradients(losses[example], trained, passes.scale)
        if not all(bool(grad.isfinite().all()) for grad in grads.values()):
            return None
        sizes = {name: _size(grad) for name, grad in grads.items()}
        found = {name: float(each[example]) for name, each in by_name.items()}
        _note(errors, {name: abs(norm - sizes.get(name, 0.0)) for name, norm in found.items()}, sizes, margin)
        for name, grad in grads.items():
            totals[name] = grad if name not in totals else totals[name] + grad
    picked = torch.zeros_like(norms)
    picked[chosen] = 1.0
    sums = _sums(passes, losses, run, picked)
    left = {name: _size(each - totals[name] if name in totals else each) for name, each in sums.items()}
    _note(errors, left, {name: _size(total) for name, total in totals.items()}, sum(margins))
    dtypes = {losses.dtype, *(p.dtype for p in trained.values()), *(call.dtype for call in run.calls)}
    # What rounding may do in the narrowest type that took part.
    _refuse(errors, max(TOLERANCE.get(dtype, TOLERANCE_OF_HALVES) for dtype in dtypes))
    return [name for name in trained if name not in totals]


def _gradients(loss: Tensor, trained: Mapping[str, nn.Parameter], scale: float) -> dict[str, Tensor]:
    """{name: gradient} of one loss, for the parameters it depends on; ``scale`` keeps float16 from rounding to zero."""
    grads = torch.autograd.grad(loss * scale, [*trained.values()], retain_graph=True, allow_unused=True)
    return {name: grad / scale for name, grad in zip(trained, grads, strict=True) if grad is not None}


def _sums(passes: TwoPasses, losses: Tensor, run: NormCollector, picked: Tensor) -> dict[str, Tensor]:
    """{name: the engine's sum of the gradients of the picked examples}."""
    sums: dict[str, Tensor] = {}
    trained = dict(passes.index.trained())
    for (owner, rows), amount in passes.weighted_sums(losses, picked, run):
        name = passes.index.names[owner]
        if name not in sums:
            sums[name] = torch.zeros_like(trained[name], dtype=amount.dtype)
        (sums[name] if rows is None else sums[name][slice(*rows)]).add_(amount)
    return sums


def _size(tensor: Tensor) -> float:
    wide = tensor.detach() if tensor.dtype in TOLERANCE else tensor.detach().float()
    return float(wide.norm())


def _note(errors: dict[str, float], deviations: Mapping[str, float], sizes: Mapping[str, float], margin: float) -> None:
    """Keeps the worst relative error of each parameter, with these deviations from norms of ``sizes`` among them."""
    floor = FLOOR * sum(size**2 for size in sizes.values()) ** 0.5
    for name, deviation in deviations.items():
        size = max(sizes.get(name, 0.0), floor)
        # Where autograd's gradients are all exactly zero, there is nothing to compare rounding errors with.
        error = 0.0 if deviation <= margin or not size else (deviation - margin) / size
        if not error <= errors.setdefault(name, 0.0):
            errors[name] = error


def _refuse(errors: Mapping[str, float], tolerance: float) -> None:
    """Raises VerificationError with the parameters whose error is above the tolerance, the worst first."""
    wrong = sorted(((error, name) for name, error in errors.items() if not error <= tolerance), reverse=True)
    if not wrong:
        return
    raise VerificationError(
        f"the first batch's self-check found gradients that aren't autograd's own, off by more than {tolerance:g} "
        f"(relative): {listed([f'{name} ({error:.2g})' for error, name in wrong])}. The layer's gradient rule is wrong "
        "(per_example of a GhostLayer), or a backward in it can't run twice over one graph; "
        "GhostClipper.verify(loss_fn, batch) compares every example. Nothing was released or charged. The errors "
        "depend on private data: for debugging, not for release"
    )


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
