"""The paper's recurrent networks: an image is a sequence of its rows."""

from torch import Tensor

from ghostclip import nn

__all__ = ["LSTMClassifier", "RNNClassifier"]

HIDDEN = 128


class RNNClassifier(nn.Module):
    """One tanh recurrent layer of 128 units, then a fully connected one on its last state (section 6.1.1).

    Args:
        input_shape: ``(channels, height, width)`` of an image, read as ``height`` steps of ``channels * width``
            numbers, or ``(steps, features)`` of a sequence.
        classes: number of outputs.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.recurrent = nn.RNN(_features(input_shape), HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of inputs ``[B, *input_shape]``."""
        states, _ = self.recurrent(_rows(inputs))
        return self.output(states[:, -1])


class LSTMClassifier(nn.Module):
    """One LSTM layer of 128 units, then a fully connected one on its last state (section 6.1.1), as `RNNClassifier`."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(_features(input_shape), HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of inputs ``[B, *input_shape]``."""
        states, _ = self.recurrent(_rows(inputs))
        return self.output(states[:, -1])


def _features(input_shape: tuple[int, ...]) -> int:
    """Numbers a step: a row of every channel, or a sequence's features."""
    if len(input_shape) == 3:
        channels, _, width = input_shape
        return channels * width
    return input_shape[-1]


def _rows(inputs: Tensor) -> Tensor:
    """``[B, channels, height, width]`` as ``[B, height, channels * width]``; a sequence stays as it is."""
    return inputs.transpose(1, 2).flatten(2) if inputs.dim() == 4 else inputs
