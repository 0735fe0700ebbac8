"""What a law is tried on: a program, which is a model with batches and losses; and how GhostClip is judged on it.

The truth is the slow loop: one backward for each single loss of the same forward, through a plain copy of the model that
GhostClip never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import comparing
import oracle
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import ghostclip

__all__ = [
    "SECOND_PASSES",
    "Judge",
    "Program",
    "assert_exact",
    "assert_letters",
    "assert_within_rounding",
    "single_gradients",
    "squares",
    "truth",
]

SECOND_PASSES = ("cached", "reweight")
Grads = dict[str, Tensor]


def squares(model: nn.Module, *inputs: Any) -> Tensor:
    """Losses [B]: squares of all outputs of an example, added up."""
    return model(*inputs).flatten(1).square().sum(1)


@dataclass(frozen=True)
class Program:
    """A model and its batches.

    Attributes:
        name: in test ids.
        build: the model, float32.
        batch: number of the batch -> what the losses read, float32.
        losses: (model, *batch) -> [B].
        expect: a letter a batch: E exact, R refused, S either (safe).
        wrap: options of `ghostclip.wrap`.
        index: (*batch) -> `batch_index`; None where none is given.
        alone: whether the truth comes from batches of one, because an example that isn't finite spoils a whole backward.
        narrow: whether bfloat16 can show what the program is about.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Sequence[Any]]
    losses: Callable[..., Tensor] = squares
    expect: str = "EEE"
    wrap: dict[str, Any] = field(default_factory=dict)
    index: Callable[..., Any] | None = None
    alone: bool = False
    narrow: bool = True

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The plain model, with the same parameters every time."""
        torch.manual_seed(0)
        return self.build().to(dtype)

    def inputs(self, number: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """A batch, with the same numbers every time."""
        torch.manual_seed(1000 + number)
        return tuple(tree_map(lambda leaf: _converted(leaf, dtype), self.batch(number)))

    def losses_of(self, model: nn.Module, number: int, dtype: torch.dtype) -> Tensor:
        """Losses of a batch; what the forward draws at random is the same every time."""
        inputs = self.inputs(number, dtype)
        torch.manual_seed(number)
        return self.losses(model, *inputs)

    def options(self, number: int, dtype: torch.dtype) -> dict[str, Any]:
        """Keyword arguments of the clipper's methods for a batch."""
        return {} if self.index is None else {"batch_index": self.index(*self.inputs(number, dtype))}


def _converted(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)


def single_gradients(model: nn.Module, losses: Tensor) -> Grads:
    """``{name: [B, *shape]}``: one backward for each loss."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in named}
    for loss in losses:
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for (name, p), grad in zip(named.items(), grads, strict=True):
            found[name].append(torch.zeros_like(p) if grad is None else grad.to_dense())
    return {name: torch.stack(rows) if rows else named[name].new_zeros(0) for name, rows in found.items()}


def truth(program: Program, number: int, dtype: torch.dtype) -> Grads:
    """Per-example gradients of a batch by the slow loop; in float64 whatever the type of the losses."""
    model = program.model(dtype)
    if program.alone:
        inputs = program.inputs(number, dtype)
        ones = [[value[i : i + 1] for value in inputs] for i in range(len(inputs[0]))]
        rows = [single_gradients(model, program.losses(model, *one)) for one in ones]
        found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    else:
        found = single_gradients(model, program.losses_of(model, number, dtype))
    return {name: grads.double() for name, grads in found.items()}


def assert_exact(program: Program, number: int, dtype: torch.dtype, second_pass: str) -> None:
    """Norms, norms of parameters, per-example gradients and the clipped sum of one batch equal the loop's."""
    expected, tolerance = truth(program, number, dtype), comparing.TOLERANCE[dtype]
    clipping = comparing.typical_norm(expected) if len(next(iter(expected.values()))) else 1.0
    model = ghostclip.wrap(program.model(dtype), **program.wrap)
    clipper = ghostclip.GhostClipper(model, clipping, second_pass=second_pass)
    losses, options = program.losses_of(model, number, dtype), program.options(number, dtype)
    whole = oracle.norms(expected)
    comparing.assert_close(clipper.norms(losses, retain_graph=True, **options), whole, tolerance, what="norms")
    by_name = clipper.norms(losses, per="parameter", retain_graph=True, **options)
    for name, norms in oracle.norms_per_parameter(expected).items():
        comparing.assert_close(by_name[name], norms, tolerance, 1e-3 * whole, f"norms of {name}")
    found = clipper.per_example_grads(losses, retain_graph=True, **options)
    comparing.assert_dicts_close(found, expected, tolerance)
    result = clipper.backward(losses, **options)
    comparing.assert_close(result.norms, whole, tolerance, what="norms of the clipped sum")
    comparing.assert_dicts_close(comparing.gradients(model), oracle.clipped_sum(expected, clipping), tolerance)


