"""torch.func as a contender: ``vmap(grad)``, every example's gradient materialised, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ghostclip.bench.contenders import Batch, CannotRun, Contender, Fill, by_filling_gradients
from ghostclip.bench.losses import Losses

__all__ = ["FUNCTIONAL"]

Parts = Mapping[str, Tensor]


def _clipped_sum_of(
    model: nn.Module, losses: Losses, max_norm: float
) -> Callable[[Parts, Parts, Tensor, Tensor], dict[str, Tensor]]:
    """A pure function from (trained, fixed, inputs, targets) to the clipped sum."""

    def loss(trained: Parts, fixed: Parts, inputs: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, {**trained, **fixed}, (inputs.unsqueeze(0),))
        return losses(outputs, target.unsqueeze(0)).sum()

    per_example = vmap(grad(loss), in_dims=(None, None, 0, 0))

    def clipped_sum(trained: Parts, fixed: Parts, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        gradients = per_example(trained, fixed, inputs, targets)
        parts = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients.values()])
        weights = (max_norm / parts.norm(dim=0)).clamp(max=1.0)
        return {name: torch.tensordot(weights, gradient, dims=1) for name, gradient in gradients.items()}

    return clipped_sum


def _vmap(compiled: bool) -> Fill:
    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        kinds = {type(module) for module in model.modules()}
        if nn.RNN in kinds:
            raise CannotRun("torch's vmap can't run nn.RNN: it adds a batch to a state that has none, in place")
        if compiled and nn.LSTM in kinds:
            raise CannotRun("torch.compile unrolls an LSTM's steps under vmap, and takes minutes for it")
        shared = dict(model.named_parameters())
        trained = {name: parameter for name, parameter in shared.items() if parameter.requires_grad}
        fixed = {name: parameter.detach() for name, parameter in shared.items() if not parameter.requires_grad}
        fixed |= dict(model.named_buffers())
        clipped_sum = _clipped_sum_of(model, losses, max_norm)
        run = torch.compile(clipped_sum) if compiled else clipped_sum

        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            detached = {name: parameter.detach() for name, parameter in trained.items()}
            for name, total in run(detached, fixed, inputs, targets).items():
                parameter = trained[name]
                parameter.grad = total if parameter.grad is None else parameter.grad + total

        return add_clipped_sum

    return fill


FUNCTIONAL = (
    Contender("vmap", "torch.func: vmap(grad)", by_filling_gradients(_vmap(compiled=False))),
    Contender("vmap-compiled", "the same under torch.compile", by_filling_gradients(_vmap(compiled=True)),
              usual=False),
)  # fmt: skip
