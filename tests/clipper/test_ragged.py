"""Ragged examples: what the laws don't say of them, how their norms are found, and mistakes in any batch."""

import copy
from contextlib import nullcontext, suppress

import comparing
import oracle
import pytest
import torch
from case_models import Wired
from comparing import assert_dicts_close, every_pass
from ragged_models import CASES, FEATURES, SIZES, gathered, gradients, graphs, losses, shuffled
from ragged_refusals import CONNECTED, plain
from ragged_refusals import SIZES as UNEQUAL
from torch import nn

from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.native.gram import gram_is_there, ragged_gram
from ghostclip.norms import ragged
from ghostclip.norms.outer import OuterProduct

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
MAX_NORM = 0.5
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def assert_exact(model, case, batch):
    """Three times: the first batch of a layout is tested in full, later ones by their graphs."""
    expected = gradients(model, batch)
    clipper = GhostClipper(model, clipping=MAX_NORM)
    for _ in range(3):
        model.zero_grad()
        result = clipper.backward(losses(model, batch), batch_index=case.index(batch))
        torch.testing.assert_close(result.norms, oracle.norms(expected), **EXACT)
        assert_dicts_close(comparing.gradients(model), oracle.clipped_sum(expected, MAX_NORM), 1e-10)


@every_case
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (4,), (1, 1, 1), (3, 3, 3, 3), (0, 2, 0), (40, 1)])
@pytest.mark.one_in(6)
def test_every_shape_of_a_batch_is_exact(case, sizes):
    model, batch = case.build().double(), graphs(sizes)
    result = GhostClipper(model, MAX_NORM).backward(losses(model, batch), batch_index=case.index(batch))
    expected = oracle.norms(gradients(model, batch)) if sizes else torch.zeros(0).double()
    torch.testing.assert_close(result.norms, expected, **EXACT)


@every_case
@pytest.mark.one_in(3)
def test_neighbouring_batches_are_within_the_bound_in_float32(case):
    model, batch = case.build(), graphs(SIZES, torch.float32)
    clipper, index = GhostClipper(model, clipping=0.01), case.index(batch)

    def clipped(without=None):
        model.zero_grad()
        own = losses(model, batch)
        if without is not None:
            own = own * torch.arange(len(own)).ne(without)
        clipper.backward(own, batch_index=index)
        return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])

    whole = clipped()
    for example in range(len(SIZES)):
        assert (whole - clipped(example)).norm() <= 0.01 * (1 + 1e-5)


def test_a_text_without_a_finite_loss_is_left_out_alone():
    case, batch, keep = CASES["packed text"], graphs(), torch.arange(len(SIZES)) != 4
    model = case.build().double()
    own = torch.where(keep, losses(model, batch), torch.nan)
    result = GhostClipper(model, clipping=MAX_NORM).backward(own, batch_index=batch["rows"])
    kept = {name: grads[keep] for name, grads in gradients(model, batch).items()}
    assert_dicts_close(comparing.gradients(model), oracle.clipped_sum(kept, MAX_NORM), 1e-10)
    assert result.weights[4] == 0


def test_as_many_rows_as_examples_follow_the_index():
    """Six nodes of six graphs, in another order than theirs and not one of each."""
    case, batch = CASES["gcn"], shuffled(graphs((2, 0, 1, 3, 0, 0)))
    assert_exact(case.build().double(), case, batch)


def test_two_kinds_with_as_many_rows_are_told_apart():
    case, batch = CASES["edges"], graphs((2, 3))
    batch["edges"] = torch.tensor([[0, 2, 2, 3, 4], [1, 3, 4, 4, 2]])  # one and four, of two and three nodes
    assert [len(index) for index in case.index(batch)] == [5, 5]
    assert_exact(case.build().double(), case, batch)


def test_a_position_table_beside_ragged_rows_is_refused():
    """Nobody can overwrite rows of which it isn't known whose they are, to see whether the table depends on them."""

    def wiring(m, batch):
        h = torch.tanh(m.layer(batch["x"].unsqueeze(2)) + m.places(torch.arange(5)))  # [rows, 5, 4]
        return m.head(gathered(h.sum(1), batch["rows"], len(batch["y"])))

    for sizes in ((2, 4), (2, 3), (1, 2, 0, 2), (1, 1, 1, 1, 1)):
        case, batch = CASES["gcn"], graphs(sizes)
        model = Wired(wiring, layer=nn.Linear(1, 4), places=nn.Embedding(5, 4), head=nn.Linear(4, 3)).double()
        with pytest.raises(UnsupportedModelError, match="could not be tried"):
            assert_exact(model, case, batch)


FORMS = pytest.mark.parametrize("compiled", [True, False], ids=["C", "buckets"])


