"""Graph layers of torch_geometric, and its batches, through the clipper and the engine.

It is imported in tests alone: that takes seconds, which no process should need that runs others.
"""

import importlib.util

import oracle
import pytest
import torch
from case_models import Wired
from comparing import assert_close, assert_dicts_close, gradients
from torch import nn
from torch.nn import functional as F

from ghostclip import GhostClipper, PrivacyEngine, UnsupportedModelError, VerificationError
from ghostclip.self_check import first_steps

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed"),
    pytest.mark.filterwarnings("ignore:the DataLoader's", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
FEATURES, WIDTH = 5, 6
LAYERS = {
    "GCN": lambda gnn, d: gnn.GCNConv(d, WIDTH),
    "GAT": lambda gnn, d: gnn.GATConv(d, 3, heads=2),
    "GATv2": lambda gnn, d: gnn.GATv2Conv(d, 3, heads=2, add_self_loops=False),
    "GIN": lambda gnn, d: gnn.GINConv(nn.Sequential(nn.Linear(d, 7), nn.ReLU(), nn.Linear(7, WIDTH)), train_eps=True),
    "SAGE": lambda gnn, d: gnn.SAGEConv(d, WIDTH),
    "GraphConv": lambda gnn, d: gnn.GraphConv(d, WIDTH),
    "Transformer": lambda gnn, d: gnn.TransformerConv(d, WIDTH),
}  # fmt: skip


def network(layer):
    """Two graph layers, a mean over each graph, a linear head."""
    from torch_geometric import nn as gnn

    def wiring(m, batch):
        h = m.first(batch.x, batch.edge_index).tanh()
        h = m.norm(m.second(h, batch.edge_index))
        return m.head(gnn.global_mean_pool(h, batch.batch, batch.num_graphs))

    parts = {"norm": gnn.LayerNorm(WIDTH, mode="node"), "head": gnn.Linear(WIDTH, 3)}
    return Wired(wiring, first=layer(gnn, FEATURES), second=layer(gnn, WIDTH), **parts)


def losses(model, batch):
    return F.cross_entropy(model(batch), batch.y, reduction="none")


def index_of(batch):
    """Of nodes and of edges: attention of the second kind multiplies with a parameter at each edge."""
    return [batch.batch, batch.batch[batch.edge_index[0]]]


def graph(nodes, dtype=torch.float64):
    from torch_geometric.data import Data

    edges = torch.randint(0, nodes, (2, 2 * nodes))
    return Data(x=torch.randn(nodes, FEATURES, dtype=dtype), edge_index=edges, y=torch.randint(0, 3, (1,)))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.one_in(3)
def test_clipped_sums_are_those_of_a_loop_over_graphs_and_an_edge_between_them_is_refused(layer):
    from torch_geometric.data import Batch

    graphs = [graph(nodes) for nodes in (3, 6, 1, 12, 4)]
    model = network(layer).double()
    each = [oracle.grads_of_single_losses(model, losses(model, Batch.from_data_list([g]))) for g in graphs]
    expected = {name: torch.cat([grads[name] for grads in each]) for name in each[0]}
    clipper, batch = GhostClipper(model, clipping=0.3), Batch.from_data_list(graphs)
    for _ in range(3):
        model.zero_grad()
        result = clipper.backward(losses(model, batch), batch_index=index_of(batch))
        assert_close(result.norms, oracle.norms(expected), 1e-10)
        assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.3), 1e-10)
    with pytest.raises(UnsupportedModelError):
        clipper.norms(losses(model, connected(batch)), batch_index=index_of(batch))


def connected(batch):
    """An edge from the first graph to the last."""
    between = torch.tensor([[0], [batch.num_nodes - 1]])
    batch.edge_index = torch.cat([batch.edge_index, between], 1)
    return batch


def one_layer():
    """Sums features before its only layer: no gradient shows whose they are."""
    from torch_geometric import nn as gnn

    layer = gnn.GINConv(nn.Linear(FEATURES, 3))
    pool = gnn.global_add_pool
    return Wired(lambda m, b: pool(m.layer(b.x, b.edge_index), b.batch, b.num_graphs), layer=layer)


def test_the_engine_trains_on_its_batches_and_swaps_their_features(monkeypatch):
    """At every step: a swap shows the edge only where its ends are in different halves of the batch."""
    from torch_geometric.loader import DataLoader

    monkeypatch.setattr(first_steps, "SELDOM", 1)
    data = [graph(1 + n % 5, torch.float32) for n in range(24)]

    def train(change):
        model = one_layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = PrivacyEngine(model, optimizer, DataLoader(data, batch_size=6), batch_size=6, noise_multiplier=1.0)
        for _ in range(3):
            for batch in engine.batches():
                batch.pass_through(change)
                engine.step(batch, losses, batch_index=lambda batch: batch.batch)
        return engine

    assert train(lambda batch: batch).steps_taken == 12
    with pytest.raises(VerificationError, match="the self-check found examples that mix"):
        train(connected)
