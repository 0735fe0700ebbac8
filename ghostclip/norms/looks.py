"""When values may be looked at. A look from the host waits until a GPU has done all it was given, which then idles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .term import is_traced

__all__ = ["looks_stall", "may_look", "without_looks"]


class _Here(threading.local):
    """What holds in one thread; a backward on a GPU has a thread of its own."""

    looks = True


_here = _Here()


def looks_stall(device: torch.device) -> bool:
    """Whether a look at values costs more than what it may save."""
    return device.type != "cpu"


def may_look() -> bool:
    """Whether values are known, and nobody wants to wait until all of them can be looked at together."""
    return _here.looks and not is_traced()


@contextmanager
def without_looks() -> Iterator[None]:
    """Inside, no value is looked at: a norm that would have needed it becomes NaN."""
    before, _here.looks = _here.looks, False
    try:
        yield
    finally:
        _here.looks = before
