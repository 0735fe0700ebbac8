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
Training = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
HONEST: dict[str, Callable[[], Training]] = {}


def honest(make: Callable[[], Training]) -> Callable[[], Training]:
    HONEST[make.__name__] = make
    return make


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


def rows(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> TensorDataset:
    return TensorDataset(scale * torch.randn(SIZE, 5, dtype=dtype), torch.randint(CLASSES, (SIZE,)))


def words() -> TensorDataset:
    """Token ids [12], 0 from the end on; lengths of 1 to 12."""
    lengths = torch.randint(1, 13, (SIZE,))
    ids = torch.randint(1, 30, (SIZE, 12)) * (torch.arange(12) < lengths[:, None])
    return TensorDataset(ids, torch.randint(CLASSES, (SIZE,)), lengths)


def collated(dataset: Any, collate: Callable[[list[Any]], Any]) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=16, collate_fn=collate)


@honest
def dropout() -> Training:
    return network(0.5), rows(), plain


@honest
def float64() -> Training:
    return network(0.2).double(), rows(torch.float64), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")


@honest
def bfloat16() -> Training:
    return network().bfloat16(), rows(torch.bfloat16), plain


@honest
def float16() -> Training:
    return network().half(), rows(torch.float16), plain


@honest
def huge() -> Training:
    return network(), rows(scale=1e6), lambda m, b: 1e8 * plain(m, b)


@honest
def tiny_and_trimmed() -> Training:
    """Losses next to zero, which are rounding alone, of rows as long as the longest of the batch."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ids, _, lengths = batch
        hidden = model.emb(ids[:, : int(lengths.max())])
        pooled = (hidden * (ids[:, : hidden.shape[1]] > 0).unsqueeze(2)).sum(1) / lengths.unsqueeze(1)
        logits = model.head(pooled)
        return F.cross_entropy(40 * logits, logits.argmax(1), reduction="none")

    return nn.ModuleDict({"emb": nn.Embedding(30, 6), "head": nn.Linear(6, CLASSES)}), words(), loss_fn


@honest
def not_finite() -> Training:
    data = rows()
    data.tensors[0][::7] = torch.nan
    data.tensors[0][1::7] = torch.inf
    return network(0.1), data, plain


def by_attention(drop: float) -> Wired:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=drop, batch_first=True)

    def forward(m: Wired, ids: Tensor) -> Tensor:
        return m.head(m.layer(m.emb(ids), src_key_padding_mask=ids == 0)[:, 0])

    return Wired(forward, emb=nn.Embedding(30, 8), layer=layer, head=nn.Linear(8, CLASSES))


@honest
def attention_with_padding() -> Training:
    return by_attention(0.1), words(), plain


@honest
def autocast_and_trimmed() -> Training:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, [batch[0][:, : int(batch[2].max())], batch[1]])

    return by_attention(0.0), words(), loss_fn


@honest
def packed_with_dropout() -> Training:
    def forward(m: Wired, ids: Tensor, lengths: Tensor) -> Tensor:
        whole = pack_padded_sequence(
            F.dropout(m.emb(ids), 0.3, m.training), lengths, batch_first=True, enforce_sorted=False
        )
        return m.head(m.rnn(whole._replace(data=F.dropout(whole.data, 0.5, m.training)))[1][0])

    model = Wired(forward, emb=nn.Embedding(30, 6), rnn=nn.GRU(6, 4, batch_first=True), head=nn.Linear(4, CLASSES))
    return model, words(), lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1], reduction="none")


@honest
def sorted_with_dropout() -> Training:
    """Dropout of rows that are sorted by their lengths, and put back."""

    def forward(m: Wired, ids: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        return m.head(m.drop(m.emb(ids[order])).mean(1)[order.argsort()])

    frozen = nn.Embedding(30, 6).requires_grad_(False)
    model = Wired(forward, emb=frozen, drop=nn.Dropout(0.4), head=nn.Linear(6, CLASSES))
    return model, words(), lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1], reduction="none")


@honest
def time_first() -> Training:
    model = Wired(lambda m, x: m.head(m.rnn(x)[0].sum(0)), rnn=nn.LSTM(3, 4), head=nn.Linear(4, CLASSES))
    data = TensorDataset(torch.randn(SIZE, 16, 3), torch.randint(CLASSES, (SIZE,)))

    def collate(some: list[Any]) -> list[Tensor]:
        return [torch.stack([x for x, _ in some], 1), torch.stack([y for _, y in some])]

    return model, collated(data, collate), plain


@honest
def norms_in_eval_mode() -> Training:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    for _ in range(3):
        model(torch.randn(16, 5))
    return model.eval(), rows(), plain


@honest
def convolution() -> Training:
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES))
    data = TensorDataset(torch.randn(SIZE, 2, 6, 6), torch.randint(CLASSES, (SIZE,)))
    return model, data, lambda m, b: plain(m, [b[0].to(memory_format=torch.channels_last), b[1]])


@honest
def tokens_in_each() -> Training:
    """Next-token losses of an example averaged over its own tokens."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ids = batch[0]
        logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none", ignore_index=0)
        return losses.view(len(ids), -1).sum(1) / (ids[:, 1:] > 0).sum(1).clamp(min=1)

    return nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 30)), words(), loss_fn


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


