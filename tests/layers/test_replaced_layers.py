"""Layers replaced in the middle of training: no decision about the old layer is used for the new one."""

import pytest
import torch
from case_models import By
from comparing import assert_dicts_close, gradients

import ghostclip
from ghostclip.graph.parameter_names import serial_number

half = lambda x: 0.5 * x  # noqa: E731
# Each mixes examples, in as many nodes as what it comes in the place of has.
MIXING = {
    "cumulated": (half, lambda x: x.cumsum(0)),
    "cumulated backwards": (torch.tanh, lambda x: x.logcumsumexp(0)),
    "softmax over the batch": (lambda x: x.softmax(1), lambda x: x.softmax(0)),
    "largest over the batch": (torch.relu, lambda x: x.cummax(0).values),
    "norm over the batch": (half, lambda x: x.renorm(2, 1, 1.0)),
}


def model_with(operation):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), By(operation), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("kind", MIXING)
def test_a_layer_that_mixes_examples_is_refused_in_the_place_of_one_that_did_not(kind, second_pass):
    before, after = MIXING[kind]
    model, x = model_with(before), torch.randn(4, 6)
    clipper = ghostclip.GhostClipper(model, 1e-3, second_pass=second_pass)
    for _ in range(6):
        clipper.backward(model(x).square().mean(1))
    model[1] = By(after)
    model.zero_grad()
    with pytest.raises(ghostclip.UnsupportedModelError):
        clipper.backward(model(x).square().mean(1))


def test_layers_that_come_and_go_are_tested_again_and_summed_right():
    model, x = model_with(half), torch.randn(4, 5, 6)
    clipper = ghostclip.GhostClipper(model, 1e-2)
    for number in range(40):
        model.zero_grad()
        model[2 * (number % 2)] = layer = ghostclip.nn.Linear(*((8, 3) if number % 2 else (6, 8)))
        del layer
        losses = model(x).square().mean((1, 2))
        clipper.backward(losses)
        found = gradients(model)
        model.zero_grad()
        ghostclip.GhostClipper(model, 1e-2).backward(model(x).square().mean((1, 2)))
        assert_dicts_close(found, gradients(model), 1e-5)


def test_a_number_is_never_given_again():
    numbers, addresses = set(), set()
    for count in range(1, 301):
        layer = torch.nn.ReLU()
        addresses.add(id(layer))
        numbers.add(serial_number(layer))
        assert serial_number(layer) in numbers
        assert len(numbers) == count
    assert len(addresses) < 300
