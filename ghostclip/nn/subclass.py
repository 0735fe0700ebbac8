"""Subclasses of torch layers: whether a forward of their own leaves the parameters to the parent's forward."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

__all__ = ["leaves_parameters_to_parent"]

# What a forward may ask of a parameter without computing with it.
LOOKS = {"device", "dtype", "requires_grad", "shape"}


def leaves_parameters_to_parent(forward: Callable[..., Any], parameters: Collection[str]) -> bool:
    """Whether ``forward`` calls ``super().forward`` and does not use the named parameters itself.

    The parent's gradient rule is then that of the subclass: what comes before the parent is its input, what comes after
    is of no concern to it. A parameter that a forward gets at in another way is followed through the graph.
    """
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or not {"super", "forward"} <= set(code.co_names):
        return False
    return not any(name in parameters and then not in LOOKS for name, then in pairwise(_words(code)))


def _words(code: Any) -> Iterator[Any]:
    """Names and constants of the code in their order."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname != "CACHE")
    yield None
