"""Models of ragged examples, batches for them, and the loop over single examples that they are compared with.

A batch is a dict of tensors. "rows" is the example of each row; an example by itself is the same dict with the rows,
and pairs of rows ("edges"), that are its own, counted from zero.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import oracle
import torch
from case_fallback import with_parameters
from case_models import Wired
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, CLASSES, WORDS = 5, 3, 11
# Unequal on purpose: one without rows, one with a single row, one much longer than the others.
SIZES = (3, 5, 1, 0, 17, 4, 2)

Batch = dict[str, Tensor]


def graphs(sizes=SIZES, dtype=torch.float64) -> Batch:
    """Graphs with so many nodes, three edges for each."""
    starts = torch.tensor([0, *sizes]).cumsum(0)
    edges = [torch.randint(0, n, (2, 3 * n)) + start for n, start in zip(sizes, starts, strict=False) if n]
    return {
        "x": torch.randn(sum(sizes), FEATURES, dtype=dtype),
        "words": torch.randint(0, WORDS, (sum(sizes),)),
        "edges": torch.cat(edges, 1) if edges else torch.zeros(2, 0, dtype=torch.int64),
        "rows": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64)),
        "y": torch.randint(0, CLASSES, (len(sizes),)),
    }


def shuffled(batch: Batch) -> Batch:
    """The same examples, their rows in an order by chance."""
    order = torch.randperm(len(batch["rows"]))
    return {
        **batch,
        **{name: batch[name][order] for name in ("x", "words", "rows")},
        "edges": order.argsort()[batch["edges"]],
    }


def alone(batch: Batch, example: int) -> Batch:
    own = (batch["rows"] == example).nonzero().flatten()
    places = torch.full_like(batch["rows"], -1)
    places[own] = torch.arange(len(own))
    edges = batch["edges"][:, batch["rows"][batch["edges"][0]] == example]
    return {
        **{name: batch[name][own] for name in ("x", "words")},
        "edges": places[edges],
        "rows": torch.zeros_like(own),
        "y": batch["y"][example : example + 1],
    }


def joined(examples: list[Batch]) -> Batch:
    """The batch of some single examples; a collate_fn."""
    sizes = torch.tensor([len(each["rows"]) for each in examples], dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    return {
        **{name: torch.cat([each[name] for each in examples]) for name in ("x", "words", "y")},
        "edges": torch.cat([each["edges"] + start for each, start in zip(examples, starts, strict=True)], 1),
        "rows": torch.repeat_interleave(torch.arange(len(examples)), sizes),
    }


def gathered(h: Tensor, to: Tensor, size: int) -> Tensor:
    """Rows [rows, ...] summed where they belong to, [size, ...]."""
    return h.new_zeros(size, *h.shape[1:]).index_add(0, to, h)


class GCN(nn.Module):
    """Kipf & Welling 2017: a linear layer, then a mean over neighbours; a bare bias, as graph libraries have it."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width, bias=False), nn.Linear(width, width, bias=False)
        self.bias, self.norm = nn.Parameter(torch.randn(width)), nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def spread(self, h, batch):
        source, target = batch["edges"]
        degree = 1 + gathered(torch.ones_like(target, dtype=h.dtype), target, len(h))
        scale = degree.rsqrt()
        messages = h[source] * (scale[source] * scale[target]).unsqueeze(1)
        return gathered(messages, target, len(h)) + h / degree.unsqueeze(1)

    def forward(self, batch):
        h = torch.relu(self.spread(self.first(batch["x"]), batch) + self.bias)
        h = self.norm(self.spread(self.second(h), batch))
        return self.head(gathered(h, batch["rows"], len(batch["y"])))


class GAT(nn.Module):
    """Velickovic et al. 2018: attention over neighbours by bare vectors, a softmax over each node's edges."""

    def __init__(self, width=4, heads=2):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.Linear(FEATURES, heads * width), nn.Linear(heads * width, heads * width)
        self.source, self.target = (nn.Parameter(torch.randn(2, 1, heads, width)) for _ in range(2))
        self.head = nn.Linear(heads * width, CLASSES)

    def attend(self, h, number, batch):
        h = h.unflatten(1, (self.heads, -1))
        source, target = batch["edges"]
        scores = (h * self.source[number]).sum(-1)[source] + (h * self.target[number]).sum(-1)[target]
        weights = F.leaky_relu(scores, 0.2).exp()
        total = gathered(weights, target, len(h))[target]
        return gathered(h[source] * (weights / total).unsqueeze(-1), target, len(h)).flatten(1)

    def forward(self, batch):
        h = F.elu(self.attend(self.first(batch["x"]), 0, batch))
        h = self.attend(self.second(h), 1, batch)
        return self.head(gathered(h, batch["rows"], len(batch["y"])))


