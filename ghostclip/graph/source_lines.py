"""Which line of code an operation comes from: the innermost one outside of torch and this package."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.nodes import inputs_first
from ghostclip.nn.base import LayerCall

__all__ = ["current_line", "line_of"]

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, os.path.dirname(HERE) + os.sep)
# How torch keeps a frame in anomaly mode, as `traceback.format_stack` writes it.
FRAME = re.compile(r'File "(.+)", line (\d+)')


def current_line() -> str:
    """The user's line that is being executed, "file:line: source"; "" where all lines are torch's and ours."""
    return _innermost((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))


def line_of(place: Any, graphs: Iterable[Tensor]) -> str:
    """The user's line that made a gradient node, or used a layer, in the graphs of some losses; "" where unknown.

    torch keeps it for nodes that were made in anomaly mode.
    """
    if isinstance(place, LayerCall):
        nodes = (node for losses in graphs for node in inputs_first(losses.grad_fn))
        place = next((node for node in nodes if getattr(node, "call", None) is place), None)
    kept = [] if place is None else place.metadata.get("traceback_", [])
    return _innermost((match[1], int(match[2])) for each in reversed(kept) if (match := FRAME.search(each)))


def _innermost(frames: Iterable[tuple[str, int]]) -> str:
    """The first frame that isn't of the packages, from the inside out."""
    for file, number in frames:
        if file.startswith("<") or os.path.abspath(file).startswith(PACKAGES):
            continue
        below = os.path.relpath(file) if os.path.abspath(file).startswith(os.getcwd() + os.sep) else file
        return f"{below}:{number}: {linecache.getline(file, number).strip()}".removesuffix(": ")
    return ""
