"""What clipping ragged examples costs: private steps over ordinary ones of the same model, taken in turn.

Graphs, packed texts and windows, eight batches of each with other lengths. A private step has clipping by an index,
noise and Adam; an ordinary one has Adam. Index and model are checked in every batch, as always.

    python experiments/ragged.py [--networks NAME ...] [--seconds S] [--out FOLDER]

writes ragged.json and ragged.md. One thread. Networks of torch_geometric are measured where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ghostclip import GhostClipper
from ghostclip.bench.contenders import by_filling_gradients
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import keep_freed_memory, take_turns, timed

RESULTS = Path(__file__).parent / "results"
BATCHES, WORDS, CLASSES = 8, 1000, 10
SECOND_PASSES = ("cached", "reweight")

Batch = dict[str, Tensor]


def gathered(h: Tensor, to: Tensor, size: int) -> Tensor:
    """Rows [rows, ...] summed where they belong to, [size, ...]."""
    return h.new_zeros(size, *h.shape[1:]).index_add(0, to, h)


class Graphs(nn.Module):
    """Three graph layers, each a linear one and a sum over neighbours; ``sum_first``: the other way round (GIN)."""

    def __init__(self, width: int, sum_first: bool) -> None:
        super().__init__()
        self.sum_first = sum_first
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        h, (source, target) = batch["x"], batch["edges"]
        for layer in self.layers:
            h = layer(h + gathered(h[source], target, len(h))) if self.sum_first else layer(h)
            h = h if self.sum_first else h + gathered(h[source], target, len(h))
        return self.head(gathered(h, batch["rows"], len(batch["y"])))


class Geometric(nn.Module):
    """Three layers of torch_geometric, whose parameters are outside of torch's layers."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        from torch_geometric import nn as geometric

        layer: Any = getattr(geometric, kind)
        self.layers, self.head = nn.ModuleList(layer(width, width) for _ in range(3)), nn.Linear(width, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        h = batch["x"]
        for layer in self.layers:
            h = layer(h, batch["edges"]).relu()
        return self.head(gathered(h, batch["rows"], len(batch["y"])))


class Texts(nn.Module):
    """A Transformer block over packed tokens, in one sequence under a mask of blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.back, self.head = nn.Linear(4 * width, width), nn.Linear(width, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        rows = batch["rows"]
        h = self.words(batch["words"]).unsqueeze(0)
        n = self.norm(h)
        h = h + self.attention(n, n, n, attn_mask=rows[:, None] != rows, need_weights=False)[0]
        h = (h + self.back(self.wide(h)))[0]
        return self.head(gathered(h, rows, len(batch["y"])))


class Windows(nn.Module):
    """A CNN over windows of images, pooled over the windows of each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(256, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(gathered(self.body(batch["windows"]), batch["rows"], len(batch["y"])))


@dataclass(frozen=True)
class Network:
    """What is measured.

    Attributes:
        about: in words.
        build: the model.
        examples: in a batch.
        rows: of an example, fewest and most.
        width: of the features.
    """

    about: str
    build: Callable[[], nn.Module]
    examples: int
    rows: tuple[int, int]
    width: int = 128


NETWORKS = {
    "gcn": Network("linear layers and sums over neighbours", lambda: Graphs(128, False), 64, (10, 40)),
    "gin": Network("sums over neighbours and linear layers", lambda: Graphs(128, True), 64, (10, 40)),
    "pyg-gcn": Network("GCNConv of torch_geometric", lambda: Geometric(128, "GCNConv"), 64, (10, 40)),
    "pyg-gat": Network("GATConv of torch_geometric", lambda: Geometric(128, "GATConv"), 64, (10, 40)),
    "texts": Network("a Transformer block over packed tokens", lambda: Texts(128), 32, (8, 128)),
    "windows": Network("a CNN over windows of images", Windows, 16, (1, 12)),
}


def batch_of(network: Network, name: str) -> Batch:
    """One batch with lengths by chance."""
    low, high = network.rows
    sizes = torch.randint(low, high + 1, (network.examples,))
    rows = torch.repeat_interleave(torch.arange(network.examples), sizes)
    starts = (sizes.cumsum(0) - sizes)[rows].repeat(3)
    edges = starts + (torch.rand(2, 3 * len(rows)) * sizes[rows].repeat(3)).long()
    windows = torch.randn(len(rows), 3, 16, 16) if name == "windows" else torch.zeros(0)
    return {
        "x": torch.randn(len(rows), network.width), "words": torch.randint(0, WORDS, (len(rows),)), "rows": rows,
        "edges": edges, "windows": windows, "y": torch.randint(0, CLASSES, (network.examples,)),
    }  # fmt: skip


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """[B]."""
    return F.cross_entropy(model(batch), batch["y"], reduction="none")


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of an ordinary step, and the ratios of private ones."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model, batches = network.build(), [batch_of(network, name) for _ in range(BATCHES)]

    def ordinary() -> Callable[[Batch], object]:
        own = copy.deepcopy(model)
        optimizer = torch.optim.Adam(own.parameters(), lr=1e-3)

        def step(batch: Batch) -> None:
            losses_of(own, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def private(second_pass: str) -> Callable[[Batch], object]:
        def fill(own: nn.Module, losses: Any, max_norm: float) -> Callable[..., object]:
            clipper = GhostClipper(own, max_norm, second_pass=second_pass)
            return lambda batch, _: clipper.backward(losses_of(own, batch), batch_index=batch["rows"])

        prepared: Any = by_filling_gradients(fill)(copy.deepcopy(model), losses_of, 1.0)  # type: ignore[arg-type]
        return lambda batch: prepared.step(batch, batch["y"])

    steps = {"ordinary": ordinary(), **{each: private(each) for each in SECOND_PASSES}}

    def turn(step: Callable[[Batch], object]) -> Callable[[], float]:
        order = itertools.cycle(batches)
        for batch in batches:
            step(batch)
        return timed(lambda: step(next(order)), time.process_time)

    timings = take_turns({each: turn(step) for each, step in steps.items()}, seconds, baseline="ordinary")
    return {
        "about": network.about,
        "examples": network.examples,
        "rows": round(sum(len(batch["rows"]) for batch in batches) / BATCHES),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ms": asdict(timings.milliseconds("ordinary")),
        "ratios": {each: asdict(timings.ratio(each, "ordinary")) for each in SECOND_PASSES},
    }


def markdown(results: dict[str, Any]) -> str:
    """A row for each network."""
    lines = [
        "Processor time of a private step over that of an ordinary one.",
        "",
        "| network | examples | rows in a batch | parameters | ordinary step, ms | cached | reweight |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for found in results["networks"].values():
        spreads = found["ratios"].values()
        ratios = [f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for each in spreads]
        cells = [found["about"], found["examples"], found["rows"], f"{found['parameters']:,}"]
        lines.append(f"| {' | '.join(map(str, [*cells, format(found['ms']['median'], '.3g'), *ratios]))} |")
    where = in_words(results["machine"])
    return "\n".join([*lines, "", f"Median (quartiles). At commit {results['commit']} on {where}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    there = [name for name in NETWORKS if not name.startswith("pyg") or find_spec("torch_geometric")]
    parser.add_argument("--networks", nargs="+", default=there, choices=there)
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time a network (default: 20)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "networks": {}}
    for name in options.networks:
        results["networks"][name] = measure(name, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ragged.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "ragged.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
