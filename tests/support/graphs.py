"""Graphs run node by node, in place of inductor's: what is tested is what was written down."""

import copy

import torch
from comparing import assert_dicts_close, gradients

import ghostclip
from ghostclip.compiled import clip, trial


class Interpreted:
    """Stands in for a `Region`."""

    def __init__(self, graph, inputs, lasting=0):
        self.graph, self.lasting, self.seconds, self.runs = graph, lasting, 0.0, 0

    @torch.no_grad()
    def __call__(self, *inputs):
        self.runs += 1
        return self.graph(*inputs)


def interpret(monkeypatch):
    """From now on graphs are interpreted, and used though that isn't faster."""
    monkeypatch.setattr(clip, "Region", Interpreted)
    monkeypatch.setattr(trial, "clock", lambda: 0.0)


def assert_as_eager(clipper, loss_fn, batch, tolerance=1e-5):
    """A batch's sums are those of a clipper of a copy of the model that doesn't compile; returns both results."""
    clipper.model.zero_grad()
    plain = copy.deepcopy(clipper.model)
    found = clipper.clip(loss_fn, batch)
    expected = ghostclip.GhostClipper(plain, clipper.clipping).clip(loss_fn, batch)
    assert_dicts_close(gradients(clipper.model), gradients(plain), tolerance)
    clipper.model.zero_grad()
    return found, expected
