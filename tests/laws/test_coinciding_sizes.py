"""Tables as long as a batch: what is decided of a model is the same at every batch size, whatever one example holds."""

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from comparing import assert_dicts_close, assert_exact_by_losses, gradients
from random_pieces import Part
from torch import nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError

MAX_NORM, WIDTH = 0.3, 5
PARTS = [
    "stack", "attention with bias", "embedded positions", "embedded positions [1, T]", "embedded, repeated",
    "positions", "table", "product from the left", "outer product", "layer on a parameter", "weight norm", "token",
]  # fmt: skip
# The first batches' sizes, one after the other, for tables of 4 and 8 rows.
SIZES = [(4, [4, 3, 2]), (4, [3, 2, 8]), (8, [6, 8]), (8, [8, 4, 5]), (8, [2]), (8, [1, 4]), (4, [8, 4])]
# How the last example is spoilt, of which [B, T, 3] and factors of losses [B] are given.
SPOILT = {
    "loss": lambda x, factors: factors[-1].fill_(torch.nan),
    "input": lambda x, factors: x[-1].fill_(torch.inf),
    "entry": lambda x, factors: x[-1, -1, 0].fill_(torch.nan),
}


def assert_clipped(model, x):
    """What a step left in the gradients is the loop's clipped sum of these examples, whose losses the model gives."""
    wanted = oracle.clipped_sum(oracle.per_example_grads(model, lambda losses: losses, (x,)), MAX_NORM)
    assert_dicts_close(gradients(model), wanted, 1e-9)


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize(("length", "sizes"), SIZES)
@pytest.mark.one_in(192)
def test_all_sizes_train_and_one_example_changes_nothing_else(length, sizes, spoil, name, second_pass):
    """The batch with the spoilt example is the second one."""
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(3, WIDTH), Part(name, {"T": length, "d": WIDTH}))
    model = ghostclip.wrap(Wired(lambda m, x: m.layers(x).square().sum((1, 2)), layers=layers).double())
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for number, examples in enumerate([sizes[0], 4, *sizes]):
        x, factors = torch.randn(examples, length, 3, dtype=torch.float64), torch.ones(examples, dtype=torch.float64)
        fine = x.clone()
        if number == 1:
            spoil(x, factors)
            fine = fine[:-1]
        model.zero_grad()
        clipper.backward(model(x) * factors)
        assert_clipped(model, fine)


every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


@every_dtype
@pytest.mark.parametrize("bare", [False, True])
def test_what_mixes_is_refused_after_a_batch_too_small_to_tell(dtype, bare):
    def wiring(m, x):
        h = m.body(x) * m.p if bare else m.body(x)
        return (h + torch.tanh(h).cumsum(0)).sum(1)

    for start in (2.0**-4, 1.0, 2.0**8):
        torch.manual_seed(1)
        model = ghostclip.wrap(with_parameters(wiring, {"p": (4,)} if bare else {}, body=nn.Linear(5, 4)).to(dtype))
        clipper, x = GhostClipper(model, MAX_NORM), torch.randn(4, 5).to(dtype)
        clipper.backward(model(x) * (start * torch.finfo(dtype).tiny))
        with pytest.raises(UnsupportedModelError, match="mix"):
            clipper.backward(model(x) * 1.0)


@every_dtype
@pytest.mark.parametrize("folded", [False, True])
def test_a_denormal_example_refuses_nothing(dtype, folded):
    smallest = float(torch.finfo(dtype).tiny)
    for seed, times in enumerate([3.0, 0.3, 0.03, 0.01, 300.0]):
        torch.manual_seed(seed)
        layer = ghostclip.wrap(nn.Linear(64, 16)).to(dtype)
        x, t = torch.randn(3, 8, 64).to(dtype), torch.randn(3, 8, 16).to(dtype)
        x[2], t[2] = (torch.full_like(each[2], times * smallest) * (1 + torch.rand_like(each[2])) for each in (x, t))
        out = layer(x.flatten(0, 1)).unflatten(0, (3, 8)) if folded else layer(x)
        result = GhostClipper(layer, 1.0).backward((out * t).sum((1, 2)))
        assert result.norms.isfinite().all()
        assert float(result.norms[2]) < 1e-30


def places_made_in_forward(m, x):
    """A product of a table that the forward makes with a bare parameter, as relative positions are."""
    table = torch.arange(40, dtype=x.dtype).view(8, 5).sin()
    return (m.body(x) * (table @ m.bare)).sum((1, 2))


@pytest.mark.parametrize("examples", [2, 4, 8])
def test_clip_tells_what_a_forward_makes_from_a_batch_that_is_as_long(examples):
    torch.manual_seed(1)
    model = with_parameters(places_made_in_forward, {"bare": (5, 5)}, body=nn.Linear(5, 5)).double()
    clipper, x = GhostClipper(ghostclip.wrap(model), MAX_NORM), torch.randn(examples, 8, 5, dtype=torch.float64)
    for part in (x, x[: examples // 2], x[:1]):
        model.zero_grad()
        clipper.clip(lambda m, x: m(x), part)
        assert_clipped(model, part)


def test_what_mixes_is_refused_by_clip_and_leaves_no_trace():
    def wiring(m, x):
        m.steps += 1
        h = m.body(x + torch.rand(1))
        return (h - h.mean(0)).square().sum((1, 2))

    model = Wired(wiring, body=nn.Linear(5, 5))
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    clipper, x = GhostClipper(ghostclip.wrap(model), MAX_NORM), torch.randn(4, 8, 5)
    torch.manual_seed(3)
    model(x)
    following = torch.rand(2)
    for _ in range(2):
        torch.manual_seed(3)
        with pytest.raises(UnsupportedModelError, match="mix"):
            clipper.clip(lambda m, x: m(x), x)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.rand(2), following)
    assert int(model.steps) == 3


# name: what is added to a layer's output, and the row of all examples: a Parameter, or one of a table
LAST = {
    "table": (lambda m, x: m.place(torch.arange(x.shape[1])), {}, {"place": (8, 5)}),
    "parameter": (lambda m, x: m.p.tanh(), {"p": (8, 5)}, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("large", [1e4, 1e6, 1e12])
@pytest.mark.parametrize("examples", [2, 4, 8])
@pytest.mark.parametrize("kind", LAST)
@pytest.mark.one_in(4)
def test_a_large_example_does_not_own_the_row_that_all_others_use(kind, examples, large, dtype):
    """Only the last position has gradients, and the last example's outweigh those of all others by far."""
    torch.manual_seed(7)
    added, shapes, tables = LAST[kind]
    parts = {"body": nn.Linear(3, 5), "head": nn.Linear(5, 2)} | {n: nn.Embedding(*size) for n, size in tables.items()}
    model = with_parameters(lambda m, x: m.head(torch.tanh(m.body(x) + added(m, x))[:, -1]), shapes, **parts).to(dtype)
    clipper, factors = GhostClipper(model, 0.1), torch.cat([torch.ones(examples - 1), torch.tensor([large])]).to(dtype)
    x = torch.randn(examples, 8, 3, dtype=dtype)
    assert_exact_by_losses(clipper, factors * model(x).square().sum(1), 1e-4)
