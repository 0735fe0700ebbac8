"""Marks, and the owners of rows that they show: each part by itself."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import ghostclip
from ghostclip.graph import alarm
from ghostclip.graph.marks import MarkScheme, compared, numbers
from ghostclip.graph.owners import owners
from ghostclip.graph.rows import Owned, Rows
from ghostclip.graph.shared.search import Doubt, may_be_shared
from ghostclip.norms.ragged import RowIndex

MARKS = MarkScheme()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
WIDTH = 5


# Marks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [MARKS, alarm.ALARM], ids=["owners", "alarm"])
@pytest.mark.parametrize("examples", [2, 3, 16, 33, 100])
def test_marks_are_spread_over_all_levels(marks, examples):
    level = marks.drawn(torch.ones(examples)).log2()
    shares = torch.unique(level, return_counts=True)[1]
    assert level.min() == marks.lowest
    assert level.max() == (marks.lowest + marks.levels - 1 if examples > 1 else marks.lowest)
    assert int(shares.max()) - int(shares.min()) <= 1
    assert len(shares) == min(examples, marks.levels)


@pytest.mark.parametrize(("marks", "most"), [(MARKS, 0.5), (alarm.ALARM, 1.0)], ids=["owners", "alarm"])
def test_marks_are_powers_of_two_and_never_above_one(marks, most):
    """A hook that cuts large gradients doesn't act because of them; those of owners are below one."""
    drawn = marks.drawn(torch.ones(200))
    assert (drawn <= most).all()
    assert torch.equal(drawn.log2(), drawn.log2().round())


@pytest.mark.parametrize(
    "draw",
    [MARKS.drawn, alarm.ALARM.drawn, lambda losses: MARKS.drawn_apart(losses, None)[0]],
    ids=["owners", "alarm", "apart"],
)
def test_no_two_examples_share_a_mark_for_long(draw):
    drawn = torch.stack([draw(torch.ones(128)) for _ in range(20)])
    always = (drawn[:, :, None] == drawn[:, None]).all(0)
    assert int(always.sum()) == 128


# Rows and their marks ------------------------------------------------------------------------------------------------


def both(plain, marks, dtype=torch.float32):
    """Numbers of rows, and of the rows multiplied with marks."""
    plain = plain.to(dtype)
    return plain, numbers(plain, 0), plain * marks.to(dtype)[:, None]


@DTYPES
def test_rows_times_their_marks_fit_and_others_do_not(dtype):
    marks = MARKS.drawn(torch.ones(40))
    _, plain, marked = both(torch.randn(40, WIDTH), marks, dtype)
    off, _, shown = compared(plain, numbers(marked, 0), marks, MARKS)
    assert shown.all()
    assert not off.any()
    assert compared(plain, numbers(marked, 0), marks.roll(1), MARKS).off.any()


@DTYPES
@pytest.mark.parametrize("off", [1e-5, 1e-3, 1e-2])
def test_the_tolerance_is_a_small_share_of_the_largest_entry(dtype, off):
    marks = MARKS.drawn(torch.ones(8))
    _, plain, marked = both(torch.ones(8, WIDTH), marks, dtype)
    marked[2, 1] *= 1 + off
    found, _, _ = compared(plain, numbers(marked, 0), marks, MARKS)
    assert found.tolist() == [row == 2 and off > 1e-4 for row in range(8)]


def test_either_number_of_a_row_shows_that_it_is_off():
    """The projections agree in one row, and the largest entries in the other."""
    marks = torch.full((2,), 0.5)
    _, plain, marked = both(torch.tensor([[3.0, 1.0, 1.0], [3.0, 1.0, 1.0]]), marks)
    _, along = numbers(torch.eye(3), 0)
    marked[0, :2] += along[[1, 0]] * torch.tensor([1.0, -1.0])
    marked[1, 1] *= 1.1
    found, _, _ = compared(plain, numbers(marked, 0), marks, MARKS)
    assert found.tolist() == [True, True]


