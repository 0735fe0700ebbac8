"""The paper's multi-layer perceptron."""

import math

from torch import Tensor

from ghostclip import nn

__all__ = ["MLP"]

HIDDEN = (128, 256)


class MLP(nn.Module):
    """Two hidden layers of 128 and 256 units with sigmoid activations (Lee & Kifer 2020, section 6.1.1).

    Args:
        input_shape: shape of one input; it is flattened.
        classes: number of outputs.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        first, second = HIDDEN
        self.hidden1 = nn.Linear(math.prod(input_shape), first)
        self.hidden2 = nn.Linear(first, second)
        self.output = nn.Linear(second, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of inputs ``[B, *input_shape]``."""
        hidden = self.hidden1(inputs.flatten(1)).sigmoid()
        return self.output(self.hidden2(hidden).sigmoid())
