"""A steady step leaves no reference cycles: Python's collector would stop training to look for them."""

import gc
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn

from ghostclip import GhostClipper

MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True), nn.Flatten(),
        nn.Linear(6, 3),
    ),
}  # fmt: skip
BATCH: list[Any] = [torch.randn(8, 6), torch.arange(8) % 3]
CLIPS: dict[str, Callable[[GhostClipper], Any]] = {
    "backward": lambda clipper: clipper.backward(runs.losses_of(clipper.model, BATCH)),
    "clip": lambda clipper: clipper.clip(runs.losses_of, BATCH),
}


def assert_no_garbage(step: Callable[[], Any]) -> None:
    """After steps that are still measured, steps leave nothing that only the collector frees."""
    for _ in range(40):
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            step()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(4)
def test_a_clipper_leaves_no_cycles(name: str, second_pass: str, clip: str) -> None:
    clipper = GhostClipper(MODELS[name](), 1.0, second_pass=second_pass)
    assert_no_garbage(lambda: (CLIPS[clip](clipper), clipper.model.zero_grad()))


def test_an_engine_leaves_no_cycles() -> None:
    engine = runs.engine_for(runs.network(), sampling="without_replacement")
    assert_no_garbage(lambda: engine.step(next(iter(engine.batches())), runs.losses_of))
