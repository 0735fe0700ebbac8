"""A steady step leaves no reference cycles: Python's collector would stop training to look for them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import private_runs as runs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostclip import GhostClipper

MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
}


def garbage_of(step: Callable[[], None], times: int) -> int:
    """How many objects only the collector frees after some steps."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            step()
        return gc.collect()
    finally:
        gc.enable()


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("name", MODELS)
def test_a_clipper_leaves_no_cycles(name: str, second_pass: str, by_hand: bool) -> None:
    model = MODELS[name]()
    clipper = GhostClipper(model, 1.0, second_pass=second_pass)
    batch = torch.randn(8, 6), torch.arange(8) % 3

    def step() -> None:
        if by_hand:
            clipper.backward(losses_of(model, batch))
        else:
            clipper.clip(losses_of, batch)
        model.zero_grad()

    for _ in range(40):
        step()
    assert garbage_of(step, 20) == 0


def test_an_engine_leaves_no_cycles() -> None:
    engine = runs.engine_for(runs.network(), sampling="without_replacement")

    def step() -> None:
        engine.step(next(iter(engine.batches())), runs.losses_of)

    for _ in range(20):
        step()
    assert garbage_of(step, 10) == 0
