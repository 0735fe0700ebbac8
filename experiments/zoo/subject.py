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
    "class_losses",
    "images",
    "masked_texts",
    "texts",
    "token_losses",
]

Batch = dict[str, Tensor]
CLASSES, TOKENS, LENGTH = 3, 31, 9


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


def masked_texts(examples: int) -> Batch:
    """The same with the ends of some texts masked, as padding is."""
    lengths = LENGTH - torch.arange(examples) % 4
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    found = texts(examples)
    return found | {"attention_mask": mask, "input_ids": found["input_ids"] * mask}


def images(examples: int, side: int = 32, channels: int = 3) -> Batch:
    """Random images [B, C, H, W], and a class for each."""
    generator = torch.Generator().manual_seed(examples)
    pixels = torch.randn(examples, channels, side, side, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "target": torch.arange(examples) % CLASSES}


def class_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each example's class."""
    inputs = {name: value for name, value in batch.items() if name != "target"}
    return F.cross_entropy(model(**inputs).logits, batch["target"], reduction="none")


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each example's next tokens, averaged over the example."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return losses.mean(1)
