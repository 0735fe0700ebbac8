"""Normalization layers (Lee & Kifer 2020, section 5.5): with the normalized input n, dL_i/dw = sum_t dz[i,t] * n[i,t].

BatchNorm mixes examples, so that no per-example gradient exists: its names here refuse to be constructed, and a module
that `wrap` found in eval mode, where it is a fixed affine map, refuses to run in train mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing, missing_batch_dimension, place_of

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


def instead_of_batchnorm(kind: str, tracked: bool = True) -> str:
    """The remedy for a batch normalization of that class; one that isn't ``tracked`` has no running statistics."""
    of_eval = ", or keep it in eval mode" if tracked else " (it has no running statistics for eval mode)"
    return (
        f'replace it with ghostclip.wrap(model, replace={{"{kind}": "GroupNorm"}}), which normalizes each example by '
        f"itself (build the optimizer after that){of_eval}"
    )


class _OverChannels(GhostLayer):
    """The rule of a normalization with a weight a channel; images have B in dimension 0, channels in 1."""

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        products = to_float32(grad)
        if name == "weight":
            products = products * self._normalized(to_float32(inputs[0]))
        return self._summed(products.movedim(call.batch_dim, 0))

    def _normalized(self, input: Tensor) -> Tensor:
        """What the weight is multiplied with."""
        raise NotImplementedError

    def _summed(self, products: Tensor) -> Dense:
        """[B, C, ...] over everything behind the channels."""
        return Dense(products if products.dim() == 2 else products.flatten(2).sum(2))


class _OverFeatures(_OverChannels):
    """The same with a weight for each entry of the last dimensions, those of ``normalized_shape``."""

    # What torch.nn.LayerNorm and RMSNorm have, for the type checker.
    normalized_shape: Any
    eps: Any

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return range(len(call.shape) - len(self.normalized_shape))

    def _summed(self, products: Tensor) -> Dense:
        positions = products.dim() - 1 - len(self.normalized_shape)
        return Dense(products.flatten(1, positions).sum(1) if positions else products)


class LayerNorm(_OverFeatures, torch.nn.LayerNorm, wraps=torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` that can be clipped; affine or not, bias or not, any normalized shape."""

    def forward(self, input: Tensor) -> Tensor:
        return self.capture(super().forward(input), input)

    def _normalized(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, None, None, self.eps)


class RMSNorm(_OverFeatures, torch.nn.RMSNorm, wraps=torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` that can be clipped; affine or not, any normalized shape."""

    def forward(self, x: Tensor) -> Tensor:
        return self.capture(super().forward(x), x)

    def _normalized(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, None, self.eps)

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return ("weight",)


class GroupNorm(_OverChannels, torch.nn.GroupNorm, wraps=torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` that can be clipped; inputs [B, C, ...]."""

    def forward(self, input: Tensor) -> Tensor:
        return self.capture(super().forward(input), input, batch_dim=0)

    def _normalized(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, eps=self.eps)


class _InstanceNorm(GhostLayer):
    """What all three share: the weights are captured as torch's kernel gets them, repeated for each example."""

    checked_when_frozen = True
    # What torch.nn.modules.instancenorm._InstanceNorm has, for the type checker.
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Any
    bias: Any
    eps: float
    num_features: int
    _get_no_batch_dim: Any

    def forward(self, input: Tensor) -> Tensor:
        if is_capturing():
            if self._updates_statistics(self):
                raise UnsupportedModelError(f"{place_of(self)} {UPDATES}; {UNTRACKED}")
            if input.dim() == self._get_no_batch_dim():
                raise missing_batch_dimension(self, input, input.dim() + 1)
        if not len(input):  # which torch's own kernel can't take
            weight, bias = (self._for_each_example(name, 0) for name in ("weight", "bias"))
            outputs = F.group_norm(input, input.shape[1], eps=self.eps)
            return outputs + sum(each.sum() for each in (weight, bias) if each is not None)
        trained = any(each is not None and each.requires_grad for each in (self.weight, self.bias))
        if not (is_capturing() and trained and self._fits(input)):
            return super().forward(input)
        # torch gives each example's channels a copy of their weights, too, and normalizes all as if of one example.
        examples, channels = input.shape[:2]
        weight, bias = (self._for_each_example(name, examples) for name in ("weight", "bias"))
        mean, variance = (
            None if each is None else to_float32(each).repeat(examples)
            for each in (self.running_mean, self.running_var)
        )
        whole = input.reshape(1, examples * channels, *input.shape[2:])
        of_input = self.training or not self.track_running_stats
        return F.instance_norm(whole, mean, variance, weight, bias, of_input, eps=self.eps).view(input.shape)

    def _fits(self, input: Tensor) -> bool:
        """Whether the input has sizes that torch takes; where not, torch says what is wrong."""
        several = self.running_mean is not None or input.shape[2:].numel() > 1
        return input.dim() == self._get_no_batch_dim() + 1 and input.shape[1] == self.num_features and several

    def _for_each_example(self, name: str, examples: int) -> Tensor | None:
        """A parameter repeated for each example, [B * C]. Whatever uses it, its gradient is each example's own."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        # The kernels sum narrow gradients over positions in float32, and for wide weights don't round the sums.
        return self.capture(to_float32(parameter).repeat(examples, 1), parameters=(name,), batch_dim=0).flatten()

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def _updates_statistics(module: Any) -> bool:
        return module.running_mean is not None and (module.training or not module.track_running_stats)

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


class _BatchNorm(_OverChannels):
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
            problem, remedy = self.obstacles(self)[0]
            raise UnsupportedModelError(f"{place_of(self)} {problem}; {remedy}")
        return self.capture(super().forward(input), input, batch_dim=0)

    @staticmethod
    def _uses_batch_statistics(module: Any) -> bool:
        return module.training or module.running_mean is None

    def _normalized(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        if not cls._uses_batch_statistics(module):
            return []
        remedy = instead_of_batchnorm(cls.wrapped.__name__, module.running_mean is not None)
        return [("normalizes by the mean and variance of the batch, which mixes examples", remedy)]


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d, wraps=torch.nn.BatchNorm1d):
    """Can't be constructed: it mixes examples."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d, wraps=torch.nn.BatchNorm2d):
    """Can't be constructed: it mixes examples."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d, wraps=torch.nn.BatchNorm3d):
    """Can't be constructed: it mixes examples."""


class SyncBatchNorm(_BatchNorm, torch.nn.SyncBatchNorm, wraps=torch.nn.SyncBatchNorm):
    """Can't be constructed: it mixes examples, over all processes."""
