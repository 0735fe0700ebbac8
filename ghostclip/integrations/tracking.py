"""Trackers: what may be published of a training with an engine, sent to TensorBoard, Weights & Biases or MLflow.

That is epsilon, steps and noise. Losses, norms and the sizes of batches are private data, and none of them is sent.
Nothing is imported here: a tracker calls the methods of the writer, run or module that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ghostclip.engine import PrivacyEngine
from ghostclip.validate import positive_int

__all__ = ["Tracker", "mlflow", "public_values", "tensorboard", "wandb"]

# ({name: value}, step) -> None
Send = Callable[[Mapping[str, float], int], Any]


def public_values(engine: PrivacyEngine) -> dict[str, float]:
    """{"privacy/epsilon", "privacy/delta", "privacy/noise_multiplier", "privacy/steps"} of an engine as it is now."""
    return {
        "privacy/epsilon": engine.epsilon(),
        "privacy/delta": engine.target_delta,
        "privacy/noise_multiplier": engine.noise_multiplier,
        "privacy/steps": float(engine.steps_taken),
    }


class Tracker:
    """Sends `public_values`; to be called with the engine after each step, in the training loop.

    Args:
        send: takes {name: value} and the number of steps taken.
        every: sends after each so many steps; the other calls do nothing.
    """

    def __init__(self, send: Send, every: int = 1) -> None:
        self._send, self._every = send, positive_int(every=every)

    def __call__(self, engine: PrivacyEngine) -> None:
        """Raises what `PrivacyEngine.epsilon` and the receiver raise."""
        steps = engine.steps_taken
        if steps % self._every == 0:
            self._send(public_values(engine), steps)


def tensorboard(writer: Any, every: int = 1) -> Tracker:
    """To a ``torch.utils.tensorboard.SummaryWriter``, as scalars."""

    def send(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(send, every)


def wandb(run: Any, every: int = 1) -> Tracker:
    """To a run of Weights & Biases, as ``wandb.init()`` returns it."""
    return Tracker(lambda values, step: run.log(dict(values), step=step), every)


def mlflow(client: Any, every: int = 1) -> Tracker:
    """To MLflow's active run: ``client`` is the module ``mlflow``, or what has its ``log_metrics``."""
    return Tracker(lambda values, step: client.log_metrics(dict(values), step=step), every)
