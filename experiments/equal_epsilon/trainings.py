"""Images: networks on oriented features, what is put on top of them, and what they are compared with."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import accounting, models
from ghostclip.cli import train as command
from ghostclip.cli.methods import OPTIMIZERS, Settings
from ghostclip.cli.plan import runs_of
from ghostclip.datasets import Data
from ghostclip.noise import BandedToeplitz, BufferedToeplitz
from ghostclip.optim import LowPassFilter

__all__ = ["RATES", "Row", "accuracy_of", "featured", "planned"]

SOME = 1024  # examples that are in memory at once
PHYSICAL = 128  # examples in a pass, whose maps then fit the cache of a processor
PARTS = 3  # bands, and batches of an epoch where noise is correlated
VIEWS = 8
AVERAGED, PASSED = 0.3, 0.5  # the newest weights' share of the moving average, and the newest gradient's of the filter
CORRELATIONS = {
    "bands": ("cyclic_poisson", lambda: BandedToeplitz(bands=PARTS)),
    "BLT": ("cyclic", lambda: BufferedToeplitz(buffers=PARTS)),
}
RATES = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        about: the same in words.
        network: a name of `ghostclip.models`, or "random filters": the oriented network with others.
        centred: a private mean is taken off the features first.
        rates: that it is tuned over, in units of the recipe's learning rate.
        adam, averaged, low_pass, views, correlation: what is put on top: another optimizer, a moving average of the
            weights, a filter of the private gradients, several views of each image, a key of CORRELATIONS.
    """

    about: str
    network: str = "oriented"
    centred: bool = True
    rates: tuple[float, ...] = RATES
    adam: bool = False
    averaged: bool = False
    low_pass: bool = False
    views: bool = False
    correlation: str | None = None


