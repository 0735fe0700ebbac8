"""Argument checks: what passes comes back, what doesn't is named together with what was expected and what came."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ghostclip import validate

BEYOND = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (validate.positive, [1, 0.5, np.float32(2), 1e300], [0, -1.0, *BEYOND]),
        (validate.nonnegative, [0, 0.0, 3], [-1e-9, *BEYOND]),
        (validate.at_least_one, [1, 1.5, np.int64(3)], [0.999, 0, -1, *BEYOND]),
        (validate.fraction, [1, 1e-9, 0.5], [0, 1.0000001, -0.5, *BEYOND]),
        (validate.open_fraction, [1e-300, 0.999], [0, 1, -1, 2, *BEYOND]),
        (validate.whole, [0, 7, 2.0, np.int64(3), 10**20], [-1, 1.5, *BEYOND]),
        (validate.positive_int, [1, 2.0, np.int32(4)], [0, -3, 0.5, *BEYOND]),
    ],
)
def test_numbers_in_range_come_back_and_others_are_refused(
    check: Callable[..., Any], good: list[Any], bad: list[Any]
) -> None:
    kind = int if check in (validate.whole, validate.positive_int) else float
    for value in good:
        found = check(some_name=value)
        assert (found, type(found)) == (value, kind)
    for value in bad:
        with pytest.raises(ValueError, match=r"^some_name must be .*; got ") as caught:
            check(some_name=value)
        assert repr(value) in str(caught.value)
    for value in ("1", None, True, [1.0], 1j):
        with pytest.raises(TypeError, match=r"^some_name must be .*; got .* of type "):
            check(some_name=value)


def test_one_of_names_the_choices() -> None:
    assert validate.one_of(("pld", "rdp"), accountant="rdp") == "rdp"
    with pytest.raises(ValueError, match=r"accountant must be one of 'pld', 'rdp'; got 'PLD'"):
        validate.one_of(("pld", "rdp"), accountant="PLD")
