"""Work shared among torch's threads, or done in one piece, with the same results."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from ghostclip.native import calls, library
from ghostclip.noise.gaussian import ChaCha

pytestmark = pytest.mark.skipif(library("share") is None, reason="no C compiler here")

both_kinds = pytest.mark.parametrize("kind", ["torch's threads", "no threads"])


@pytest.fixture
def threads(kind, monkeypatch):
    """Sets how many threads torch says it has, and whether they can be had, for work however small."""
    if kind == "no threads":
        monkeypatch.setattr(calls, "_runtime", lambda: None)
    monkeypatch.setattr(calls, "SHARE", 1)
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


@pytest.mark.skipif(torch.version.cuda is not None, reason="other builds of torch may have other threads")
def test_torchs_own_runtime_is_found():
    assert calls._runtime() is not None


@both_kinds
def test_a_part_that_fails_is_reported(kind, threads):
    threads(4)
    part = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_ssize_t] * 3)
    assert calls.share_out(part(lambda word, first, last: int(first == 0)), 64, 8, 1000, (7,))


@both_kinds
@pytest.mark.parametrize("size", [1, 255, 256, 257, 5_000])
def test_noise_does_not_depend_on_the_threads(size, kind, threads):
    ends = []
    for count in (1, 2, 7):
        threads(count)
        stream = ChaCha(library("normal"), 5)
        filled = torch.empty(size)
        stream.fill(filled, 2.0)
        sums = [torch.arange(float(length)) for length in (3, 0, 700, size, 13)]
        assert stream.add(sums, 1.5, 3.0)
        ends.append((torch.cat([filled, *sums]), stream.position))
    assert all(torch.equal(one, ends[0][0]) and place == ends[0][1] for one, place in ends)


def test_an_interrupted_draw_is_not_repeated(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    stream = ChaCha(library("normal"), 5)
    with monkeypatch.context() as patched:
        patched.setattr("ghostclip.noise.gaussian.share_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.fill(torch.empty(1000), 1.0)
    assert stream.position > 0
    first, second = torch.empty(1000), torch.empty(1000)
    ChaCha(library("normal"), 5).fill(first, 1.0)
    stream.fill(second, 1.0)
    assert not torch.equal(first, second)


FORKED = """
import os, sys, torch
from ghostclip.native import calls, library
from ghostclip.noise.gaussian import ChaCha
if sys.argv[1] == "used":
    ChaCha(library("normal")).fill(torch.empty(1_000_000), 1.0)
child = os.fork()
if not child:
    ChaCha(library("normal")).fill(torch.empty(1_000_000), 1.0)
    os._exit(7 if calls._forks.lost_threads else 8)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("before", "status"), [("used", "7"), ("unused", "8")])
@pytest.mark.slow
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have(before, status):
    """Where there were none, it has its own, as the processes of a fork server do."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKED, before]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [status]
