"""The private mean: against a loop over rows, its sensitivity over hostile rows, its noise, its charge; Centre."""

import math
from typing import Any

import pytest
import torch
from comparing import assert_exact
from dp_accounting import gaussian_mechanism
from torch import Tensor, nn

import ghostclip
from ghostclip import accounting, private_mean
from ghostclip.events import Event, JointGaussian, SampledGaussian
from ghostclip.nn import Centre

NAN, INF = math.nan, math.inf
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged)


def features(rows: int = 50, width: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows whose norms lie on both sides of 1."""
    torch.manual_seed(3)
    return torch.randn(rows, width, dtype=dtype) * torch.linspace(0.1, 1.0, rows, dtype=dtype)[:, None]


def by_loop(rows: Tensor, bound: float, power: int = 1) -> Tensor:
    """The sum of cut rows (or of their squares), one row after another."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row in rows.double():
        norm = float(sum(value**2 for value in row.tolist())) ** 0.5
        if math.isfinite(norm):
            total += (row * (1.0 if norm <= bound else bound / norm)) ** power
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [0.5, 1.0, 100.0])
def test_mean_and_variance_without_noise_equal_the_loop(bound: float, dtype: torch.dtype) -> None:
    rows = features(dtype=dtype)
    released = private_mean(rows, bound, 0.0, variance_noise_multiplier=0.0)
    mean = by_loop(rows, bound) / 50
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert released.mean.dtype == released.variance.dtype == expected
    torch.testing.assert_close(released.mean.double(), mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(released.variance.double(), by_loop(rows, bound, 2) / 50 - mean**2, rtol=1e-5, atol=1e-7)
    # More rows than are summed at once.
    assert private_mean(torch.full((20_000, 2), 0.25, dtype=dtype), 1.0, 0.0).mean.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("row", [[1e30] * 6, [NAN] + [1.0] * 5, [INF] * 6, [-INF] + [0.0] * 5, [1e-30] * 6, [0.0] * 6])
@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_no_row_moves_a_sum_by_more_than_the_bound(row: list[float], bound: float) -> None:
    """Removed or replaced in a data set of public size, by a row of zeros or by the opposite row."""
    rows = features()
    rows[7] = torch.tensor(row, dtype=torch.float64)
    without = rows.clone()
    without[7] = 0.0
    first, second = (private_mean(each, bound, 0.0, variance_noise_multiplier=0.0) for each in (rows, without))
    squares = [(each.variance + each.mean**2) * 50 for each in (first, second)]  # type: ignore[operator]
    assert (first.mean - second.mean).norm() * 50 <= bound * (1 + 1e-9)
    assert (squares[0] - squares[1]).norm() <= bound**2 * (1 + 1e-9)
    rows[8] = -rows[7]
    assert private_mean(rows, bound, 0.0).mean.isfinite().all()


@pytest.mark.parametrize("noise", ["standard", "hardened"])
def test_the_noise_has_the_standard_deviation_of_its_charge(noise: str) -> None:
    """Chi-square of 40,000 entries: a relative standard error of 0.35%; five of them."""
    rows, bound, sigma = torch.zeros(10, 40_000), 0.5, 4.0
    released = private_mean(rows, bound, sigma, noise=noise)
    std = float((released.mean.double() * 10 / bound).square().mean().sqrt())
    assert std == pytest.approx(sigma, rel=0.018)
    assert released.generator
    assert private_mean(rows, bound, sigma, noise=noise).mean.ne(released.mean).any()


def test_the_variance_s_noise_is_over_the_square_of_the_bound() -> None:
    """Rows of one large known square: nothing is cut at 0, and mean squared has no noise to speak of."""
    rows = torch.full((1, 20_000), 10.0, dtype=torch.float64)
    bound = float(rows.norm())
    released = private_mean(rows, bound, 0.0, variance_noise_multiplier=2.0)
    # N = 1: variance = max(0, noise of std 2 bound^2), a half-normal whose second moment is half of the variance.
    second = float(released.variance.square().mean())  # type: ignore[union-attr]
    assert second == pytest.approx(0.5 * (2.0 * bound**2) ** 2, rel=5 * math.sqrt(5.0 / 20_000))


ONE, TWO = SampledGaussian(1.0, 6.0), SampledGaussian(1.0, 8.0)
CHARGES: list[tuple[dict[str, Any], Event, float]] = [
    ({}, ONE, 6.0),
    # Replacing a row moves the sum by up to twice the bound.
    ({"neighboring": "replace_one"}, SampledGaussian(1.0, 6.0, relation="replace_one"), 3.0),
    ({"variance_noise_multiplier": 8.0}, JointGaussian((ONE, TWO)), 1 / math.hypot(1 / 6, 1 / 8)),
]


@pytest.mark.parametrize(("options", "event", "noise"), CHARGES)
def test_the_charge_is_that_of_one_gaussian_release(options: dict[str, Any], event: Event, noise: float) -> None:
    released = private_mean(features(), 1.0, 6.0, **options)
    assert released.event == event
    exact = gaussian_mechanism.get_epsilon_gaussian(noise, 1e-5)
    assert accounting.epsilon_of([released.event], delta=1e-5) == pytest.approx(exact, rel=1e-3)


def test_noise_that_can_be_repeated_is_charged_as_none() -> None:
    first, second, other = (private_mean(features(), noise="test", seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.mean, second.mean)
    assert not torch.equal(first.mean, other.mean)
    assert (first.event, first.planned) == (SampledGaussian(1.0, 0.0), SampledGaussian(1.0, 8.0))
    assert first.name != second.name
    assert accounting.epsilon_of([first.event], delta=1e-5) == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": [[1.0]]}, r"features must be a tensor \[N, d\]; got list"),
        ({"features": torch.ones(3, 2, dtype=torch.int64)}, "floating point type; got torch.int64"),
        ({"features": torch.ones(3, 2).to_sparse()}, r"dense tensor .* got a torch\.sparse_coo one"),
        ({"features": torch.ones(3, 2, device="meta")}, "got a meta one"),
        ({"features": NESTED}, "got a nested one"),
        ({"features": torch.ones(3)}, r"flatten the rest\); got \[3\]"),
        ({"features": torch.ones(0, 3)}, r"got \[0, 3\]"),
        ({"bound": 0.0}, "bound must be a finite number > 0; got 0.0"),
        ({"bound": "1"}, "bound"),
        ({"bound": 1e-175}, "bound must be at least 1e-100"),
        ({"bound": 1e200, "variance_noise_multiplier": 1.0}, r"and at most 1e\+100"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"noise_multiplier": INF}, "noise_multiplier must be"),
        ({"variance_noise_multiplier": NAN}, "variance_noise_multiplier must be"),
        ({"noise": "none"}, "noise must be one of"),
        ({"seed": 3}, "would make the noise predictable"),
        ({"neighboring": "swap"}, "relation must be one of"),
    ],
)
def test_arguments_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        private_mean(**{"features": features(), **changes})


