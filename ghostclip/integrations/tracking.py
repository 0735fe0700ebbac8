"""Trackers send the public values of a private training to TensorBoard, Weights & Biases or MLflow.

Public values are epsilon, delta, the noise multiplier and the number of steps. Losses, norms and sizes of batches are
private data and are never sent. These packages are not imported: a tracker calls the writer, run or module it is given.
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
    """The values that may be published: the privacy spent so far, and how.

    Returns:
        {"privacy/epsilon", "privacy/delta", "privacy/noise_multiplier", "privacy/steps": number}.

    Raises:
        PrivacyError: trained parameters changed outside of steps.
    """
    return {
        "privacy/epsilon": engine.epsilon(),
        "privacy/delta": engine.target_delta,
        "privacy/noise_multiplier": engine.noise_multiplier,
        "privacy/steps": float(engine.steps_taken),
    }


class Tracker:
    """Sends `public_values` after every n-th step: call ``tracker(engine)`` after each step of the training loop.

    Args:
        send: ({name: number}, number of steps taken) -> anything.
        every: n, >= 1; the other calls do nothing.

    Raises:
        ValueError, TypeError: ``send`` is no function, or ``every`` is out of range.
    """

    def __init__(self, send: Send, every: int = 1) -> None:
        if not callable(send):
            raise TypeError(f"send must be a function of (values, step); got {send!r}")
        self._send, self._every = send, positive_int(every=every)

    def __call__(self, engine: PrivacyEngine) -> None:
        """Sends the values if a multiple of ``every`` steps was taken; raises as `public_values` and ``send``."""
        steps = engine.steps_taken
        if steps % self._every == 0:
            self._send(public_values(engine), steps)


def tensorboard(writer: Any, every: int = 1) -> Tracker:
    """A `Tracker` that writes scalars to TensorBoard.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        every: as for `Tracker`.
    """

    if not hasattr(writer, "add_scalar"):
        raise TypeError(f"writer must be a SummaryWriter, which has add_scalar; got {writer!r}")

    def send(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(send, every)


def wandb(run: Any, every: int = 1) -> Tracker:
    """A `Tracker` that logs to Weights & Biases.

    Args:
        run: the result of ``wandb.init()``.
        every: as for `Tracker`.
    """
    return Tracker(lambda values, step: run.log(dict(values), step=step), every)


def mlflow(client: Any, every: int = 1) -> Tracker:
    """A `Tracker` that logs metrics to MLflow's active run.

    Args:
        client: the module ``mlflow``, or an object with its ``log_metrics``.
        every: as for `Tracker`.
    """
    return Tracker(lambda values, step: client.log_metrics(dict(values), step=step), every)
