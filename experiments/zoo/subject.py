"""What a row of the table of models is: how to build the model, its batch, and one loss per example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "CLASSES",
    "LENGTH",
    "TOKENS",
    "Batch",
    "Subject",
    "Timed",
    "as_floats",
    "class_losses",
    "images",
    "masked_texts",
    "texts",
    "token_losses",
]

Batch = dict[str, Tensor]
CLASSES, TOKENS, LENGTH = 3, 31, 9
LONG = 36  # tokens of the texts that are timed


@dataclass(frozen=True)
class Timed:
    """What is timed of a model: the same in a size of which a step takes a few milliseconds at least.

    Attributes:
        build: the model with random weights, float32.
        batch: a batch of so many examples.
        examples: of a batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    examples: int = 16


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Some examples of a batch, by the first dimension of its tensors."""
    return {name: value[start:stop] for name, value in batch.items()}


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        name: what the table calls it.
        library: where its code comes from; has to be importable.
        about: what is particular about it.
        build: the model with random weights, float32, unmodified.
        batch: a batch of so many examples.
        losses: (model, batch) -> [B].
        wrap: options of ``ghostclip.wrap``.
        trains: whether it is measured in train mode, where that has no randomness.
        refused: words of the refusal that is expected, for a model that can't be clipped exactly; "" where it can.
        kind: of model, as the table groups them.
        timed: what is timed; None for this same model.
        index: batch -> whose each row is, as ``batch_index`` takes it; None where examples have a row each.
        taken: (batch, start, stop) -> the batch of some of its examples.
        joined: batches of one example each -> the batch of all; None where they are stacked.
    """

    name: str
    library: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]
    wrap: dict[str, Any] = field(default_factory=dict)
    trains: bool = False
    refused: str = ""
    kind: str = ""
    timed: Timed | None = None
    index: Callable[[Batch], Any] | None = None
    taken: Callable[[Batch, int, int], Batch] = rows_of
    joined: Callable[[list[Batch]], Batch] | None = None

    def ready(self) -> nn.Module:
        """The model in float64, each parameter random; norms and biases that start at 0 or 1 would hide mistakes."""
        torch.manual_seed(7)
        model = self.build().double()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        return model


def texts(examples: int, length: int = LENGTH) -> Batch:
    """Random tokens [B, T], and a class for each text."""
    generator = torch.Generator().manual_seed(examples)
    tokens = torch.randint(3, TOKENS, (examples, length), generator=generator)
    return {"input_ids": tokens, "target": torch.arange(examples) % CLASSES}


def masked_texts(examples: int, length: int = LENGTH) -> Batch:
    """The same with the ends of some texts masked, as padding is."""
    lengths = length - torch.arange(examples) % 4
    mask = (torch.arange(length) < lengths[:, None]).long()
    found = texts(examples, length)
    return found | {"attention_mask": mask, "input_ids": found["input_ids"] * mask}


def images(examples: int, side: int = 32, channels: int = 3) -> Batch:
    """Random images [B, C, H, W], and a class for each."""
    generator = torch.Generator().manual_seed(examples)
    pixels = torch.randn(examples, channels, side, side, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "target": torch.arange(examples) % CLASSES}


def as_floats(batch: Batch, dtype: torch.dtype = torch.float32) -> Batch:
    """The batch with its floating point numbers of one type."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def class_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each example's class."""
    inputs = {name: value for name, value in batch.items() if name != "target"}
    return F.cross_entropy(model(**inputs).logits, batch["target"], reduction="none")


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each example's next tokens, averaged over the example."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return losses.mean(1)
