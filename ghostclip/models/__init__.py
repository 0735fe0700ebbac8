"""Networks of `ghostclip.nn` layers, by name: five of Lee & Kifer (2020, section 6.1.1), two on oriented features."""

from torch.nn import Module

from ghostclip.models.networks import CNN, MLP, LSTMClassifier, RNNClassifier, TransformerClassifier
from ghostclip.models.oriented import OrientedCNN, OrientedLinear
from ghostclip.validate import one_of, positive_int

__all__ = [
    "CNN",
    "MLP",
    "NAMES",
    "LSTMClassifier",
    "OrientedCNN",
    "OrientedLinear",
    "RNNClassifier",
    "TransformerClassifier",
    "build",
]

NAMES = ("mlp", "cnn", "rnn", "lstm", "transformer", "oriented", "oriented-linear")


def build(name: str, input_shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> Module:
    """The network called ``name`` for inputs ``[B, *input_shape]``, giving logits ``[B, classes]``.

    Args:
        name: one of ``NAMES``.
        input_shape: ``(channels, height, width)`` for images, ``(features,)`` for rows of a table, ``(positions,)`` for
            token ids.
        classes: number of labels.
        vocabulary: number of token ids when the inputs are token ids; None otherwise.

    Raises:
        ValueError: the name is unknown, or the network does not take such inputs.
    """
    one_of(NAMES, model=name)
    positive_int(classes=classes)
    if name == "transformer":
        if vocabulary is None or len(input_shape) != 1:
            raise ValueError(f"transformer takes token ids of texts; {_inputs(input_shape, vocabulary)}")
        return TransformerClassifier(vocabulary, input_shape[0], classes)
    if vocabulary is not None:
        raise ValueError(f"{name} does not take token ids, transformer does; {_inputs(input_shape, vocabulary)}")
    if name == "mlp":
        return MLP(input_shape, classes)
    if len(input_shape) != 3:
        raise ValueError(f"{name} takes images [channels, height, width]; {_inputs(input_shape, vocabulary)}")
    kinds = {"cnn": CNN, "rnn": RNNClassifier, "lstm": LSTMClassifier}
    kinds |= {"oriented": OrientedCNN, "oriented-linear": OrientedLinear}
    return kinds[name](input_shape, classes)


def _inputs(input_shape: tuple[int, ...], vocabulary: int | None) -> str:
    """What the inputs are, for a message."""
    kind = "numbers" if vocabulary is None else "token ids"
    return f"here each input is {kind} of shape {list(input_shape)}"
