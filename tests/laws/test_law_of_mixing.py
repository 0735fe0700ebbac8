"""A model in which one row has two owners is refused, in the first batch in which it has."""

import pytest
import torch
from law_programs import SECOND_PASSES, assert_letters
from mixing_programs import GATED, GATES, HOOKS, MIXTURES, NETWORKS, NEVER, TOO_WEAK, WHOLE, between, hooked
from random_mixing import mixed_program

every_pass = pytest.mark.parametrize("second_pass", SECOND_PASSES)
every_network = pytest.mark.parametrize("network", NETWORKS)
every_mixture = pytest.mark.parametrize("mixture", MIXTURES)
SEEDS, MANY = 40, 1000


@every_mixture
@every_network
@every_pass
def test_activations(mixture, network, second_pass):
    assert_letters(between(mixture, network, MIXTURES[mixture]), second_pass)


@every_mixture
@every_pass
def test_activations_in_float64(mixture, second_pass):
    assert_letters(between(mixture, "perceptron", MIXTURES[mixture]), second_pass, torch.float64)


@pytest.mark.parametrize("mixture", [name for name in MIXTURES if name not in TOO_WEAK])
@every_pass
def test_activations_in_bfloat16(mixture, second_pass):
    assert_letters(between(mixture, "perceptron", MIXTURES[mixture]), second_pass, torch.bfloat16)


@pytest.mark.parametrize("hook", HOOKS)
@every_network
@every_pass
def test_hooks_on_gradients(hook, network, second_pass):
    assert_letters(between(hook, network, hooked(HOOKS[hook])), second_pass)


@pytest.mark.parametrize("program", WHOLE, ids=str)
@every_pass
def test_programs(program, second_pass):
    assert_letters(program, second_pass)


@pytest.mark.parametrize("seed", range(SEEDS))
@every_pass
@pytest.mark.one_in(2)
def test_random_graphs(seed, second_pass):
    assert_letters(mixed_program(seed), second_pass)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(SEEDS, MANY, 40))
def test_many_random_graphs(start):
    for seed in range(start, start + 40):
        assert_letters(mixed_program(seed), SECOND_PASSES[seed % 2])


@every_mixture
@every_network
@every_pass
@pytest.mark.one_in(3)
def test_mixing_that_comes_and_goes(mixture, network, second_pass):
    """By another branch of the program, and so by another graph."""

    def forward(h, on):
        return MIXTURES[mixture](h) if on else h

    program = between(mixture, network, forward, "EERREER", lambda number: ("EERREER"[number] == "R",))
    assert_letters(program, second_pass)


@every_mixture
@every_network
@every_pass
@pytest.mark.one_in(3)
def test_a_gate_that_opens(mixture, network, second_pass):
    """The same graph: while the gate is zero, no gradient comes along the branch that mixes."""

    def forward(h, gate):
        return h + gate * (MIXTURES[mixture](h) - h)

    expect = GATED.replace("E", "S") if mixture in NEVER else GATED
    program = between(mixture, network, forward, expect, lambda number: (torch.tensor(GATES[number]),))
    assert_letters(program, second_pass)


@pytest.mark.parametrize("hook", HOOKS)
@every_network
@every_pass
def test_hooks_from_the_third_batch_on(hook, network, second_pass):
    program = between(hook, network, hooked(HOOKS[hook]), "EERRER", lambda number: ("EERRER"[number] == "R",))
    assert_letters(program, second_pass)
