"""A workload of the benchmark that takes no time, and contenders that fail."""

import torch

from ghostclip.bench import Workload
from ghostclip.bench.contenders import CannotRun

TINY = Workload(
    "tiny",
    "one hidden layer",
    6,
    lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)),
    lambda size: (3 * torch.randn(size, 5), torch.randint(0, 3, (size,))),
)


def broken(model, losses, max_norm):
    raise RuntimeError("out of paper\nsecond line")


def unable(model, losses, max_norm):
    raise CannotRun("no such layer here")
