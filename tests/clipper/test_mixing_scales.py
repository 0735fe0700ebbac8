"""Examples that mix are found whatever the scale of the others' gradients; those that don't are not refused for it."""

import copy

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from case_types import project
from torch import nn

import ghostclip
from ghostclip import UnsupportedModelError

EXAMPLES = 8


def network(wiring):
    torch.manual_seed(4)
    return ghostclip.wrap(Wired(wiring, body=nn.Linear(3, 5), head=nn.Linear(5, 2)))


def inputs():
    return torch.randn(EXAMPLES, 3, generator=torch.Generator().manual_seed(5))


def centred(m, x):
    hidden = torch.tanh(m.body(x))
    return m.head(hidden - hidden.mean(0))


def centred_elsewhere(m, x):
    """Half of the examples mix, and the large one isn't among them."""
    hidden = torch.tanh(m.body(x))
    return m.head(torch.cat([hidden[:4] - hidden[:4].mean(0), hidden[4:]]))


# Where all examples mix and one is not finite, nothing finite is left of any, and nothing is added.
HIDDEN = pytest.mark.xfail(
    strict=True, reason="all rows follow the mark of the one large example, within the tolerance"
)


@pytest.mark.parametrize("which", [4, EXAMPLES - 1])
@pytest.mark.parametrize(
    ("wiring", "large"),
    [(centred, 1e4), pytest.param(centred, 1e20, marks=HIDDEN)]
    + [(centred_elsewhere, large) for large in (1e4, 1e12, 1e30, torch.inf, torch.nan)],
)
def test_one_example_hides_no_mixing_of_others(wiring, which, large):
    model, factors = network(wiring), torch.ones(EXAMPLES)
    factors[which] = large
    with pytest.raises(UnsupportedModelError, match="mix"):
        ghostclip.GhostClipper(model).backward(factors * model(inputs()).square().sum(1))


@pytest.mark.parametrize("large", [1e-30, 1.0, 1e12, 5e37])
@pytest.mark.parametrize("faint", [1.0, 1e-7, 1e-12])
@pytest.mark.one_in(2)
def test_no_scale_is_taken_for_mixing(faint, large):
    model, factors = network(lambda m, x: m.head(faint * torch.tanh(m.body(x)))), torch.ones(EXAMPLES)
    factors[2] = large
    clipper = ghostclip.GhostClipper(model, 0.5)
    for _ in range(2):
        model.zero_grad()
        result = clipper.backward(factors * model(inputs()).abs().sum(1))
    each = oracle.per_example_grads(model.double(), lambda out: out.abs().sum(1), (inputs().double(),))
    others = [i for i in range(EXAMPLES) if i != 2]
    torch.testing.assert_close(result.norms[others].double(), oracle.norms(each)[others], rtol=1e-4, atol=0)


def rows_by_time(m, x):
    """Positions folded into the rows before the examples, [T * B, d], of a layer or a bare product."""
    h = m.body(x)
    rows = h.transpose(0, 1).reshape(-1, 5)
    rows = rows @ m.p if hasattr(m, "p") else m.fold(rows)
    return m.head(rows.view(h.shape[1], len(h), -1).transpose(0, 1))


def matrix_by_position(m, x):
    """A matrix for each of as many positions as there are examples, positions first."""
    return m.head(torch.bmm(m.body(x).transpose(0, 1), m.q).transpose(0, 1))


def lowest_by_time(m, x):
    """The same, of the lowest layer."""
    return m.head(m.body(x.transpose(0, 1).reshape(-1, 3)).view(x.shape[1], len(x), 5).transpose(0, 1))


def folded(kind):
    torch.manual_seed(4)
    parts = {"body": nn.Linear(3, 5), "head": nn.Linear(5, 2)}
    if kind == "lowest_by_time":
        return Wired(lowest_by_time, **parts)
    if kind == "matrix_by_position":
        return with_parameters(matrix_by_position, {"q": (7, 5, 5)}, **parts)
    if kind == "bare_rows_by_time":
        return with_parameters(rows_by_time, {"p": (5, 5)}, **parts)
    return Wired(rows_by_time, fold=nn.Linear(5, 5), **parts)


@pytest.mark.parametrize("large", [1.0, 3e3, 1e6, 1e12])
@pytest.mark.parametrize(
    ("kind", "positions"),
    [("matrix_by_position", 7), *((kind, t) for kind in ("rows_by_time", "bare_rows_by_time") for t in (2, 7, 11))],
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.one_in(24)
def test_a_large_example_hides_no_order_of_rows(kind, large, last, positions, dtype):
    """All rows of one order may belong to the large example, beside which those of others are as small as rounding."""
    model = ghostclip.wrap(folded(kind)).to(dtype)
    x = torch.randn(EXAMPLES - 1, positions, 3, generator=torch.Generator().manual_seed(5)).to(dtype)
    for which in (0, EXAMPLES - 2):
        factors = torch.ones(EXAMPLES - 1, dtype=dtype)
        factors[which] = min(large, 8e3 if dtype == torch.float16 else large)
        model.zero_grad()
        result = ghostclip.GhostClipper(model, 0.5).backward(sums(model(x), last) * factors)
        each = oracle.per_example_grads(copy.deepcopy(model).double(), lambda out: sums(out, last), (x.double(),))
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 16 * torch.finfo(dtype).eps)
        norms = oracle.norms(each) * factors.double()
        torch.testing.assert_close(result.norms.double(), norms, rtol=tolerance, atol=0)


def sums(out, last):
    return (out[:, -1] if last else out).flatten(1).sum(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("spoilt", [0, 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["lowest_by_time", "bare_rows_by_time"])
@pytest.mark.one_in(4)
def test_rows_that_are_not_finite_go_to_the_example_whose_loss_is_not(kind, bad, spoilt, dtype):
    """Of two examples at two positions, only the last of which has gradients, two rows say the same of both orders."""
    model = folded(kind).to(dtype)
    x, factors = torch.randn(2, 2, 3).to(dtype), torch.ones(2, dtype=dtype)
    plain, clipper = copy.deepcopy(model), ghostclip.GhostClipper(model)
    factors[spoilt] = bad
    result = clipper.backward(factors * model(x)[:, -1].square().sum(1))
    other = 1 - spoilt
    plain(x[other : other + 1])[:, -1].square().sum().backward()
    size = sum(p.grad.double().square().sum() for p in plain.parameters() if p.grad is not None).sqrt()
    assert float(result.norms[other]) == pytest.approx(float(size), rel=1e-2)
    assert float(result.weights[spoilt]) == 0.0


def small_bias(m, x):
    """A learned bias by the distance of positions, with gradients far below those of the rest."""
    places = torch.arange(4)
    return m.head(x) + 1e-5 * (m.table[(places[:, None] - places + 3).flatten()].view(4, 4) @ x)


def test_a_table_of_faint_gradients_is_shared():
    """Its rows follow no factor, and are too small beside the head's to say so: they are no example's own."""
    model, x = with_parameters(small_bias, {"table": (7, 1)}, head=nn.Linear(4, 4)), torch.randn(4, 4, 4)
    expected = oracle.per_example_grads(model, project, (x,))["table"].flatten(1).norm(dim=1)
    clipper = ghostclip.GhostClipper(model, clipping=1.0)
    torch.testing.assert_close(clipper.norms(project(model(x)), per="parameter")["table"], expected)
