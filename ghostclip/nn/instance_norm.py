"""Instance normalization: each channel of each example by itself; with the normalized n, dL_i/dw = sum_t dz * n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.term import PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing, place_of
from .normalization import over_channels

__all__ = ["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"]

UPDATES = "updates its running statistics (track_running_stats) from private data, without noise"
UNTRACKED = "build it with track_running_stats=False, or call .eval() on it and keep it so"


class _InstanceNorm(GhostLayer):
    """The rule all three share; images have B in dimension 0, channels in 1."""

    checked_when_frozen = True
    # What torch.nn.modules.instancenorm._InstanceNorm has, for the type checker.
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Any
    bias: Any
    eps: float
    _get_no_batch_dim: Any

    def forward(self, input: Tensor) -> Tensor:
        if is_capturing():
            if self._updates_statistics(self):
                raise UnsupportedModelError(f"{place_of(self)} {UPDATES}; {UNTRACKED}")
            if input.dim() == self._get_no_batch_dim():
                raise UnsupportedModelError(
                    f"{place_of(self)} got an input of shape {list(input.shape)} without a batch dimension; "
                    f"add one: {input.dim() + 1} dimensions, examples first"
                )
        if not len(input):  # which torch's own kernel can't take
            return self.capture(
                F.group_norm(input, input.shape[1], self.weight, self.bias, self.eps), input, batch_dim=0
            )
        return self.capture(super().forward(input), input, batch_dim=0)

    @staticmethod
    def _updates_statistics(module: Any) -> bool:
        return module.running_mean is not None and (module.training or not module.track_running_stats)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        if name == "bias":
            return over_channels(to_float32(grad))
        return over_channels(to_float32(grad) * self._normalized(to_float32(inputs[0])))

    def _normalized(self, images: Tensor) -> Tensor:
        if self.running_mean is None:
            return F.group_norm(images, images.shape[1], eps=self.eps)
        return F.instance_norm(images, self.running_mean, self.running_var, use_input_stats=False, eps=self.eps)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        if not cls._updates_statistics(module):
            return []
        return [(UPDATES, UNTRACKED)]


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d, wraps=torch.nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` that can be clipped; affine or not, inputs [B, C, L]."""


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d, wraps=torch.nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` that can be clipped; affine or not, inputs [B, C, H, W]."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d, wraps=torch.nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` that can be clipped; affine or not, inputs [B, C, D, H, W]."""
