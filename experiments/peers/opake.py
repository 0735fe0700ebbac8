"""opake's clipped gradients as contenders, by the functions that its own trainers call, eager and compiled.

It takes a batch in microbatches whose size the user chooses: each size that divides the batch, by twos, is timed once
before the first step, uncompiled, and the fastest is kept. What its trainers compile under ``torch_compile=True`` is
the work on one microbatch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.bench.contenders import Batch, Contender, Fill, by_filling_gradients
from ghostclip.bench.losses import Losses

from .trl_scripts import opake_imports

__all__ = ["OPAKE"]


def _absent() -> str | None:
    found = importlib.util.find_spec("opake")
    return None if found else "opake is not installed; run: pip install opake==0.16.1"


def _sizes(examples: int) -> list[int]:
    """Sizes of microbatches: halves of halves of the batch, down to one example."""
    found = [examples]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


def _opake(compiled: bool) -> Fill:
    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        opake_imports()
        from opake.dpsgd.clipping import clipped_grad
        from opake.functional import make_functional

        of_model, trained, fixed = make_functional(model, disable_autograd_tracking=True, partition_trainable=True)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def loss(trained: Any, fixed: Any, inputs: Tensor, target: Tensor) -> Tensor:
            return losses(of_model(trained | fixed, inputs.unsqueeze(0)), target.unsqueeze(0)).sum()

        def clipped(size: int, compiled: bool = False) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
            compiler = partial(torch.compile, fullgraph=True) if compiled else None
            by_batch, state = clipped_grad(
                loss, clipping_norm=max_norm, batch_argnums=(2, 3), microbatch_size=size, _chunk_compiler=compiler
            )
            return lambda inputs, targets: by_batch(trained, fixed, inputs, targets, state=state)[0].pytree

        chosen: list[Callable[[Tensor, Tensor], dict[str, Tensor]]] = []

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            if not chosen:
                size = _fastest({size: clipped(size) for size in _sizes(len(targets))}, inputs, targets)
                chosen.append(clipped(size, compiled))
            for name, total in chosen[0](inputs, targets).items():
                parameter = parameters[name]
                parameter.grad = total if parameter.grad is None else parameter.grad + total

        return add_clipped_sum

    return fill


def _fastest(ways: dict[int, Callable[..., Any]], *batch: Tensor) -> int:
    """The name of the way with the least time of its second run."""
    seconds = {}
    for name, way in ways.items():
        way(*batch)
        started = time.perf_counter()
        way(*batch)
        seconds[name] = time.perf_counter() - started
    return min(seconds, key=seconds.__getitem__)


OPAKE = (
    Contender("opake", "opake's clipped_grad, the fastest microbatches", by_filling_gradients(_opake(False)), _absent,
              usual=False),
    Contender("opake-compiled", "the same under torch.compile", by_filling_gradients(_opake(True)), _absent,
              usual=False),
)  # fmt: skip
