"""Several processes on gloo, under DistributedDataParallel and FSDP2: exactness, noise, epsilon, time and memory.

- Exactness: in float64, the clipped sum of one logical batch on 1, 2 and 4 processes beside that of a process alone
  (relative L2), the noise in the gradients that each rank holds, and epsilon.
- Time and memory: of a network most of whose memory are its parameters. All processes share one logical batch, so that
  each has fewer examples where there are more of them. Every process has one thread. Memory is what a process's peak
  (VmHWM) in the steps is above what it held before its model was built; freed memory goes back to the system at once
  (MALLOC_MMAP_THRESHOLD_), so that it doesn't count.

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
from collections.abc import Callable, Sequence
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
# {kind: (how the model is distributed, whether training is private)}.
KINDS = {
    "DDP, ordinary": ("DDP", False),
    "DDP": ("DDP", True),
    "FSDP2, ordinary": ("FSDP2", False),
    "FSDP2": ("FSDP2", True),
    "FSDP2, reshard_after_forward=False": ("kept", True),
}
SHARED = ("DDP", "FSDP2")
BATCH, LAYERS, CLASSES = 64, 6, 10
MIB = 1 << 20
# Freed blocks of this size and more are given back.
RETURNED = str(MIB)
NORM, SIGMA, SMALL = 0.5, 2.0, 48


def network(width: int) -> nn.Sequential:
    """Blocks of one layer, all as wide."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(width, CLASSES))


def distributed(model: nn.Sequential, kind: str) -> nn.Module:
    """The model as processes share it."""
    if kind == "DDP":
        return DistributedDataParallel(model)
    for block in model[:LAYERS]:
        fully_shard(block, reshard_after_forward=kind != "kept")
    return fully_shard(model)


def losses_of(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """[B]."""
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def bytes_of(name: str) -> int:
    """A figure of this process in bytes, by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) << 10


def ordinary_steps(model: nn.Module, data: TensorDataset, steps: int) -> list[float]:
    """Seconds of ordinary steps, each on this process's share of a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.Adam(model.parameters())
    seconds = []
    for number in range(steps):
        start = time.perf_counter()
        rows = torch.arange(rank, BATCH, size) + number % 16 * BATCH
        losses_of(model, [tensor[rows] for tensor in data.tensors]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


def private_steps(model: nn.Module, data: TensorDataset, steps: int) -> list[float]:
    """Seconds of private steps."""
    engine = PrivacyEngine(
        model, torch.optim.Adam(model.parameters()), data,
        batch_size=BATCH, noise_multiplier=1.0, sampling="without_replacement", self_check=False,
    )  # fmt: skip
    seconds: list[float] = []
    while len(seconds) < steps:
        for batch in engine.batches():
            start = time.perf_counter()
            engine.step(batch, losses_of)
            seconds.append(time.perf_counter() - start)
    return seconds[:steps]


def costs(kind: str, width: int, steps: int) -> dict[str, Any]:
    """Seconds of steps after the first three, and bytes, in one process of a group."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * BATCH, width), torch.randint(0, CLASSES, (16 * BATCH,)))
    before = bytes_of("VmRSS")
    shared, private = KINDS[kind]
    model = distributed(network(width), shared)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of the steps
    seconds = (private_steps if private else ordinary_steps)(model, data, steps + 3)
    return {"seconds": seconds[3:], "bytes": bytes_of("VmHWM") - before}


def whole(tensor: Any) -> Tensor:
    """A copy of a tensor, gathered where it is sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def updates(make: Callable[[nn.Sequential], nn.Module], sigma: float) -> tuple[list[Tensor], list[Tensor], float]:
    """One step in float64: the clipped sums (and noise), this rank's part of the gradients, and epsilon.

    With noise, all losses are zero, so that noise is all there is.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4 * SMALL, SMALL, dtype=torch.float64), torch.arange(4 * SMALL) % CLASSES)
    model = make(network(SMALL).double())
    before = [whole(parameter) for parameter in model.parameters()]
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), data, batch_size=4 * SMALL, clipping=NORM,
        noise_multiplier=sigma, sampling="without_replacement", max_physical_batch_size=16,
        noise="standard" if sigma else "test", seed=None if sigma else 0, self_check=False,
    )  # fmt: skip
    batch = next(iter(engine.batches()))
    for rows in batch.physical():
        losses = losses_of(model, rows)
        engine.backward(losses * 0 if sigma else losses)
    engine.optimizer.step()
    after = list(model.parameters())
    parts = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in after]
    sums = [engine.batch_size * (old - whole(new)) for old, new in zip(before, after, strict=True)]
    return sums, [engine.batch_size * part for part in parts], engine.epsilon()


def exactness(kind: str) -> dict[str, Any]:
    """One process of a group: how far its sums are from those of a process alone, its noise, and epsilon."""
    expected, _, _ = updates(lambda model: model, 0.0) if dist.get_world_size() == 1 else (None, None, None)
    found, _, _ = updates(lambda model: distributed(model, kind), 0.0)
    _, noise, epsilon = updates(lambda model: distributed(model, kind), SIGMA)
    numbers = torch.cat([part.flatten() for part in noise])
    sums = torch.cat([each.flatten() for each in found])
    return {
        "sums": sums.tolist(),
        "alone": None if expected is None else torch.cat([each.flatten() for each in expected]).tolist(),
        "entries": len(numbers),
        "noise": float(numbers.square().mean()) / (SIGMA * NORM) ** 2,
        "epsilon": epsilon,
    }


def on_ranks(size: int, *words: str) -> list[Any]:
    """What this script, called with ``words``, prints as the last line in each of ``size`` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **common, "MALLOC_MMAP_THRESHOLD_": RETURNED}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *words],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    found = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {' '.join(words)} on {size} processes failed")
    return [json.loads(text.splitlines()[-1]) for text in found]


