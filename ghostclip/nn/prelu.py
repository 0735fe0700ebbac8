"""PReLU: z = max(0, x) + a min(0, x), so dL_i/da = sum_t dz[i,t] min(0, x[i,t])."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall

__all__ = ["PReLU"]


class PReLU(GhostLayer, torch.nn.PReLU, wraps=torch.nn.PReLU):
    """`torch.nn.PReLU` that can be clipped; one slope for all, or one a channel of inputs [B, C, ...]."""

    def forward(self, input: Tensor) -> Tensor:
        # Several slopes go to dimension 1 whatever the user says, so that examples can only be before it.
        batch_dim = 0 if self.num_parameters > 1 else None
        return self.capture(super().forward(input), input, batch_dim=batch_dim)

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return (call.batch_dim,) if self.num_parameters > 1 else range(len(call.shape))

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        products = to_float32(grad) * to_float32(inputs[0]).clamp(max=0)
        products = products.movedim(call.batch_dim, 0)
        if self.num_parameters == 1:
            return Dense(products.flatten(1).sum(1, keepdim=True))
        return Dense(products if products.dim() == 2 else products.flatten(2).sum(2))

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return ("weight",)