def test_centre_subtracts_a_copy_that_is_saved_with_the_model() -> None:
    mean = torch.tensor([1.0, 2.0])
    layer = Centre(mean)
    mean += 5.0
    assert torch.equal(layer(torch.tensor([[[3.0, 3.0]]])), torch.tensor([[[2.0, 1.0]]]))
    assert list(layer.state_dict()) == ["mean"]
    assert list(layer.parameters()) == []
    assert repr(layer) == "Centre(shape=(2,))"
    assert Centre is ghostclip.nn.Centre
    model = nn.Sequential(nn.Linear(4, 2), layer, nn.Tanh(), nn.Linear(2, 2)).double()
    assert ghostclip.check(model) == []
    assert_exact(model, torch.randn(5, 4, dtype=torch.float64), clipping=0.1)


@pytest.mark.parametrize(
    ("mean", "shape", "error", "message"),
    [
        ([1.0], (), TypeError, r"got \[1.0\]"),
        (torch.ones(2, dtype=torch.int64), (2,), TypeError, "floating-point"),
        (torch.tensor([NAN]), (1,), ValueError, "finite"),
        *((torch.zeros(2), shape, ValueError, r"must end with the mean's shape \[2\]") for shape in ((2, 3), (3,), ())),
    ],
)
def test_what_cannot_be_subtracted_is_refused(
    mean: Any, shape: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Centre(mean)(torch.zeros(shape))
