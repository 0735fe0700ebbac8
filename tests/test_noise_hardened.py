"""Hardened noise: every released number on the lattice, exactly the law it claims, and every digit from the cipher."""

import builtins
import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostclip.cli import main
from ghostclip.native import library
from ghostclip.noise import noise_source
from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.hardened import HardenedNoise
from ghostclip.noise.lattice import CHUNK, FINENESS, LIMIT, Lattice
from ghostclip.noise.ziggurat import LAYERS, REACH, ziggurat

# A false alarm once in a million runs for each p-value looked at.
RARE = 1e-6
KEY = bytes(range(32))


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def compiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both with the C function and without it."""
    if not request.param:
        monkeypatch.setattr("ghostclip.noise.lattice.library", lambda name: None)
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
        ratios = multiples(gradient, 0.9 * engine._steps._sensitivity, 8)
        assert torch.equal(ratios, ratios.round())
        assert ratios.abs().max() > 100
