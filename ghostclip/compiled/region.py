"""One graph of everything between a batch and its clipped sums: forward, first pass, weights, second pass.

The eager code itself runs once under a tracer that writes down every tensor operation, both backwards included, so that
there is nothing to break the graph; what can't be written down (a branch on data, memory filled behind torch's
back) is refused. Inductor compiles the graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import UnsupportedModelError

__all__ = ["Region", "trace"]

log = logging.getLogger("ghostclip")


class Region:
    """A compiled graph for batches of one shape.

    Args:
        graph: from `trace`.
        inputs: parameters, buffers and the batch it was traced with.

    Attributes:
        seconds: how long compiling took.
    """

    def __init__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        import torch._inductor as inductor
        import torch._inductor.config as settings

        started = time.perf_counter()
        # A CUDA graph is replayed into the same memory, so what comes out of it is copied before the next one.
        self._on_cuda = inputs[0].is_cuda
        # Dropout must draw what it draws without compiling, or the two couldn't be compared.
        with torch.no_grad(), settings.patch({"fallback_random": True, "triton.cudagraphs": self._on_cuda}):
            self._run: Any = inductor.compile(graph, [tensor.detach() for tensor in inputs])
            self(*inputs)
        self.seconds = time.perf_counter() - started

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for inputs of the shapes it was compiled for."""
        if self._on_cuda:
            torch.compiler.cudagraph_mark_step_begin()
            return tuple(output.clone() for output in self._run(*inputs))
        return self._run(*inputs)


def trace(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The graph of ``step(*inputs)``; parameters among the inputs are the very tensors the model holds.

    Raises:
        UnsupportedModelError: something in it depends on the data's values, or comes from outside of the inputs.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        graph = make_fx(step)(*inputs)
    except RuntimeError as error:
        if "trying to get value out of a tracing tensor" in str(error):
            raise UnsupportedModelError("the forward or the loss looks at values of its tensors") from error
        raise
    strange = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    strange = [name for name in strange if not _is_constant(graph, name)]
    if strange:
        raise UnsupportedModelError(
            f"it uses tensors that are neither inputs nor parameters of the model, or fills memory itself: {strange}"
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _is_constant(graph: nn.Module, name: str) -> bool:
    """Whether what the tracer put aside is a number written in the code, and so the same for every batch."""
    value = getattr(graph, name)
    return isinstance(value, Tensor) and value.dim() == 0
