"""Private trainings on small data, many times: one setting and seed -> test accuracies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import ghostclip
from ghostclip.datasets import Data
from ghostclip.models import CNN

__all__ = ["Outcome", "Setting", "train"]


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        policy: makes the clipping policy afresh, since some change in training.
        learning_rate: of SGD with momentum 0.9.
        target_epsilon, delta, epochs, batch_size: of the training; the noise follows.
    """

    policy: Callable[[], Any]
    learning_rate: float
    target_epsilon: float = 3.0
    delta: float = 1e-4
    epochs: int = 15
    batch_size: int = 128


@dataclass(frozen=True)
class Outcome:
    """What a training reached on the test examples.

    Attributes:
        accuracy: of all.
        by_class: of each class.
    """

    accuracy: float
    by_class: list[float]


def train(setting: Setting, data: Data, seed: int, examples: Dataset | None = None) -> Outcome:
    """Trains the paper's CNN and tests it. The seed sets initial weights, samples and noise.

    Args:
        setting: how.
        data: images; its test part is used, and its train part where ``examples`` is None.
        seed: settings with the same seed have the same initial weights and samples, and are compared in pairs.
        examples: to train on.
    """
    torch.manual_seed(seed)
    model = CNN(data.input_shape, data.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate, momentum=0.9)
    engine = ghostclip.PrivacyEngine(
        model, optimizer, data.train if examples is None else examples, batch_size=setting.batch_size,
        target_epsilon=setting.target_epsilon, target_delta=setting.delta, epochs=setting.epochs,
        clipping=setting.policy(), noise="test", seed=seed, self_check=False,
    )  # fmt: skip
    for _ in range(setting.epochs):
        for batch in engine.batches():
            engine.step(batch, _losses)
    return tested(model, data)


def _losses(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


@torch.no_grad()
def tested(model: nn.Module, data: Data) -> Outcome:
    """Accuracies on the test examples."""
    images, labels = data.test.tensors if isinstance(data.test, TensorDataset) else _stacked(data.test)
    right = model(images).argmax(1) == labels
    by_class = [float(right[labels == each].float().mean()) for each in range(data.classes)]
    return Outcome(float(right.float().mean()), by_class)


def _stacked(examples: Any) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(examples[place] for place in range(len(examples))), strict=True)
    return torch.stack(images), torch.tensor(labels)
