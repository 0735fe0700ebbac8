"""Tables as long as a batch: what is decided of a model is the same at every batch size, whatever one example holds."""

import copy
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from comparing import assert_dicts_close, gradients
from random_pieces import Part
from torch import Tensor, nn

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
SPOILT: dict[str, Callable[[Tensor, Tensor], None]] = {
    "loss": lambda x, factors: factors[-1].fill_(torch.nan),
    "input": lambda x, factors: x[-1].fill_(torch.inf),
    "entry": lambda x, factors: x[-1, -1, 0].fill_(torch.nan),
}


def network(name: str, length: int) -> nn.Module:
    """Its outputs are losses."""
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(3, WIDTH), Part(name, {"T": length, "d": WIDTH}))
    return ghostclip.wrap(Wired(lambda m, x: m.layers(x).square().sum((1, 2)), layers=layers).double())


def assert_clipped(model: nn.Module, x: Tensor) -> None:
    """What a step left in the gradients is the loop's clipped sum of these examples, whose losses the model gives."""
    wanted = oracle.clipped_sum(oracle.per_example_grads(model, lambda losses: losses, (x,)), MAX_NORM)
    assert_dicts_close(gradients(model), wanted, 1e-9)


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize(("length", "sizes"), SIZES)
@pytest.mark.one_in(48)
def test_all_sizes_train_and_one_example_changes_nothing_else(length, sizes, spoil, name, second_pass) -> None:
    """The batch with the spoilt example is the second one."""
    model = network(name, length)
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


PAIRS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda h, count: h[:, None].expand(-1, count, -1),
    "product": lambda h, count: h[:, None] * torch.ones(1, count, 1, dtype=h.dtype, requires_grad=True).tanh(),
    "index": lambda h, count: h[torch.arange(len(h))[:, None].expand(-1, count)],
}


def tokens_of_pairs(how: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Each example's score against every other's token: the tokens' rows are added to something of [B, B, d]."""

    def wiring(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
        return m.head(torch.tanh(PAIRS[how](m.body(x).mean(1), len(x)) + m.token(tokens))).logsumexp(1)[:, 0]

    return wiring


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("wiring", [tokens_of_pairs(how) for how in PAIRS], ids=PAIRS)
def test_pairs_of_examples_are_no_positions(wiring: Any, positions: int) -> None:
    for examples in (2, 4, 7):
        torch.manual_seed(3)
        model = Wired(wiring, body=nn.Linear(5, 8), token=nn.Embedding(9, 8), head=nn.Linear(8, 1))
        clipper = GhostClipper(ghostclip.wrap(model), MAX_NORM)
        with pytest.raises(UnsupportedModelError, match="mix"):
            clipper.backward(model(torch.randn(examples, positions, 5), torch.arange(examples) % 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bare", [False, True])
def test_what_mixes_is_refused_after_a_batch_too_small_to_tell(dtype: torch.dtype, bare: bool) -> None:
    def wiring(m: Any, x: Tensor) -> Tensor:
        h = m.body(x) * m.p if bare else m.body(x)
        return (h + torch.tanh(h).cumsum(0)).sum(1)

    for start in (2.0**-4, 1.0, 2.0**8):
        torch.manual_seed(1)
        model = ghostclip.wrap(with_parameters(wiring, {"p": (4,)} if bare else {}, body=nn.Linear(5, 4)).to(dtype))
        clipper = GhostClipper(model, MAX_NORM)
        x = torch.randn(4, 5).to(dtype)
        clipper.backward(model(x) * (start * torch.finfo(dtype).tiny))
        with pytest.raises(UnsupportedModelError, match="mix"):
            clipper.backward(model(x) * 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("folded", [False, True])
def test_a_denormal_example_refuses_nothing(dtype: torch.dtype, folded: bool) -> None:
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


def places_made_in_forward(m: Any, x: Tensor) -> Tensor:
    """A product of a table that the forward makes with a bare parameter, as relative positions are."""
    table = torch.arange(40, dtype=x.dtype).view(8, 5).sin()
    return (m.body(x) * (table @ m.bare)).sum((1, 2))


@pytest.mark.parametrize("examples", [2, 4, 8])
def test_clip_tells_what_a_forward_makes_from_a_batch_that_is_as_long(examples: int) -> None:
    torch.manual_seed(1)
    model = with_parameters(places_made_in_forward, {"bare": (5, 5)}, body=nn.Linear(5, 5)).double()
    clipper, x = GhostClipper(ghostclip.wrap(model), MAX_NORM), torch.randn(examples, 8, 5, dtype=torch.float64)
    for part in (x, x[: examples // 2], x[:1]):
        model.zero_grad()
        clipper.clip(lambda m, x: m(x), part)
        assert_clipped(model, part)


def test_what_mixes_is_refused_by_clip_and_leaves_no_trace() -> None:
    def wiring(m: Any, x: Tensor) -> Tensor:
        m.steps += 1
        h = m.body(x + torch.rand(1))
        return (h - h.mean(0)).square().sum((1, 2))

    model = Wired(wiring, body=nn.Linear(5, 5))
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    clipper, x = GhostClipper(ghostclip.wrap(model), MAX_NORM), torch.randn(4, 8, 5)
    torch.manual_seed(3)
    model(x)
    following = torch.rand(2)
    torch.manual_seed(3)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="mix"):
            clipper.clip(lambda m, x: m(x), x)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.rand(2), following)
        torch.manual_seed(3)
    assert int(model.steps) == 3


def last_of_table(m, x):
    return m.head(torch.tanh(m.body(x) + m.place(torch.arange(x.shape[1])))[:, -1])


def last_of_parameter(m, x):
    return m.head(torch.tanh(m.body(x) + m.p.tanh())[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("large", [1e4, 1e6, 1e12])
@pytest.mark.parametrize("examples", [2, 4, 8])
@pytest.mark.parametrize("wiring", [last_of_table, last_of_parameter])
def test_a_large_example_does_not_own_the_row_that_all_others_use(wiring, examples, large, dtype):
    """Only the last position has gradients, and the last example's outweigh those of all others by far."""
    torch.manual_seed(7)
    parts = {"body": nn.Linear(3, 5), "head": nn.Linear(5, 2)}
    if wiring is last_of_table:
        model = with_parameters(wiring, {}, place=nn.Embedding(8, 5), **parts).to(dtype)
    else:
        model = with_parameters(wiring, {"p": (8, 5)}, **parts).to(dtype)
    x, factors = torch.randn(examples, 8, 3, dtype=dtype), torch.ones(examples, dtype=dtype)
    factors[-1] = large

    def losses(m, x, factors):
        return factors * m(x).square().sum(1)

    plain = copy.deepcopy(model).double()
    clipper = ghostclip.GhostClipper(model, 0.1)
    result = clipper.backward(losses(model, x, factors))
    expected = oracle.norms_by_single_losses(plain, losses(plain, x.double(), factors.double()))
    torch.testing.assert_close(result.norms.double(), expected, rtol=1e-4, atol=0)
