"""Normalization layers (Lee & Kifer 2020, section 5.5): with the normalized input n, dL_i/dw = sum_t dz[i,t] * n[i,t].

BatchNorm mixes examples, so that no per-example gradient exists: its names here refuse to be constructed, and a module
that `wrap` found in eval mode, where it is a fixed affine map, refuses to run in train mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing, place_of, without_examples

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
    "SyncBatchNorm",
]


UPDATES = "updates its running statistics (track_running_stats) from private data, without noise"
UNTRACKED = "build it with track_running_stats=False, or call .eval() on it and keep it so"


def instead_of_batchnorm(kind: str) -> str:
    """The remedy for a batch normalization of that class."""
    return (
        f'replace it with ghostclip.wrap(model, replace={{"{kind}": "GroupNorm"}}), which normalizes each example by '
        "itself, or keep it in eval mode"
    )


class LayerNorm(GhostLayer, torch.nn.LayerNorm, wraps=torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` that can be clipped; affine or not, bias or not, any normalized shape."""

    row_by_row = True

    def forward(self, input: Tensor) -> Tensor:
        return self.capture(super().forward(input), input)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        grads, dims = to_float32(grad), len(self.normalized_shape)
        if name == "bias":
            return _over_positions(grads, call.batch_dim, dims)
        normalized = F.layer_norm(to_float32(inputs[0]), self.normalized_shape, None, None, self.eps)
        return _over_positions(grads * normalized, call.batch_dim, dims)


class RMSNorm(GhostLayer, torch.nn.RMSNorm, wraps=torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that can be clipped; affine or not, any normalized shape."""

    row_by_row = True

    def forward(self, x: Tensor) -> Tensor:
        return self.capture(super().forward(x), x, parameters=("weight",))

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        normalized = F.rms_norm(to_float32(inputs[0]), self.normalized_shape, None, self.eps)
        return _over_positions(to_float32(grad) * normalized, call.batch_dim, len(self.normalized_shape))

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return ("weight",)


def _over_positions(products: Tensor, batch_dim: int, normalized: int) -> Dense:
    """Summed over all dimensions but that of the examples and the last ``normalized`` ones."""
    products = products.movedim(batch_dim, 0)
    positions = products.dim() - 1 - normalized
    return Dense(products.flatten(1, positions).sum(1) if positions else products)


class GroupNorm(GhostLayer, torch.nn.GroupNorm, wraps=torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` that can be clipped; inputs [B, C, ...]."""

    def forward(self, input: Tensor) -> Tensor:
        return self.capture(super().forward(input), input, batch_dim=0)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        if name == "bias":
            return _over_channels(to_float32(grad))
        return _over_channels(to_float32(grad) * F.group_norm(to_float32(inputs[0]), self.num_groups, eps=self.eps))


def _over_channels(products: Tensor) -> Dense:
    """Products [B, C, ...] summed over everything behind the channels."""
    return Dense(products if products.dim() == 2 else products.flatten(2).sum(2))


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
                raise without_examples(self, input, input.dim() + 1)
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
            return _over_channels(to_float32(grad))
        return _over_channels(to_float32(grad) * self._normalized(to_float32(inputs[0])))

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


class _BatchNorm(GhostLayer):
    """A BatchNorm that stays in eval mode: the affine map of its running statistics."""

    rule = "BatchNorm in eval mode"
    checked_when_frozen = True
    running_mean: Tensor | None
    running_var: Tensor | None
    eps: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedModelError(
            f"{type(self).__name__} mixes the examples of a batch, so no per-example gradient exists; "
            f"{instead_of_batchnorm(self.wrapped.__name__)}"
        )

    def forward(self, input: Tensor) -> Tensor:
        if self._uses_batch_statistics(self) and is_capturing():
            raise UnsupportedModelError(
                f"{place_of(self)} is in train mode, where it mixes the examples of a batch; "
                f"{instead_of_batchnorm(self.wrapped.__name__)}"
            )
        return self.capture(super().forward(input), input)

    @staticmethod
    def _uses_batch_statistics(module: Any) -> bool:
        return module.training or module.running_mean is None

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        products = to_float32(grad)
        if name == "weight":
            images = to_float32(inputs[0])
            products = products * F.batch_norm(images, self.running_mean, self.running_var, eps=self.eps)
        return _over_channels(products)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        if not cls._uses_batch_statistics(module):
            return []
        remedy = instead_of_batchnorm(cls.wrapped.__name__)
        return [("normalizes by the mean and variance of the batch, which mixes examples", remedy)]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d, wraps=torch.nn.BatchNorm1d):
    """Can't be constructed: it mixes examples."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d, wraps=torch.nn.BatchNorm2d):
    """Can't be constructed: it mixes examples."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d, wraps=torch.nn.BatchNorm3d):
    """Can't be constructed: it mixes examples."""


class SyncBatchNorm(_BatchNorm, torch.nn.SyncBatchNorm, wraps=torch.nn.SyncBatchNorm):
    """Can't be constructed: it mixes examples, over all processes."""
