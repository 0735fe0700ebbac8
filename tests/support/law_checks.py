"""How GhostClip is judged on a program: against the slow loop, under both second passes."""

import functools
from collections.abc import Callable, Iterable

import comparing
import oracle
import torch
from law_programs import Grads, Program, converted, truth
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ghostclip

SECOND_PASSES = ("cached", "reweight")


def assert_exact(program: Program, number: int, dtype: torch.dtype) -> None:
    """Norms, norms of parameters, per-example gradients and clipped sums of one batch equal the loop's."""
    expected, tolerance = truth(program, number, dtype), comparing.TOLERANCE[dtype]
    whole, clipping = oracle.norms(expected), comparing.typical_norm(expected)
    model, options = ghostclip.wrap(program.model(dtype), **program.wrap), program.options(number, dtype)
    clipper = ghostclip.GhostClipper(model)
    losses = program.losses_of(model, number, dtype)
    comparing.assert_close(clipper.norms(losses, retain_graph=True, **options), whole, tolerance, what="norms")
    by_name = clipper.norms(losses, per="parameter", retain_graph=True, **options)
    for name, norms in oracle.norms_per_parameter(expected).items():
        comparing.assert_close(by_name[name], norms, tolerance, 1e-3 * whole, f"norms of {name}")
    comparing.assert_dicts_close(clipper.per_example_grads(losses, **options), expected, tolerance)
    for second_pass in SECOND_PASSES:
        norms, sums = clipped(program, number, dtype, second_pass, clipping)
        comparing.assert_close(norms, whole, tolerance, what=f"norms, {second_pass}")
        comparing.assert_dicts_close(sums, oracle.clipped_sum(expected, clipping), tolerance)


def clipped(
    program: Program, number: int, dtype: torch.dtype, second_pass: str, clipping: float
) -> tuple[Tensor, Grads]:
    """Norms and the clipped sum of a first batch."""
    model = ghostclip.wrap(program.model(dtype), **program.wrap)
    clipper = ghostclip.GhostClipper(model, clipping, second_pass=second_pass)
    result = clipper.backward(program.losses_of(model, number, dtype), **program.options(number, dtype))
    return result.norms, comparing.gradients(model)


def assert_within_rounding(program: Program, number: int, dtype: torch.dtype) -> None:
    """The same in a narrow type: within four times what rounding alone does to the loop, and two eps of the norm.

    What rounding does is the distance from the loop in ``dtype`` to the loop in float64 over the same numbers.
    """
    expected, eps = _flat(truth(program, number, dtype)), 2 * torch.finfo(dtype).eps
    wide = program.model(dtype).double()
    inputs = tree_map(lambda leaf: converted(leaf, torch.float64), program.inputs(number, dtype))
    torch.manual_seed(number)
    rounding = (_flat(oracle.grads_of_single_losses(wide, program.losses(wide, *inputs))) - expected).norm(dim=1)
    norms = expected.norm(dim=1)
    allowed, clipping = 4 * rounding + eps * norms, float(norms.median()) or 1.0
    model = ghostclip.wrap(program.model(dtype), **program.wrap)
    clipper, options = ghostclip.GhostClipper(model), program.options(number, dtype)
    grads = clipper.per_example_grads(program.losses_of(model, number, dtype), **options)
    off = (_flat(grads) - expected).norm(dim=1)
    assert (off <= allowed).all(), f"gradients off by {off.tolist()}, allowed {allowed.tolist()}"
    weights = (clipping / norms).clamp(max=1)
    for second_pass in SECOND_PASSES:
        found, sums = clipped(program, number, dtype, second_pass, clipping)
        assert ((found - norms).abs() <= allowed).all(), f"{second_pass}: norms {found.tolist()}, {norms.tolist()}"
        total = torch.cat([grad.double().flatten() for grad in sums.values()])
        # A norm's error moves its weight by as large a share as it moves the gradient.
        most = 2 * float(weights @ allowed) + eps * float(total.norm())
        assert float((total - weights @ expected).norm()) <= most, f"{second_pass}: the sum"


def assert_letters(program: Program, dtype: torch.dtype = torch.float32) -> None:
    """Each batch, in order through one clipper, comes out as ``program.expect`` says, under both second passes."""
    expected = functools.cache(lambda number: truth(program, number, dtype))
    for second_pass in SECOND_PASSES:
        found = letters(program, range(len(program.expect)), dtype, second_pass, expected)
        pairs = zip(found, program.expect, strict=True)
        fits = all(letter == wanted or (wanted == "S" and letter in "ER") for letter, wanted in pairs)
        assert fits, f"{program.name}, {second_pass}: {''.join(found)}, not {program.expect}"


def letters(
    program: Program, numbers: Iterable[int], dtype: torch.dtype, second_pass: str, expected: Callable[[int], Grads]
) -> list[str]:
    """What becomes of each batch, one after another through one clipper at a threshold of 1.

    Returns:
        E: exact; R: refused, and nothing added to gradients; W(relative error): wrong.
    """
    model = program.model(dtype)
    try:
        clipper = ghostclip.GhostClipper(ghostclip.wrap(model, **program.wrap), 1.0, second_pass=second_pass)
    except ghostclip.UnsupportedModelError:
        return ["R" for _ in numbers]
    return [_letter(program, number, dtype, clipper, model, expected) for number in numbers]


def _letter(
    program: Program, number: int, dtype: torch.dtype, clipper: ghostclip.GhostClipper, model: nn.Module,
    expected: Callable[[int], Grads],
) -> str:  # fmt: skip
    model.zero_grad()
    try:
        losses = program.losses_of(model, number, dtype)
        result = clipper.backward(losses, **program.options(number, dtype))
    except ghostclip.UnsupportedModelError:
        return "R" if all(p.grad is None for p in model.parameters()) else "W(refused, and added)"
    except ghostclip.GhostClipError as error:
        return f"W({type(error).__name__})"
    error = _relative_error(result.norms.double(), comparing.gradients(model), _flat(expected(number)))
    return "E" if error <= comparing.TOLERANCE[dtype] else f"W({error:.1e})"


def _relative_error(norms: Tensor, sums: Grads, expected: Tensor) -> float:
    """The largest of the sum's and the norms', over examples whose gradients are finite."""
    finite = expected.isfinite().all(1)
    expected, norms = expected[finite], norms[finite]
    whole = expected.norm(dim=1)
    total = (1 / whole).clamp(max=1) @ expected
    found = torch.cat([grad.double().flatten() for grad in sums.values()])
    off = (found - total).norm() / total.norm().clamp(min=1e-30)
    return max([float(off), *((norms - whole).abs() / whole.clamp(min=1e-30)).tolist()])


def _flat(grads: Grads) -> Tensor:
    return torch.cat([each.unsqueeze(-1).flatten(1).double() for each in grads.values()], 1)