def test_rows_that_are_zero_in_the_plain_backward_only_have_several_owners():
    marks = MARKS.drawn(torch.ones(4))
    _, plain, marked = both(torch.tensor([[1.0], [0.0], [1.0], [0.0]]), marks)
    marked[1] = 0.25
    off, *_ = compared(plain, numbers(marked, 0), marks, MarkScheme(floor=1e-20))
    assert off.tolist() == [False, True, False, False]


# Owners of the rows of one tensor ------------------------------------------------------------------------------------


def owners_of(change, rows, dtype=torch.float32, losses=lambda h: h.flatten(1).square().sum(1)):
    """What is found of a tensor of so many rows, of which ``change`` makes what has a row for each loss."""
    leaf = torch.randn(rows, WIDTH, dtype=dtype).requires_grad_()
    h = leaf * 1.0
    edge = (h.grad_fn, 0)
    return owners(losses(change(h)), [], [edge], [(get_gradient_edge(leaf).node, 0)])[edge]


@DTYPES
@pytest.mark.parametrize("examples", [2, 5, 40])
@pytest.mark.parametrize("times", [1, 3])
def test_rows_in_order(dtype, examples, times):
    example_first = owners_of(lambda h: h.view(examples, times, WIDTH), examples * times, dtype)
    row_first = owners_of(lambda h: h.view(times, examples, WIDTH).transpose(0, 1), examples * times, dtype)
    assert example_first == Owned(Rows(0, "example"), examples, whole=True)
    assert row_first == Owned(Rows(0, "row" if times > 1 else "example"), examples, whole=True)


@DTYPES
@pytest.mark.parametrize("examples", [2, 5, 40, 1100])
def test_permuted_rows_get_owners(dtype, examples):
    order = torch.randperm(examples).roll(1)
    found = owners_of(lambda h: h[order], examples, dtype)
    if torch.equal(order, torch.arange(examples)):
        assert found.is_regular
    else:
        assert torch.equal(found.rows.order.index, order.argsort())
        assert found.shown
        assert not found.is_regular


def test_rows_that_two_examples_have_in_equal_parts_have_no_owner():
    """Multiplied with equal marks they look like one example's, in a backward for a digit."""
    for _ in range(100):
        pair = owners_of(lambda h: torch.cat([h[:1], h[:1], h[1:]]), 40, losses=lambda h: h.sum(1))
        assert pair.is_shared


def test_rows_that_one_example_outweighs_are_open():
    """Each row has a part of all examples, and a large one of one."""

    def parts(h):
        shares = torch.ones(20, 2, dtype=h.dtype)
        shares[17, 0] = shares[3, 1] = 1e14
        return shares @ h

    found = owners_of(parts, 2, torch.float64, lambda h: h.sum(1))
    assert found.shown
    assert found.uncertain


# What counts as shared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loose", [True, False])
def test_rows_in_no_order_that_fit_loosely_are_never_taken_for_one_examples(loose):
    """Along the positions, rows of two examples fit the marks of the larger one: beside an input of 1e15 that moved the
    sum by 1.7 of the bound."""
    edge = (torch.zeros(2, 6, 4).requires_grad_().mul(2).grad_fn, 0)
    found = Owned(Rows(1, RowIndex(torch.zeros(6, dtype=torch.int64), 2)), examples=1, loose=loose)
    assert may_be_shared(edge, found, Doubt.NOTHING) == loose


class Doubled(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, grad: 2 * grad)


def test_a_function_of_single_numbers_is_measured():
    """Numbers have no dimension along which anybody could look."""
    layer = ghostclip.wrap(torch.nn.Linear(4, 1)).double()
    clipper = ghostclip.GhostClipper(layer, 1.0)
    for size in (6, 6, 5):
        inputs = torch.randn(size, 4, dtype=torch.float64)
        outputs = layer(inputs)
        norms = clipper.norms(torch.stack([Doubled.apply(outputs[row, 0]) for row in range(size)]))
        torch.testing.assert_close(norms, 2 * (inputs.square().sum(1) + 1).sqrt())
        clipper.backward(torch.stack([Doubled.apply(number) for number in layer(inputs)[:, 0]]))