def gin(m, batch):
    """Xu et al. 2019: sums over neighbours, then two linear layers; the weight of the node itself is trained."""
    h, (source, target) = m.words(batch["words"]) + batch["x"], batch["edges"]
    for eps, layer in zip(m.eps, (m.first, m.second), strict=True):
        h = layer((1 + eps) * h + gathered(h[source], target, len(h)))
    return m.head(gathered(h, batch["rows"], len(batch["y"])))


def gin_model(width=6):
    layers = {
        "words": nn.Embedding(WORDS, FEATURES),
        "first": nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width)),
        "second": nn.Sequential(nn.Linear(width, width), nn.RMSNorm(width), nn.ReLU(), nn.Linear(width, width)),
    }
    return with_parameters(gin, {"eps": (2,)}, **layers, head=nn.Linear(width, CLASSES))


def edge_net(m, batch):
    """Messages by a layer over edges: rows of two kinds."""
    h, (source, target) = m.node(batch["x"]).tanh(), batch["edges"]
    messages = m.edge(torch.cat([h[source], h[target]], 1)).tanh()
    return m.head(gathered(gathered(messages, target, len(h)), batch["rows"], len(batch["y"])))


class PackedText(nn.Module):
    """Texts one after another: attention under a mask of blocks, a table of words that is the head's as well.

    With ``one_sequence`` the layers see [1, rows, width], else [rows, width].
    """

    def __init__(self, width=8, one_sequence=False):
        super().__init__()
        self.one_sequence = one_sequence
        self.words, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.logits = nn.Linear(width, WORDS, bias=False)
        self.logits.weight = self.words.weight

    def forward(self, batch):
        words, rows = batch["words"], batch["rows"]
        h = self.words(words.unsqueeze(0) if self.one_sequence else words)
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        mask = rows.unsqueeze(0) == rows.unsqueeze(1)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(-2, -3).flatten(-2))
        logits = self.logits(h).flatten(0, -2)
        losses = F.cross_entropy(logits, words, reduction="none")
        return gathered(losses, rows, len(batch["y"]))


def windows(m, batch):
    """Images of unlike size as windows [rows, C, H, W]: convolutions in each, of groups and depthwise too."""
    images = batch["x"][:, :4].reshape(-1, 1, 1, 4).expand(-1, 1, 4, 4) * torch.linspace(0.5, 2, 4).view(4, 1)
    h = m.scale(m.body(images)).mean((2, 3))
    return m.head(gathered(h, batch["rows"], len(batch["y"])))


def windows_model():
    convolutions = nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=4)
    body = nn.Sequential(*convolutions, nn.ConvTranspose2d(4, 3, 2))
    return Wired(windows, body=body, scale=nn.PReLU(3), head=nn.Linear(3, CLASSES))


def short_sequences(m, batch):
    """A recurrent layer over rows that are short sequences."""
    return m.head(gathered(m.rnn(batch["x"].unsqueeze(2))[0][:, -1], batch["rows"], len(batch["y"])))


@dataclass(frozen=True)
class Case:
    """A model, and the indices of its rows.

    Attributes:
        build: the model.
        index: batch -> what ``batch_index`` takes.
    """

    build: Callable[[], nn.Module]
    index: Callable[[Batch], Tensor | list[Tensor]] = lambda batch: batch["rows"]


CASES = {
    "gcn": Case(GCN),
    "gat": Case(GAT),
    "gin": Case(gin_model),
    "edges": Case(
        lambda: Wired(edge_net, node=nn.Linear(FEATURES, 6), edge=nn.Linear(12, 6), head=nn.Linear(6, 3)),
        lambda batch: [batch["rows"], batch["rows"][batch["edges"][0]]],
    ),
    "packed text": Case(PackedText),
    "packed text in one sequence": Case(lambda: PackedText(one_sequence=True)),
    "windows": Case(windows_model),
    "gru": Case(lambda: Wired(short_sequences, rnn=nn.GRU(1, 4, batch_first=True), head=nn.Linear(4, CLASSES))),
}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch)
    return output if output.dim() == 1 else F.cross_entropy(output, batch["y"], reduction="none")


def gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """{parameter name: [B, *shape]} by the loop over single examples, through a plain copy of the model."""
    plain = copy.deepcopy(model)
    rows = [oracle.grads_of_single_losses(plain, losses(plain, alone(batch, each))) for each in range(len(batch["y"]))]
    return {
        name: torch.cat([row[name] for row in rows]) if rows else parameter.new_zeros(0)
        for name, parameter in plain.named_parameters()
    }
