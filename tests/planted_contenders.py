"""Contenders that go wrong in a process of their own, and only there; pytest, slow to import, isn't imported here."""

import os
import signal
import time

import torch

from ghostclip.bench.contenders import Contender, Prepared


def chatty(model, losses, max_norm):
    """A library that prints, from Python and past it."""

    def step(inputs, targets):
        print("a word", flush=True)
        os.write(1, b"another\n")

    return Prepared(step, None)


def mortal(model, losses, max_norm):
    """A contender whose process is killed in its eighth step."""
    left = iter(range(7))

    def step(inputs, targets):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return Prepared(step, None)


def fragile(model, losses, max_norm):
    """A contender that can't be prepared."""
    raise RuntimeError("out of paper")


def endless(model, losses, max_norm):
    """A contender whose second step doesn't end."""
    naps = iter([0.0])
    return Prepared(lambda inputs, targets: time.sleep(next(naps, 600.0)), None)


def telling(model, losses, max_norm):
    """A contender that only says what its process has to work with."""
    cores = sorted(os.sched_getaffinity(0))
    raise RuntimeError(f"{torch.get_num_threads()} threads, {os.environ['OMP_NUM_THREADS']} for others, cores {cores}")


CONTENDERS = tuple(Contender(method.__name__, "", method) for method in (chatty, mortal, fragile, endless, telling))
