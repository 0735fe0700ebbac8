"""Logistic regression on many examples in a fixed order, once each: where correlated noise should help."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip.datasets import Data
from ghostclip.noise import BandedToeplitz, BufferedToeplitz

__all__ = ["DELTA", "STREAMS", "Stream", "accuracy_of_stream", "regression"]

EXAMPLES, TESTED, FEATURES, STRENGTH = 100_000, 20_000, 200, 3.0
BATCH, DELTA, CLIPPING = 500, 1e-6, 0.5
RATE = 1.0  # the middle one of those that are tuned over, times CLIPPING


class Stream(NamedTuple):
    """How batches are drawn and noise is correlated; None: independent noise over Poisson samples."""

    about: str
    sampling: str = "poisson"
    bands: int | str | None = None
    buffers: int | None = None


STREAMS = {
    "Poisson": Stream("DP-SGD over Poisson samples"),
    "cyclic": Stream("batches in a fixed order, independent noise", "cyclic", bands=1),
    "cyclic, 32 bands": Stream("batches in a fixed order, 32 bands", "cyclic", bands=32),
    "cyclic, BLT": Stream("batches in a fixed order, BLT with 3 buffers", "cyclic", buffers=3),
    "cyclic Poisson, bands": Stream('cyclic Poisson samples, bands by `bands="auto"`', "cyclic_poisson", bands="auto"),
}


@cache
def regression() -> Data:
    """Examples of unit norm and labels of a logistic model; both are the same in every run."""
    random = torch.Generator().manual_seed(0)
    inputs = F.normalize(torch.randn(EXAMPLES + TESTED, FEATURES, generator=random))
    weights = torch.randn(FEATURES, generator=random)
    labels = (torch.rand(len(inputs), generator=random) < (STRENGTH * inputs @ weights).sigmoid()).long()
    train, test = (TensorDataset(inputs[part], labels[part]) for part in (slice(EXAMPLES), slice(EXAMPLES, None)))
    return Data("logistic regression", train, test, input_shape=(FEATURES,), classes=2)


_CALIBRATED: dict[tuple[str, float, int], tuple[float, Any]] = {}


def accuracy_of_stream(name: str, epsilon: float, factor: float, data: Data, seed: int) -> float:
    """Test accuracy after one epoch, by a rate ``factor`` times the usual one; the seed is of noise and samples."""
    stream, model = STREAMS[name], nn.Linear(*data.input_shape, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=factor * RATE / CLIPPING)
    steps, key = len(data.train) // BATCH, (name, epsilon, len(data.train))
    noise, matrix = _CALIBRATED.get(key, (None, None))
    if matrix is None and stream.sampling != "poisson":
        matrix = BufferedToeplitz(stream.buffers) if stream.buffers else BandedToeplitz(stream.bands)
    told: dict[str, Any] = {"target_epsilon": epsilon, "steps": steps}
    if noise is not None:
        told = {"noise_multiplier": noise} | ({} if matrix is None else {"steps": steps})
    engine = ghostclip.PrivacyEngine(
        model, optimizer, data.train, batch_size=BATCH, target_delta=DELTA, clipping=CLIPPING, noise="test", seed=seed,
        self_check=False, sampling=stream.sampling, correlation=matrix, **told,
    )  # fmt: skip
    _CALIBRATED[key] = engine.noise_multiplier, None if engine.correlation is None else engine.correlation.matrix
    for _, batch in zip(range(steps), engine.batches(), strict=False):
        engine.step(batch, _losses_of)
    inputs, labels = data.test.tensors
    with torch.no_grad():
        return float(((model(inputs)[:, 0] > 0) == labels.bool()).float().mean())


def _losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Losses [B]."""
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1].float(), reduction="none")
