"""What the fuzzer found, and what became of it; written by hand."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FOUND", "Found"]


@dataclass(frozen=True)
class Found:
    """One cause.

    Attributes:
        what: the defect.
        by: commit and seed that show it.
        then: how it ended.
    """

    what: str
    by: str
    then: str


FOUND: tuple[Found, ...] = ()
