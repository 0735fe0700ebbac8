"""One example moves a sum of many others' gradients by its own share, however the numbers are rounded that are added.

The first examples lift a running sum of float32 to just over a power of two, or, with one less of them, to just below.
Gradients that come after have 0.6 of the distance of two numbers below, and so are rounded up there, and to nothing
above: in a plain sum of 20,000 numbers one example decides about 5 times its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ghostclip.native import rows as native
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.rows import LookupGrads
from ghostclip.norms.term import Dense
from ghostclip.sharding.plain import Totals

# Of a share; float32 rounds the sum itself by 2e-4.
MOST = 1.02
SIZES = {"examples": (4097, 16384, 1), "positions": (257, 512, 256)}


def looked_up(shares: Tensor, width: int) -> LookupGrads:
    indices = torch.zeros(shares.shape, dtype=torch.long)
    return LookupGrads(indices, shares[..., None].repeat(1, 1, width), torch.Size((4, width)))


def grouped(shares: Tensor, width: int) -> OuterProduct:
    """Of two groups, as a depthwise convolution has."""
    left = shares.repeat_interleave(2, 0)[..., None]
    return OuterProduct(left, torch.ones(*left.shape[:2], width), torch.Size((2, width)), groups=2)


TERMS: dict[str, Callable[[Tensor, int], Callable[[Tensor], Tensor]]] = {
    "dense": lambda shares, width: Dense(shares.sum(1, keepdim=True).repeat(1, width)).weighted_sum,
    "dense, of two dimensions": lambda s, width: Dense(s.sum(1)[:, None, None].repeat(1, 2, width)).weighted_sum,
    "outer": lambda shares, width: (
        OuterProduct(
            shares[..., None].repeat(1, 1, width), torch.ones(*shares.shape, width), torch.Size((width, width))
        ).weighted_sum
    ),
    "outer, one output": lambda shares, width: (
        OuterProduct(shares[..., None], torch.ones(*shares.shape, width), torch.Size((1, width))).weighted_sum
    ),
    "groups": lambda shares, width: grouped(shares, width).weighted_sum,
    "lookup": lambda shares, width: looked_up(shares, width).weighted_sum,
}


def shares_of(first: int, others: int, positions: int, last_of_first: float) -> Tensor:
    shares = torch.full((first + others, positions), -0.6 * 2.0**-24 * (first - 1))
    shares[:first] = 1.0 / positions
    shares[first - 1] *= last_of_first
    return shares


def moved(total: Callable[[Tensor], Tensor], size: tuple[int, int, int]) -> float:
    """By how much the example moves the first number of a sum."""
    with_it, without = (total(shares_of(*size, present)).flatten()[0] for present in (1.0, 0.0))
    return float(with_it - without)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [1, 8, 16])
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.one_in(3)
def test_sums_of_a_physical_batch(term: str, width: int, size: str) -> None:
    def total(shares: Tensor) -> Tensor:
        return TERMS[term](shares, width)(torch.ones(len(shares)))

    assert 1 / MOST <= moved(total, SIZES[size]) <= MOST


def test_rows_of_a_table_without_compiled_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda *_: None)
    found = moved(lambda shares: looked_up(shares, 8).weighted_sum(torch.ones(len(shares))), SIZES["positions"])
    assert 1 / MOST <= found <= MOST


@pytest.mark.parametrize("width", [1, 8])
def test_both_parameters_of_a_linear_layer(width: int) -> None:
    def pair(shares: Tensor) -> Iterator[Tensor]:
        left = shares.repeat(1, width)
        yield from LinearPair(left, torch.ones(len(left), width), ("weight", "bias")).weighted_sums(
            torch.ones(len(left))
        )

    for place in range(2):
        found = moved(lambda shares, place=place: list(pair(shares))[place], SIZES["examples"])
        assert 1 / MOST <= found <= MOST


def test_sums_over_physical_batches() -> None:
    """Of one example each."""
    parameter = torch.nn.Parameter(torch.zeros(1))

    def total(shares: Tensor) -> Tensor:
        totals = Totals()
        for share in shares:
            totals.add({id(parameter): share.clone()})
        return totals.complete([parameter])[0]

    found = moved(total, (1025, 4096, 1))
    assert 1 / MOST <= found <= MOST


def test_a_parameter_that_takes_part_later_is_added_up_likewise() -> None:
    """Others took part in 100 physical batches before."""
    first, later = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))

    def total(shares: Tensor) -> Tensor:
        totals = Totals()
        for _ in range(100):
            totals.add({id(first): torch.ones(1)})
        for share in shares:
            totals.add({id(later): share.clone()})
        return totals.complete([later])[0]

    assert 1 / MOST <= moved(total, (1025, 4096, 1)) <= MOST
