"""Trackers send epsilon, delta, noise and steps, and nothing of the data; objects say what they are."""

from typing import Any

import private_runs as runs
import pytest
from torch import nn

from ghostclip import GhostClipper, PrivacyEngine
from ghostclip.integrations import tracking
from ghostclip.integrations.tracking import public_values

pytestmark = pytest.mark.usefixtures("coarse_losses")

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


def engine_of() -> PrivacyEngine:
    return runs.engine_for(runs.network(), dataset=runs.data(40), batch_size=10, noise_multiplier=2.0, clipping=1.0)


@pytest.mark.parametrize("make", [tracking.tensorboard, tracking.wandb, tracking.mlflow])
def test_each_receiver_gets_the_public_values_of_each_step(make: Any) -> None:
    engine, receiver, other = engine_of(), Receiver(), Receiver()
    track, few = make(receiver), make(other, every=3)
    runs.train(engine, after=lambda: (track(engine), few(engine)))
    assert (list(receiver.sent), list(other.sent)) == ([1, 2, 3, 4], [3])
    assert all(set(values) == VALUES for values in receiver.sent.values())
    assert receiver.sent[4] == public_values(engine)
    assert receiver.sent[4]["privacy/epsilon"] == engine.epsilon()
    assert receiver.sent[4]["privacy/noise_multiplier"] == 2.0
    for every in (0, 1.5):
        with pytest.raises(ValueError, match="every"):
            make(receiver, every=every)


@pytest.mark.parametrize(("make", "name"), [(tracking.tensorboard, "writer"), (tracking.Tracker, "send")])
def test_a_path_is_no_receiver(make: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be .*; got 'runs/x'"):
        make("runs/x")


def test_a_real_writer_of_tensorboard(tmp_path: Any) -> None:
    boards = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = engine_of()
    with boards.SummaryWriter(tmp_path) as writer:
        track = tracking.tensorboard(writer)
        runs.train(engine, after=lambda: track(engine))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == VALUES
    found = read.Scalars("privacy/epsilon")
    assert [event.step for event in found] == [1, 2, 3, 4]
    assert found[-1].value == pytest.approx(engine.epsilon(), rel=1e-6)


def test_objects_say_how_they_were_built_and_nothing_private() -> None:
    engine = engine_of()
    assert repr(engine) == (
        "PrivacyEngine(Sequential, SGD, batch_size=10, sample_rate=0.25, noise_multiplier=2.0, "
        "clipping=Flat(max_norm=1.0), steps_taken=0, planned_steps=None)"
    )
    batch = next(batch for batch in engine.batches() if batch.sizes or batch.discard())
    assert repr(batch).endswith("not yet used)")
    place = batch.step_number
    engine.step(batch, runs.losses_of)
    assert repr(batch) == f"LogicalBatch(step {place}, stepped)"
    clipper = GhostClipper(nn.Linear(2, 2), 0.5)
    assert repr(clipper) == "GhostClipper(Linear, Flat(max_norm=0.5), second_pass='auto')"
