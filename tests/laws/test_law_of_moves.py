"""Rows that are moved in some batches only, and rows that gradients don't settle at first: exact or refused in each."""

import pytest
import torch
from law_checks import assert_letters
from moving_programs import MOVES, PARTS
from open_programs import LENGTHS, OPEN, STEPS


@pytest.mark.parametrize("program", [*PARTS, *LENGTHS, *OPEN, *STEPS], ids=str)
@pytest.mark.one_in(8)
def test_programs(program):
    assert_letters(program, torch.float64)


@pytest.mark.parametrize("program", MOVES, ids=str)
@pytest.mark.one_in(16)
def test_indices(program):
    assert_letters(program, torch.float64)
