"""What is timed, one entry each in WORKLOADS: the five networks of Lee & Kifer (2020, section 6.1.1) and a CIFAR CNN.

All data are random tensors of the right shapes: a step costs the same whatever the pixels are, and no file is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ghostclip import models
from ghostclip.convert import unwrap

__all__ = ["WORKLOADS", "Workload"]

IMAGE = (1, 28, 28)
CIFAR_IMAGE = (3, 32, 32)
POSITIONS, WORDS = 128, 10_000


@dataclass(frozen=True)
class Workload:
    """A model and batches for it.

    Attributes:
        name: as on the command line.
        about: the model and the data in a line, printed with the figures.
        batch_size: examples in a batch, unless the caller wants another number.
        model: a new model with plain torch layers, so that the baseline pays for nothing of ours.
        batch: batch size -> (inputs [B, ...], class numbers [B]).
    """

    name: str
    about: str
    batch_size: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def _random_images(shape: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, *shape), torch.randint(0, 10, (size,))

    return batch


def _random_reviews(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, WORDS, (size, POSITIONS)), torch.randint(0, 2, (size,))


def _on_images(name: str, about: str) -> Workload:
    """One of the paper's networks for MNIST."""

    def model() -> nn.Module:
        return unwrap(models.build(name, IMAGE, 10))

    return Workload(name, f"{about}; random 28 x 28 images", 128, model, _random_images(IMAGE))


def _transformer() -> nn.Module:
    """The paper's, its word vectors fixed as GloVe's were there."""
    model = unwrap(models.build("transformer", (POSITIONS,), 2, vocabulary=WORDS))
    model.get_submodule("embedding").requires_grad_(False)
    return model


def _cifar_cnn() -> nn.Module:
    """Six 3 x 3 convolutions in three blocks of 32, 64 and 128 channels, average pooling, 128 hidden units."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 128), nn.ReLU(), nn.Linear(128, 10))


_ALL = (
    _on_images("mlp", "two hidden layers of 128 and 256 units, sigmoid"),
    _on_images("cnn", "convolutions of 20 and 50 kernels 5 x 5, max pooling, 128 hidden units"),
    _on_images("rnn", "one recurrent layer of 128 units, tanh, over the 28 rows"),
    _on_images("lstm", "one LSTM layer of 128 units over the 28 rows"),
    Workload(
        "transformer",
        "one encoder block, 200 features, 8 heads, frozen word vectors; 128 random words a text",
        32,
        _transformer,
        _random_reviews,
    ),
    Workload(
        "cifar-cnn",
        "six convolutions of 32 to 128 channels, 550,570 parameters; random 32 x 32 colour images",
        64,
        _cifar_cnn,
        _random_images(CIFAR_IMAGE),
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
