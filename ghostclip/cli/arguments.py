"""What the commands' arguments and outputs have in common."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = [
    "Joined",
    "OneLineParser",
    "UsageError",
    "as_bytes",
    "as_path",
    "converted",
    "print_json",
    "sizes",
]

BYTES = {"": 1, "B": 1} | {unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1)}
BYTES |= {unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)}


T = TypeVar("T")


class UsageError(ValueError):
    """The command line does not make sense; the message says why, in one line."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line, without the usage, and which takes no abbreviated option."""

    def __init__(self, **options: Any) -> None:
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(**options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError for a value that isn't among the choices, with the one that was probably meant."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; an unknown option that is like a known one is refused with the latter's name."""
        if self._subparsers is None and args:  # before argparse says that the one which was meant is missing
            self._refuse_misspelt([each for each in args if each.startswith("--")])
        found, unknown = super().parse_known_args(args, namespace)
        self._refuse_misspelt(unknown)
        return found, unknown

    def _refuse_misspelt(self, options: Sequence[str]) -> None:
        for option in (each for each in options if each.partition("=")[0] not in self._option_string_actions):
            if near := difflib.get_close_matches(option.partition("=")[0], self._option_string_actions, n=1):
                self.error(f"unrecognized argument {option}; did you mean {near[0]}?")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with argparse's message and where help is."""
        raise UsageError(f"{message} (see {self.prog} --help)")


class Joined(argparse.Action):
    """Stores the lists that an option was given one after another, as one list."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [each for part in values for each in part])


def converted(convert: Callable[[str], T], expected: str) -> Callable[[str], T]:
    """A type for argparse: ``convert``, whose ValueError becomes a message that says what was ``expected``."""

    def parse(text: str) -> T:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}") from None

    return parse


sizes = converted(lambda text: [int(part) for part in text.split(",")], "sizes such as 1 8 8 or 1,8,8")


def as_path(text: str) -> Path:
    """The path that a text names. Raises ArgumentTypeError for an empty one, as an unset variable of a shell is."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path; got an empty text")
    return Path(text)


def as_bytes(text: str) -> int:
    """The bytes that ``4294967296``, ``4GiB`` or ``4.5 GB`` stand for. Raises ArgumentTypeError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if found is None or found[2] not in BYTES or (count := int(float(found[1]) * BYTES[found[2]])) < 1:
        raise argparse.ArgumentTypeError(f"expected bytes or a number with a unit, such as 4GiB or 500MB; got {text!r}")
    return count


def print_json(value: Any) -> None:
    """Prints one JSON object; infinities and NaN are text, which JSON has no numbers for."""
    from ghostclip.report import plain  # torch comes with it

    print(json.dumps(plain(value), indent=2, allow_nan=False))
