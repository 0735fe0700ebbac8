"""Argument checks: what passes comes back, what doesn't is named together with what was expected and what came."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ghostclip import validate

NOT_NUMBERS = ["1", None, True, [1.0], 1j]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (validate.positive, [1, 0.5, np.float32(2), 1e300], [0, -1.0, math.nan, math.inf, -math.inf]),
        (validate.nonnegative, [0, 0.0, 3], [-1e-9, math.nan, math.inf]),
        (validate.fraction, [1, 1e-9, 0.5], [0, 1.0000001, -0.5, math.nan, math.inf]),
        (validate.open_fraction, [1e-300, 0.999], [0, 1, -1, 2, math.nan, math.inf]),
        (validate.whole, [0, 7, 2.0, np.int64(3), 10**20], [-1, 1.5, math.nan, math.inf, -math.inf]),
        (validate.positive_int, [1, 2.0, np.int32(4)], [0, -3, 0.5, math.nan, math.inf]),
    ],
)
def test_numbers_in_range_come_back_and_others_are_refused(
    check: Callable[..., Any], good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert check(some_name=value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^some_name must be .*; got ") as caught:
            check(some_name=value)
        assert repr(value) in str(caught.value)
    for value in NOT_NUMBERS:
        with pytest.raises(TypeError, match=r"^some_name must be .*; got .* of type "):
            check(some_name=value)


def test_whole_numbers_come_back_as_int() -> None:
    assert type(validate.whole(steps=2.0)) is int
    assert type(validate.positive_int(batch_size=np.int64(5))) is int
    assert type(validate.positive(max_norm=1)) is float


def test_one_of_names_the_choices() -> None:
    assert validate.one_of(("pld", "rdp"), accountant="rdp") == "rdp"
    for other in ("PLD", None, 3):
        with pytest.raises(ValueError, match=r"accountant must be one of 'pld', 'rdp'; got ") as caught:
            validate.one_of(("pld", "rdp"), accountant=other)
        assert repr(other) in str(caught.value)


def test_a_check_takes_exactly_one_name() -> None:
    with pytest.raises(ValueError, match="unpack"):
        validate.positive(a=1.0, b=2.0)