@honest
def counts_of_calls() -> Training:
    return nn.Sequential(nn.Linear(5, 8), Counting(), nn.Linear(8, CLASSES)), rows(), plain


def every(period: int, phase: int) -> Callable[[], Training]:
    """An auxiliary loss in one of so many calls."""

    def make() -> Training:
        turn = iter(range(phase, 10**9))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return plain(model, batch) * (2.0 if next(turn) % period == 0 else 1.0)

        return network(), rows(), loss_fn

    return make


HONEST |= {f"every {period} calls, {phase}": every(period, phase) for period in (2, 3, 4, 5, 7) for phase in (0, 1, 2)}


@honest
def annealed() -> Training:
    turn = iter(range(10**9))
    return network(), rows(), lambda m, b: plain(m, b) * (1.0 + 0.01 * next(turn))


@honest
def augmented() -> Training:
    """By three sources of random numbers."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] * (1 + 0.1 * random.random()) + 0.1 * np.random.randn() + 0.1 * torch.randn(batch[0].shape)
        return plain(model, [x, batch[1]])

    return network(0.3), rows(), loss_fn


@honest
def drawn_for_some() -> Training:
    """Noise for entries that are above zero, and for no others: where it falls depends on all the data before."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone()
        x[x > 0] += 0.3 * torch.randn(int((x > 0).sum()))
        return plain(model, [x, batch[1]])

    return network(0.3), rows(), loss_fn


