"""Argument checks: each takes one ``name=value`` pair and returns the value, or raises naming it.

``positive(max_norm=max_norm)`` reads aloud as what it does. The messages say the name, what was expected and what came.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

__all__ = ["fraction", "nonnegative", "one_of", "open_fraction", "positive", "positive_int", "power_of_two", "whole"]


def _single(arguments: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = arguments.items()
    return name, value


def _real(arguments: dict[str, Any], expected: str) -> tuple[str, float]:
    name, value = _single(arguments)
    # What is checked at every step is a float as a rule, which is soon told.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be {expected}; got {value!r} of type {type(value).__name__}")
    return name, float(value)


def positive(**argument: Any) -> float:
    """The one keyword argument as a float: finite and > 0. Raises ValueError or TypeError naming it."""
    name, value = _real(argument, "a finite number > 0")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0; got {value!r}")
    return value


def power_of_two(**argument: Any) -> float:
    """The one keyword argument as a float: 2**k, k from -24 to 24. Raises ValueError or TypeError naming it."""
    name, value = _real(argument, "a power of two, such as 1024.0")
    if not 2.0**-24 <= value <= 2.0**24 or math.frexp(value)[0] != 0.5:
        raise ValueError(f"{name} must be a power of two from 2**-24 to 2**24, such as 1024.0; got {value!r}")
    return value


def nonnegative(**argument: Any) -> float:
    """The one keyword argument as a float: finite and >= 0. Raises ValueError or TypeError naming it."""
    name, value = _real(argument, "a finite number >= 0")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number >= 0; got {value!r}")
    return value


def fraction(**argument: Any) -> float:
    """The one keyword argument as a float in (0, 1]. Raises ValueError or TypeError naming it."""
    name, value = _real(argument, "a number in (0, 1]")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be a number in (0, 1]; got {value!r}")
    return value


def open_fraction(**argument: Any) -> float:
    """The one keyword argument as a float in (0, 1). Raises ValueError or TypeError naming it."""
    name, value = _real(argument, "a number in (0, 1)")
    if not 0 < value < 1:
        raise ValueError(f"{name} must be a number in (0, 1); got {value!r}")
    return value


def whole(**argument: Any) -> int:
    """The one keyword argument as an int >= 0 (2.0 counts as 2). Raises ValueError or TypeError naming it."""
    name, value = _single(argument)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a whole number >= 0; got {value!r} of type {type(value).__name__}")
    if not (isinstance(value, Integral) or (math.isfinite(float(value)) and float(value).is_integer())) or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0; got {value!r}")
    return int(float(value)) if not isinstance(value, Integral) else int(value)


def positive_int(**argument: Any) -> int:
    """The one keyword argument as an int >= 1. Raises ValueError or TypeError naming it."""
    name, value = _single(argument)
    try:
        number = whole(**argument)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a whole number >= 1; got {value!r}")
    return number


def one_of(choices: Sequence[str], **argument: Any) -> str:
    """The one keyword argument, which must be among ``choices``. Raises ValueError naming it and them."""
    name, value = _single(argument)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    return value
