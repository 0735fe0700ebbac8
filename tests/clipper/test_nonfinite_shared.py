"""Parameters outside of layers, in batches with an example that is not finite: it is left out, and nothing else is.

What is decided of a model on such a batch holds for that batch and all others, of that size and of any.
"""

import functools
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired, freeze
from comparing import assert_dicts_close, every_pass, gradients
from graphs import interpret
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip import clipping as c

MAX_NORM, BAD = 0.3, 1


def _gain_frozen() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(5, 8))
    return freeze(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2)), "0.parametrizations.weight.original0")


def _frozen_lengths() -> nn.Module:
    """A weight of rows of frozen lengths, out of torch's own operation, which no rule knows."""
    wiring = lambda m, x: m.head(torch.tanh(F.linear(x, torch._weight_norm(m.rows, m.lengths, 0))))  # noqa: E731
    return freeze(with_parameters(wiring, {"rows": (8, 5), "lengths": (8, 1)}, head=nn.Linear(8, 2)), "lengths")


def _attended() -> nn.Module:
    """Attention over a single position, which gives queries and keys no gradient, or none that is finite."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        h = m.body(x) + m.place(torch.arange(1))
        return m.head(h + F.scaled_dot_product_attention(m.query(h), m.key(h), m.value(h)))

    layers = {name: nn.Linear(6, 6) for name in ("query", "key", "value")}
    return Wired(wiring, body=nn.Linear(5, 6), place=nn.Embedding(1, 6), head=nn.Linear(6, 2), **layers)


def _prompted() -> nn.Module:
    """A row of a table before each example's, and a recurrent cell whose first output alone is used."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        rows, state, found = m.body(x), None, []
        prompt = m.place(torch.zeros(1, dtype=torch.int64))[None].repeat(len(x), 1, 1)
        for row in torch.cat([prompt, rows[:, 1:]], 1).unbind(1):
            state = m.cell(row, state)
            found.append(state[0])
        return m.head(torch.stack(found, 1))[:, 0]

    cell = nn.LSTMCell(6, 6)
    return Wired(wiring, body=nn.Linear(5, 6), place=nn.Embedding(3, 6), cell=cell, head=nn.Linear(6, 2))


def _positions() -> nn.Module:
    wiring = lambda m, x: m.head(torch.tanh(m.body(x) + m.place(torch.arange(4))))  # noqa: E731
    return Wired(wiring, body=nn.Linear(5, 6), place=nn.Embedding(9, 6), head=nn.Linear(6, 2))


def _number() -> nn.Module:
    return with_parameters(lambda m, x: m.first(x) * m.scale, {"scale": ()}, first=nn.Linear(5, 4))


def _silent_keys() -> nn.Module:
    """Attention over one position whose keys are a bare parameter; a parameter below it has no gradient."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        h = h + torch.gather(m.p.expand(h.shape), 1, torch.zeros(h.shape, dtype=torch.int64))
        keys = m.q.expand(h.shape)
        return F.scaled_dot_product_attention(h, keys, keys)

    return with_parameters(wiring, {"p": (1, 4), "q": (1, 4)}, first=nn.Linear(5, 4))


# name: (model, shape of an example)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "positions [T] added": (_positions, (4, 5)),
    "one position, then attention": (_attended, (1, 5)),
    "a prompt, then a recurrent cell": (_prompted, (5, 5)),
    "weight_norm, gain frozen": (_gain_frozen, (5,)),
    "rows of frozen lengths": (_frozen_lengths, (5,)),
    "a single number": (_number, (5,)),
    "keys that show nothing": (_silent_keys, (1, 5)),
}

# Where the number stands, and what it is; "all" is that of every example.
SPOILT = [("input", torch.nan), ("one entry", torch.inf), ("loss", torch.nan), ("target", 1e200),
          ("all inputs", torch.nan), ("all losses", torch.nan), ("all targets", torch.nan)]  # fmt: skip
PLACES = {"input": 0, "loss": 1, "target": 2, "all inputs": 0, "all losses": 1, "all targets": 2}


def of_targets(model: nn.Module) -> nn.Module:
    """Losses [B] of inputs, factors and targets."""

    def wiring(m: Any, x: Tensor, factor: Tensor, target: Tensor) -> Tensor:
        return factor * (m.model(x).flatten(1) - target[:, None]).square().mean(1)

    return Wired(wiring, model=model).double()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return of_targets(MODELS[name][0]())


def batch(name: str, examples: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((examples, *MODELS[name][1]), (examples,), (examples,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in shapes]


def spoilt(name: str, examples: int, where: str, value: float) -> list[Tensor]:
    found = batch(name, examples)
    if where == "one entry":
        found[0][BAD].view(-1)[3] = value
    else:
        found[PLACES[where]][slice(None) if where.startswith("all") else BAD] = value
    return found


def expected(model: nn.Module, inputs: list[Tensor], others: list[int]) -> dict[str, Tensor]:
    """The loop's clipped sums of some examples."""
    each = oracle.per_example_grads(model, lambda losses: losses, inputs)
    return oracle.clipped_sum({name: grads[others] for name, grads in each.items()}, MAX_NORM)


