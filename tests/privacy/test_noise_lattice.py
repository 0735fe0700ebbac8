"""Noise on a lattice: every released number is one of its points, with exactly the law it claims, by a ziggurat."""

import bisect
import math
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from commands import as_json
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostclip.native import library
from ghostclip.noise import noise_source
from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.hardened import CHUNK, ENOUGH, FINENESS, LIMIT, Lattice
from ghostclip.noise.ziggurat import DIGITS, LAYER_BITS, LAYERS, PRECISION, REACH, Ziggurat, ziggurat

# A false alarm once in a million runs for each p-value.
RARE = 1e-6


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def compiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both with the C function and without it."""
    if not request.param:
        monkeypatch.setattr("ghostclip.noise.hardened.library", lambda name, real: None)
    elif library("lattice") is None:
        pytest.skip("no C compiler here")
    return request.param


def released(
    sums: np.ndarray, std: float, divisor: float = 1.0, key: bytes | None = None, **options: Any
) -> np.ndarray:
    return Lattice(std, divisor, **options).release(sums, KeyStream(key))


def multiples(numbers: torch.Tensor, std: float, divisor: float) -> torch.Tensor:
    """The numbers over the lattice's step, which is a power of two, so that nothing is rounded here."""
    return numbers.double() / Lattice(std, divisor).step


SUMS = [0.0, 1e-38, -1e-30, 0.1, -3.7, 1e4, -1e9, 3e30, -3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("std", "divisor"), [(1.1, 128.0), (3e-7, 77.0), (5e8, 1000.0)])
def test_released_numbers_are_on_the_lattice(dtype: torch.dtype, std: float, divisor: float, compiling: bool) -> None:
    sums = torch.tensor(SUMS, dtype=dtype).repeat(50)
    (found,) = noise_source("hardened").release([sums], std, divisor)
    ratios = multiples(found, std, divisor)
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    assert torch.equal(ratios, ratios.round())
    # It is as fine as it says: a thousand of its points within a standard deviation.
    assert 2**FINENESS <= std / divisor / Lattice(std, divisor).step < 2 ** (FINENESS + 1)
    assert len(ratios.unique()) > 150
    for narrow in (torch.bfloat16, torch.float16):
        cast = multiples(found.to(narrow), std, divisor)
        cast = cast[torch.isfinite(cast)]
        assert torch.equal(cast, cast.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_that_an_optimizer_gets_is_on_the_lattice(dtype: torch.dtype) -> None:
    model = runs.network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    engine = runs.engine_for(
        model, optimizer, runs.data(dtype=dtype), noise="hardened", noise_multiplier=0.9, clipping=1.0
    )
    runs.on_step(optimizer, lambda: seen.append(runs.grads(model).clone()))
    runs.train(engine)
    assert len(seen) == 3
    for gradient in seen:
        ratios = multiples(gradient, 0.9 * engine._steps.release.sensitivity, 8)
        assert torch.equal(ratios, ratios.round())
        assert ratios.abs().max() > 100


def test_sums_of_any_shape_are_taken(compiling: bool) -> None:
    sums = [torch.ones(3, 5).t(), torch.zeros(0, 4), torch.zeros(()), torch.full((7,), 2.0, dtype=torch.float64)]
    found = noise_source("hardened").release(sums, 1e-3, 2.0)
    assert [(part.shape, part.dtype) for part in found] == [(part.shape, part.dtype) for part in sums]
    for part, total in zip(found, sums, strict=True):
        assert torch.allclose(part, total / 2, atol=0.01)


@pytest.mark.parametrize(("std", "divisor"), [(1e-280, 1.0), (1e-255, 1e20), (1e300, 1e-20)])
def test_noise_that_would_be_rounded_away_is_refused(std: float, divisor: float) -> None:
    with pytest.raises(ValueError, match=r"standard deviation over the batch size must be between .* got .* / "):
        noise_source("hardened").release([torch.zeros(3, dtype=torch.float64)], std, divisor)


def test_what_is_no_number_is_bounded(compiling: bool) -> None:
    lattice = Lattice(1.0, 4.0)
    found = lattice.release(np.array([math.nan, math.inf, -math.inf, 1e30, -1e300]), KeyStream()) / lattice.step
    assert abs(found[0]) < REACH * lattice.spread + 1
    assert np.abs(found[1:] - LIMIT * np.array([1, -1, 1, -1])).max() < REACH * lattice.spread + 1


@pytest.mark.parametrize("target", [0.3, -0.5, 1e6 + 0.25])
@pytest.mark.parametrize(("std", "dtype"), [(1.7, np.float64), (0.999, np.float32)])
def test_the_law_is_that_of_a_rounded_gaussian(target: float, std: float, dtype: type, compiling: bool) -> None:
    # A lattice as coarse as the noise shows every probability, and the place of the sum between its points.
    lattice = Lattice(std, 1.0, fineness=0)
    found = lattice.release(np.full(100_000, target * lattice.step, dtype), KeyStream()) / lattice.step
    values, counts = np.unique(found.astype(np.float64), return_counts=True)
    center = float(np.full(1, target * lattice.step, dtype)[0]) / lattice.step
    # No cell is so rare that one number in it would look unlikely.
    edges = np.arange(math.floor(center) - 3, math.floor(center) + 5) - 0.5
    expected = np.diff(stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]]), center, lattice.spread))
    observed = np.array([counts[np.searchsorted(edges, values) == cell].sum() for cell in range(len(expected))])
    assert stats.chisquare(observed, expected * counts.sum()).pvalue > RARE


