"""One graph of everything between a batch and its clipped sums: forward, first pass, weights, second pass.

The eager code itself runs once under a tracer that writes down every tensor operation, both backwards included, so that
there is nothing to break the graph; what can't be written down (a branch on data, memory filled behind torch's
back) is refused. Inductor compiles the graph.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.precision import full_precision

__all__ = ["Region", "blindfolded", "trace"]

log = logging.getLogger("ghostclip")

# By which a forward gets numbers out of a tensor that the tracer doesn't see. Those of `item` and `bool` it does.
LOOKS = {
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__,
    Tensor.storage,
}  # fmt: skip
# What operations are called that show a number, or as many entries as a condition picks.
SHOWING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
LOOKS_AT_VALUES = "the forward or the loss looks at values of its tensors"


class Region:
    """A compiled graph for batches of one shape.

    Args:
        graph: from `trace`.
        inputs: parameters, buffers and the batch it was traced with.
        lasting: how many of the first inputs lie where they lay, call after call. A CUDA graph reads those in place,
            and has copies made of the others.

    Attributes:
        seconds: how long compiling took.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Tensor], lasting: int = 0) -> None:
        started = time.perf_counter()
        # A CUDA graph is replayed into the same memory, so what comes out of it is copied before the next one.
        self._on_cuda = inputs[0].is_cuda
        with torch.no_grad(), warnings.catch_warnings():
            # What inductor uses of torch itself is deprecated by torch.
            warnings.simplefilter("ignore")
            import torch._inductor as inductor
            import torch._inductor.config as config

            # Dropout must draw what it draws without compiling, and narrow types must round what they round, or the two
            # couldn't be compared.
            settings = {"fallback_random": True, "emulate_precision_casts": True, "triton.cudagraphs": self._on_cuda}
            if not self._on_cuda:
                # With channels last in between, norms would be read crosswise (a CNN's step: 1.18 of this one).
                settings["layout_optimization"] = False
            mode = _fake_mode()
            given: list[Any] = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in inputs]
            with config.patch(settings), _cached(mode):
                self._run: Any = _in_place(graph, given, lasting) if self._on_cuda else inductor.compile(graph, given)
                self(*inputs)
        self.seconds = time.perf_counter() - started

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for inputs of the shapes it was compiled for; its products are in full float32."""
        with full_precision(inputs[0].device):
            if self._on_cuda:
                torch.compiler.cudagraph_mark_step_begin()
                return tuple(output.clone() for output in self._run(*inputs))
            return self._run(*inputs)


def _fake_mode() -> Any:
    """Where inputs are given fakes, whose sizes are numbers: of tensors inductor takes all sizes for symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def _cached(mode: Any) -> AbstractContextManager[Any]:
    """Inside, inductor takes compiled code from its cache on disk, where an earlier process left it.

    It looks there only where sizes could be symbols, as those of `_fake_mode` could.
    """
    from torch._guards import TracingContext, tracing

    return tracing(TracingContext(mode))


def _in_place(graph: GraphModule, inputs: Sequence[Tensor], lasting: int) -> Any:
    """`torch._inductor.compile` for a graph whose first inputs are lasting, which only dynamo tells it otherwise."""
    from torch._inductor import compile_fx

    def inner(graph: GraphModule, inputs: Any, **settings: Any) -> Any:
        return compile_fx.compile_fx_inner(graph, inputs, **{**settings, "static_input_idxs": list(range(lasting))})

    return compile_fx.compile_fx(graph, list(inputs), inner_compile=inner)


def trace(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], other: Sequence[Tensor]) -> GraphModule:
    """The graph of ``step(*inputs)``; parameters among the inputs are the very tensors the model holds.

    Args:
        step: returns tensors.
        inputs: what it is traced with.
        other: the same with other data, whose maximum, mean and counts are others as a rule. Numbers, and tensors that
            are no input (a loss's class weights, a table in the code), must be the same both times: otherwise they are
            computed from data in a way that can't be written down.

    Raises:
        UnsupportedModelError: something in it depends on the data's values, or is computed behind the tracer's back.
    """
    graph, again = _written_down(step, inputs), _written_down(step, other)
    constants, others = _constants(graph), _constants(again)
    changing = graph.code != again.code or any(
        one is not two and not _equal(one, two) for one, two in zip(constants, others, strict=True)
    )
    if changing:
        raise UnsupportedModelError("it computes with values of tensors in a way that torch's dispatcher doesn't see")
    for node in graph.graph.nodes:
        # Inductor's memory formats are its own: where it was a view here, it may take a copy there.
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _written_down(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        return make_fx(step)(*inputs)
    except RuntimeError as error:
        if "trying to get value out of a tracing tensor" in str(error):
            raise UnsupportedModelError(LOOKS_AT_VALUES) from error
        raise


@contextmanager
def blindfolded() -> Iterator[None]:
    """Inside, a forward that looks at a tensor's values raises: a graph would have them built in for good."""
    with _NoMethods(), _NoNumbers():
        yield


class _NoMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKS:
            raise UnsupportedModelError(LOOKS_AT_VALUES)
        return func(*args, **(kwargs or {}))


class _NoNumbers(TorchDispatchMode):
    """Python is shown no number of a tensor, and no size that depends on one, as that of ``x[mask]``.

    Numbers of tensors that the forward makes from sizes and constants of its own, as ``torch.tensor(x.shape[1])``, are
    the same in every run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}  # such tensors, by their ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        own = func is torch.ops.aten.lift_fresh.default or all(id(each) in self._made for each in given)
        picking = func is not torch.ops.aten.index.Tensor or _has_mask(args[1])
        if not own and picking and not SHOWING.isdisjoint(func.tags):
            raise UnsupportedModelError(f"{LOOKS_AT_VALUES} ({func})")
        found = func(*args, **(kwargs or {}))
        if own and torch.Tag.nondeterministic_seeded not in func.tags:
            self._made.update((id(each), each) for each in tree_leaves(found) if isinstance(each, Tensor))
        elif func._schema.is_mutable:  # something else may have been written into one of them
            self._made.clear()
        return found


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _constants(graph: GraphModule) -> list[Any]:
    """What the graph uses besides its inputs, in the order of its first use."""
    names = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    return [getattr(graph, str(name)) for name in dict.fromkeys(names)]


def _equal(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return False
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
