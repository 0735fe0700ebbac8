"""Mixing along a path that was too faint to be seen when ownership was measured: refused in the batch that shows it.

A graph that reduces over examples is measured in every batch. tests/clipper/test_moved_rows.py has what sees it
elsewhere.
"""

import pytest
import torch
from law_checks import assert_letters
from law_programs import Program
from torch import nn

EXAMPLES, WIDTH = 64, 5
FAINT = {torch.float32: 1e-30, torch.float64: 1e-295}


class Layers(nn.Module):
    """Two layers, and the mean of the batch between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, x, gate):
        h = torch.tanh(self.first(x))
        return self.second(h + gate * (h - 2 * h.mean(0, keepdim=True)))


class Bare(nn.Module):
    """Parameters outside of layers alone, and the mean of the batch above them."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Parameter(torch.randn(WIDTH, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x, gate):
        h = x @ self.first * self.scale
        return h + gate * (h - 2 * h.mean(0, keepdim=True))


def program(build, dtype):
    gates = (FAINT[dtype], FAINT[dtype], 1.0, FAINT[dtype], 1.0)
    return Program("faint", build, lambda number: (torch.randn(EXAMPLES, WIDTH), gates[number]), expect="EERER")


@pytest.mark.parametrize("build", [Layers, Bare])
@pytest.mark.parametrize("dtype", FAINT, ids=str)
def test_a_faint_path_to_the_mean(build, dtype):
    assert_letters(program(build, dtype))


class TwoWays(nn.Module):
    """Reads a statistic of the batch if all examples are different, as they aren't in a forward on others."""

    def __init__(self, different, alike):
        super().__init__()
        self.first, self.context, self.second = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6), nn.Linear(6, 3)
        self.bare, self.different, self.alike = nn.Parameter(torch.ones(6)), different, alike

    def forward(self, x):
        way = self.different if len(x.unique(dim=0)) == len(x) else self.alike
        return self.second(way(self, torch.tanh(self.first(x)), x))


WAYS = {
    "a layer": (lambda m, h, x: h + m.context(x.mean(0, keepdim=True)), lambda m, h, x: h),
    "a parameter": (lambda m, h, x: h + m.bare * x.mean(), lambda m, h, x: h + (m.bare + 1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_forwards_that_take_another_way(way):
    """They say nothing about what the batch's own forward read."""
    assert_letters(Program(way, lambda: TwoWays(*WAYS[way]), lambda number: (torch.randn(6, WIDTH),), expect="RR"))


class GivenWhatIsShared(nn.Module):
    """A layer reads a table of parameters, with as many rows as the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.table = (
            nn.Linear(WIDTH, 3),
            nn.Linear(WIDTH, 3),
            nn.Parameter(torch.ones(6, WIDTH)),
        )

    def forward(self, x):
        return (self.first(x) + self.second(self.table)).tanh()


def test_a_layer_that_is_given_what_all_examples_share():
    assert_letters(Program("table", GivenWhatIsShared, lambda number: (torch.randn(6, WIDTH),), expect="RR"))


class TimeFirstInThree(nn.Module):
    """A layer on rows [T * B] that are taken for those of three steps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, x):
        rows = self.first(x).transpose(0, 1).reshape(-1, 6)
        h = self.second(rows.tanh().view(3, -1, 6)).reshape(-1, 3).view(x.shape[1], len(x), 3)
        return h.transpose(0, 1)


def test_a_reshape_that_takes_other_rows_together_at_another_size():
    sizes = ((4, 3), (4, 3), (4, 6), (4, 3), (4, 6))
    assert_letters(Program("steps", TimeFirstInThree, lambda n: (torch.randn(*sizes[n], WIDTH),), expect="EEEEE"))


class InFour(nn.Module):
    """Sums within quarters of the batch, of which each is an example's own as long as there are four."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.second(h.view(4, -1, 6).cumsum(1).view(h.shape))


def test_a_batch_twice_as_large_shows_what_a_small_one_hides():
    sizes = (4, 4, 8, 4, 8)
    assert_letters(Program("quarters", InFour, lambda number: (torch.randn(sizes[number], 2, WIDTH),), expect="EERER"))


class LastSteps(nn.Module):
    """Layers on rows [T * B], of which each loss reads one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

    def forward(self, x, last):
        examples, steps, _ = x.shape
        rows = self.second(self.first(x.transpose(0, 1).reshape(-1, WIDTH)).tanh())
        read = torch.nn.functional.one_hot(last, steps).T.reshape(-1, 1)
        return (rows * read).view(steps, examples, 2).sum(0)


def test_a_diagonal_that_fits_two_orders():
    """As many steps as examples: losses read the steps of a diagonal, then all of them the last one."""
    last = [torch.arange(4)] * 2 + [torch.full((4,), 3)] * 3
    assert_letters(Program("steps", LastSteps, lambda n: (torch.randn(4, 4, WIDTH), last[n]), expect="EEEEE"))


def test_a_gate_that_opens_after_several_batches():
    gates = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    assert_letters(
        Program("gate", Layers, lambda number: (torch.randn(4, WIDTH), torch.tensor(gates[number])), expect="EEEEERE")
    )
