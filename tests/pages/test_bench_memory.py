"""Peak memory: what a fresh process reports."""

import os
import subprocess
import sys

import pytest

from ghostclip.bench import memory
from ghostclip.bench.memory import peaks

MIB = 2**20


@pytest.mark.slow  # three processes, each of which imports torch
def test_a_fresh_process_finds_what_a_step_needs():
    found = peaks("mlp", ["nxbp"], batch_size=4096)
    plain = found["nonprivate"]
    # Gradients and Adam's two moments are 1.6 MiB; inputs of the hidden layers 4096 x (128 + 256) x 4 bytes, twice.
    assert 6 * MIB < plain["peak"] < 60 * MIB
    assert found["nxbp"]["over_nonprivate"] == found["nxbp"]["peak"] / plain["peak"] < 1


COUNTED = """
import ctypes
libc = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "aligned_alloc"):
    getattr(libc, name).restype = ctypes.c_void_p
now, most = libc.ghostclip_allocated, libc.ghostclip_most_allocated
now.restype = most.restype = ctypes.c_long
size, floor = ctypes.c_size_t, now()
most()
blocks = [libc.malloc(size(100_000)), libc.calloc(size(10), size(20_000)), libc.aligned_alloc(size(64), size(64_000))]
held = now() - floor
grown = libc.realloc(ctypes.c_void_p(blocks[0]), size(1_000_000))
for block in (grown, *blocks[1:]):
    libc.free(ctypes.c_void_p(block))
print(held, most() - floor, most() - floor, now() - floor)
"""


@pytest.mark.skipif(memory._counter() is None, reason="no compiler, or not glibc")
def test_allocated_bytes_are_counted():
    environment = {**os.environ, "LD_PRELOAD": memory._counter(), "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    held, most, since, left = map(int, done.stdout.split())
    assert 364_000 <= held < 364_000 + 20_000
    # While it grew, the first block was counted once; Python's own objects come on top.
    assert 1_264_000 <= most < 1_264_000 + 120_000
    assert since < 20_000
    assert left < 20_000
