"""Layers that torch builds of other layers: made from ghostclip.nn, their parts are wrappers from the start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .base import LAYERS

__all__ = ["built_of_wrappers"]


def built_of_wrappers(wrapped: type[torch.nn.Module]) -> Callable[..., None]:
    """An ``__init__`` that does what that of ``wrapped`` does, then turns the new module's parts into wrappers.

    It takes the same arguments and draws the same random numbers. A part is turned by its class, in place; one with a
    setting that its rule can't be exact for stays as it is, for `ghostclip.check` to find.
    """

    @functools.wraps(wrapped.__init__)
    def __init__(self: torch.nn.Module, *args: Any, **options: Any) -> None:
        wrapped.__init__(self, *args, **options)
        for part in self.modules():
            wrapper = LAYERS.get(type(part))
            if wrapper is not None and not wrapper.obstacles(part):
                part.__class__ = wrapper

    return __init__
