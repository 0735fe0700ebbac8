"""An example whose numbers are not finite contributes exactly zero, spares the others, and raises nothing."""

import math

import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired, cnn, recurrent, two_linears
from case_types import project
from comparing import assert_dicts_close, every_pass, gradients
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError

MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,)),
    "linear 3-D": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (5, 3)),
    "conv": (lambda: cnn(nn), (1, 18, 18)),
    "lstm": (lambda: recurrent("LSTM", "both", nn, batch_first=True), (6, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 6, 0.0, batch_first=True), (5, 8)),
}
SPOILT = {"nan": torch.nan, "inf": torch.inf}


def check_spoilt(model, losses_of, second_pass, bad, norm_strategy="auto"):
    """Example ``bad`` is not finite; the sum is what the others give, and nothing is raised, first batch or not."""
    everyone, others = torch.arange(5), [example for example in range(5) if example != bad]
    expected = clipped(model, losses_of(torch.tensor(others)), second_pass=second_pass)[1]
    clipper = GhostClipper(model, 0.5, second_pass=second_pass, norm_strategy=norm_strategy)
    for _ in range(2):
        model.zero_grad()
        result = clipper.backward(losses_of(everyone))
        assert float(result.weights[bad]) == 0.0
        assert bool((result.weights[others] > 0).all())
        assert_dicts_close(gradients(model), expected, 1e-12)


def clipped(model, losses, clipping=0.5, **options):
    """The result of one step by a new clipper, and its sums."""
    model.zero_grad()
    result = GhostClipper(model, clipping, **options).backward(losses)
    return result, {name: grad.clone() for name, grad in gradients(model).items()}


@every_pass
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm_strategy", ["direct", "gram"])
@pytest.mark.one_in(5)
def test_a_spoilt_input_contributes_zero(name, value, second_pass, norm_strategy):
    """Whether gradients are kept, or inputs and what comes back to a layer are."""
    build, shape = MODELS[name]
    model = build().double()
    inputs = torch.randn(5, *shape, dtype=torch.float64)
    inputs[2].view(-1)[0] = value
    check_spoilt(model, lambda chosen: project(model(inputs[chosen])), second_pass, bad=2, norm_strategy=norm_strategy)


@every_pass
def test_a_finite_loss_with_an_infinite_gradient_contributes_zero(second_pass):
    model = two_linears()
    x, scale = torch.randn(5, 3, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    scale[1] = 0.0  # the derivative of sqrt at 0 is infinite
    losses_of = lambda chosen: (scale[chosen] * (model(x[chosen]) ** 2).sum(1)).sqrt()  # noqa: E731
    check_spoilt(model, losses_of, second_pass, bad=1)


def test_an_expanded_tensor_of_which_one_example_is_not_finite_leaves_that_one_out():
    """Nobody can write into an expanded tensor; the memory behind it holds each number once."""

    def wiring(m, x):
        return torch.cdist(m.layer(x)[:, None].expand(-1, 5, -1), m.points, p=1.0).sum((1, 2))

    model = ghostclip.wrap(with_parameters(wiring, {"points": (3, 6)}, layer=nn.Linear(4, 6)))
    x = torch.randn(4, 4)
    x[1] = torch.inf
    result, sums = clipped(model, model(x))
    others, expected = clipped(model, model(x[[0, 2, 3]]))
    assert result.weights[1] == 0
    torch.testing.assert_close(result.norms[[0, 2, 3]], others.norms)
    torch.testing.assert_close(sums, expected)


COUNTED = torch.tensor([0.0, 1, 0, 1, 1, 0, 1, 1])


def packed(attend):
    """Documents in one row of the batch, which don't read each other: by a mask, or by their positions."""

    def losses(m, x, document):
        own = m.out(attend(m.inner(x), document))[0, :, 0].square() * COUNTED
        return torch.zeros(int(document.max()) + 1).index_add(0, document, own)

    return Wired(losses, inner=nn.Linear(4, 4), out=nn.Linear(4, 1))


def by_mask(h, document):
    return F.scaled_dot_product_attention(h, h, h, attn_mask=document[None, :, None] == document[None, None, :])


def by_zeros(h, document):
    return (document[:, None] == document).to(h.dtype) @ h


def by_positions(h, document):
    parts = [h[:, document == each] for each in range(int(document.max()) + 1)]
    return torch.cat([F.scaled_dot_product_attention(part, part, part) for part in parts], 1)


@pytest.mark.parametrize("attend", [by_mask, by_zeros, by_positions])
@pytest.mark.parametrize("bad", [[0], [5], [0, 5]])
@pytest.mark.one_in(2)
def test_documents_that_share_a_row_are_not_left_out_beside_one_that_is_not_finite(attend, bad):
    """0 * NaN is NaN, so a mask alone keeps it from nobody: the batch is refused, with nothing clipped."""
    document = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])
    model = ghostclip.wrap(packed(attend))
    clipper = GhostClipper(model, 1.0)
    for _ in range(4):
        clipper.backward(model(torch.randn(1, 8, 4), document))
    model.zero_grad()
    x = torch.randn(1, 8, 4)
    whole = clipper.norms(model(x, document))
    x[0, bad] = math.nan
    if attend is not by_positions:
        with pytest.raises(UnsupportedModelError, match="examples of this batch are not finite"):
            clipper.backward(model(x, document))
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    result = clipper.backward(model(x, document))
    others = ~torch.isin(torch.arange(4), document[bad])
    assert not result.weights[~others].any()
    torch.testing.assert_close(result.norms[others], whole[others])


