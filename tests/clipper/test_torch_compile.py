"""Models under torch.compile are refused with what to do instead, before and after an engine is built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ghostclip

# What dynamo says of code that it traces; an error raised of it there would end the tracing.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def engine_over(model: nn.Module) -> ghostclip.PrivacyEngine:
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ghostclip.PrivacyEngine(model, optimizer, data, batch_size=16, noise_multiplier=1.0)


def losses(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def a_part(model: nn.Module) -> nn.Module:
    model[2].compile(backend="aot_eager")  # type: ignore[index]
    return model


@pytest.mark.parametrize("way", [lambda model: torch.compile(model, backend="aot_eager"), in_place, a_part])
def test_a_compiled_model_is_refused_when_the_engine_or_clipper_is_built(way: Any) -> None:
    for build in (engine_over, ghostclip.GhostClipper):
        with pytest.raises(ghostclip.UnsupportedModelError, match=r"torch\.compile.*engine\.compile\(\)"):
            build(way(network()))


@pytest.mark.parametrize("way", [lambda model: torch.compile(model, backend="aot_eager"), in_place])
@pytest.mark.one_in(math.inf)
def test_a_model_compiled_afterwards_is_refused_at_the_first_batch(way: Any) -> None:
    model = network()
    engine = engine_over(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    compiled = way(model)
    with pytest.raises(ghostclip.UnsupportedModelError, match=r"torch\.compile.*engine\.compile\(\)"):  # noqa: PT012
        for batch in engine.batches():
            engine.step(batch, lambda _, batch: losses(compiled, batch))
    assert engine.steps_taken == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
