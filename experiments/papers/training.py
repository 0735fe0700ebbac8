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
from ghostclip.clipping.choice import adapts
from ghostclip.datasets import Data
from ghostclip.engine.adaptation import policy_for
from ghostclip.models import CNN

__all__ = ["Outcome", "Setting", "engine_for", "train"]

# {what the noise multiplier follows from: the one that an engine calibrated}; a calibration takes seconds.
_CALIBRATED: dict[tuple[float, ...], float] = {}


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
    epochs: int = 10
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
    engine = engine_for(setting, model, data.train if examples is None else examples, seed)
    for _ in range(setting.epochs):
        for batch in engine.batches():
            engine.step(batch, losses_of)
    return tested(model, data)


def engine_for(setting: Setting, model: nn.Module, examples: Any, seed: int | None) -> ghostclip.PrivacyEngine:
    """An engine with the noise for the setting, which is calibrated by the first engine that needs it.

    Args:
        setting: how to train.
        model: to be trained.
        examples: to train on.
        seed: of noise and samples that can be repeated; None: of private ones.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate, momentum=0.9)
    policy = policy_for(model, setting.policy())
    # Counts are charged with the gradients: an adaptive policy takes more noise for the same epsilon.
    counts = (policy.counted, policy.count_noise_for(setting.batch_size)) if adapts(policy) else (0, 0.0)
    key = (setting.target_epsilon, setting.delta, setting.epochs, setting.batch_size, len(examples), *counts)
    options: dict[str, Any] = {"noise_multiplier": _CALIBRATED.get(key)}
    if key not in _CALIBRATED:
        options |= {"target_epsilon": setting.target_epsilon, "epochs": setting.epochs}
    engine = ghostclip.PrivacyEngine(
        model, optimizer, examples, batch_size=setting.batch_size, target_delta=setting.delta, clipping=policy,
        noise="standard" if seed is None else "test", seed=seed, self_check=False, **options,
    )  # fmt: skip
    _CALIBRATED.setdefault(key, engine.noise_multiplier)
    return engine


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example."""
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