def test_sixty_digits_alone_give_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_is_certain(self: Ziggurat, layers: np.ndarray, shares: np.ndarray, stream: KeyStream) -> tuple:
        return np.zeros(len(layers), bool), np.ones(len(layers), bool), stream.words64(len(layers)) >> np.uint64(11)

    monkeypatch.setattr(Ziggurat, "under", nothing_is_certain)
    monkeypatch.setattr("ghostclip.noise.hardened.library", lambda name, real: None)
    found = released(np.full(5000, 2.5, np.float32), 1.0, 3.0)
    assert stats.kstest(found, stats.norm(2.5 / 3, 1 / 3).cdf).pvalue > RARE


@settings(max_examples=40, deadline=None)
@given(
    sums=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    std=st.floats(1e-6, 1e6),
    divisor=st.floats(1e-3, 1e5),
    key=st.binary(min_size=32, max_size=32),
)
def test_what_c_settles_no_further_digit_would_change(sums: list, std: float, divisor: float, key: bytes) -> None:
    if library("lattice") is None:
        pytest.skip("no C compiler here")
    lattice, words = Lattice(std, divisor), KeyStream(key).words32(20 * len(sums))
    totals = np.array(20 * sums, np.float32)
    out = np.empty_like(totals)
    left = lattice._look(totals, out, words)
    for index in sorted(set(range(len(totals))) - set(left.tolist())):
        word, total = int(words[index]), Fraction(float(totals[index]))
        layer, sign = word % LAYERS, -1 if word & LAYERS else 1
        target = min(max(total / Fraction(divisor) / Fraction(lattice.step), -Fraction(LIMIT)), Fraction(LIMIT))
        for digits in (word >> (LAYER_BITS + 1), (word >> (LAYER_BITS + 1)) + 1):
            x = Fraction(float(ziggurat().widths[layer])) * Fraction(digits, 1 << DIGITS)
            assert ziggurat().certainly_under(layer, x, Fraction(1))
            nearest = math.floor(target + sign * Fraction(lattice.spread) * x + Fraction(1, 2))
            assert out[index] == np.float32(nearest * lattice.step)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_number_of_every_size_is_filled(size: int, dtype: type, compiling: bool) -> None:
    found = released(np.full(size, 50.0, dtype), 1.0)
    assert found.dtype == dtype
    assert np.all(np.abs(found - 50.0) < REACH)


