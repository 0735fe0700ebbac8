"""An example that is not finite is left out: its batch's sum is that of the others, and later batches are exact."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import comparing
import oracle
import pytest
import torch
from computed_programs import COMPUTED
from honest_programs import EXPERTS, LAYERS, RAGGED
from law_checks import SECOND_PASSES
from law_programs import Program, truth
from outside_programs import OUTSIDE

import ghostclip

BAD, MAX_NORM = 1, 0.3
# A recurrent layer or attention over all texts at once hands a NaN on to others' gradients; such batches are refused.
APART = [program for program in RAGGED if "packed" not in program.name]
# Whose first input is [B, ...] of floating point; a padded and dilated filter reads others' zeros, and is refused.
OF_NUMBERS = [
    program
    for program in (*COMPUTED, *OUTSIDE)
    if program.batch(0)[0].is_floating_point() and "dilated" not in program.name
]


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times nan": lambda x: x * torch.nan,
    "times inf": lambda x: x * torch.inf,
    "inf added": lambda x: x + torch.inf,  # the gradient of such a loss is finite
    "one nan": lambda x: x.flatten().index_fill(0, torch.tensor(x.numel() // 2), torch.nan).view(x.shape),
    "all inf": lambda x: torch.full_like(x, torch.inf),
}


def assert_left_out(program: Program, second_pass: str, spoil: Callable, in_input: bool = False) -> None:
    """``spoil`` makes a loss or an input of one example in the first batch not finite; two batches come after it."""
    model = ghostclip.wrap(program.model(torch.float64), **program.wrap)
    clipper = ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for number in range(3):
        model.zero_grad()
        expected, inputs = truth(program, number, torch.float64), program.inputs(number, torch.float64)
        bad = BAD if number == 0 else None
        if bad is not None and in_input:
            inputs[0][bad] = spoil(inputs[0][bad])
        torch.manual_seed(number)
        losses = program.losses(model, *inputs)
        if bad is not None and not in_input:
            losses = torch.stack([spoil(loss) if i == bad else loss for i, loss in enumerate(losses)])
        others = [i for i in range(len(losses)) if i != bad]
        result = clipper.backward(losses, **program.options(number, torch.float64))
        assert bad is None or float(result.weights[bad]) == 0.0
        sums = oracle.clipped_sum({name: grads[others] for name, grads in expected.items()}, MAX_NORM)
        comparing.assert_dicts_close(comparing.gradients(model), sums, 1e-9)


def turns(programs: Iterable[Program], spoils: Iterable[str]) -> list[Any]:
    """Cases of each program, with ways to spoil and second passes in turn."""
    kinds = itertools.cycle(itertools.product(spoils, SECOND_PASSES))
    return [
        pytest.param(each, *kind, id=f"{each}-{'-'.join(kind)}") for each, kind in zip(programs, kinds, strict=False)
    ]


@pytest.mark.parametrize(
    ("program", "spoil", "second_pass"),
    turns([*LAYERS, *COMPUTED, *OUTSIDE, *EXPERTS, *APART], ["times nan", "times inf", "inf added"]),
)
@pytest.mark.one_in(40)
def test_losses(program, spoil, second_pass):
    assert_left_out(program, second_pass, SPOILT[spoil])


@pytest.mark.parametrize(
    ("program", "spoil", "second_pass"), [*turns(OF_NUMBERS, ["one nan", "all inf"]), *turns(EXPERTS, ["one nan"])]
)
@pytest.mark.one_in(40)
def test_inputs(program, spoil, second_pass):
    assert_left_out(program, second_pass, SPOILT[spoil], in_input=True)