def measured_costs(kind: str, size: int, width: int, steps: int) -> dict[str, Any]:
    """What `costs` finds in ``size`` processes: the times of the first, and the most memory of any."""
    told = on_ranks(size, "--costs-of", kind, "--width", str(width), "--steps", str(steps))
    spread = Spread.of(told[0]["seconds"])
    return {"kind": kind, "processes": size, "seconds": vars(spread), "bytes": max(each["bytes"] for each in told)}


def measured_exactness(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What `exactness` finds, for each kind and size; a process alone comes first."""
    alone = torch.tensor(on_ranks(1, "--exactness-of", "DDP")[0]["alone"], dtype=torch.float64)
    rows = []
    for kind in SHARED:
        for size in sizes:
            told = on_ranks(size, "--exactness-of", kind)
            sums = [torch.tensor(each["sums"], dtype=torch.float64) for each in told]
            row = {
                "kind": kind,
                "processes": size,
                "difference": max(float((each - alone).norm() / alone.norm()) for each in sums),
                "entries": [each["entries"] for each in told],
                "noise": [each["noise"] for each in told],
                "epsilon": sorted({each["epsilon"] for each in told}),
            }
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def markdown(results: dict[str, Any]) -> str:
    """Two tables."""
    lines = [
        "# Several processes",
        "",
        "## Exactness",
        "",
        f"{LAYERS} layers of {SMALL} x {SMALL} in float64, one logical batch in physical batches of 16. Variance: that "
        "of the noise in the gradients that a rank holds (its shards under FSDP2, all under DDP) over what it must be, "
        "(noise multiplier x clipping norm)^2. All ranks report the same epsilon.",
        "",
        "| model | processes | clipped sum, relative L2 distance from one process alone "
        "| entries of the noise, by rank | their variance over the expected one, by rank | epsilon |",
        "| --- " * 6 + "|",
    ]
    for row in results["exactness"]:
        noise = ", ".join(f"{each:.3f}" for each in row["noise"])
        lines.append(
            f"| {row['kind']} | {row['processes']} | {row['difference']:.1e} | {', '.join(map(str, row['entries']))} | "
            f"{noise} | {', '.join(f'{each:.6f}' for each in row['epsilon'])} |"
        )
    lines += [
        "",
        "## Time and memory",
        "",
        f"{LAYERS} layers of {results['width']} x {results['width']}, {results['parameters']:,} parameters in float32 "
        f"({4 * results['parameters'] / MIB:.0f} MiB), Adam, {BATCH} examples in a logical batch of all processes.",
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
    lines += ["", f"At commit {results['commit']} on {where}.", ""]
    return "\n".join([*lines, "Written by `python experiments/several_processes.py`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; as a rank, prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes (default: 1 2 4)")
    parser.add_argument("--width", type=int, default=2048, help="of the layers (default: 2048)")
    parser.add_argument("--steps", type=int, default=10, help="that are timed (default: 10)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--costs-of", choices=tuple(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--exactness-of", choices=SHARED, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    if options.costs_of or options.exactness_of:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        kind = options.costs_of
        found = costs(kind, options.width, options.steps) if kind else exactness(options.exactness_of)
        dist.barrier()  # so that no rank leaves while another's last message is under way
        dist.destroy_process_group()
        print(json.dumps(found))  # which waits until it is read, one rank after another
        return 0
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in network(options.width).parameters())
    results = {"machine": describe(), "commit": commit(), "width": options.width, "parameters": parameters}
    results["exactness"] = measured_exactness(options.sizes)
    results["rows"] = []
    for kind in KINDS:
        for size in options.sizes:
            results["rows"].append(measured_costs(kind, size, options.width, options.steps))
            print(results["rows"][-1], file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
