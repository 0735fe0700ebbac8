"""Graphs run node by node, in place of inductor's: what is tested is what was written down."""

import torch

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
