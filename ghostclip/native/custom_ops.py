"""Functions as single operations of a graph that is being traced: what they call isn't looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.library import CustomOpDef

__all__ = ["Traceable", "as_compiled", "constant_values", "custom_op", "is_traced", "traceable"]

P = ParamSpec("P")
T = TypeVar("T")

_dispatch_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
# How many `as_compiled` there are at present.
_as_compiled = [0]


def is_traced() -> bool:
    """Whether operations are being written down as a graph, where no value is known."""
    return _dispatch_mode(_PROXY) is not None or (torch.compiler.is_compiling() and not _as_compiled[0])


@contextmanager
def as_compiled() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling` is true, though values are there: forwards don't branch on any.

    Unless it is compiled, a model of transformers drops a mask of ones, for example.
    """
    before = torch.compiler._is_compiling_flag  # torch.export sets it likewise
    torch.compiler._is_compiling_flag = True
    _as_compiled[0] += 1
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        _as_compiled[0] -= 1


def constant_values(tensor: torch.Tensor) -> list[Any] | None:
    """The values of a tensor that is the same in every run of the graph being traced, nested; None for another tensor.

    ``torch.arange(len(x))`` is a constant, though an operation of the graph makes it: neither an input of the graph nor
    a random number goes there. A tensor that was there before isn't: the graph reads it anew in every run.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_slot

    first = get_proxy_slot(tensor, _dispatch_mode(_PROXY).tracer, None, lambda found: found.proxy.node)
    nodes, stack, random = set[Any](), [first], torch.Tag.nondeterministic_seeded
    while stack:
        node = stack.pop()
        if node is None or node.op != "call_function" or random in getattr(node.target, "tags", ()):
            return None
        if node not in nodes:
            nodes.add(node)
            stack += node.all_input_nodes
    with disable_proxy_modes_tracing():
        return tensor.tolist()


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