@functools.cache
def expected_of_all(name: str, examples: int) -> dict[str, Tensor]:
    return expected(model_of(name), batch(name, examples, 1), list(range(examples)))


# Layers here have gradients of zeros: 0 * inf is nobody's.
BELOW_ZEROS = ["keys that show nothing", "a prompt, then a recurrent cell"]
SETTINGS = [(name, *each, examples) for name in MODELS for each in SPOILT for examples in (2, 4, 8)]


def is_nobodys(name: str, where: str, value: float, examples: int) -> bool:
    """Whether it isn't shown whose the gradient is that isn't finite: losses are, and one example's rows show no order.

    Nor is it where the cell behind the prompt sees NaN of all examples.
    """
    if where == "one entry":
        return name in BELOW_ZEROS or (examples == 2 and "frozen" in name)
    return (name, where) == (BELOW_ZEROS[1], "all inputs")


@every_pass
@pytest.mark.parametrize(("name", "where", "value", "examples"), [each for each in SETTINGS if not is_nobodys(*each)])
@pytest.mark.one_in(72)
def test_examples_that_are_not_finite_in_the_first_batch(name, where, value, examples, second_pass) -> None:
    """Batches after it, of that size and of others, are exact."""
    model, inputs = model_of(name), spoilt(name, examples, where, value)
    clipper = GhostClipper(ghostclip.wrap(model), MAX_NORM, second_pass=second_pass)
    others = [] if where.startswith("all") else [i for i in range(examples) if i != BAD]
    result = clipper.backward(model(*inputs))
    assert [i for i, weight in enumerate(result.weights) if weight] == others
    assert_dicts_close(gradients(model), expected(model, inputs, others), 1e-9)
    for size in (examples, 3, 4, 8, 2):
        model.zero_grad()
        clipper.backward(model(*batch(name, size, 1)))
        assert_dicts_close(gradients(model), expected_of_all(name, size), 1e-9)


@every_pass
@pytest.mark.parametrize("examples", [2, 8])
@pytest.mark.parametrize("name", BELOW_ZEROS)
def test_an_infinite_input_below_gradients_of_zeros_leaves_out_nobody(name, examples, second_pass):
    model = model_of(name)
    clipper = GhostClipper(ghostclip.wrap(model), MAX_NORM, second_pass=second_pass)
    whole = clipper.norms(model(*batch(name, examples)))
    result = clipper.backward(model(*spoilt(name, examples, "one entry", torch.inf)))
    others = [example for example in range(examples) if example != BAD]
    torch.testing.assert_close(result.norms[others], whole[others])
    assert result.weights.all()


@every_pass
def test_where_all_gradients_may_have_been_spoilt_by_one_example_nothing_is_clipped(second_pass):
    model = model_of(BELOW_ZEROS[1])
    clipper = GhostClipper(ghostclip.wrap(model), MAX_NORM, second_pass=second_pass)
    with pytest.raises(UnsupportedModelError, match="spoils the gradients of others"):
        clipper.backward(model(*spoilt(BELOW_ZEROS[1], 4, "all inputs", torch.nan)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(2)
def test_numbers_that_overflow_in_float32(name: str) -> None:
    model = model_of(name).float()
    inputs = [part.float() for part in spoilt(name, 4, "target", 1e38)]
    GhostClipper(ghostclip.wrap(model), MAX_NORM).backward(model(*inputs))
    sums = expected(model.double(), [part.double() for part in inputs], [0, 2, 3])
    assert_dicts_close(gradients(model), sums, 1e-4)


# name: (operation, shape of its matrix); gradients of the last one's are taken one example after another.
SATURATED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "from the left": (lambda p, x: p @ x, (4, 4)),
    "einsum": (lambda p, x: torch.einsum("st,btd->bsd", p, x), (4, 4)),
    "distances": (lambda p, x: torch.cdist(x[:, 2], p), (5, 5)),
}


def saturated_below(name: str) -> nn.Module:
    """A matrix between a layer and a saturated function: an input of inf there leaves a finite loss and 0 * inf."""
    use, shape = SATURATED[name]

    def wiring(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.layer(torch.tanh(use(m.p, x)))))

    torch.manual_seed(3)
    return of_targets(with_parameters(wiring, {"p": shape}, layer=nn.Linear(5, 5), head=nn.Linear(5, 2)))