def blank_beside_nan(out, power):
    """Losses of which example 0 has a gradient of zeros, and example 1 beside another one where the power is 0.5.

    That isn't finite. Others have a gradient in one row alone, which has the example's number.
    """
    unread = (out[1, 0] - out[1, 0].detach()).abs().pow(power).sum()
    others = [2.0 * out[example, example].sum() for example in range(2, len(out))]
    return torch.stack([(out[0] * 0.0).sum(), 4.5 * out[1, 1].sum() + unread, *others])


@every_pass
@pytest.mark.parametrize(
    "build",
    [lambda: nn.Sequential(nn.Linear(3, 2)), lambda: with_parameters(lambda model, x: x * model.w, {"w": (3,)})],
    ids=["a layer", "a bare parameter"],
)
@pytest.mark.parametrize("examples", [2, 3, 6])
def test_a_gradient_that_is_not_finite_counts_for_nobody_else(second_pass, build, examples):
    """Along dimension 1 the same numbers are a row of example 0, which isn't finite, and one of example 1."""
    model = build()
    clipper, others = GhostClipper(model, clipping=1.0, second_pass=second_pass), [0, *range(2, examples)]
    for _ in range(3):
        batch = torch.randn(examples, examples, 3)
        whole = clipper.norms(blank_beside_nan(model(batch), 2.0))
        model.zero_grad()
        result = clipper.backward(blank_beside_nan(model(batch), 0.5))
        torch.testing.assert_close(result.norms[others], whole[others])
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@every_pass
def test_beside_gradients_of_zeros_one_that_is_not_finite_is_nobodys(second_pass):
    model = nn.Linear(3, 2)
    clipper = GhostClipper(model, clipping=1.0, second_pass=second_pass)
    for _ in range(3):
        result = clipper.backward(blank_beside_nan(model(torch.randn(2, 3)).unsqueeze(2).expand(2, 2, 2), 0.5))
        assert result.weights.isfinite().all()
        assert not any(parameter.grad.any() for parameter in model.parameters())


def one_by_one(model, batch):
    """The model is called once for each example, whose rows are all those of the call."""
    return torch.stack([model(rows).square().sum() for rows in batch])


def by_roots(model, batch):
    """Of rows of zeros the loss is zero, and its gradient isn't finite."""
    return torch.stack([(model(rows) * rows[:, :1]).square().sum().sqrt() for rows in batch])


def saturating():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@every_pass
@pytest.mark.parametrize("rows", [1, 3, 5])  # 5 as there are examples
@pytest.mark.parametrize("spared", [[], [0], [2]])
@pytest.mark.one_in(3)
def test_rows_without_a_gradient_count_for_nobody_where_examples_come_one_by_one(second_pass, rows, spared):
    """Units that an infinite input saturates have gradients of zeros; 0 * inf was a NaN of the other examples."""
    model, batch = saturating(), torch.randn(5, rows, 3, dtype=torch.float64)
    whole = clipped(model, one_by_one(model, batch), second_pass=second_pass)[0]
    batch[2, [row for row in range(rows) if row not in spared or rows == 1]] = batch.new_tensor([torch.inf, 0.0, 0.0])
    clipper, others = GhostClipper(model, 0.5, second_pass=second_pass), [0, 1, 3, 4]
    for _ in range(3):
        model.zero_grad()
        result = clipper.backward(one_by_one(model, batch))
        torch.testing.assert_close(result.norms[others], whole.norms[others])
        assert result.weights[others].all()


