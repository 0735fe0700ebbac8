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


def network(name: str, length: int) -> nn.Module:
    torch.manual_seed(2)
    return ghostclip.wrap(nn.Sequential(nn.Linear(3, WIDTH), Part(name, {"T": length, "d": WIDTH})).double())


def assert_clipped(model: nn.Module, x: Tensor) -> None:
    """What a step left in the gradients is the loop's clipped sum of these examples, whose losses the model gives."""
    wanted = oracle.clipped_sum(oracle.per_example_grads(model, lambda losses: losses, (x,)), MAX_NORM)
    assert_dicts_close(gradients(model), wanted, 1e-9)


def losses_of(factors: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda out: out.square().sum((1, 2)) * factors[: len(out)]


def expected(model: nn.Module, x: Tensor, factors: Tensor, without: int | None = None) -> dict[str, Tensor]:
    others = [i for i in range(len(x)) if i != without]
    each: list[dict[str, Tensor]] = []
    for i in others:
        each.append(oracle.per_example_grads(model, losses_of(factors[i : i + 1]), (x[i : i + 1],)))
    return oracle.clipped_sum({name: torch.cat([one[name] for one in each]) for name in each[0]}, MAX_NORM)


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("spoilt", [None, "loss", "input", "entry", "denormal"])
@pytest.mark.one_in(12)
def test_all_sizes_train_and_one_example_changes_nothing_else(name: str, spoilt: str | None, second_pass: str) -> None:
    for turn, (length, sizes) in enumerate(SIZES):
        if (turn % 2 == 0) == (second_pass == "cached") and spoilt is not None:
            continue
        for when in [(turn // 2) % len(sizes)] if spoilt is not None else [None]:
            model = network(name, length)
            clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
            for number, examples in enumerate([*sizes, sizes[0]]):
                x = torch.randn(examples, length, 3, dtype=torch.float64)
                factors = torch.rand(examples, dtype=torch.float64) + 0.5
                bad = examples // 2 if number == when else None
                if bad is not None:
                    change(x, factors, bad, str(spoilt))
                model.zero_grad()
                result = clipper.backward(losses_of(factors)(model(x)))
                left_out = bad if spoilt != "denormal" else None
                assert result.norms.isfinite().sum() == examples - (left_out is not None)
                wanted = {} if left_out is not None and examples == 1 else expected(model, x, factors, left_out)
                found = gradients(model)
                assert_dicts_close({key: found[key] for key in wanted}, wanted, 1e-9)


def change(x: Tensor, factors: Tensor, example: int, how: str) -> None:
    if how == "loss":
        factors[example] = torch.nan
    elif how == "input":
        x[example] = torch.inf
    elif how == "entry":
        x[example, -1, 0] = torch.nan
    else:
        factors[example] = 5e-322


def concatenated(m: Any, x: Tensor) -> Tensor:
    places = m.place(torch.arange(x.shape[1]))
    return m.head(torch.tanh(torch.cat([m.body(x), places.expand(len(x), -1, -1)], 1))).square().sum((1, 2))


def added_to_inputs(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(x + m.place(torch.arange(x.shape[1])))).square().sum((1, 2))


@pytest.mark.parametrize("spoilt", [None, 1])
@pytest.mark.parametrize("wiring", [concatenated, added_to_inputs])
def test_a_shape_that_another_size_had_too_is_no_batch(wiring: Any, spoilt: int | None) -> None:
    for sizes in ((3, 4), (3, 2, 4), (5, 2)):
        torch.manual_seed(1)
        parts = {"body": nn.Linear(5, 5), "place": nn.Embedding(9, 5), "head": nn.Linear(5, 1)}
        model = ghostclip.wrap(Wired(wiring, **parts).double())
        clipper = GhostClipper(model, MAX_NORM)
        for number, examples in enumerate(sizes):
            x = torch.randn(examples, 4, 5, dtype=torch.float64)
            if spoilt is not None and number:
                x[spoilt] = torch.nan
            model.zero_grad()
            clipper.backward(model(x))
            others = x[[i for i in range(examples) if i != spoilt or not number]]
            assert_clipped(model, others)


PAIRS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda h, count: h[:, None].expand(-1, count, -1),
    "repeat": lambda h, count: h[:, None].repeat(1, count, 1),
    "product": lambda h, count: h[:, None] * torch.ones(1, count, 1, dtype=h.dtype, requires_grad=True).tanh(),
    "stack": lambda h, count: torch.stack([h] * count, 1),
    "cat": lambda h, count: torch.cat([h[:, None]] * count, 1),
    "index": lambda h, count: h[torch.arange(len(h))[:, None].expand(-1, count)],
    "ones": lambda h, count: torch.ones(len(h), count, 1, dtype=h.dtype) @ h[:, None],
    "interpolate": lambda h, count: nn.functional.interpolate(h[:, :, None], size=count).transpose(1, 2),
    "pad": lambda h, count: nn.functional.pad(h[:, :, None], (0, count - 1), mode="replicate").transpose(1, 2),
}


def tokens_of_pairs(how: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Each example's score against every other's token: the tokens' rows are added to something of [B, B, d]."""

    def wiring(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
        return m.head(torch.tanh(PAIRS[how](m.body(x).mean(1), len(x)) + m.token(tokens))).logsumexp(1)[:, 0]

    return wiring


def scores(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """Against the other examples' keys, which get no gradient, and with a number for each other example's token."""
    keys = m.body(x).mean(1).detach()
    return (m.body(x).mean(1) @ keys.T + m.token(tokens)[:, 0]).logsumexp(1)


def classes(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """As many classes as examples."""
    return (m.body(x)[:, 0, : len(x)] + m.token(tokens)[:, 0]).logsumexp(1)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize(
    "wiring", [*(tokens_of_pairs(how) for how in PAIRS), scores, classes], ids=[*PAIRS, "scores", "classes"]
)
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


def filled_in_forward(m: Any, x: Tensor) -> Tensor:
    """A weight that is put into zeros, as orthogonal fine-tuning does."""
    weight = torch.zeros(8, 8, dtype=x.dtype)
    weight[:, m.columns] = m.bare.view(8, 3)
    return (m.body(x).transpose(1, 2) @ weight).square().sum((1, 2))


@pytest.mark.parametrize("examples", [2, 4, 8])
@pytest.mark.parametrize(("wiring", "shape"), [(places_made_in_forward, (5, 5)), (filled_in_forward, (24,))])
def test_clip_tells_what_a_forward_makes_from_a_batch_that_is_as_long(wiring: Any, shape: Any, examples: int) -> None:
    torch.manual_seed(1)
    model = Wired(wiring, body=nn.Linear(5, 5)).double()
    model.bare = nn.Parameter(torch.randn(*shape, dtype=torch.float64))
    model.columns = torch.tensor([0, 3, 6])
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


@pytest.mark.parametrize("examples", [2, 4, 8])
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
def test_an_example_that_is_not_finite_spoils_no_table_that_is_not_known_for_one(
    examples: int, second_pass: str
) -> None:
    """The graph doesn't tell it from examples' own rows, all of which have NaN: it counts as shared, which is exact."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        h[:, 0] = m.other(h[:, 0].clone())
        places = torch.arange(x.shape[1])
        bias = m.place((places[:, None] - places).abs())[..., 0]
        return ((h @ h.mT + bias).softmax(-1) @ h).square().sum((1, 2))

    for bad in range(examples):
        torch.manual_seed(1)
        parts = {"body": nn.Linear(5, 5), "other": nn.Linear(5, 5), "place": nn.Embedding(9, 5)}
        model = ghostclip.wrap(Wired(wiring, **parts).double())
        x = torch.randn(examples, 8, 5, dtype=torch.float64)
        x[bad, 3] = torch.nan
        result = GhostClipper(model, MAX_NORM, second_pass=second_pass).backward(model(x))
        others = x[[i for i in range(examples) if i != bad]]
        assert_clipped(model, others)
        assert (result.weights == 0).tolist() == [i == bad for i in range(examples)]


@pytest.mark.parametrize("bad", [0, 2])
def test_a_layer_of_which_nothing_is_left_is_no_table(bad: int) -> None:
    """One position, in whose place a prompt comes: no gradient reaches the layer but 0 * NaN of one example."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.body(x))
        return m.head(torch.cat([m.prompt.repeat(len(x), 1, 1), h[:, 1:]], 1)).square().sum((1, 2))

    torch.manual_seed(1)
    model = with_parameters(wiring, {"prompt": (1, 1, 5)}, body=nn.Linear(5, 5), head=nn.Linear(5, 2)).double()
    clipper, x = GhostClipper(ghostclip.wrap(model), MAX_NORM), torch.randn(4, 1, 5, dtype=torch.float64)
    x[bad] = torch.nan
    result = clipper.backward(model(x))
    assert (result.weights > 0).tolist() == [i != bad for i in range(4)]


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
    norms = []
    for example in range(examples):
        plain.zero_grad()
        part = slice(example, example + 1)
        losses(plain, x[part].double(), factors[part].double()).sum().backward()
        norms.append(sum(p.grad.square().sum() for p in plain.parameters() if p.grad is not None).sqrt())
    torch.testing.assert_close(result.norms.double(), torch.stack(norms), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_saturated_example_makes_no_table_of_a_layer(dtype):
    """Its gradient is exactly zero below tanh, and its input isn't finite; the other example alone shows rows."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    x = torch.randn(2, 5).to(dtype)
    x[0, 4] = -torch.inf
    result = ghostclip.GhostClipper(model, 1.0).backward(model(x).square().sum(1))
    assert bool(result.norms[1].isfinite())
    assert float(result.weights[1]) > 0.0
