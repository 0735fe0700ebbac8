"""What is timed, one entry each in WORKLOADS: the networks of the papers, and larger ones of the kinds in use today.

All data are random tensors of the right shapes: a step costs the same whatever the pixels are, and no file is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ghostclip import models
from ghostclip.bench import networks
from ghostclip.bench.losses import Losses, class_losses, token_losses
from ghostclip.wrap import unwrap

__all__ = ["SETS", "WORKLOADS", "Workload", "gpt", "numbers", "texts"]

WORDS = 10_000

Batches = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Workload:
    """A model and batches for it.

    Attributes:
        name: as on the command line.
        about: the model and the data in a line, printed with the figures.
        batch_size: examples in a batch, unless the caller wants another number.
        model: a new model with plain torch layers, so that the baseline pays for nothing of ours.
        batch: batch size -> (inputs [B, ...], targets [B, ...]).
        losses: (outputs, targets) -> one loss an example, [B].
        belongs: the set it is chosen with: "usual", "sizes" (more shapes of the usual ones) or "gpu" (too large for a
            processor).
    """

    name: str
    about: str
    batch_size: int
    model: Callable[[], nn.Module]
    batch: Batches
    losses: Losses = class_losses
    belongs: str = "usual"

    def on(self, device: str, batch_size: int) -> tuple[nn.Module, Tensor, Tensor]:
        """A new model, then a batch's inputs [B, ...] and targets [B, ...], on a device."""
        model = self.model().to(device)
        inputs, targets = (part.to(device) for part in self.batch(batch_size))
        return model, inputs, targets


def numbers(*shape: int, classes: int = 10) -> Batches:
    """Images or rows of a table, and a class for each."""
    return lambda size: (torch.randn(size, *shape), torch.randint(0, classes, (size,)))


def _reviews(positions: int) -> Batches:
    """Texts, and one of two classes for each."""
    return lambda size: (torch.randint(1, WORDS, (size, positions)), torch.randint(0, 2, (size,)))


def texts(positions: int, words: int = WORDS) -> Batches:
    """Texts, and the token that follows each of theirs."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(0, words, (size, positions + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


def _on_images(name: str, about: str) -> Workload:
    """One of the paper's networks for MNIST."""
    build = partial(models.build, name, (1, 28, 28), 10)
    return Workload(name, f"{about}; random 28 x 28 images", 128, lambda: unwrap(build()), numbers(1, 28, 28))


def _transformer() -> nn.Module:
    """The paper's, its word vectors fixed as GloVe's were there."""
    model = unwrap(models.build("transformer", (128,), 2, vocabulary=WORDS))
    model.get_submodule("embedding").requires_grad_(False)
    return model


def _resnet(side: int, batch_size: int, belongs: str = "sizes") -> Workload:
    about = f"ResNet-18 with GroupNorm, 11.2 M parameters; random {side} x {side} colour images"
    model, data = partial(networks.resnet, (2, 2, 2, 2), bottleneck=False, classes=10), numbers(3, side, side)
    return Workload(f"resnet18-{side}px", about, batch_size, model, data, belongs=belongs)


def _small_gpt(positions: int) -> Callable[[], nn.Module]:
    return partial(networks.gpt, 256, 4, 4, positions, WORDS)


def gpt(positions: int, batch_size: int, belongs: str = "sizes") -> Workload:
    """A GPT-2-like model on texts of a length."""
    about = f"GPT-2-like, width 256, 4 blocks, 10,000 words, 8.3 M parameters; texts of {positions} random words"
    data = texts(positions)
    return Workload(f"gpt-{positions}", about, batch_size, _small_gpt(positions), data, token_losses, belongs)


_ALL = (
    _on_images("mlp", "two hidden layers of 128 and 256 units, sigmoid"),
    Workload("fcnn-adult", "one hidden layer of 50 units; 104 random features, as of the Adult data", 256,
             lambda: nn.Sequential(nn.Linear(104, 50), nn.ReLU(), nn.Linear(50, 2)), numbers(104, classes=2)),
    _on_images("cnn", "convolutions of 20 and 50 kernels 5 x 5, max pooling, 128 hidden units"),
    _on_images("rnn", "one recurrent layer of 128 units, tanh, over the 28 rows"),
    _on_images("lstm", "one LSTM layer of 128 units over the 28 rows"),
    Workload("transformer", "one encoder block, 200 features, 8 heads, frozen word vectors; 128 random words a text",
             32, _transformer, _reviews(128)),
    Workload("cifar-cnn", "eight convolutions of 32 to 256 channels, 605,226 parameters; random 32 x 32 colour images",
             64, networks.cifar_cnn, numbers(3, 32, 32)),
    Workload("lstm-imdb", "word vectors of 100, LSTM of 100 units, 1,081,002 parameters; 256 random words a text",
             32, partial(networks.text_lstm, WORDS), _reviews(256)),
    Workload("embedding", "word vectors of 16, their mean, two classes, 160,034 parameters; 256 random words a text",
             128, partial(networks.embeddings, WORDS), _reviews(256)),
    _resnet(64, 16, "usual"),
    gpt(128, 8, "usual"),
    gpt(512, 2, "usual"),
    Workload("vgg11", "VGG11 without batch norm, 9.2 M parameters; random 32 x 32 colour images", 16, networks.vgg11,
             numbers(3, 32, 32)),
    Workload("lora-gpt", "the GPT-2-like model, frozen; adapters of rank 8 at its attention; texts of 128 random words",
             8, lambda: networks.with_adapters(_small_gpt(128)(), 256), texts(128), token_losses),
    _resnet(32, 32),
    _resnet(128, 8),
    _resnet(256, 4),
    gpt(256, 4),
    gpt(1024, 2),
    Workload("gpt2-124m", "GPT-2's shape, 124 M parameters, head tied to the embedding; texts of 1,024 random words", 8,
             partial(networks.gpt, 768, 12, 12, 1024, 50_257, tied=True), texts(1024, 50_257), token_losses, "gpu"),
    Workload("vit-b16", "ViT-B/16's shape, 86 M parameters; random 224 x 224 colour images", 32,
             partial(networks.vision_transformer, 768, 12, 12, 224, 16, 1000), numbers(3, 224, 224, classes=1000),
             belongs="gpu"),
    Workload("resnet50-224px", "ResNet-50 with GroupNorm, 25.6 M parameters; random 224 x 224 colour images", 32,
             partial(networks.resnet, (3, 4, 6, 3), bottleneck=True, classes=1000), numbers(3, 224, 224, classes=1000),
             belongs="gpu"),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in _ALL}
SETS = {
    kind: tuple(name for name, work in WORKLOADS.items() if work.belongs == kind) for kind in ("usual", "sizes", "gpu")
}