def test_the_layers_cover_the_curve_and_no_more_is_taken_for_inside() -> None:
    layers, floors = ziggurat(), ziggurat().exact_floors
    assert floors[-1] >= 1 > floors[-2]
    assert np.all(np.diff(layers.widths) < 0)
    for layer in range(LAYERS):
        width = Decimal(layers.widths[layer])
        if layer:
            assert (-width * width / 2).exp() <= floors[layer]
        inside = width * Decimal(layers.inside[layer])
        assert layers.inside[layer] == 0 or (-inside * inside / 2).exp() >= floors[layer + 1]
        assert Fraction(int(layers.table["inside"][layer]), 1 << DIGITS) <= Fraction(layers.inside[layer])
        assert Decimal(float(layers.table["width"][layer])) == width
        assert layers.floors[layer] == float(floors[layer])
    assert 2 * stats.norm.sf(REACH) < 2.0**-125


class Fixed(KeyStream):
    """A stream of words that are given."""

    def __init__(self, words: list[int]) -> None:
        self._given = np.array(words, np.uint64)

    def words64(self, count: int) -> np.ndarray:
        found, self._given = self._given[:count], self._given[count:]
        return found


@settings(max_examples=100, deadline=None)
@given(layer=st.integers(0, LAYERS - 1), digits=st.integers(0, 2**ENOUGH - 1), word=st.integers(0, 2**64 - 1))
def test_float64_says_what_sixty_digits_say_or_doubts(layer: int, digits: int, word: int) -> None:
    shares = np.array([(digits + 0.5) * 2.0**-ENOUGH])
    accepted, doubtful, heights = ziggurat().under(np.array([layer]), shares, Fixed([word]))
    x = Fraction(float(ziggurat().widths[layer])) * Fraction(2 * digits + 1, 1 << (ENOUGH + 1))
    height = Fraction(2 * int(heights[0]) + 1, 1 << 54)
    assert bool(doubtful[0]) or accepted[0] == ziggurat().certainly_under(layer, x, height)


@pytest.mark.parametrize("nearness", ["-1e-12", "1e-12", "-1e-18", "1e-18", "-1e-30", "1e-30"])
def test_points_next_to_the_curve_are_told_apart(nearness: str) -> None:
    # Heights just above and below the curve, most of which float64 can't tell from it.
    with localcontext(PRECISION):
        x, floors = Decimal(13) / 8, ziggurat().exact_floors
        curve = (-x * x / 2).exp()
        layer = bisect.bisect_right(floors, curve) - 1
        share = (curve - floors[layer]) / (floors[layer + 1] - floors[layer]) + Decimal(nearness)
    assert ziggurat().certainly_under(layer, Fraction(x), Fraction(share)) == nearness.startswith("-")


@pytest.mark.slow
def test_the_command_line_says_how_its_noise_was_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "--model", "mlp", "--noise-multiplier", "1", "--epochs", "1", "--no-compare"]
    found = as_json(capsys, *words, "--noise", "hardened", "--report", tmp_path)
    assert found["settings"]["noise"] == found["runs"][0]["noise"] == "hardened"
    assert "lattice of public step" in (tmp_path / "index.html").read_text()


def share_of_multiples(mode: str, total: float, unit: float) -> float:
    """How many of the small noisy sums of ``total`` are multiples of ``unit``."""
    (found,) = noise_source(mode).release([torch.full((100_000,), total)], 1.0)
    small = found[found.abs() < 2**-4].double()
    return float((small / unit == (small / unit).round()).double().mean())


def test_low_digits_tell_sums_apart_in_floating_point_and_not_on_the_lattice() -> None:
    # 1 + noise in float32 is rounded to 2^-24 near 1 and to 2^-23 beyond, noise alone far finer (Mironov 2012).
    assert share_of_multiples("standard", 1.0, 2**-25) == 1.0
    assert share_of_multiples("standard", 0.0, 2**-25) < 0.3
    assert share_of_multiples("hardened", 1.0, 2**-25) == share_of_multiples("hardened", 0.0, 2**-25) == 1.0
    step = Lattice(1.0, 1.0).step
    assert share_of_multiples("hardened", 1.0, step) == share_of_multiples("hardened", 1e-7, step) == 1.0
