"""Graph networks of torch_geometric over graphs of different sizes, whose nodes belong to examples by an index."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .subject import CLASSES, Batch, Subject, Timed

__all__ = ["SUBJECTS"]

FEATURES = 5


class Network(nn.Module):
    """Two layers of torch_geometric, a sum over the nodes of each graph, and a linear layer."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        from torch_geometric import nn as geometric

        self.low, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(_layer(geometric, kind, width) for _ in range(2))

    def forward(self, batch: Batch) -> Tensor:
        h = torch.tanh(self.low(batch["x"]))
        for layer in self.layers:
            h = torch.relu(layer(h, torch.stack([batch["source"], batch["target"]])))
        return self.head(h.new_zeros(len(batch["label"]), h.shape[1]).index_add(0, batch["rows"], h))


def _layer(geometric: Any, kind: str, width: int) -> nn.Module:
    if kind == "GINConv":
        return geometric.GINConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
    if kind == "GatedGraphConv":
        return geometric.GatedGraphConv(width, 2)
    if kind == "ChebConv":
        return geometric.ChebConv(width, width, 2)
    if kind == "PNAConv":
        return geometric.PNAConv(width, width, ["mean", "max"], ["identity"], deg=torch.tensor([0, 4, 4, 2]))
    if kind == "GATv2Conv":
        return geometric.GATv2Conv(width, width // 2, 2)
    return getattr(geometric, kind)(width, width)


def graphs(examples: int, fewest: int = 3) -> Batch:
    """Rings with chords, of fewest to twice as many nodes, and a class for each."""
    return joined([_graph(number, fewest + number % (fewest + 1)) for number in range(examples)])


def _graph(number: int, nodes: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    ring = torch.arange(nodes)
    ends = torch.cat([ring, ring]), torch.cat([(ring + 1) % nodes, (ring + 2) % nodes])
    x = torch.randn(nodes, FEATURES, generator=generator, dtype=torch.float64)
    return {"x": x, "source": torch.cat(ends), "target": torch.cat(ends[::-1]),
            "rows": torch.zeros(nodes, dtype=torch.int64), "label": torch.tensor([number % CLASSES])}  # fmt: skip


def joined(parts: list[Batch]) -> Batch:
    """The graphs side by side."""
    starts = [0, *torch.tensor([len(part["x"]) for part in parts]).cumsum(0).tolist()]
    examples = [0, *torch.tensor([len(part["label"]) for part in parts]).cumsum(0).tolist()]
    offsets = {"source": starts, "target": starts, "rows": examples}
    return {name: torch.cat([part[name] + offsets.get(name, [0] * len(parts))[i] for i, part in enumerate(parts)])
            for name in parts[0]}  # fmt: skip


def taken(batch: Batch, start: int, stop: int) -> Batch:
    """Some of the graphs."""
    nodes = (batch["rows"] >= start) & (batch["rows"] < stop)
    edges, first = nodes[batch["source"]], int(nodes.int().argmax())
    return {"x": batch["x"][nodes], "source": batch["source"][edges] - first, "target": batch["target"][edges] - first,
            "rows": batch["rows"][nodes] - start, "label": batch["label"][start:stop]}  # fmt: skip


def graph_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each graph's class."""
    return F.cross_entropy(model(batch), batch["label"], reduction="none")


def nodes_only(batch: Batch) -> Tensor:
    """The graph of each node."""
    return batch["rows"]


def edges_too(batch: Batch) -> list[Tensor]:
    """The graph of each node, and that of each edge and of a loop for each node, which the layer adds at the end."""
    return [batch["rows"], torch.cat([batch["rows"][batch["target"]], batch["rows"]])]


KINDS = {
    "GCN": ("GCNConv", "normalised by degree"),
    "GAT": ("GATConv", "attention over edges"),
    "GATv2": ("GATv2Conv", "attention over edges, two heads"),
    "GIN": ("GINConv", "a perceptron of sums"),
    "GraphSAGE": ("SAGEConv", "means of neighbours"),
    "GraphConv": ("GraphConv", "sums of neighbours"),
    "TAG": ("TAGConv", "neighbours up to three steps away"),
    "Chebyshev": ("ChebConv", "polynomials of the Laplacian"),
    "Gated graph network": ("GatedGraphConv", "a GRU cell over steps"),
}


def _subjects() -> Iterator[Subject]:
    for name, (kind, about) in KINDS.items():
        timed = Timed(partial(Network, kind, 128), partial(graphs, fewest=12), 64)
        yield Subject(
            name, "torch_geometric", about, partial(Network, kind, 8), graphs, graph_losses, kind="graph", timed=timed,
            index=edges_too if kind == "GATv2Conv" else nodes_only, taken=taken, joined=joined,
        )  # fmt: skip


SUBJECTS = tuple(_subjects())
