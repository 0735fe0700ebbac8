"""Whether per-example gradients are autograd's own, and whether the first update moves what is to be trained.

Autograd differentiates two single losses of the graph that is there anyway, so that random layers need no second
forward, and it doesn't matter where in its inputs the model keeps its examples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper.collector import Keep
from ghostclip.clipper.second_pass import TwoPasses
from ghostclip.errors import UnsupportedModelError, VerificationError
from ghostclip.graph.nodes import inputs_first
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.norms.reduce import all_finite
from ghostclip.norms.term import to_float32
from ghostclip.sharding.plain import Sharding, local_part

__all__ = ["gradients_agree", "untrained"]

# Relative: wide enough for any kernel's rounding (products of TF32 too), far below what a wrong rule does.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
TOLERANCE_OF_HALVES = 5e-2
# Errors of a gradient smaller than this share of its example's norm are relative to that share. A parameter whose
# update is smaller than this share of the largest one may fail to move, by rounding.
FLOOR = 1e-3
NAMES_SHOWN = 5

log = logging.getLogger("ghostclip")


@torch.enable_grad()
def gradients_agree(passes: TwoPasses, losses: Tensor) -> list[str] | None:
    """Names of trained parameters on which the losses [B] don't depend; None where the batch is not fit for comparing.

    A batch without examples, or with gradients that aren't finite, isn't fit. Compared are, for the example with the
    largest gradient and one in the middle, the norm of each parameter's gradient and their sums. Keeps the graph.

    Raises:
        VerificationError: something differs; the layers are named.
        UnsupportedModelError: no loss depends on a trained parameter.
    """
    run = passes.norms_pass(losses, Keep.CHOSEN, retain_graph=True)
    norms, trained = run.norms(), dict(passes.index.trained())
    if not len(losses) or not all_finite(norms, losses.detach().to(norms.dtype)):
        return None
    order = norms.argsort(descending=True).tolist()
    chosen = sorted({order[0], order[len(order) // 2]})
    own = [_gradients(losses[example], trained, passes.scale) for example in chosen]
    if not all(bool(grad.isfinite().all()) for grads in own for grad in grads.values()):
        return None
    # What rounding may leave of positions, or uses of a parameter, that cancel, also of gradients kept materialised.
    measured, bounds = passes.norms_pass(losses, Keep.NOTHING, retain_graph=True).norms_and_bounds()
    margins = (bounds - measured)[chosen].tolist()
    by_name, _ = run.norms_by_group({id(parameter): name for name, parameter in trained.items()})
    errors: list[tuple[float, str]] = []
    for example, grads, margin in zip(chosen, own, margins, strict=True):
        sizes = _sizes(grads)
        off = {name: abs(float(each[example]) - sizes.get(name, 0.0)) for name, each in by_name.items()}
        errors += _relative(off, sizes, margin)
    left = {name: torch.stack(each).sum(0) for name in trained if (each := [g[name] for g in own if name in g])}
    sizes = _sizes(left)
    picked = torch.zeros_like(norms)
    picked[chosen] = 1.0
    for (owner, rows), amount in passes.weighted_sums(picked, run):
        name = passes.index.names[owner]
        left.setdefault(name, torch.zeros_like(trained[name], dtype=amount.dtype))
        (left[name] if rows is None else left[name][slice(*rows)]).sub_(amount)
    errors += _relative(_sizes(left), sizes, sum(margins))
    # What rounding may do in the narrowest type that took part.
    dtypes = {losses.dtype, *(p.dtype for p in trained.values()), *(call.dtype for call in run.calls)}
    _refuse(errors, max(TOLERANCE.get(dtype, TOLERANCE_OF_HALVES) for dtype in dtypes))
    _warn_of_others(losses, passes.index)
    return _unused(losses, trained)


def _warn_of_others(losses: Tensor, names: ParameterNames) -> None:
    """Warns of trainable tensors outside of the model, as the centers or the temperature of a criterion."""
    leaves = [getattr(node, "variable", None) for node in inputs_first(losses.grad_fn)]
    others = [str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, nn.Parameter) and not names.name_of(leaf)]
    if others:
        log.warning(
            "the losses depend on trainable parameters outside of the model (of shape %s), which get no gradient: to "
            "train them privately make them a part of the model (a submodule); else leave requires_grad off",
            _listed(others),
        )


def _unused(losses: Tensor, trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of the parameters on which none of the losses depends; UnsupportedModelError where these are all."""
    slopes = torch.autograd.grad(losses.sum(), [*trained.values()], retain_graph=True, allow_unused=True)
    names = [name for name, slope in zip(trained, slopes, strict=True) if slope is None]
    if len(names) == len(trained):
        raise UnsupportedModelError(
            "no loss of the first batch depends on a trainable parameter, so steps would be noise and nothing else; is "
            "an output detached (.detach(), .data, torch.no_grad()), or computed without the trained layers?"
        )
    return names


