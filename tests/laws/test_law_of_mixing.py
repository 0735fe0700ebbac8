"""A model in which one row has two owners is refused, in the first batch in which it has."""

import functools

import mixing_programs as mixing
import pytest
import torch
from law_checks import assert_letters, letters, truth
from mixing_programs import between
from random_mixing import mixed_program

from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph import marks

every_network = pytest.mark.parametrize("network", mixing.NETWORKS)
every_mixture = pytest.mark.parametrize("mixture", mixing.MIXTURES, ids=lambda name: name.replace(" ", "_"))
every_hook = pytest.mark.parametrize("hook", mixing.HOOKS, ids=lambda name: name.replace(" ", "_"))


@every_mixture
@every_network
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.one_in(32)
def test_activations(mixture, network, dtype):
    assert_letters(between(mixture, network, mixing.MIXTURES[mixture]), dtype)


@every_network
@pytest.mark.one_in(3)
def test_a_millionth_of_the_mean_is_mostly_seen(network, monkeypatch):
    """Whether it is depends on the marks that are drawn."""
    monkeypatch.setattr(marks, "_dice", torch.Generator("cpu").manual_seed(0))
    program = between("a millionth", network, lambda h: h - 1e-6 * h.mean(0))
    truths = functools.cache(lambda number: truth(program, number, torch.float32))
    found = [letter for _ in range(10) for letter in letters(program, range(2), torch.float32, "cached", truths)]
    assert found.count("R") >= 19


@pytest.mark.parametrize("program", mixing.WHOLE, ids=str)
@pytest.mark.one_in(2)
def test_programs(program):
    assert_letters(program)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 400))])
def test_random_graphs(seed):
    assert_letters(mixed_program(seed))


@every_mixture
@every_network
@pytest.mark.one_in(20)
def test_mixing_that_comes_and_goes(mixture, network):
    """By another branch of the program, and so by another graph."""

    def forward(h, on):
        return mixing.MIXTURES[mixture](h) if on else h

    program = between(mixture, network, forward, "EERREER", lambda number: ("EERREER"[number] == "R",))
    assert_letters(program)


@every_mixture
@every_network
@pytest.mark.one_in(20)
def test_a_gate_that_opens(mixture, network):
    """The same graph: while the gate is zero, no gradient comes along the branch that mixes."""

    def forward(h, gate):
        return h + gate * (mixing.MIXTURES[mixture](h) - h)

    expect = mixing.GATED.replace("E", "S") if mixture in mixing.NEVER else mixing.GATED
    expect = f"{expect[:-1]}S" if mixture in mixing.WEAK else expect
    assert_letters(between(mixture, network, forward, expect, lambda number: (torch.tensor(mixing.GATES[number]),)))


@pytest.mark.parametrize("name", mixing.BEHIND_A_MASK, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.one_in(4)
def test_a_mask_that_opens(name):
    """The same graph: what is zero behind the mask of the first two batches is a pair of examples in the next."""
    diagonal = torch.eye(mixing.EXAMPLES, dtype=torch.bool)
    masks, expect = {"E": diagonal, "R": torch.ones_like(diagonal)}, "EERERR"
    assert_letters(
        between(name, "perceptron", mixing.BEHIND_A_MASK[name], expect, lambda number: (masks[expect[number]],))
    )


@pytest.mark.parametrize("examples", [16, 32, 256])
def test_a_row_in_which_all_examples_have_the_same_part(examples):
    """It comes out as the mean of all marks, which must be no example's."""
    model, weights = torch.nn.Linear(3, 1), torch.eye(examples)
    weights[:, 0] = 1
    for _ in range(24):
        clipper = GhostClipper(model)
        with pytest.raises(UnsupportedModelError, match="examples mix"):
            clipper.norms(weights @ model(torch.randn(examples, 3))[:, 0])


@every_hook
@every_network
@pytest.mark.parametrize("expect", ["RR", "EERRER"], ids=["at once", "from the third batch on"])
@pytest.mark.one_in(9)
def test_hooks_on_gradients(hook, network, expect):
    assert_letters(
        between(hook, network, mixing.hooked(mixing.HOOKS[hook]), expect, lambda number: (expect[number] == "R",))
    )
