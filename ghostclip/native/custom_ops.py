"""Functions as single operations of a graph that is being traced: what they call isn't looked into."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.library import CustomOpDef

__all__ = ["Traceable", "custom_op", "is_traced", "traceable"]

P = ParamSpec("P")
T = TypeVar("T")

_dispatch_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY


def is_traced() -> bool:
    """Whether operations are being written down as a graph, where no value is known."""
    return _dispatch_mode(_PROXY) is not None or torch.compiler.is_compiling()


def custom_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes an operation ``ghostclip::name`` of a function that changes none of its arguments.

    Args:
        schema: name, arguments and results as torch writes them: ``"half(Tensor x) -> Tensor"``.
        fake: takes the same arguments; returns uninitialised tensors of the results' shapes.
    """
    name, bracket, rest = schema.partition("(")

    def register(function: Callable[..., Any]) -> CustomOpDef:
        operation = torch.library.custom_op(f"ghostclip::{name}", function, mutates_args=(), schema=bracket + rest)
        operation.register_fake(fake)
        return operation

    return register


class Traceable(Generic[P, T]):
    """A function of which a call is one `custom_op` of a graph being traced.

    Attributes:
        operation: the custom operation; it isn't given keyword arguments, which are for calls outside of graphs.
    """

    def __init__(self, schema: str, fake: Callable[..., Any], function: Callable[P, T]) -> None:
        self.__doc__, self._function = function.__doc__, function
        self.operation = custom_op(schema, fake)(function)

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> T:
        if is_traced():
            # Sizes are lists in a graph: inductor writes them down as they print.
            return self.operation(*([*each] if isinstance(each, tuple) else each for each in args))
        return self._function(*args, **keywords)


def traceable(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[P, T]], Traceable[P, T]]:
    """Makes a function `Traceable`; arguments as those of `custom_op`."""
    return partial(Traceable, schema, fake)
