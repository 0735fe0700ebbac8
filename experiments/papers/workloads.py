"""The papers' networks that the benchmark doesn't have, as its workloads; ``register`` makes them known by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ghostclip import models
from ghostclip.bench import Workload, networks
from ghostclip.wrap import unwrap

__all__ = ["DEPTHS", "IMAGE_SIDES", "RESNETS", "VGGS", "VGG_LAYERS", "WORKLOADS", "frozen_resnet", "vgg"]

WORDS_OF_EMBEDDINGS = 10_004  # with 16 features and two classes: 160,098 parameters
IMAGE_SIDES = (32, 64, 128, 256)
DEPTHS = (2, 4, 6, 8)
SHAPES = {"28px": (1, 28, 28), "cifar10": (3, 32, 32)}
RESNETS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True), 101: ((3, 4, 23, 3), True)}
VGGS = {
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    16: ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3),
}
# VGG11's convolutions: channels in and out, and the images' side as a fraction of the input's.
VGG_LAYERS = ((3, 64, 1), (64, 128, 2), (128, 256, 4), (256, 256, 4), (256, 512, 8), (512, 512, 8), (512, 512, 16))
LINEAR_WIDTH = 256


def _images(*shape: int, classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (torch.randn(size, *shape), torch.randint(0, classes, (size,)))


def frozen_resnet(depth: int) -> nn.Module:
    """A ResNet whose batch norms stay as they are: running statistics, nothing of them trained."""
    stages, bottleneck = RESNETS[depth]
    model = networks.resnet(stages, bottleneck=bottleneck, classes=10)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.GroupNorm):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.BatchNorm2d(module.num_channels).requires_grad_(False))
    return model.eval()


def vgg(depth: int) -> nn.Module:
    """VGG as published (Simonyan & Zisserman 2015), without dropout: three linear layers on 7 x 7 positions."""
    layers: list[nn.Module] = []
    channels = 3
    for widths in VGGS[depth]:
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    dense = (nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *dense)


def _mlp(depth: int, features: int) -> nn.Module:
    """Hidden layers of 128 and 256 sigmoid units in turns, as the paper's two."""
    widths = [features, *((128, 256) * depth)[:depth]]
    hidden = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], 10))


def _mnist_cnn() -> nn.Module:
    """26,010 parameters, as in the MNIST examples of TensorFlow Privacy and of Opacus."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def _positions(length: int) -> Workload:
    """One linear layer over the positions of a sequence, whose mean is classified by what isn't trained."""
    data = _images(length, LINEAR_WIDTH)
    about = f"one linear layer of {LINEAR_WIDTH} inputs and outputs; {length} positions"
    return Workload(f"linear-{length}", about, 8, lambda: _pooled(nn.Linear(LINEAR_WIDTH, LINEAR_WIDTH)), data)


def _layer(number: int, side: int) -> Workload:
    """One convolution of VGG11 on images of a side, as many pixels as it has there."""
    inside, outside, fraction = VGG_LAYERS[number]
    own = side // fraction
    about = f"convolution {number + 1} of VGG11, {inside} to {outside} channels, {own} x {own} pixels"
    build = partial(nn.Conv2d, inside, outside, 3, padding=1)
    return Workload(f"vgg11-layer{number + 1}-{side}px", about, 8, lambda: _pooled(build()), _images(inside, own, own))


class _Pooled(nn.Module):
    """A layer's outputs, tanh, and the mean over positions of ten channels as logits."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs).tanh()
        return outputs.mean(1)[:, :10] if outputs.dim() == 3 else outputs.mean((2, 3))[:, :10]


def _pooled(layer: nn.Module) -> nn.Module:
    return _Pooled(layer)


def _classifier(name: str, shape: tuple[int, ...]) -> Workload:
    """One of the paper's networks on colour images."""
    build = partial(models.build, name, shape, 10)
    return Workload(f"{name}-cifar10", f"{name}; random 32 x 32 colour images", 32, lambda: unwrap(build()),
                    _images(*shape))  # fmt: skip


WORKLOADS = (
    *(_classifier(name, SHAPES["cifar10"]) for name in ("mlp", "cnn", "rnn", "lstm")),
    *(
        Workload(f"mlp-{depth}-{kind}", f"MLP of {depth} hidden layers; random images {shape}", 128,
                 partial(_mlp, depth, shape[0] * shape[1] * shape[2]), _images(*shape))
        for depth in DEPTHS for kind, shape in SHAPES.items()
    ),
    *(
        Workload(f"resnet{depth}-frozen-{side}px", f"ResNet-{depth}, batch norm frozen; random {side} x {side} colour "
                 "images", 32, partial(frozen_resnet, depth), _images(3, side, side))
        for depth in RESNETS for side in IMAGE_SIDES
    ),
    *(
        Workload(f"vgg{depth}-{side}px", f"VGG{depth} as published; random {side} x {side} colour images", 20,
                 partial(vgg, depth), _images(3, side, side))
        for depth in VGGS for side in (64, 256)
    ),
    Workload("mnist-cnn", "two convolutions, 26,010 parameters; random 28 x 28 images", 64, _mnist_cnn,
             _images(1, 28, 28)),
    Workload("embedding-imdb", "word vectors of 16, their mean, two classes, 160,098 parameters; texts of 256 words",
             64, partial(networks.embeddings, WORDS_OF_EMBEDDINGS),
             lambda size: (torch.randint(0, WORDS_OF_EMBEDDINGS, (size, 256)), torch.randint(0, 2, (size,)))),
    *(_positions(length) for length in (4, 16, 32, 64, 128, 256, 512, 1024)),
    *(_layer(number, side) for number in range(len(VGG_LAYERS)) for side in (32, 64, 224)),
)  # fmt: skip
