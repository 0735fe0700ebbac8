"""A layer of the tests' own, and one whose rule is wrong."""

from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.nn import GhostLayer


class Scale(nn.Module):
    """One factor a feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Forgetful(GhostLayer, Scale, wraps=Scale):
    """Its rule forgets the input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.capture(super().forward(x), x, parameters=("weight",))

    def per_example(self, name: str, call: Any, inputs: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return grad