GROUPS = {"below": ["*.p", "*head.bias"], "above": ["*layer*", "*head.weight"]}
POLICIES: dict[str, Callable[[], Any]] = {
    "flat": lambda: c.Flat(MAX_NORM),
    "adaptive": lambda: c.Adaptive(MAX_NORM),
    "groups": lambda: c.Grouped(GROUPS, {"below": 0.2, "above": 0.4}),
    "a function of groups": lambda: c.Custom(
        lambda norms: {group: 3.0 / (0.1 + norm) for group, norm in norms.items()}, MAX_NORM, groups=GROUPS),
    "composed": lambda: c.Composed(c.ByParameter(), c.ByDimension(MAX_NORM), c.AutoS(), c.EqualNoise()),
    "composed, a scaling of a user's own": lambda: c.Composed(scaling=lambda n, bound: torch.full_like(n, 0.5)),
    "quantiles of groups": lambda: c.Composed(c.ByLayer(), c.Quantiles(MAX_NORM)),
    "a joint bound": lambda: c.Composed(
        c.ByLayer(), c.JointBound(lambda norms: {group: 1.0 / (0.1 + n) for group, n in norms.items()}, MAX_NORM)),
}  # fmt: skip


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)


def by_loop(model: nn.Module, policy: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The loop's clipped sums by a policy that a clipper has."""
    each = oracle.per_example_grads(model, lambda losses: losses, inputs)
    if isinstance(policy, c.Groupwise):
        group_of = policy.partition({name: grads[0].numel() for name, grads in each.items()})
        inside = {group: {n: g for n, g in each.items() if group_of[n] == group} for group in group_of.values()}
        found = policy.weights({group: oracle.norms(grads) for group, grads in inside.items()})
    else:
        group_of, found = dict.fromkeys(each, ""), {"": policy.weights(oracle.norms(each))}
    return {name: torch.einsum("b,b...->...", found[group_of[name]], grads) for name, grads in each.items()}


CALLS = [(policy, call) for policy in POLICIES for call in ("backward", "clip")]
CALLS += [(policy, "compiled") for policy in POLICIES if policy not in ("adaptive", "quantiles of groups")]


@every_pass
@pytest.mark.parametrize(("policy", "call"), CALLS)
@pytest.mark.parametrize("name", SATURATED)
@pytest.mark.one_in(33)
def test_an_example_with_a_finite_loss_and_one_gradient_that_is_not(name, policy, second_pass, call, monkeypatch):
    """What comes back to the matrix is zero, and zero times inf is no gradient of zero."""
    if call == "compiled":
        interpret(monkeypatch)
    model, fine, compiled = saturated_below(name), batch("positions [T] added", 4), call == "compiled"
    clipper = GhostClipper(model, POLICIES[policy](), second_pass=second_pass, compile=compiled)
    spoilt = [fine[0].clone(), *fine[1:]]
    spoilt[0][BAD, 2] = torch.inf
    # Graphs are in use from the fifth batch on.
    for inputs, others in [(fine, [0, 1, 2, 3])] * (6 if compiled else 1) + [(spoilt, [0, 2, 3])]:
        model.zero_grad()
        losses = model(*inputs)
        assert bool(losses.isfinite().all())
        result = clipper.backward(losses) if call == "backward" else clipper.clip(loss_fn, tuple(inputs))
        assert_dicts_close(gradients(model), by_loop(model, clipper.clipping, [x[others] for x in inputs]), 1e-9)
    weights = result.weights.values() if isinstance(result.weights, dict) else [result.weights]
    assert all(float(weight[BAD]) == 0.0 for weight in weights)
    assert clipper.compiled is None or clipper.compiled.refusals == []
