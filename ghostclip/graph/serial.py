"""Numbers for objects, to be used in keys that outlive them: an ``id`` is given again when its object is gone."""

from __future__ import annotations

import itertools
import weakref

__all__ = ["serial_number"]

_numbers = itertools.count()
_known: dict[int, tuple[weakref.ref[object], int]] = {}


def serial_number(item: object) -> int:
    """The number of a module or tensor: the same as long as it lives, and never another object's."""
    address = id(item)
    known = _known.get(address)
    if known is not None and known[0]() is item:
        return known[1]
    number = next(_numbers)

    def forget(reference: weakref.ref[object], known: dict[int, tuple[weakref.ref[object], int]] = _known) -> None:
        now = known.get(address)
        if now is not None and now[0] is reference:
            del known[address]

    _known[address] = weakref.ref(item, forget), number
    return number
