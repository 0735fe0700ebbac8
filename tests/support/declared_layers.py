"""Layers as users write them, for `ghostclip.same_as`: some compute what torch's class does, some only seem to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ghostclip


def plain(self: nn.Linear, x: Tensor) -> Tensor:
    """What torch's layer computes."""
    return F.linear(x, self.weight, self.bias)


def linear(
    name: str, forward: Callable[..., Any] = plain, before: Callable[..., Any] = lambda self, x: None,
    buffer: str | None = None, **attributes: Any,
) -> type[nn.Linear]:  # fmt: skip
    """A subclass of Linear with this forward, what ``before(self, x)`` does before it, and a buffer of one zero."""

    def __init__(self: nn.Linear, *sizes: int) -> None:
        nn.Linear.__init__(self, *sizes)
        if buffer:
            self.register_buffer(buffer, torch.zeros(()))

    def both(self: nn.Linear, x: Tensor) -> Any:
        before(self, x)
        return forward(self, x)

    return type(name, (nn.Linear,), {"__init__": __init__, "forward": both, "__module__": __name__, **attributes})


def _largest(self: nn.Linear, x: Tensor) -> None:
    self.largest = torch.maximum(self.largest, x.detach().abs().max())


# The same function.
DrawingLinear = linear("DrawingLinear", before=lambda self, x: torch.rand(3))
# Another function: always; in eval mode and once a flag is set; by chance.
Doubled = linear("Doubled", lambda self, x: 2 * plain(self, x))
FlaggedLinear = linear(
    "FlaggedLinear", lambda self, x: (3 if self.flag or not self.training else 1) * plain(self, x), flag=False
)
Jittered = linear("Jittered", lambda self, x: plain(self, x) + torch.rand((), device=x.device))
# The same output, and another gradient.
DetachedBias = linear("DetachedBias", lambda self, x: F.linear(x, self.weight, self.bias.detach()))
# Effects: on a buffer (as layers have that will be quantized), on the weight behind autograd's back, on attributes, on
# the input.
Observed = linear("Observed", before=_largest, buffer="largest")
Renormed = linear("Renormed", before=lambda self, x: self.weight.data.renorm_(p=2, dim=0, maxnorm=0.1))
KeptInput = linear("KeptInput", before=lambda self, x: setattr(self, "seen", x))
InPlaceInput = linear("InPlaceInput", lambda self, x: (plain(self, x), x.mul_(2))[0])


class MyLinear(nn.Linear):
    """Casts its input first; counts its calls outside of itself."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        MyLinear.calls += 1
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def describe(self) -> str:
        return f"mine, {self.out_features} wide"


class SubclassOfMine(MyLinear):
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


class LoRALinear(nn.Linear):
    """One more parameter, which is frozen and adds nothing."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.up = nn.Parameter(torch.zeros(self.out_features, 1), requires_grad=False)


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
    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = (size,), 1e-5, True
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)[0]


class NoWeight(MyLayerNorm):
    """Lacks a parameter, even as None."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        del self.weight


class HandRMSNorm(nn.Module):
    """Has no attributes that torch's has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class IndexEmbedding(nn.Embedding):
    """Looks up rows by indexing: as torch's, unless there is a padding_idx, which has no gradient there."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


def declared(kind: type[nn.Module], target: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A wrapped model whose module "1" is of a declared class."""
    ghostclip.same_as(kind, target)
    torch.manual_seed(1)
    return ghostclip.wrap(nn.Sequential(nn.Identity(), kind(*args)), **options)