class Head(nn.Module):
    """The part of a network above features that are fixed: those are computed once."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.centre, self.output = network.centre, network.output

    def features(self, features: Tensor) -> Tensor:
        """As they are."""
        return features

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        return self.output(F.normalize(self.centre(features)))


@cache
def planned(network: str, centred: bool, optimizer: str | None, epsilon: float, examples: int) -> tuple[Settings, int]:
    """What `ghostclip train` would take, and the number of steps; without a mean the steps have all of epsilon."""
    parser = argparse.ArgumentParser()
    command.add_train(parser)
    words = ["--model", "oriented" if network == "random filters" else network, "--epsilon", str(epsilon)]
    words += ["--no-compare", *([] if optimizer is None else ["--optimizer", optimizer])]
    plan = next(runs_of(parser.parse_args(words), examples))
    if centred or plan.settings.mean_noise is None:
        return plan.settings, plan.steps
    noise = accounting.noise_multiplier(
        target_epsilon=epsilon, sample_rate=1.0, steps=plan.steps, delta=plan.settings.delta
    )
    return replace(plan.settings, noise_multiplier=noise, mean_noise=None), plan.steps


def accuracy_of(row: Row, epsilon: float, factor: float, data: Data, seed: int) -> float:
    """Test accuracy of one training, its learning rate ``factor`` times the recipe's.

    The seed sets initial weights, samples and noise. Such noise protects nobody; its size is that of private noise.
    """
    named = "adam" if row.adam else None
    settings, steps = planned(row.network, row.centred, named, epsilon, len(data.train))
    torch.manual_seed(seed)
    examples = _with_views(data, row.network) if row.views else None
    model, data = _network(row, data)
    examples = examples or data.train
    released = [] if settings.mean_noise is None else [_centred(model, data, settings.mean_noise, seed)]
    optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), factor * settings.learning_rate)
    if row.low_pass:  # in the place of momentum
        optimizer = torch.optim.SGD(model.parameters(), factor * settings.learning_rate)
    engine, steps = _engine(row, settings, steps, model, optimizer, examples, (released, seed))
    if row.low_pass:
        LowPassFilter(optimizer, (PASSED,), (PASSED - 1,))
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    losses_of = _losses_of_views if row.views else _losses_of
    for number, batch in enumerate(_batches(engine, steps)):
        engine.step(batch, losses_of)
        if row.averaged:
            for name, value in model.state_dict().items():
                mean[name].lerp_(value, AVERAGED if number else 1.0)
    if row.averaged:
        model.load_state_dict(mean)
    return _tested(model, data.test)


def _batches(engine: ghostclip.PrivacyEngine, steps: int) -> Iterator[Any]:
    """So many logical batches, epoch after epoch."""
    taken = 0
    while taken < steps:
        for batch in engine.batches():
            yield batch
            taken += 1
            if taken == steps:
                return


_CALIBRATED: dict[tuple[Any, ...], float] = {}


def _engine(
    row: Row, settings: Settings, steps: int, model: nn.Module, optimizer: Any, examples: TensorDataset, drawn: Any
) -> tuple[ghostclip.PrivacyEngine, int]:
    """The engine and its number of steps; noise that a correlation needs is calibrated once."""
    released, seed = drawn
    options: dict[str, Any] = {"batch_size": settings.batch_size, "noise_multiplier": settings.noise_multiplier}
    key = (row.correlation, settings.target_epsilon, steps, len(examples))
    if row.correlation is not None:
        sampling, matrix = CORRELATIONS[row.correlation]
        steps *= PARTS
        options = {"batch_size": len(examples) // PARTS, "sampling": sampling, "correlation": matrix(), "steps": steps}
        known = _CALIBRATED.get(key)
        options |= {"target_epsilon": settings.target_epsilon} if known is None else {"noise_multiplier": known}
    engine = ghostclip.PrivacyEngine(
        model, optimizer, examples, max_physical_batch_size=None if isinstance(model, Head) else PHYSICAL,
        target_delta=settings.delta, clipping=settings.max_norm, noise="test", seed=2 * seed, self_check=False,
        before=released, **options,
    )  # fmt: skip
    _CALIBRATED[key] = engine.noise_multiplier
    return engine, steps


def _network(row: Row, data: Data) -> tuple[nn.Module, Data]:
    """The network with its first weights, and the data that it takes: features where those are fixed."""
    if row.network == "random filters":
        network: Any = models.build("oriented", data.input_shape, data.classes)
        weight = network.convolution.weight
        with torch.no_grad():
            weight.copy_(F.normalize(torch.randn_like(weight).flatten(1)).view_as(weight) * weight[0].norm())
        return network, data
    network = models.build(row.network, data.input_shape, data.classes)
    if row.network == "oriented-linear":
        return Head(network), featured(data)
    return network, data


@torch.no_grad()
def _centred(model: Any, data: Data, noise_multiplier: float, seed: int) -> ghostclip.PrivateMean:
    """Releases the mean of the features, which the model takes off from now on."""
    features = torch.cat([model.features(inputs) for inputs in data.train.tensors[0].split(SOME)])
    released = ghostclip.private_mean(features, noise_multiplier=noise_multiplier, noise="test", seed=2 * seed + 1)
    model.centre.mean.copy_(released.mean)
    return released


@cache
@torch.no_grad()
def featured(data: Data) -> Data:
    """The fixed features of `ghostclip.models.OrientedLinear` in place of images."""
    network = models.OrientedLinear(data.input_shape, data.classes)
    parts = []
    for part in (data.train, data.test):
        images, labels = part.tensors
        parts.append(TensorDataset(torch.cat([network.features(each) for each in images.split(SOME)]), labels))
    return replace(data, train=parts[0], test=parts[1])


@cache
@torch.no_grad()
def _with_views(data: Data, network: str) -> TensorDataset:
    """Each image in eight views: itself, shifted by half a pixel (4), turned by 7.5 degrees (2), enlarged."""
    images, labels = data.train.tensors
    shift, turn = 1.0 / images.shape[-1], math.radians(7.5)
    moves = [(0.0, 1.0, 0.0, 0.0), *((0.0, 1.0, x, y) for x, y in ((shift, 0), (-shift, 0), (0, shift), (0, -shift)))]
    moves += [(turn, 1.0, 0.0, 0.0), (-turn, 1.0, 0.0, 0.0), (0.0, 0.95, 0.0, 0.0)]
    views = []
    for angle, scale, x, y in moves:
        cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
        where = torch.tensor([[cosine, -sine, x], [sine, cosine, y]]).expand(len(images), 2, 3)
        grid = F.affine_grid(where, list(images.shape), align_corners=False)
        views.append(F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False))
    if network == "oriented-linear":
        fixed = models.OrientedLinear(data.input_shape, data.classes)
        views = [torch.cat([fixed.features(each) for each in view.split(SOME)]) for view in views]
    return TensorDataset(torch.stack(views, 1), labels)


def _losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Losses [B]."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _losses_of_views(model: nn.Module, batch: Any) -> Tensor:
    """Losses [B], each the mean over the views of its image."""
    scores = model(batch[0].flatten(0, 1))
    return F.cross_entropy(scores, batch[1].repeat_interleave(VIEWS), reduction="none").view(-1, VIEWS).mean(1)


@torch.no_grad()
def _tested(model: nn.Module, test: TensorDataset) -> float:
    """Share of the examples that are classified correctly."""
    inputs, labels = test.tensors
    scores = torch.cat([model(each) for each in inputs.split(SOME)])
    return float((scores.argmax(1) == labels).float().mean())