@pytest.mark.parametrize(("losses_of", "rows"), [(by_roots, 1), (by_roots, 3), *((one_by_one, n) for n in (1, 3, 5))])
def test_a_call_of_whose_rows_none_is_finite_is_nobody_elses(rows, losses_of):
    """With as many rows as there are examples, each was said to be an example's, and all were left out."""
    model, batch = saturating(), torch.randn(5, rows, 3, dtype=torch.float64)
    batch[2] = 0.0 if losses_of is by_roots else torch.nan
    clipper = GhostClipper(model, 0.5)
    for _ in range(3):
        with pytest.raises(UnsupportedModelError, match="which example's gradient is not finite"):
            clipper.clip(losses_of, batch)


class Sent(nn.Module):
    """Examples with a layer of their own, and rows that an expert is sent, of which each is some example's."""

    def __init__(self, bare):
        super().__init__()
        self.own = nn.Linear(3, 2)
        self.first = nn.Parameter(torch.randn(3, 4)) if bare else nn.Linear(3, 4)

    def forward(self, batch, tokens, factors, owners):
        first = tokens @ self.first if isinstance(self.first, nn.Parameter) else self.first(tokens)
        found = (first * factors).tanh()[:, :2] * factors
        return self.own(batch).index_add(0, owners, found).square().sum(1)


@every_pass
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("value", "factor"), [(torch.inf, 1.0), (1e300, 1e-148)])
@pytest.mark.parametrize(("owners", "place"), [([1, 1, 2, 3], 0), ([0, 1, 2, 2], 3), ([0, 0, 1, 1, 2, 2, 3, 0], 7)])
def test_a_row_that_shows_nothing_is_not_taken_for_the_example_of_its_place(
    second_pass, bare, value, factor, owners, place
):
    """Rows that an expert is sent may be almost in order; what a gradient of about zero hides is anybody's."""
    model, owners = Sent(bare).double(), torch.tensor(owners)
    clipper = GhostClipper(model, 0.1, second_pass=second_pass)
    others = [example for example in range(4) if example != owners[place]]
    for _ in range(4):
        batch, tokens = torch.randn(4, 3).double(), torch.randn(len(owners), 3).double()
        factors = torch.ones(len(owners), 1).double()
        clean = clipper.norms(model(batch, tokens, factors, owners))
        tokens[place], factors[place] = tokens.new_tensor([value, 0.0, 0.0]), factor
        result = clipper.backward(model(batch, tokens, factors, owners))
        torch.testing.assert_close(result.norms[others], clean[others])


@every_pass
def test_an_infinite_input_that_saturates_all_units_leaves_out_its_example_from_the_first_batch_on(second_pass):
    model, batch = saturating(), torch.randn(4, 3).double()
    clipper, batch[2] = GhostClipper(model, 0.1, second_pass=second_pass), batch.new_tensor([torch.inf, 0.0, 0.0])
    for _ in range(3):
        weights = clipper.backward(model(batch).square().sum(1)).weights
        assert (weights == 0).tolist() == [False, False, True, False]


def merged(trained):
    """A layer whose weights are read by giving it unit vectors, which all examples share."""
    torch.manual_seed(5)
    wiring = lambda m, x: torch.tanh(m.first(x) @ m.layer(m.units)).square().sum(1)  # noqa: E731
    model = Wired(wiring, layer=nn.Linear(6, 6), first=nn.Linear(4, 6))
    model.units = nn.Parameter(torch.eye(6), requires_grad=trained)
    return ghostclip.wrap(model)


@pytest.mark.parametrize("examples", [2, 6, 8])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("value", [torch.nan, 1e30])
@every_pass
@pytest.mark.one_in(3)
def test_beside_a_spoilt_example_what_all_share_is_still_shared(examples, trained, value, second_pass):
    """All rows of its gradient are nan then, or the spoilt example's alone by their size."""
    torch.manual_seed(1)
    x, rest = torch.randn(examples, 4), [example for example in range(examples) if example != 1]
    whole = x.clone()
    whole[1] = value
    found = {}
    for name, batch in (("whole", whole), ("rest", x[rest])):
        model = merged(trained)
        clipper = GhostClipper(model, 0.5, second_pass=second_pass)
        found[name] = clipper.clip(lambda model, x: model(x), batch), gradients(model)
    torch.testing.assert_close(found["whole"][0].norms[rest], found["rest"][0].norms)
    if not found["whole"][0].weights[1]:
        torch.testing.assert_close(found["whole"][1], found["rest"][1])
    assert value == 1e30 or not found["whole"][0].weights[1]