@FORMS
def test_digits_that_cancel_between_rows_are_not_lost(compiled, monkeypatch):
    """Inputs are about constant, and gradients of an example's rows add up to nearly nothing."""
    if not compiled:
        monkeypatch.setattr(ragged, "gram_is_there", lambda like: False)
    rows = torch.tensor([1, 0, 0, 1, 1, 0, 2, 2, 1])
    factors = torch.tensor([1.0, -2.0, 3.0, -1.5, 0.5, -1.0001, 1.0, -0.9999, 0.0001]).unsqueeze(1)
    model, x = nn.Linear(4, 4, bias=False), 1 + 1e-4 * torch.randn(9, 4)

    def loss(model, x, factors, rows):
        return gathered((model(x) * factors).sum(1), rows, 3)

    found = GhostClipper(model).norms(loss(model, x, factors, rows), batch_index=rows)
    wide = copy.deepcopy(model).double()
    expected = GhostClipper(wide).norms(loss(wide, x.double(), factors.double(), rows), batch_index=rows)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("order", ["in order", "by chance"])
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 5), (40, 1)], ids=str)
def test_both_forms_of_norms_and_margins_agree(order, positions, sizes, monkeypatch):
    if not gram_is_there(torch.zeros(1)):
        pytest.skip("no C compiler here")
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    index = index if order == "in order" else index[torch.randperm(len(index))]
    left, right = (torch.randn(len(index), positions, width).double() for width in (200, 300))
    term = ragged.regrouped(OuterProduct(left, right, torch.Size((200, 300))), 1, ragged.RowIndex(index, len(sizes)))
    calls = []
    monkeypatch.setattr(ragged, "ragged_gram", lambda *a: calls.append(1) or ragged_gram(*a))
    by_c = term.closed_form(False)
    monkeypatch.setattr(ragged, "gram_is_there", lambda like: False)
    by_buckets = term.closed_form(False)
    assert calls == [1]
    torch.testing.assert_close(by_c.squared_norms, by_buckets.squared_norms, **EXACT)
    # Rows of zeros in a bucket count in its margin; a single row has none there.
    several = positions * torch.tensor(sizes) > 1
    assert bool((by_c.absolute <= by_buckets.absolute * (1 + 1e-12))[several].all())
    parts = torch.zeros(len(sizes)).double().index_add(0, index, (left.norm(dim=2) * right.norm(dim=2)).sum(1))
    assert bool((by_c.absolute >= parts.square() * (1 - 1e-12)).all())


@pytest.mark.parametrize(
    ("mistake", "build"),
    [
        (mistake, build)
        for mistake in CONNECTED.values()
        for build in (plain, *(CASES[name].build for name in ("gcn", "gat", "packed text")))
        if not (mistake is CONNECTED["an edge between graphs"] and build is CASES["packed text"].build)
    ],
)
@pytest.mark.parametrize("sizes", [UNEQUAL, (5, 2, 3) * 30], ids=["6 examples", "90 examples"])
@pytest.mark.one_in(12)
def test_a_mistake_in_any_batch_is_refused(mistake, build, sizes):
    """Of up to 32 examples always; of more, one row that two examples share is overlooked once in 32 times."""
    model, passed = build(), 0
    clipper = GhostClipper(model)
    for turn in range(12):
        batch = graphs(sizes, torch.float32)
        index = mistake(batch) if turn >= 3 else batch["rows"]
        with nullcontext() if turn < 3 else suppress(UnsupportedModelError):
            clipper.backward(losses(model, batch), batch_index=index)
            passed += turn >= 3
        assert turn < 3 or passed or all(p.grad is None for p in model.parameters())
        model.zero_grad()
    assert passed <= (0 if len(sizes) <= 32 else 3)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@every_pass
def test_layers_of_width_zero_are_exact(second_pass):
    """The tail of the rarest words has 6 / 4^2 features, which is none, and the rows of some examples only."""
    model = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 10]).double()
    x, words = torch.randn(8, 6, dtype=torch.float64), torch.tensor([1, 12, 7, 3, 19, 12, 0, 9])
    of_loss = lambda found: -found.output  # noqa: E731
    comparing.assert_exact(model, x, words, losses=of_loss, clipping=MAX_NORM, second_pass=second_pass)


def test_batches_with_and_without_an_index_take_turns():
    model = nn.Linear(FEATURES, 3)
    clipper, x = GhostClipper(model), torch.randn(6, FEATURES)
    for _ in range(3):
        alone = clipper.norms(model(x).square().sum(1))
        index = torch.tensor([0, 0, 1, 2, 2, 2])
        summed = clipper.norms(gathered(model(x).square().sum(1), index, 3), batch_index=index)
        assert alone.shape == (6,)
        torch.testing.assert_close(summed[1], alone[2])
