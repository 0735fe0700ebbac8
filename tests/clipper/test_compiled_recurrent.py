"""Recurrent layers in compiled steps: one operation for all time steps, the sums of eager, whatever the length."""

import pytest
import torch
from comparing import TOLERANCE, every_pass
from graphs import assert_as_eager, interpret
from recurrent_readers import LAYERS, losses_of, model_of

import ghostclip
from ghostclip.compiled import trial


def assert_sums_of_eager(name, second_pass):
    clipper = ghostclip.GhostClipper(model_of(name), 0.5, second_pass=second_pass, compile=True)
    for _ in range(6):
        assert_as_eager(clipper, losses_of, (torch.randn(5, 7, 3, dtype=torch.float64),), TOLERANCE[torch.float64])
    assert clipper.compiled.refusals == []
    assert clipper.compiled.graphs == 1


@every_pass
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.one_in(6)
def test_a_graph_gives_the_sums_of_eager(name, second_pass, monkeypatch):
    interpret(monkeypatch)
    assert_sums_of_eager(name, second_pass)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru"])
def test_inductor_takes_the_operations_as_they_are(name, monkeypatch):
    monkeypatch.setattr(trial, "clock", lambda: 0.0)  # its graph is used, whatever is faster
    assert_sums_of_eager(name, "cached")
