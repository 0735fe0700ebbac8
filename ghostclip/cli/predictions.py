"""What trained models say of the test examples: accuracy, errors by class, and ten digits to look at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.datasets import Data
from ghostclip.report import ShownExample

__all__ = ["accuracy", "confusion", "misread_digits", "predicted"]

EVALUATION_BATCH = 512


@torch.no_grad()
def predicted(model: nn.Module, examples: TensorDataset) -> Tensor:
    """The likeliest class [N] of each example by ``model``, which is left in the mode it was in."""
    training = model.training
    model.eval()
    batches = DataLoader(examples, batch_size=EVALUATION_BATCH)
    classes = torch.cat([model(inputs).argmax(1) for inputs, _ in batches])
    model.train(training)
    return classes


def accuracy(model: nn.Module, examples: TensorDataset) -> float:
    """Share of the examples that ``model`` classifies correctly."""
    return float((predicted(model, examples) == examples.tensors[1]).sum()) / len(examples)


def confusion(classes: Tensor, labels: Tensor, number: int) -> list[list[int]]:
    """How many examples of each class [K] were taken for each class [K], of predicted classes [N] and labels [N]."""
    return torch.bincount(labels * number + classes, minlength=number**2).view(number, number).tolist()


def misread_digits(data: Data, predictions: Mapping[str, Tensor]) -> list[ShownExample]:
    """Of each digit the test image that most models misread, the first of several; public images, so digits alone.

    Args:
        data: with the test images.
        predictions: {training: predicted classes [N]}.
    """
    if data.name != "digits":
        return []
    images, labels = data.test.tensors
    wrong = torch.stack([classes != labels for classes in predictions.values()]).sum(0)
    places = [int(torch.where(labels == digit, wrong, -1).argmax()) for digit in range(data.classes)]
    return [
        ShownExample(
            pixels=images[place, 0].tolist(),
            label=int(labels[place]),
            predicted={training: int(classes[place]) for training, classes in predictions.items()},
        )
        for place in places
    ]
