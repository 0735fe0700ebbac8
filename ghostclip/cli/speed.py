"""Examples a second of one training step: private, non-private and the naive loop in turns on one batch."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip.bench.losses import class_losses
from ghostclip.bench.measure import take_turns, timed
from ghostclip.bench.methods import CONTENDERS

__all__ = ["examples_per_second"]

BASELINE = "nonprivate"
METHODS = (BASELINE, "cached", "reweight", "nxbp")


def examples_per_second(model: nn.Module, data: TensorDataset, batch_size: int, seconds: float) -> dict[str, float]:
    """Speed of a method's step (clipping, noise and Adam included) on copies of ``model``.

    Args:
        model: what to train; not changed.
        data: its first ``batch_size`` examples (or all) are the batch.
        seconds: how long to measure.

    Returns:
        {method: examples a second}, by the median of its times.
    """
    inputs, labels = (tensor[:batch_size] for tensor in data.tensors)
    state = torch.get_rng_state()
    turns = {
        name: timed(CONTENDERS[name].prepare(copy.deepcopy(model), class_losses, 1.0).turn(inputs, labels))
        for name in METHODS
    }
    timings = take_turns(turns, seconds, baseline=BASELINE)
    torch.set_rng_state(state)
    return {name: 1e3 * len(labels) / timings.milliseconds(name).median for name in turns}
