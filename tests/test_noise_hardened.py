"""Hardened noise: every released number on the lattice, exactly the law it claims, and every digit from the cipher."""

import bisect
import copy
import json
import math
import multiprocessing
import os
import pickle
import sys
from decimal import Decimal, localcontext
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostclip.cli import main
from ghostclip.cli.summary import run_table
from ghostclip.native import library
from ghostclip.noise import noise_source
from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.generator import CipherGenerator
from ghostclip.noise.lattice import CHUNK, ENOUGH, FINENESS, LIMIT, Lattice
from ghostclip.noise.ziggurat import DIGITS, LAYER_BITS, LAYERS, PRECISION, REACH, Ziggurat, ziggurat
from ghostclip.report import TrainingRun

# A false alarm once in a million runs for each p-value looked at.
RARE = 1e-6
KEY = bytes(range(32))


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def compiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both with the C function and without it."""
    if not request.param:
        monkeypatch.setattr("ghostclip.noise.lattice.library", lambda name, real: None)
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
@pytest.mark.parametrize(("std", "divisor"), [(1.0, 1.0), (1.1, 128.0), (3e-7, 77.0), (5e8, 1000.0), (0.3, 0.7)])
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


def test_ordinary_gaussian_noise_is_not_on_the_lattice() -> None:
    (found,) = noise_source().release([torch.zeros(100)], 1.1, 128.0)
    ratios = multiples(found, 1.1, 128.0)
    assert not torch.equal(ratios, ratios.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_that_an_optimizer_gets_is_on_the_lattice(dtype: torch.dtype) -> None:
    model = runs.network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    engine = runs.engine_for(
        model, optimizer, runs.data(dtype=dtype), noise="hardened", noise_multiplier=0.9, clipping=1.0
    )
    runs.on_step(optimizer, lambda: seen.append(runs.grads(model).clone()))
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    assert len(seen) == 3
    for gradient in seen:
        ratios = multiples(gradient, 0.9 * engine._steps.release.sensitivity, 8)
        assert torch.equal(ratios, ratios.round())
        assert ratios.abs().max() > 100


def test_sums_of_any_shape_are_taken_and_odd_ones_refused(compiling: bool) -> None:
    sums = [torch.ones(3, 5).t(), torch.zeros(0, 4), torch.zeros(()), torch.full((7,), 2.0, dtype=torch.float64)]
    found = noise_source("hardened").release(sums, 1e-3, 2.0)
    assert [(part.shape, part.dtype) for part in found] == [(part.shape, part.dtype) for part in sums]
    for part, total in zip(found, sums, strict=True):
        assert torch.allclose(part, total / 2, atol=0.01)
    assert noise_source("hardened").release([], 1.0) == []
    assert torch.equal(noise_source("hardened").release([torch.ones(3)], 0.0, 4.0)[0], torch.full((3,), 0.25))
    with pytest.raises(TypeError, match=r"float32 or float64, and cast afterwards; got a sum in torch\.bfloat16"):
        noise_source("hardened").release([torch.zeros(2, dtype=torch.bfloat16)], 1.0)
    for wrong in ({"std": -1.0}, {"std": math.nan}, {"std": 1.0, "divisor": 0.0}):
        with pytest.raises(ValueError, match="must be a finite number"):
            noise_source("hardened").release([torch.ones(3)], **wrong)


@pytest.mark.parametrize(("std", "divisor"), [(5e-324, 1.0), (1e-300, 1e20), (1e300, 1e-20)])
def test_noise_that_would_be_rounded_away_is_refused(std: float, divisor: float) -> None:
    with pytest.raises(ValueError, match=r"standard deviation over the batch size must be between .* got .* / "):
        noise_source("hardened").release([torch.zeros(3)], std, divisor)


def test_what_is_no_number_is_bounded(compiling: bool) -> None:
    lattice = Lattice(1.0, 4.0)
    found = lattice.release(np.array([math.nan, math.inf, -math.inf, 1e30, -1e300]), KeyStream()) / lattice.step
    assert abs(found[0]) < REACH * lattice.spread + 1
    assert np.abs(found[1:] - LIMIT * np.array([1, -1, 1, -1])).max() < REACH * lattice.spread + 1


# The law


@pytest.mark.parametrize("target", [0.0, 0.3, -0.5, 1e6 + 0.25])
@pytest.mark.parametrize(("std", "dtype"), [(1.0, np.float32), (1.7, np.float64), (0.999, np.float32)])
def test_the_law_is_that_of_a_rounded_gaussian(target: float, std: float, dtype: type, compiling: bool) -> None:
    # A lattice as coarse as the noise shows every probability, and the place of the sum between its points.
    lattice = Lattice(std, 1.0, fineness=0)
    found = lattice.release(np.full(100_000, target * lattice.step, dtype), KeyStream()) / lattice.step
    values, counts = np.unique(found.astype(np.float64), return_counts=True)
    center = float(np.full(1, target * lattice.step, dtype)[0]) / lattice.step
    edges = np.arange(math.floor(center) - 4, math.floor(center) + 6) - 0.5
    expected = np.diff(stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]]), center, lattice.spread))
    observed = np.array([counts[np.searchsorted(edges, values) == cell].sum() for cell in range(len(expected))])
    assert stats.chisquare(observed, expected * counts.sum()).pvalue > RARE


def test_the_fine_lattice_s_law_is_a_discrete_gaussian_s(compiling: bool) -> None:
    # At 256 steps and more a standard deviation, rounded and discrete Gaussian probabilities differ by 1e-6 of them.
    lattice = Lattice(1.0, 1.0)
    found = np.rint(lattice.release(np.zeros(300_000, np.float32), KeyStream()) / lattice.step).astype(int)
    reach = int(5 * lattice.spread)
    points = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (points / lattice.spread) ** 2)
    edges = np.searchsorted(np.cumsum(weights) / weights.sum(), np.linspace(0, 1, 201)[1:-1])
    cells = np.searchsorted(points[edges], found)
    expected = np.add.reduceat(weights, np.concatenate([[0], edges + 1])) / weights.sum()
    assert stats.chisquare(np.bincount(cells, minlength=200), expected * len(found)).pvalue > RARE
    # Every residue is as frequent as another: nothing favours some of the lattice's points.
    assert stats.chisquare(np.bincount(found % 16, minlength=16)).pvalue > RARE


def test_sixty_digits_alone_give_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_is_certain(self: Ziggurat, layers: np.ndarray, shares: np.ndarray, stream: KeyStream) -> tuple:
        return np.zeros(len(layers), bool), np.ones(len(layers), bool), stream.words(len(layers)) >> np.uint64(11)

    monkeypatch.setattr(Ziggurat, "under", nothing_is_certain)
    monkeypatch.setattr("ghostclip.noise.lattice.library", lambda name, real: None)
    found = released(np.full(5000, 2.5, np.float32), 1.0, 3.0)
    assert stats.kstest(found, "norm", args=(2.5 / 3, 1 / 3)).pvalue > RARE


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
    lattice, words = Lattice(std, divisor), KeyStream(key).halves(20 * len(sums))
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


def test_c_leaves_few_and_fills_every_size() -> None:
    if library("lattice") is None:
        pytest.skip("no C compiler here")
    lattice = Lattice(1.0, 1.0)
    zeros, words = np.zeros(CHUNK, np.float32), KeyStream().halves(CHUNK)
    assert len(lattice._look(zeros, np.empty_like(zeros), words)) < 0.01 * CHUNK
    for size in (0, 1, 7, 63, 64, 65, 129, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 3):
        for dtype in (np.float32, np.float64):
            found = released(np.full(size, 50.0, dtype), 1.0)
            assert found.dtype == dtype
            assert np.all(np.abs(found - 50.0) < REACH)


# The ziggurat


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

    def words(self, count: int) -> np.ndarray:
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


# Where the numbers come from


def test_the_key_stream_is_aes_256_in_counter_mode() -> None:
    # The blocks of the counters 0 and 1 under the key of zeros, as in test cases 13 and 14 of GCM's specification.
    expected = bytes.fromhex("dc95c078a2408989ad48a21492842087530f8afbc74536b9a963b4f1c4cb738b")
    assert KeyStream(bytes(32)).words(4).tobytes() == expected
    stream = KeyStream(bytes(32))
    assert stream.halves(3).tobytes() + stream.halves(5).tobytes() == expected


def test_every_release_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy, asked = os.urandom, []
    monkeypatch.setattr("os.urandom", lambda count: asked.append(entropy(count)) or asked[-1])
    source, zeros = noise_source("hardened"), torch.zeros(100)
    asked.clear()
    drawn = [source.release([zeros], 1.0)[0].tolist() for _ in range(3)]
    assert [len(key) for key in asked] == [32, 32, 32]
    assert len(set(asked)) == 3
    assert source.draws == 3
    assert len({number for numbers in drawn for number in numbers}) > 150
    # The same key alone would repeat the noise: everything random comes from it.
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    again = [source.release([zeros], 1.0)[0].tolist() for _ in range(2)]
    assert again[0] == again[1]


def _send(source: Any, pipe: Connection) -> None:
    pipe.send(source.release([torch.zeros(50, dtype=torch.float64)], 1.0)[0].tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_no_process_and_no_copy_repeats_another_s_noise(method: str) -> None:
    source = noise_source("hardened")
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context(method).Process(target=_send, args=(source, theirs))
    child.start()
    assert ours.poll(60)
    drawn = [ours.recv()]
    child.join()
    for each in (source, copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))):
        torch.manual_seed(0)
        np.random.seed(0)
        drawn.append(each.release([torch.zeros(50, dtype=torch.float64)], 1.0)[0].tolist())
    # Numbers are multiples of the step, so single ones may agree; two sequences never do.
    assert max(np.mean(np.equal(one, other)) for i, one in enumerate(drawn) for other in drawn[:i]) < 0.2


def test_a_missing_cipher_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ModuleNotFoundError, match=r'^noise="hardened" needs .*pip install "ghostclip\[hardened\]"$'):
        noise_source("hardened")
    model = runs.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ModuleNotFoundError, match="needs the cryptography package"):
        runs.engine_for(model, optimizer, noise="hardened")
    assert not optimizer._optimizer_step_pre_hooks
    assert main(["train", "--model", "mlp", "--noise", "hardened", "--noise-multiplier", "1", "--no-compare"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith('cryptography is not installed; run: pip install "ghostclip[hardened]"')
    )


# Sampling


class Given(CipherGenerator):
    """A generator whose words are given."""

    def __init__(self, words: list[int]) -> None:
        super().__init__()
        self._given = list(words)

    def _words(self, count: int) -> np.ndarray:
        taken, self._given = self._given[:count], self._given[count:]
        return np.array(taken, np.uint64)


@pytest.mark.parametrize(("n", "p"), [(7, 0.3), (40, 1 / 3), (3, 0.999), (2000, 1e-3)])
def test_the_cipher_s_binomial_numbers_are_binomial(n: int, p: float) -> None:
    generator = CipherGenerator()
    found = [generator.binomial(n, p) for _ in range(4000)]
    # One cell for each number, and one for each tail, of at least ten expected.
    edges = [k for k in range(n + 1) if 10 < 4000 * stats.binom.cdf(k, n, p) < 3990]
    expected = 4000 * np.diff(stats.binom.cdf([-1, *edges, n], n, p))
    observed = np.bincount(np.searchsorted(edges, found), minlength=len(expected))
    assert stats.chisquare(observed, expected).pvalue > RARE
    assert generator.binomial(n, 1.0) == n


def test_a_coin_is_decided_by_as_many_digits_as_its_probability_has() -> None:
    p = 2.0**-30 + 2.0**-80
    first, second = 2**34, 2**48
    assert Fraction(p) == Fraction(first, 2**64) + Fraction(second, 2**128)
    assert Given([first - 1, first, first + 1, second - 1]).binomial(3, p) == 2
    assert Given([first, second]).binomial(1, p) == 0
    assert Given([first, second - 1]).binomial(1, p) == 1


@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_the_cipher_s_subsets_are_all_equally_likely(size: int) -> None:
    generator, found = CipherGenerator(), {}
    for _ in range(6000):
        chosen = frozenset(generator.choice(9, size, replace=False, shuffle=False).tolist())
        assert len(chosen) == size
        assert chosen <= set(range(9))
        found[chosen] = found.get(chosen, 0) + 1
    assert len(found) == math.comb(9, size)
    assert size == 9 or stats.chisquare(list(found.values())).pvalue > RARE


def test_no_number_is_favoured_by_division_and_nothing_else_is_asked_for() -> None:
    # 2^64 is 4 more than a multiple of 6, whose last four words would favour 0 ... 3.
    assert Given([2**64 - 4, 2**64 - 1, 5, 11]).choice(6, 1).tolist() == [5]
    for wrong in ({"size": 7}, {"size": -1}, {"size": 1, "replace": True}, {"size": 1, "shuffle": True}):
        with pytest.raises(ValueError, match="choice gives distinct numbers in no order, at most 6; got size="):
            CipherGenerator().choice(6, **wrong)


def test_what_was_drawn_ahead_can_be_drawn_again_and_two_generators_differ() -> None:
    generator, other = noise_source("hardened").generator(), noise_source("hardened").generator()
    generator.binomial(10, 0.5)
    before = generator.bit_generator.state
    first = [generator.choice(1000, 5).tolist() for _ in range(3)]
    assert [other.choice(1000, 5).tolist() for _ in range(3)] != first
    generator.bit_generator.state = before
    assert [generator.choice(1000, 5).tolist() for _ in range(3)] == first


@pytest.mark.parametrize("sampling", ["poisson", "without_replacement", "truncated"])
def test_the_engine_samples_from_the_cipher(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    choice = CipherGenerator.choice
    monkeypatch.setattr(CipherGenerator, "choice", lambda *of, **how: drawn.append(choice(*of, **how)) or drawn[-1])
    options = {"max_batch_size": 9} if sampling == "truncated" else {}
    engine = runs.engine_for(runs.network(), noise="hardened", noise_multiplier=1.0, sampling=sampling, **options)
    sizes = []
    for batch in engine.batches():
        sizes.append(sum(batch.sizes))
        batch.discard()
    assert sizes == [len(chosen) for chosen in drawn]
    assert sampling != "without_replacement" or sizes == 3 * [8]


# In the engine


@pytest.mark.parametrize("noise", ["standard", "hardened"])
@pytest.mark.parametrize("physical", [1, 3, None])
def test_every_step_draws_once_whatever_the_physical_batches(noise: str, physical: int | None) -> None:
    model = runs.network()
    engine = runs.engine_for(
        model, noise=noise, noise_multiplier=1.0, clipping=1.0, batch_size=2, max_physical_batch_size=physical
    )
    sizes = []
    for batch in engine.batches():
        sizes.append(sum(batch.sizes))
        engine.step(batch, runs.losses_of)
    assert engine._steps.release._noise.draws == len(sizes) == 12
    assert engine.noise == noise


@pytest.mark.parametrize("physical", [1, None])
def test_the_noise_has_its_std_whatever_the_physical_batches(physical: int | None) -> None:
    model = torch.nn.Linear(5, 4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    engine = runs.engine_for(
        model, optimizer, noise="hardened", noise_multiplier=1.3, clipping=1e-3, max_physical_batch_size=physical
    )
    runs.on_step(optimizer, lambda: seen.append(runs.grads(model).clone()))
    engine.step(next(iter(engine.batches())), lambda model, batch: 0.0 * model(batch[0]).sum(1))
    assert stats.kstest(seen[0].numpy(), "norm", args=(0, 1.3e-3 / 8)).pvalue > RARE


# Attacks


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


@pytest.mark.slow
def test_compiled_steps_release_through_the_lattice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    release = Lattice.release
    monkeypatch.setattr(Lattice, "release", lambda *of: given.append(release(*of)) or given[-1])
    model = runs.network()
    before = runs.weights(model)
    engine = runs.engine_for(
        model, torch.optim.SGD(model.parameters(), lr=1.0), noise="hardened", noise_multiplier=1.0, clipping=1.0
    )
    engine.compile()
    for _ in range(2):
        for batch in engine.batches():
            engine.step(batch, runs.losses_of)
    assert engine._steps.release._noise.draws == len(given) == 6
    # The parameters move by what was released, and by nothing else.
    moved = before - runs.weights(model)
    assert torch.allclose(moved, torch.from_numpy(np.sum(given, axis=0)), atol=1e-5)


# Reports


@pytest.mark.parametrize(("noise", "said"), [("hardened", "1.000 hardened"), ("test", "1.000 test"), (None, "1.000")])
def test_a_table_of_runs_says_how_the_noise_was_made(noise: str | None, said: str) -> None:
    run = TrainingRun("private", "cached", 0.5, 1, 2, 1.0, 3.0, noise_multiplier=1.0, noise=noise)
    cells = run_table([run], 1e-5).splitlines()[2].split("  ")
    assert said in [cell.strip() for cell in cells]


@pytest.mark.slow
def test_the_command_line_says_how_its_noise_was_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "--model", "mlp", "--noise-multiplier", "1", "--epochs", "1", "--no-compare"]
    assert main([*words, "--noise", "hardened", "--json", "--report", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["noise"] == found["runs"][0]["noise"] == "hardened"
    page = (tmp_path / "index.html").read_text()
    assert "<td>hardened</td>" in page
    assert "lattice of public step" in page
    assert main(words) == 0
    assert "1.000 standard" in capsys.readouterr().out
    assert main(["train", "--method", "nonprivate", "--noise", "hardened"]) == 2
    assert "--method nonprivate takes no --noise" in capsys.readouterr().err
