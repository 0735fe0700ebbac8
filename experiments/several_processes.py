"""Time of a step and memory of a process under DistributedDataParallel and FSDP2, for 1, 2 and 4 processes on gloo.

All processes share one logical batch, so that each has fewer examples where there are more of them. Every process has
one thread. Memory is what a process's peak (VmHWM) is above what it held before its model was built.

    python experiments/several_processes.py [--sizes 1 2 4] [--width N] [--steps N] [--out FOLDER]

writes several_processes.json and several_processes.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import Spread

RESULTS = Path(__file__).parent / "results"
FILE = "several_processes"
KINDS = {"DDP": "DistributedDataParallel", "FSDP2": "fully_shard of each block and of the model"}
BATCH, LAYERS, CLASSES = 64, 6, 10
MIB = 1 << 20


def network(width: int) -> nn.Sequential:
    """Blocks of one layer, all as wide."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(width, CLASSES))


def distributed(model: nn.Sequential, kind: str) -> nn.Module:
    """The model as processes share it."""
    if kind == "DDP":
        return DistributedDataParallel(model)
    for block in model[:LAYERS]:
        fully_shard(block)
    return fully_shard(model)


def losses_of(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """[B]."""
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def bytes_of(name: str) -> int:
    """A figure of this process in bytes, by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) << 10


def work(kind: str, width: int, steps: int) -> dict[str, Any]:
    """Seconds of steps after the first three, and bytes, in one process of a group."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * BATCH, width), torch.randint(0, CLASSES, (16 * BATCH,)))
    before = bytes_of("VmRSS")
    model = distributed(network(width), kind)
    engine = PrivacyEngine(
        model, torch.optim.Adam(model.parameters()), data,
        batch_size=BATCH, noise_multiplier=1.0, sampling="without_replacement", self_check=False,
    )  # fmt: skip
    seconds: list[float] = []
    while len(seconds) < steps + 3:
        for batch in engine.batches():
            start = time.perf_counter()
            engine.step(batch, losses_of)
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[3 : steps + 3], "bytes": bytes_of("VmHWM") - before}


def measure(kind: str, size: int, width: int, steps: int) -> dict[str, Any]:
    """What `work` finds in ``size`` processes: the times of the first, and the most memory of any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--rank-of", kind, "--width", str(width), "--steps", str(steps)]
    ranks = [
        subprocess.Popen(words, env={**os.environ, **common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    found = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {kind} on {size} processes failed")
    told = [json.loads(text.splitlines()[-1]) for text in found]
    spread = Spread.of(told[0]["seconds"])
    return {"kind": kind, "processes": size, "seconds": vars(spread), "bytes": max(each["bytes"] for each in told)}


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"{LAYERS} layers of {results['width']} x {results['width']}, {results['parameters']:,} parameters in float32, "
        f"Adam, {BATCH} examples in a logical batch of all processes.",
        "",
        "| model | processes | step, ms (quartiles) | peak memory of a process, MiB |",
        "| --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        low, middle, high = (1e3 * row["seconds"][name] for name in ("low", "median", "high"))
        lines.append(
            f"| {row['kind']} | {row['processes']} | {middle:.0f} ({low:.0f} to {high:.0f}) | "
            f"{row['bytes'] / MIB:.0f} |"
        )
    where = in_words(results["machine"])
    return "\n".join([*lines, "", f"At commit {results['commit']} on {where}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; as a rank, prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes (default: 1 2 4)")
    parser.add_argument("--width", type=int, default=1024, help="of the layers (default: 1024)")
    parser.add_argument("--steps", type=int, default=30, help="that are timed (default: 30)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--rank-of", choices=tuple(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    if options.rank_of is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        print(json.dumps(work(options.rank_of, options.width, options.steps)))
        dist.destroy_process_group()
        return 0
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in network(options.width).parameters())
    results = {"machine": describe(), "commit": commit(), "width": options.width, "parameters": parameters}
    results["rows"] = [
        measure(kind, size, options.width, options.steps) for kind in KINDS for size in options.sizes
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
