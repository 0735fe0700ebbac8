"""Norms, per-example gradients and clipped sums equal those of single backwards of the same forward."""

import importlib.util

import pytest
import torch
from difficult_programs import BATCHES, DIFFICULT
from honest_programs import EXPERTS, LAYERS, NETWORKS, RAGGED, WITHOUT_BATCH_DIM, WITHOUT_BATCH_INDEX, random_program
from law_programs import SECOND_PASSES, assert_exact, assert_within_rounding
from zoo import SUBJECTS
from zoo.measuring import measure

every_pass = pytest.mark.parametrize("second_pass", SECOND_PASSES)
MODELS = (*EXPERTS, *NETWORKS, *RAGGED, *WITHOUT_BATCH_DIM, *WITHOUT_BATCH_INDEX)
SEEDS, MANY = 40, 1000
# Of the layers one in so many in float32.
SHARE = 6


@pytest.mark.parametrize("program", LAYERS, ids=str)
@every_pass
@pytest.mark.one_in(2)
def test_layers(program, second_pass):
    assert_exact(program, 0, torch.float64, second_pass)


@pytest.mark.parametrize("program", MODELS, ids=str)
@every_pass
def test_models(program, second_pass):
    assert_exact(program, 0, torch.float64, second_pass)


@pytest.mark.parametrize("program", DIFFICULT, ids=str)
@every_pass
def test_difficult_models(program, second_pass):
    for number in range(BATCHES):
        assert_exact(program, number, torch.float64, second_pass)


@pytest.mark.parametrize("seed", range(SEEDS))
@every_pass
def test_random_graphs(seed, second_pass):
    assert_exact(random_program(seed), 0, torch.float64, second_pass)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(SEEDS, MANY, 40))
def test_many_random_graphs(start):
    for seed in range(start, start + 40):
        assert_exact(random_program(seed), 0, torch.float64, SECOND_PASSES[seed % 2])


@pytest.mark.parametrize("program", [*LAYERS[::SHARE], *MODELS, *DIFFICULT], ids=str)
@every_pass
@pytest.mark.one_in(2)
def test_in_float32(program, second_pass):
    assert_exact(program, 0, torch.float32, second_pass)


@pytest.mark.parametrize("program", [each for each in (*LAYERS[3::SHARE], *MODELS, *DIFFICULT) if each.narrow], ids=str)
@every_pass
@pytest.mark.one_in(3)
def test_in_bfloat16(program, second_pass):
    assert_within_rounding(program, 0, torch.bfloat16, second_pass)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [each for each in SUBJECTS if not each.refused], ids=lambda each: each.name)
def test_models_of_libraries(subject):
    if importlib.util.find_spec(subject.library.replace("-", "_")) is None:
        pytest.skip(f"{subject.library} is not installed")
    assert measure(subject).worst < 1e-10
