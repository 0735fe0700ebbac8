"""Default training settings, found on public data.

The settings for the digits were chosen on a quarter of their training images, held out, never on the test images. On
private data such a search would spend privacy of its own: start from settings that worked on similar public data.
"""

from __future__ import annotations

__all__ = ["EPOCHS", "MAX_NORM", "batch_size_for", "learning_rate"]

EPOCHS, MAX_NORM = 30, 1.0
LARGE_FROM = 10_000  # examples
# The standard deviation that one step's noise may give a weight, before momentum, and the largest useful rate.
NOISE_PER_STEP, LARGEST_RATE = 0.002, 0.5
ADAM_RATE = 1e-3


def batch_size_for(examples: int, private: bool) -> int:
    """For a training set of that size; that of a Poisson sample is an expected one."""
    usual = 64 if not private else 1024 if examples >= LARGE_FROM else 512
    return min(usual, examples)


def learning_rate(optimizer: str, noise: float | None, batch_size: int, max_norm: float) -> float:
    """The default rate: Adam's own, which noise does not change much, or for SGD what keeps a step's noise the same.

    A step of SGD moves each weight by noise of standard deviation ``rate * noise * max_norm / batch_size``.
    """
    if optimizer != "sgd" or noise is None:
        return ADAM_RATE if optimizer != "sgd" else 0.05
    if noise == 0:
        return LARGEST_RATE / max_norm
    return min(LARGEST_RATE, NOISE_PER_STEP * batch_size / noise) / max_norm