def _gradients(loss: Tensor, trained: Mapping[str, nn.Parameter], scale: float) -> dict[str, Tensor]:
    """{name: gradient} of one loss, for the parameters it depends on; ``scale`` keeps float16 from rounding to zero."""
    grads = torch.autograd.grad(loss * scale, [*trained.values()], retain_graph=True, allow_unused=True)
    return {name: to_float32(grad) / scale for name, grad in zip(trained, grads, strict=True) if grad is not None}


def _sizes(grads: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(grad.detach().norm()) for name, grad in grads.items()}


def _relative(off: Mapping[str, float], sizes: Mapping[str, float], margin: float) -> Iterator[tuple[float, str]]:
    """(relative error, name) of what is ``off``, by more than the margin, from gradients of these sizes."""
    floor = FLOOR * sum(size**2 for size in sizes.values()) ** 0.5
    for name, deviation in off.items():
        size = max(sizes.get(name, 0.0), floor)
        # Where autograd's gradients are all exactly zero, there is nothing to compare rounding errors with.
        if not deviation <= margin and size:
            yield (deviation - margin) / size, name


def _refuse(errors: Sequence[tuple[float, str]], tolerance: float) -> None:
    """Raises VerificationError with the parameters whose error is above the tolerance, the worst first."""
    wrong = {name: error for error, name in sorted(errors) if not error <= tolerance}
    if not wrong:
        return
    said = [f"{name} ({error:.2g})" for name, error in sorted(wrong.items(), key=lambda each: -each[1])]
    raise VerificationError(
        f"the self-check of the first batch found gradients that aren't autograd's own, off by more than {tolerance:g} "
        f"(relative): {_listed(said)}\n"
        "The layer's gradient rule is wrong (per_example of a GhostLayer, or that of a layer above, whose capture must "
        "get the tensor that the operation read), or a backward in it can't run twice over one graph; "
        "GhostClipper.verify(loss_fn, batch) compares every example.\n"
        "Nothing was released or charged. The errors depend on private data: for debugging, not for release"
    )


def _listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


@torch.no_grad()
def untrained(
    sharding: Sharding, held: Collection[nn.Parameter], optimizer: Optimizer, unused: Sequence[str]
) -> Callable[[], None] | None:
    """A function to call after the step that is about to be taken: it warns of trained parameters that didn't move.

    None where every learning rate is zero. Of each of the optimizer's parameters ``held`` the number is watched whose
    gradient is largest: it moves if any does. No loss depends on the ``unused``.
    """
    rates = {each: float(group.get("lr", 1.0)) for group in optimizer.param_groups for each in group["params"]}
    if not any(rates.values()):
        return None
    trained = [(name, parameter) for name, parameter, _ in sharding.pairs if parameter.requires_grad]
    watched: list[tuple[float, str, Tensor, Tensor]] = []
    for name, parameter in trained:
        if parameter in held and rates[parameter] and parameter.grad is not None:
            slopes, values = local_part(parameter.grad).abs(), local_part(parameter)
            if slopes.numel():
                place = tuple(map(int, torch.unravel_index(slopes.argmax(), slopes.shape)))
                number = values[place]  # a view, also where the parameter isn't contiguous
                watched.append((float(slopes[place]), name, number, number.clone()))
    largest = max((slope for slope, *_ in watched), default=0.0)
    watched = [each for each in watched if each[0] > FLOOR * largest]
    not_held = [name for name, parameter in trained if parameter not in held]

    def warn() -> None:
        found = {
            "no loss of the first batch depends on {}: until one does, noise is all they are given": unused,
            "the optimizer doesn't hold {}: they stay as they are, and their gradients take up a part of the clipping "
            "norm": not_held,
            "the first update left {} as they were: it is skipped, or lost in rounding": [
                name for _, name, number, before in watched if torch.equal(number, before)
            ],
        }
        if said := [problem.format(_listed(names)) for problem, names in found.items() if names]:
            log.warning(
                "some trainable parameters are not trained: %s. Freeze what is not meant to be trained "
                "(requires_grad_(False)) before the engine is built, and give the optimizer the rest",
                "; ".join(said),
            )

    return warn
