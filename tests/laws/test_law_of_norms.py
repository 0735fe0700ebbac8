"""Norms, per-example gradients and clipped sums equal those of single backwards of the same forward.

Of layers by themselves layers/test_layers.py says so in float64.
"""

import pytest
import torch
from computed_programs import COMPUTED
from difficult_programs import BATCHES, DIFFICULT
from honest_programs import EXPERTS, LAYERS, RAGGED, WITHOUT_BATCH_DIM, WITHOUT_BATCH_INDEX, random_program
from law_checks import assert_exact, assert_within_rounding
from outside_programs import OUTSIDE

MODELS = (*EXPERTS, *RAGGED, *WITHOUT_BATCH_DIM, *WITHOUT_BATCH_INDEX)
# Weights that are cast where parameters are of float32.
CASTS = [program for program in COMPUTED if "cast" in program.name]
SEEDS = 425


@pytest.mark.parametrize("program", [*COMPUTED, *OUTSIDE], ids=str)
@pytest.mark.one_in(16)
def test_parameters_outside_of_layers(program):
    assert_exact(program, 0, torch.float64)


@pytest.mark.parametrize("program", MODELS, ids=str)
@pytest.mark.one_in(8)
def test_models(program):
    assert_exact(program, 0, torch.float64)


@pytest.mark.parametrize("program", DIFFICULT, ids=str)
@pytest.mark.one_in(8)
def test_difficult_models(program):
    for number in range(BATCHES):
        assert_exact(program, number, torch.float64)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.one_in(64)
def test_random_graphs(seed):
    assert_exact(random_program(seed), 0, torch.float64)


@pytest.mark.parametrize("program", [*LAYERS, *MODELS, *DIFFICULT, *CASTS], ids=str)
@pytest.mark.one_in(32)
def test_in_float32(program):
    assert_exact(program, 0, torch.float32)


@pytest.mark.parametrize("program", [each for each in (*LAYERS[3::6], *MODELS, *DIFFICULT) if each.narrow], ids=str)
@pytest.mark.one_in(8)
def test_in_bfloat16(program):
    assert_within_rounding(program, 0, torch.bfloat16)
