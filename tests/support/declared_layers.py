"""Layers as users write them, for `ghostclip.same_as`: some compute what torch's class does, some only seem to."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ghostclip

__all__ = [
    "AWrapper",
    "AutocastLinear",
    "ClassEps",
    "Counted",
    "CroppedConv2d",
    "DetachedBias",
    "Doubled",
    "DrawingLinear",
    "FlaggedLinear",
    "HandLinear",
    "HandNorm",
    "HandRMSNorm",
    "InPlaceInput",
    "IndexEmbedding",
    "InputsFirst",
    "Jittered",
    "KeptInput",
    "LoRALinear",
    "MyConv2d",
    "MyLSTM",
    "MyLayerNorm",
    "MyLinear",
    "NoWeight",
    "Observed",
    "Renormed",
    "ShapeLinear",
    "SubclassOfMine",
    "WithNone",
    "declared",
]


class MyLinear(nn.Linear):
    """Casts its input first; counts its calls outside of itself."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        MyLinear.calls += 1
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def describe(self) -> str:
        """A method that torch's class doesn't have."""
        return f"mine, {self.out_features} wide"


class SubclassOfMine(MyLinear):
    """Something else again."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class HandLinear(nn.Module):
    """No subclass of torch's, but of the same parameters and attributes."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class MyConv2d(nn.Conv2d):
    """The hook that torch offers for it, overridden."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class CroppedConv2d(nn.Conv2d):
    """torch's forward on an image without its border."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input[..., 1:-1, 1:-1], weight, bias)


class MyLayerNorm(nn.Module):
    """A module of torch's attributes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = (size,), 1e-5, True
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)[0]


class IndexEmbedding(nn.Embedding):
    """Looks up rows by indexing: as torch's, unless there is a padding_idx, which has no gradient there."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class MyLSTM(nn.LSTM):
    """torch's, called in another way."""

    def forward(self, x: Any, state: Any = None) -> Any:
        return super().forward(x, state)


class DrawingLinear(nn.Linear):
    """Draws random numbers and doesn't use them."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return F.linear(x, self.weight, self.bias)


class FlaggedLinear(nn.Linear):
    """Another function in eval mode, and once a flag is set."""

    flag = False

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return 3 * out if self.flag or not self.training else out


class ShapeLinear(nn.Linear):
    """Another function of sequences."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out.cumsum(1) if x.dim() == 3 else out


class Doubled(nn.Linear):
    """Not torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


class HandNorm(nn.LayerNorm):
    """Computed by hand: the same up to rounding, which is not the same."""

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class HandRMSNorm(nn.Module):
    """Has no attributes that torch's has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class ClassEps(MyLayerNorm):
    """An attribute of the class in the place of the module's own."""

    eps = 1e-3

    def __init__(self, size: int) -> None:
        super().__init__(size)
        del self.eps


class LoRALinear(nn.Linear):
    """Two more parameters, which are frozen and add nothing."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.down = nn.Linear(self.in_features, 1, bias=False).requires_grad_(False)
        self.up = nn.Parameter(torch.zeros(self.out_features, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class DetachedBias(nn.Linear):
    """The same output and another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias.detach())


class Observed(nn.Linear):
    """Keeps the largest input in a buffer, as layers do that will be quantized."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return F.linear(x, self.weight, self.bias)


class Renormed(nn.Linear):
    """Rescales its weight before it is used, behind autograd's back."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.renorm_(p=2, dim=0, maxnorm=0.1)
        return F.linear(x, self.weight, self.bias)


class KeptInput(nn.Linear):
    """Leaves its input behind."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return F.linear(x, self.weight, self.bias)


class Counted(nn.Linear):
    """Counts in a buffer in place."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return F.linear(x, self.weight, self.bias)


class InPlaceInput(nn.Linear):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        x.mul_(2)
        return out


class Jittered(nn.Linear):
    """Random."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + torch.rand((), device=x.device)


class WithNone(nn.Linear):
    """Another structure."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class InputsFirst(nn.Linear):
    """A weight of the other layout."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(self.weight.detach().T.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class NoWeight(nn.Module):
    """Lacks a parameter, even as None."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = (size,), 1e-5, False
        self.scale = None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape)


class AutocastLinear(nn.Linear):
    """torch's function, which autocast knows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class AWrapper(ghostclip.nn.Linear):
    """A subclass of a wrapper is one."""


def declared(kind: type[nn.Module], target: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A wrapped model whose module "1" is of a declared class."""
    ghostclip.same_as(kind, target)
    torch.manual_seed(1)
    return ghostclip.wrap(nn.Sequential(nn.Identity(), kind(*args)), **options)


class Listing(nn.Linear):
    """Keeps a penalty beside its output, as layers with auxiliary losses do."""

    def __init__(self, *args):
        super().__init__(*args)
        self.penalties, self.statistics, self.kinds = [], {}, set()

    def forward(self, x):
        self.penalties.append(self.weight.square().sum())
        self.statistics["largest"] = x.detach().max()
        self.kinds.add(x.dtype)
        return super().forward(x)


class Nested(nn.Linear):
    """Counts in a tensor in a list in a dict, and in a submodule."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inner, self.seen = nn.Identity(), {"rows": [torch.zeros(())]}

    def forward(self, x):
        self.seen["rows"][0] += len(x)
        self.inner.calls = 1
        return super().forward(x)


class OutOfMemory(nn.Linear):
    """Runs out of memory, as the CPU's allocator says it."""

    def forward(self, x):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
