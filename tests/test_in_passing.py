"""Clipping in passing: an example's gradient is formed, measured, weighed and added up before the next one's."""

import math

import oracle
import pytest
import torch
from comparing import assert_close, assert_dicts_close, gradients
from test_memory import Live
from torch import Tensor, nn

import ghostclip
from ghostclip.clipping import Custom, Grouped, PerLayer
from ghostclip.norms.dense import squared_norm_of
from ghostclip.norms.outer import ALONE_LEAST, ALONE_MOST, Outer
from ghostclip.norms.whole import bounded_weight, bounded_weights
from ghostclip.planner import PASSING, Planner, _alike

EXAMPLES, POSITIONS, WIDTH = 5, 6, 192
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


class Texts(nn.Module):
    """Losses [B] of two linear layers with a norm between them; the second one is used twice if ``twice``."""

    def __init__(self, bias: bool = True, twice: bool = False, time_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.twice, self.time_first = twice, time_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        x = self.second(self.norm(self.first(x).tanh()))
        x = self.second(x.tanh()) if self.twice else x
        return x.square().mean((0, 2) if self.time_first else (1, 2)) * 40


MODELS = {
    "weight and bias": {},
    "weight alone": {"bias": False},
    "a layer twice": {"twice": True},
    "time first": {"time_first": True},
}


@pytest.fixture
def one_thread():
    """Several threads are faster on the gradients of all examples at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


pytestmark = pytest.mark.usefixtures("one_thread")


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(EXAMPLES, POSITIONS, WIDTH, dtype=dtype) * torch.linspace(0.2, 2, EXAMPLES, dtype=dtype).view(
        -1, 1, 1
    )


def ready(model: nn.Module, clipping: object, **options: object) -> ghostclip.GhostClipper:
    """A clipper whose planner finds nothing faster than that."""
    wrapped = ghostclip.wrap(model, batch_dim=1 if getattr(model, "time_first", False) else 0)
    clipper = ghostclip.GhostClipper(wrapped, clipping, **options)
    clipper._passes._planner = Planner(measure=lambda run, device, best: (run(), 1.0)[1])
    return clipper


def strategies(clipper: ghostclip.GhostClipper) -> dict[str, str]:
    return {f"{row.layer}.{row.parameter}": row.strategy for row in clipper.explain()}


def truth(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return oracle.per_example_grads(model.double(), lambda losses: losses, (x.double(),))


def by_layer(grads: dict[str, Tensor], bounds: dict[str, float]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """{group: norms} and the clipped sum, for groups named by the first part of a name, or "all"."""
    group_of = {name: "all" if "all" in bounds else name.partition(".")[0] for name in grads}
    norms = {b: oracle.norms({n: g for n, g in grads.items() if group_of[n] == b}) for b in bounds}
    weights = {b: (bounds[b] / norm).clamp(max=1.0) for b, norm in norms.items()}
    return norms, {n: torch.einsum("b,b...->...", weights[group_of[n]], g) for n, g in grads.items()}


def medians(grads: dict[str, Tensor]) -> dict[str, float]:
    """{layer: a threshold that clips about half of the examples}."""
    layers = ("first", "norm", "second")
    return {g: float(oracle.norms({n: v for n, v in grads.items() if n.startswith(g)}).median()) for g in layers}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", MODELS)
def test_sums_norms_and_weights_are_the_loop_s(name, dtype):
    model = Texts(**MODELS[name])
    x = batch(dtype)
    grads = truth(model, x)
    bounds = medians(grads)
    norms, sums = by_layer(grads, bounds)
    clipper = ready(model.to(dtype), PerLayer(thresholds=bounds))
    for _ in range(2):
        model.zero_grad()
        result = clipper.backward(model(x))
        assert_dicts_close(gradients(model), sums, TOLERANCE[dtype])
        for group, bound in bounds.items():
            assert_close(result.norms[group], norms[group], TOLERANCE[dtype])
            assert_close(result.weights[group], (bound / norms[group]).clamp(max=1.0), 10 * TOLERANCE[dtype])
            assert (result.weights[group] * result.norms[group] <= bound).all()
            assert (result.weights[group] < 1).any()
            assert (result.weights[group] == 1).any()
    found = strategies(clipper)
    assert found["first.weight"] == found["second.weight"] == PASSING


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}])
def test_an_example_that_is_not_finite_adds_nothing_anywhere(options):
    model, x = Texts().double(), batch()
    good = [0, 1, 3, 4]
    grads = truth(model, x[good])
    bounds = medians(grads)
    _, sums = by_layer(grads, bounds)

    def broken(grad: Tensor) -> Tensor:
        return torch.where(torch.arange(EXAMPLES).view(-1, 1, 1) == 2, torch.inf, grad)

    # What the second layer had was finite: the sum it was part of has to be formed anew.
    model.first.register_forward_hook(lambda layer, given, out: out.register_hook(broken) and None)
    clipper = ready(model, PerLayer(thresholds=bounds))
    for _ in range(2):
        model.zero_grad()
        clipper.backward(model(x), **options)
        assert_dicts_close(gradients(model), sums, 1e-10)


def test_groups_that_wait_for_others():
    """The last of a group of several layers is weighed by the norms of all."""
    model, x = Texts().double(), batch()
    grads = truth(model, x)
    bound = float(oracle.norms(grads).median())
    norms, sums = by_layer(grads, {"all": bound})
    clipper = ready(model, Grouped({"all": ["*"]}, max_norm=bound))
    result = clipper.backward(model(x))
    assert_dicts_close(gradients(model), sums, 1e-10)
    assert_close(result.norms["all"], norms["all"], 1e-10)
    found = strategies(clipper)
    assert (found["first.weight"] == PASSING) != (found["second.weight"] == PASSING)


def test_weights_that_need_all_norms_are_not_given_in_passing():
    model, x = Texts().double(), batch()
    clipper = ready(model, Custom(lambda norms: {g: 0.5 / (1 + n) for g, n in norms.items()}, 1.0, {"all": ["*"]}))
    clipper.backward(model(x))
    grads = truth(model, x)
    weights = 0.5 / (1 + oracle.norms(grads))
    assert_dicts_close(gradients(model), {n: torch.einsum("b,b...->...", weights, g) for n, g in grads.items()}, 1e-10)
    assert PASSING not in strategies(clipper).values()


def test_no_more_than_one_example_s_gradient_stands():
    model, x = Texts().double(), batch()
    clipper = ready(model, PerLayer(1.0))
    clipper.backward(model(x))
    model.zero_grad()
    losses = model(x)
    one = WIDTH * WIDTH * 8
    with Live({one, 2 * one, EXAMPLES * one}) as live:
        clipper.backward(losses)
    # One example's, and the sums of both layers, of which one is done.
    assert live.peak == 3 * one


def test_an_empty_batch_adds_nothing():
    model, x = Texts().double(), batch()
    clipper = ready(model, PerLayer(1.0))
    for given in (x, x[:0]):
        model.zero_grad()
        result = clipper.backward(model(given))
        assert {len(norms) for norms in result.norms.values()} == {len(given)}
    assert all(not gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_the_loss_scale_changes_nothing(scale):
    model, x = Texts().double(), batch()
    grads = truth(model, x)
    _, sums = by_layer(grads, medians(grads))
    clipper = ready(model, PerLayer(thresholds=medians(grads)), loss_scale=scale)
    clipper.backward(model(x))
    assert_dicts_close(gradients(model), sums, 1e-10)


@pytest.mark.parametrize(("others", "chosen"), [(0.25, False), (2.0, True)])
def test_a_measurement_decides(others, chosen):
    torch.manual_seed(0)
    term = Outer(torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH), torch.Size((WIDTH, WIDTH)))
    planner = Planner(measure=lambda run, device, best: 1.0 if run.args == (_alike,) else others)
    found = planner.clip(term, lambda example, squared: 1.0)
    assert (found is not None) == chosen
    choice = planner.choices[term.key, PASSING]
    assert choice.milliseconds[PASSING] == 1.0
    assert len(choice.milliseconds) >= 2


@pytest.mark.parametrize(
    ("planner", "threads", "sizes"),
    [
        ("gram", 1, (WIDTH, WIDTH)),
        ("auto", 2, (WIDTH, WIDTH)),
        ("auto", 1, (8, 8)),
        ("auto", 1, (2 * ALONE_MOST // 4, 1)),
    ],
)
def test_where_it_is_no_way(planner, threads, sizes):
    torch.set_num_threads(threads)
    term = Outer(torch.randn(2, 3, sizes[0]), torch.randn(2, 3, sizes[1]), torch.Size(sizes))
    assert Planner(planner, measure=lambda run, device, best: 1.0).clip(term, lambda example, squared: 1.0) is None


def test_deterministic_algorithms_ask_no_clock():
    term = Outer(torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH), torch.Size((WIDTH, WIDTH)))

    def never(run, device, best):
        raise AssertionError("a clock was asked")

    torch.use_deterministic_algorithms(True)
    try:
        assert Planner(measure=never).clip(term, lambda example, squared: 1.0) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_one_weight_is_as_many_are(dtype):
    norms = torch.tensor([0.0, 1e-30, 0.5, 1.0, 1.0 + 1e-6, 3.0, 1e18], dtype=dtype)
    many = bounded_weights(norms, [1.0])
    for norm, weight in zip(norms.tolist(), many.tolist(), strict=True):
        one = bounded_weight(norm**2, 1.0, dtype)
        assert one == pytest.approx(weight, rel=4 * torch.finfo(dtype).eps)
        assert torch.tensor(one, dtype=dtype) * norm <= 1.0
    assert bounded_weight(math.inf, 1.0, dtype) == bounded_weight(math.nan, 1.0, dtype) == 0.0


@pytest.mark.parametrize("numbers", [3, ALONE_LEAST // 4, (1 << 18) + 5, ALONE_MOST // 4])
def test_the_squared_norm_of_one_gradient_follows_it(numbers):
    gradient = torch.zeros(numbers)
    read = squared_norm_of(gradient)
    for seed in range(2):
        torch.manual_seed(seed)
        gradient.copy_(torch.randn(numbers))
        assert read() == pytest.approx(float(gradient.double().square().sum()), rel=1e-5)
