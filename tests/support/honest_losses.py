"""Trainings in which every loss depends on its own example alone, however odd: none of them may be refused.

Each case makes (model, data, loss function) from a seed; data is a dataset or a DataLoader.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from case_models import Wired
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

SIZE, CLASSES = 120, 3
Losses = Callable[[nn.Module, Any], Tensor]
Training = tuple[nn.Module, Any, Losses]


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def of_both(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[2]), batch[1], reduction="none")


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


def rows(dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(torch.randn(SIZE, 5, dtype=dtype), torch.randint(CLASSES, (SIZE,)))


def words() -> TensorDataset:
    """Token ids [12], 0 from the end on; lengths of 1 to 12."""
    lengths = torch.randint(1, 13, (SIZE,))
    ids = torch.randint(1, 30, (SIZE, 12)) * (torch.arange(12) < lengths[:, None])
    return TensorDataset(ids, torch.randint(CLASSES, (SIZE,)), lengths)


def collated(dataset: Any, collate: Callable[..., Any]) -> DataLoader[Any]:
    """``collate`` takes the columns, each stacked."""
    stacked = lambda some: collate(*(torch.stack(column) for column in zip(*some, strict=True)))  # noqa: E731
    return DataLoader(dataset, batch_size=16, collate_fn=stacked)


def of_network(loss_fn: Losses, dropout: float = 0.0) -> Callable[[], Training]:
    return lambda: (network(dropout), rows(), loss_fn)


# Numbers and types.


def not_finite() -> Training:
    data = rows()
    data.tensors[0][::7] = torch.nan
    data.tensors[0][1::7] = torch.inf
    return network(0.1), data, plain


def autocast_and_trimmed() -> Training:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(m: Wired, ids: Tensor) -> Tensor:
        return m.head(m.layer(m.emb(ids), src_key_padding_mask=ids == 0)[:, 0])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, [batch[0][:, : int(batch[2].max())], batch[1]])

    return Wired(forward, emb=nn.Embedding(30, 8), layer=layer, head=nn.Linear(8, CLASSES)), words(), loss_fn


def features_in_bfloat16() -> Training:
    """Of a frozen table without a graph, rounded otherwise in batches of another length; the losses are float32."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ids, _, lengths = batch
        longest = int(lengths.max())
        with torch.no_grad():
            sums = (model.emb(ids[:, :longest]) * longest).bfloat16().float().sum(1)
        return F.cross_entropy(model.head(sums / longest), batch[1], reduction="none")

    frozen = nn.Embedding(30, 6, padding_idx=0).requires_grad_(False)
    return nn.ModuleDict({"emb": frozen, "head": nn.Linear(6, CLASSES)}), words(), loss_fn


# Random numbers, and where they fall.


def packed_with_dropout() -> Training:
    def forward(m: Wired, ids: Tensor, lengths: Tensor) -> Tensor:
        hidden = F.dropout(m.emb(ids), 0.3, m.training)
        whole = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        return m.head(m.rnn(whole._replace(data=F.dropout(whole.data, 0.5, m.training)))[1][0])

    model = Wired(forward, emb=nn.Embedding(30, 6), rnn=nn.GRU(6, 4, batch_first=True), head=nn.Linear(4, CLASSES))
    return model, words(), of_both


def augmented(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0] * (1 + 0.1 * random.random()) + 0.1 * np.random.randn() + 0.1 * torch.randn(batch[0].shape)
    return plain(model, [x, batch[1]])


def drawn_for_some(model: nn.Module, batch: Any) -> Tensor:
    """Noise for entries that are above zero, and for no others: where it falls depends on all the data before.

    As on a GPU, whose generators go on by as much for 80 numbers as for 100.
    """
    x, before = batch[0].clone(), torch.get_rng_state()
    x[x > 0] += 0.3 * torch.randn(int((x > 0).sum()))
    torch.set_rng_state(before)
    torch.rand(1000)
    return plain(model, [x, batch[1]])


# What follows from how often something was called.


class Counting(nn.Module):
    """Counts its forwards in a buffer and in an attribute, and is louder from the third on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return x * (1.0 + 0.1 * (self.calls > 3))


def by_turns(factor: Callable[[int], float]) -> Callable[[], Training]:
    """A factor of the loss by the number of the call."""

    def make() -> Training:
        turn = iter(range(10**9))
        return network(), rows(), lambda m, b: plain(m, b) * factor(next(turn))

    return make


# Batches of odd structures.


def shared_table() -> Training:
    def collate(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"x": x, "y": y, "weights": torch.tensor([0.5, 1.0, 2.0]), "temperature": torch.tensor(2.0)}

    def loss_fn(model: nn.Module, b: Any) -> Tensor:
        return b["weights"][b["y"]] * plain(model, [b["x"] / b["temperature"], b["y"]])

    return network(), collated(rows(), collate), loss_fn


def shared_mask() -> Training:
    """A mask [T, T]; the first batch is not to have T examples, which it could be taken for."""

    def collate(ids: Tensor, y: Tensor, _: Tensor) -> list[Tensor]:
        return [F.pad(ids, (0, 28)), y, torch.ones(40, 40).tril()]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        mixed = (batch[2] / batch[2].sum(1, keepdim=True)) @ model.emb(batch[0])
        return F.cross_entropy(model.head(mixed[:, 11]), batch[1], reduction="none")

    model = nn.ModuleDict({"emb": nn.Embedding(30, 6), "head": nn.Linear(6, CLASSES)})
    return model, collated(words(), collate), loss_fn


def ragged() -> Training:
    """Bags of values side by side, told apart by where they start."""

    def collate(ids: Tensor, y: Tensor, lengths: Tensor) -> list[Tensor]:
        values = torch.cat([row[:length] for row, length in zip(ids, lengths, strict=True)])
        return [values, lengths.cumsum(0) - lengths, y]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model.head(model.bags(batch[0], batch[1])), batch[2], reduction="none")

    model = nn.ModuleDict({"bags": nn.EmbeddingBag(30, 6), "head": nn.Linear(6, CLASSES)})
    return model, collated(words(), collate), loss_fn


HONEST: dict[str, Callable[[], Training]] = {
    make.__name__: make
    for make in (
        not_finite, autocast_and_trimmed, features_in_bfloat16, packed_with_dropout, shared_table, shared_mask,
    )
}  # fmt: skip
HONEST |= {
    "bfloat16": lambda: (network().bfloat16(), rows(torch.bfloat16), plain),
    "augmented": of_network(augmented, 0.3),
    "drawn for some": of_network(drawn_for_some, 0.3),
    "counts of calls": lambda: (nn.Sequential(nn.Linear(5, 8), Counting(), nn.Linear(8, CLASSES)), rows(), plain),
    "annealed": by_turns(lambda turn: 1.0 + 0.01 * turn),
    # It is refused batches of one by its own squeeze().
    "one size only": of_network(lambda model, batch: plain(model, batch).unsqueeze(1).squeeze()),
    "ragged": ragged,
}
# An auxiliary loss in one of so many calls.
HONEST |= {
    f"every {period} calls, {phase}": by_turns(lambda turn, of=(period, phase): 1.0 + ((turn + of[1]) % of[0] == 0))
    for period, phase in ((2, 0), (3, 1), (5, 0))
}
