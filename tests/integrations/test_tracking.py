"""Trackers send epsilon, delta, noise and steps, and nothing of the data; objects say what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ghostclip
from ghostclip.integrations import tracking
from ghostclip.integrations.tracking import Tracker, public_values

VALUES = {"privacy/epsilon", "privacy/delta", "privacy/noise_multiplier", "privacy/steps"}


class Receiver:
    """What a SummaryWriter, a run of Weights & Biases and the module mlflow have in common: it takes figures."""

    def __init__(self) -> None:
        self.sent: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.sent.setdefault(step, {})[name] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent[step] = values

    log_metrics = log


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def engine_over(size: int = 40) -> ghostclip.PrivacyEngine:
    model = nn.Linear(4, 3)
    data = torch.utils.data.TensorDataset(torch.randn(size, 4), torch.randint(3, (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ghostclip.PrivacyEngine(model, optimizer, data, batch_size=10, noise_multiplier=2.0)


@pytest.mark.parametrize("make", [tracking.tensorboard, tracking.wandb, tracking.mlflow])
def test_each_receiver_gets_the_public_values_of_each_step(make: Any) -> None:
    engine, receiver, other = engine_over(), Receiver(), Receiver()
    track, few = make(receiver), make(other, every=3)
    for batch in engine.batches():
        engine.step(batch, losses)
        track(engine)
        few(engine)
    assert (list(receiver.sent), list(other.sent)) == ([1, 2, 3, 4], [3])
    assert all(set(values) == VALUES for values in receiver.sent.values())
    assert receiver.sent[4] == public_values(engine)
    assert receiver.sent[4]["privacy/epsilon"] == engine.epsilon()
    assert receiver.sent[4]["privacy/noise_multiplier"] == 2.0


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_every_is_a_positive_number(every: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="every"):
        Tracker(lambda values, step: None, every)


def test_parameters_that_moved_outside_of_steps_are_not_reported_as_covered() -> None:
    engine = engine_over()
    engine.step(next(iter(engine.batches())), losses)
    with torch.no_grad():
        engine.model.weight.add_(1.0)
    with pytest.raises(ghostclip.PrivacyError, match="accept_parameters"):
        public_values(engine)


def test_a_real_writer_of_tensorboard(tmp_path: Any) -> None:
    boards = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = engine_over()
    with boards.SummaryWriter(tmp_path) as writer:
        track = tracking.tensorboard(writer)
        for batch in engine.batches():
            engine.step(batch, losses)
            track(engine)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == VALUES
    found = read.Scalars("privacy/epsilon")
    assert [event.step for event in found] == [1, 2, 3, 4]
    assert found[-1].value == pytest.approx(engine.epsilon(), rel=1e-6)


def test_objects_say_how_they_were_built_and_nothing_private() -> None:
    engine = engine_over(size=40)
    assert repr(engine) == (
        "PrivacyEngine(Linear, SGD, batch_size=10, sample_rate=0.25, noise_multiplier=2.0, "
        "clipping=Flat(max_norm=1.0), steps_taken=0, planned_steps=None)"
    )
    batch = next(iter(engine.batches()))
    while not batch.sizes:
        batch.discard()
        batch = next(iter(engine.batches()))
    assert repr(batch).endswith("not yet used)")
    place = batch.place
    engine.step(batch, losses)
    assert repr(batch) == f"LogicalBatch(step {place}, stepped)"
    clipper = ghostclip.GhostClipper(nn.Linear(2, 2), 0.5)
    assert repr(clipper) == "GhostClipper(Linear, Flat(max_norm=0.5), second_pass='auto')"