def assert_within_rounding(program: Program, number: int, dtype: torch.dtype, second_pass: str) -> None:
    """The same in a narrow type: within four times what rounding alone does to the loop, and two eps of the norm.

    What rounding does is the distance from the loop in ``dtype`` to the loop in float64 over the same numbers.
    """
    expected = _flat(truth(program, number, dtype))
    wide = program.model(dtype).double()
    inputs = tree_map(lambda leaf: _converted(leaf, torch.float64), program.inputs(number, dtype))
    torch.manual_seed(number)
    rounding = (_flat(single_gradients(wide, program.losses(wide, *inputs))) - expected).norm(dim=1)
    norms = expected.norm(dim=1)
    allowed, clipping = 4 * rounding + 2 * torch.finfo(dtype).eps * norms, float(norms.median()) or 1.0
    model = ghostclip.wrap(program.model(dtype), **program.wrap)
    clipper = ghostclip.GhostClipper(model, clipping, second_pass=second_pass)
    losses, options = program.losses_of(model, number, dtype), program.options(number, dtype)
    found = _flat(clipper.per_example_grads(losses, retain_graph=True, **options))
    result = clipper.backward(losses, **options)
    total = torch.cat([grad.double().flatten() for grad in comparing.gradients(model).values()])
    weights = (clipping / norms).clamp(max=1)
    assert ((found - expected).norm(dim=1) <= allowed).all(), f"gradients: {(found - expected).norm(dim=1)}, {allowed}"
    assert ((result.norms - norms).abs() <= allowed).all(), f"norms: {result.norms}, {norms}"
    # A weight moves by a norm's share, and so does its example's part of the sum.
    off = float((total - weights @ expected).norm())
    assert off <= 2 * float(weights @ allowed) + 2 * torch.finfo(dtype).eps * float(total.norm()), f"sum: off by {off}"


def _flat(grads: Grads) -> Tensor:
    """[B, P] in float64."""
    return torch.cat([each.unsqueeze(-1).flatten(1).double() for each in grads.values()], 1)


class Judge:
    """One clipper over a program's batches: what becomes of each, as a letter."""

    def __init__(self, program: Program, dtype: torch.dtype, second_pass: str) -> None:
        self.program, self.dtype = program, dtype
        self.model = ghostclip.wrap(program.model(dtype), **program.wrap)
        self.clipper = ghostclip.GhostClipper(self.model, 1.0, second_pass=second_pass)

    def letter(self, number: int, expected: Grads | None = None) -> str:
        """E: exact; R: refused, with nothing added; W(relative error): wrong."""
        program, dtype = self.program, self.dtype
        self.model.zero_grad()
        losses = program.losses_of(self.model, number, dtype)
        try:
            result = self.clipper.backward(losses, **program.options(number, dtype))
        except ghostclip.UnsupportedModelError:
            return "R" if all(p.grad is None for p in self.model.parameters()) else "W(refused, and added)"
        except ghostclip.GhostClipError as error:
            return f"W({type(error).__name__})"
        expected = truth(program, number, dtype) if expected is None else expected
        error = relative_error(result.norms, comparing.gradients(self.model), expected)
        return "E" if error <= comparing.TOLERANCE[dtype] else f"W({error:.1e})"


def relative_error(norms: Tensor, sums: Grads, expected: Grads) -> float:
    """The largest of the sum's and the norms', over examples whose gradients are finite; the threshold is 1."""
    flat = _flat(expected)
    flat, norms = flat[flat.isfinite().all(1)], norms.double()[flat.isfinite().all(1)]
    whole = flat.norm(dim=1)
    total = (flat * (1 / whole).clamp(max=1)[:, None]).sum(0)
    found = torch.cat([grad.double().flatten() for grad in sums.values()])
    off = (found - total).norm() / total.norm().clamp(min=1e-30)
    return max([float(off), *((norms - whole).abs() / whole.clamp(min=1e-30)).tolist()])


def assert_letters(program: Program, second_pass: str, dtype: torch.dtype = torch.float32) -> None:
    """Each batch, in order through one clipper, comes out as ``program.expect`` says."""
    try:
        judge = Judge(program, dtype, second_pass)
    except ghostclip.UnsupportedModelError:
        found = ["R"] * len(program.expect)
    else:
        found = [judge.letter(number) for number in range(len(program.expect))]
    fits = [letter == wanted or (wanted == "S" and letter in "ER") for letter, wanted in zip(found, program.expect, strict=True)]
    assert all(fits), f"{program.name}, {second_pass}: {''.join(found)}, not {program.expect}"