@honest
def drawn_for_some_on_a_gpu() -> Training:
    """The same where generators don't tell how much was drawn: a GPU's go on by as much for 80 numbers as for 100."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, before = batch[0].clone(), torch.get_rng_state()
        x[x > 0] += 0.3 * torch.randn(int((x > 0).sum()))
        torch.set_rng_state(before)
        torch.rand(1000)
        return plain(model, [x, batch[1]])

    return network(0.3), rows(), loss_fn


@honest
def shared_table() -> Training:
    def collate(some: list[Any]) -> dict[str, Tensor]:
        x, y = (torch.stack(column) for column in zip(*some, strict=True))
        return {"x": x, "y": y, "weights": torch.tensor([0.5, 1.0, 2.0]), "temperature": torch.tensor(2.0)}

    return (
        network(),
        collated(rows(), collate),
        lambda m, b: b["weights"][b["y"]] * plain(m, [b["x"] / b["temperature"], b["y"]]),
    )


@honest
def shared_mask() -> Training:
    """A mask [T, T]; the first batch is not to have T examples, which it could be taken for."""

    def collate(some: list[Any]) -> list[Tensor]:
        ids, y, _ = (torch.stack(column) for column in zip(*some, strict=True))
        ids = F.pad(ids, (0, 28))
        return [ids, y, torch.ones(40, 40).tril()]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        mixed = (batch[2] / batch[2].sum(1, keepdim=True)) @ model.emb(batch[0])
        return F.cross_entropy(model.head(mixed[:, 11]), batch[1], reduction="none")

    model = nn.ModuleDict({"emb": nn.Embedding(30, 6), "head": nn.Linear(6, CLASSES)})
    return model, collated(words(), collate), loss_fn


def ragged(as_offsets: bool) -> Callable[[], Training]:
    """Bags of values side by side, told apart by their lengths or by where they start."""

    def collate(some: list[Any]) -> list[Tensor]:
        lengths = torch.stack([length for *_, length in some])
        values = torch.cat([ids[:length] for ids, _, length in some])
        return [values, lengths.cumsum(0) - lengths if as_offsets else lengths, torch.stack([y for _, y, _ in some])]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        values, where, labels = batch
        starts = where if as_offsets else where.cumsum(0) - where
        return F.cross_entropy(model.head(model.bags(values, starts)), labels, reduction="none")

    def make() -> Training:
        model = nn.ModuleDict({"bags": nn.EmbeddingBag(30, 6), "head": nn.Linear(6, CLASSES)})
        return model, collated(words(), collate), loss_fn

    return make


HONEST |= {"ragged, offsets": ragged(True), "ragged, lengths": ragged(False)}


@honest
def a_list_of_tensors() -> Training:
    """One [length, 5] for each example, some of them with as many rows as the batch has."""

    def collate(some: list[Any]) -> tuple[list[Tensor], Tensor]:
        return [torch.ones(int(length), 5) * y for _, y, length in some], torch.stack([y for _, y, _ in some])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        weights = torch.arange(1.0, 40.0).unsqueeze(1)
        sums = torch.stack([(row.cumsum(0) * weights[: len(row)]).sum(0) for row in batch[0]])
        return plain(model, [sums / 100, batch[1]])

    data = words()
    return network(), collated(TensorDataset(*data.tensors[:2], torch.randint(10, 20, (SIZE,))), collate), loss_fn


@honest
def slopes() -> Training:
    """A loss of the model's slope by its inputs, which needs a graph of its own."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return plain(model, batch) + 0.0 * slope.detach().square().sum(1)

    return network(), rows(), loss_fn


@honest
def lengths_in_a_list() -> Training:
    def collate(some: list[Any]) -> dict[str, Any]:
        ids, y, _ = (torch.stack(column) for column in zip(*some, strict=True))
        return {"ids": ids, "y": y, "lengths": [int(length) for *_, length in some], "names": ["a"] * len(some)}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        shown = torch.arange(12) < torch.tensor(batch["lengths"])[:, None]
        means = (model.emb(batch["ids"]) * shown.unsqueeze(2)).sum(1) / shown.sum(1, keepdim=True)
        return F.cross_entropy(model.head(means), batch["y"], reduction="none")

    model = nn.ModuleDict({"emb": nn.Embedding(30, 6), "head": nn.Linear(6, CLASSES)})
    return model, collated(words(), collate), loss_fn


@honest
def experts() -> Training:
    """Each example goes to one of four frozen experts, whose batches have other sizes when others come to them."""

    def forward(m: Wired, x: Tensor) -> Tensor:
        expert, out = m.router(x).argmax(1), torch.zeros(len(x), 8)
        for number in expert.unique().tolist():
            out[expert == number] = m.experts[number](x[expert == number])
        return m.head(out)

    frozen = nn.ModuleList([nn.Linear(5, 8) for _ in range(4)]).requires_grad_(False)
    router = nn.Linear(5, 4).requires_grad_(False)
    return Wired(forward, router=router, experts=frozen, head=nn.Linear(8, CLASSES)), rows(), plain


@honest
def one_size_only() -> Training:
    """A loss function that is refused batches of another size than the last ones by its own squeeze()."""
    return network(), rows(), lambda m, b: plain(m, b).unsqueeze(1).squeeze()


@honest
def zero_for_many() -> Training:
    return network(), rows(), lambda m, b: plain(m, b) * (b[1] == 0)


@honest
def by_a_constant() -> Training:
    return network(), rows(), lambda m, b: plain(m, b) / 16


@honest
def a_teacher() -> Training:
    teacher = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)).eval()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0]).softmax(1)
        return -(wanted * model(batch[0]).log_softmax(1)).sum(1)

    return network(), rows(), loss_fn
