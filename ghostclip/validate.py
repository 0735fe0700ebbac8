"""Argument checks: each takes one ``name=value`` pair and returns the value, or raises naming it.

``positive(max_norm=max_norm)`` reads aloud as what it does. The messages say the name, what was expected and what came.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

__all__ = [
    "RefusesNames",
    "a_path",
    "at_least_one",
    "flag",
    "fraction",
    "nonnegative",
    "one_of",
    "open_fraction",
    "positive",
    "positive_int",
    "power_of_two",
    "probability",
    "whole",
]

if TYPE_CHECKING:
    from typing_extensions import Self


def _number(argument: dict[str, Any], expected: str, holds: Callable[[Any], bool]) -> Any:
    """The value of the one argument, which must be a number for which ``holds``."""
    ((name, value),) = argument.items()
    # What is checked at every step is a float as a rule, which is soon told.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be {expected}; got {value!r} of type {type(value).__name__}")
    if not holds(value):
        raise ValueError(f"{name} must be {expected}; got {value!r}")
    return value


def positive(**argument: Any) -> float:
    """The one keyword argument as a float: finite and > 0. Raises ValueError or TypeError naming it."""
    return float(_number(argument, "a finite number > 0", lambda value: 0 < value < math.inf))


def at_least_one(**argument: Any) -> float:
    """The one keyword argument as a float: finite and >= 1. Raises ValueError or TypeError naming it."""
    return float(_number(argument, "a finite number >= 1", lambda value: 1 <= value < math.inf))


def power_of_two(**argument: Any) -> float:
    """The one keyword argument as a float: 2**k, k from -24 to 24. Raises ValueError or TypeError naming it."""
    expected = "a power of two from 2**-24 to 2**24, such as 1024.0"
    return float(_number(argument, expected, lambda v: 2.0**-24 <= v <= 2.0**24 and math.frexp(v)[0] == 0.5))


def nonnegative(**argument: Any) -> float:
    """The one keyword argument as a float: finite and >= 0. Raises ValueError or TypeError naming it."""
    return float(_number(argument, "a finite number >= 0", lambda value: 0 <= value < math.inf))


def fraction(**argument: Any) -> float:
    """The one keyword argument as a float in (0, 1]. Raises ValueError or TypeError naming it."""
    return float(_number(argument, "a number in (0, 1]", lambda value: 0 < value <= 1))


def open_fraction(**argument: Any) -> float:
    """The one keyword argument as a float in (0, 1). Raises ValueError or TypeError naming it."""
    return float(_number(argument, "a number in (0, 1)", lambda value: 0 < value < 1))


def probability(**argument: Any) -> float:
    """The one keyword argument as a float in [0, 1]. Raises ValueError or TypeError naming it."""
    return float(_number(argument, "a number in [0, 1]", lambda value: 0 <= value <= 1))


def whole(**argument: Any) -> int:
    """The one keyword argument as an int >= 0 (2.0 counts as 2). Raises ValueError or TypeError naming it."""
    return int(_number(argument, "a whole number >= 0", lambda value: value >= 0 and value % 1 == 0))


def positive_int(**argument: Any) -> int:
    """The one keyword argument as an int >= 1. Raises ValueError or TypeError naming it."""
    return int(_number(argument, "a whole number >= 1", lambda value: value >= 1 and value % 1 == 0))


def flag(**argument: Any) -> bool:
    """The one keyword argument, True or False. Raises TypeError naming it: "no" would be true."""
    ((name, value),) = argument.items()
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's, too
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def one_of(choices: Sequence[str], **argument: Any) -> str:
    """The one keyword argument, which must be among ``choices``. Raises ValueError naming it and them."""
    ((name, value),) = argument.items()
    if value not in choices:
        instead = "; pld bounds what Opacus's prv estimates" if value == "prv" else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}{instead}")
    return value


def a_path(**argument: Any) -> Path:
    """The one keyword argument as a Path. Raises TypeError naming it."""
    ((name, value),) = argument.items()
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a str or a Path; got {value!r} of type {type(value).__name__}")
    return Path(value)


class RefusesNames:
    """A class whose constructor refuses the argument names of other libraries with what to use in their place.

    Attributes:
        refused_names: {argument of another library: what to use here}.
        without_arguments: what to do instead of a call without any argument; "": Python's own error says enough.
    """

    refused_names: ClassVar[Mapping[str, str]] = {}
    without_arguments: ClassVar[str] = ""

    # Not around __init__: one frame more there would part warnings from the user's line.
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raises TypeError for a refused name, one that is nearly an argument's, or where arguments are missing."""
        for name in kwargs.keys() & cls.refused_names.keys():
            raise TypeError(f"{cls.__name__} has no argument {name}; use {cls.refused_names[name]}")
        known = dict(inspect.signature(cls.__init__).parameters) if kwargs else {}
        known.pop("self", None)
        anything = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for name in (each for each in kwargs if each not in known and not anything):
            if near := difflib.get_close_matches(name, known, n=1):
                raise TypeError(f"{cls.__name__} has no argument {name}; did you mean {near[0]}?")
        if cls.without_arguments and not args and not kwargs:
            raise TypeError(f"{cls.__name__} takes a model, its optimizer and the data: {cls.without_arguments}")
        return super().__new__(cls)
