"""A batch is accepted, and exact, whatever batches came before it: accepted ones in any order, and refused ones."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from difficult_programs import BATCHES, DIFFICULT
from honest_programs import EXPERTS, RAGGED, WITHOUT_BATCH_INDEX
from law_checks import SECOND_PASSES, letters
from law_programs import truth

PROGRAMS = (*DIFFICULT, *EXPERTS, *RAGGED, *WITHOUT_BATCH_INDEX)
# The batches of these numbers have several examples; plus `BATCHES`, they are the ones that are refused.
SPOILT = range(5)


@functools.cache
def expected(program, number):
    return truth(program, number, torch.float64)


# Losses are added to their neighbours': where a gate is open, in one graph for all; by another branch and graph.
SPOILS = {
    "gated": lambda own, gate: own + gate * own.roll(1, 0),
    "branching": lambda own, gate: own + own.roll(1, 0) if gate else own,
}


def spoilt(program, spoil):
    """The program with twice its batches, of which the second half is spoilt."""
    index = program.index and (lambda *values: program.index(*values[:-1]))

    def batch(number):
        return *program.batch(number % BATCHES), torch.tensor(float(number >= BATCHES))

    def losses(model, *values):
        return spoil(program.losses(model, *values[:-1]), values[-1])

    return replace(program, batch=batch, losses=losses, index=index)


def assert_whatever_came_before(program, honest, order, seed=0):
    """Batches below `BATCHES` are exact, as ``honest`` has them, and the others refused; shuffled by a seed."""
    random.Random(seed).shuffle(order)
    wanted = ["R" if number >= BATCHES else "E" for number in order]
    for second_pass in SECOND_PASSES:
        found = letters(program, order, torch.float64, second_pass, lambda number: expected(honest, number % BATCHES))
        assert found == wanted, f"{program.name}, {second_pass}, batches {order}: {found}, not {wanted}"


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.one_in(64)
def test_any_order(program, seed):
    assert_whatever_came_before(program, program, [*range(BATCHES)], seed)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
@pytest.mark.one_in(64)
def test_refusals_in_between(program, spoil):
    numbers = [*range(BATCHES), *(BATCHES + number for number in SPOILT)]
    assert_whatever_came_before(spoilt(program, spoil), program, numbers)
