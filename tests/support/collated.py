"""Collate functions and losses: those that let one example reach the losses of others, and those that don't.

A case makes (model, data, loss function, options of the engine). Most texts have 4 to 9 tokens of 1 to 29.
"""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from case_models import Wired
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, default_collate

CLASSES, WORDS = 3, 30
Training = tuple[nn.Module, DataLoader[Any], Callable[[nn.Module, Any], Tensor], dict[str, Any]]
MIXING: dict[str, Callable[[], Training]] = {}
HONEST: dict[str, Callable[[], Training]] = {}


def mixing(make: Callable[[], Training]) -> Callable[[], Training]:
    MIXING[make.__name__] = make
    return make


def honest(make: Callable[[], Training]) -> Callable[[], Training]:
    HONEST[make.__name__] = make
    return make


def texts(count: int = 64, lengths: tuple[int, int] = (4, 10)) -> list[tuple[Tensor, int]]:
    """(tokens [length], class), the classes in turn."""
    return [(torch.randint(1, WORDS, (int(torch.randint(*lengths, ())),)), row % CLASSES) for row in range(count)]


def features(count: int = 64) -> list[tuple[Tensor, int]]:
    return [(torch.randn(5), row % CLASSES) for row in range(count)]


def loader(data: Any, collate: Callable[[list[Any]], Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=16, collate_fn=collate)


def padded(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """To the longest text, with the mask and the lengths that honest losses need."""
    ids = pad_sequence([text for text, _ in rows], batch_first=True)
    lengths = torch.tensor([len(text) for text, _ in rows])
    return {"ids": ids, "mask": ids > 0, "lengths": lengths, "y": torch.tensor([y for _, y in rows])}


def padded_on_the_left(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    batch = padded([(text.flip(0), y) for text, y in rows])
    return {**batch, "ids": batch["ids"].flip(1), "mask": batch["mask"].flip(1)}


def by(forward: Callable[..., Tensor], **parts: nn.Module) -> Wired:
    return Wired(forward, emb=nn.Embedding(WORDS, 6), head=nn.Linear(6, CLASSES), **parts)


def class_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch["y"], reduction="none")


def next_token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[B, T - 1]: zero where there is padding."""
    logits = model(batch["ids"][:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none", ignore_index=0)


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))


def masked_mean(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (hidden * batch["mask"].unsqueeze(2)).sum(1) / batch["lengths"].unsqueeze(1)


# Padding to the longest text of the batch.


@mixing
def token_losses_averaged_over_the_padded_length() -> Training:
    return language_model(), loader(texts(), padded), lambda m, b: next_token_losses(m, b).mean(1), {}


@mixing
def mean_pooling_without_a_mask() -> Training:
    return by(lambda m, b: m.head(m.emb(b["ids"]).mean(1))), loader(texts(), padded), class_losses, {}


@mixing
def the_last_state_of_an_lstm() -> Training:
    model = by(lambda m, b: m.head(m.rnn(m.emb(b["ids"]))[1][0][0]), rnn=nn.LSTM(6, 6, batch_first=True))
    return model, loader(texts(), padded), class_losses, {}


@mixing
def attention_without_a_mask() -> Training:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    return (
        by(lambda m, b: m.head(m.layer(m.emb(b["ids"]))[:, 0]), layer=layer),
        loader(texts(), padded),
        class_losses,
        {},
    )


@mixing
def positions_from_the_left_of_padding() -> Training:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        hidden = m.emb(batch["ids"]) + m.positions(torch.arange(batch["ids"].shape[1])).expand(
            len(batch["ids"]), -1, -1
        )
        return m.head(masked_mean(hidden, batch))

    return by(forward, positions=nn.Embedding(300, 6)), loader(texts(), padded_on_the_left), class_losses, {}


@mixing
def group_norm_over_the_padding() -> Training:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        hidden = m.norm(m.emb(batch["ids"]).transpose(1, 2)).transpose(1, 2)
        return m.head(masked_mean(hidden.square(), batch))

    return by(forward, norm=nn.GroupNorm(2, 6)), loader(texts(), padded), class_losses, {}


@mixing
def fourier_transform_over_the_padding() -> Training:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        return m.head(torch.fft.fft(m.emb(batch["ids"]), dim=1).real[:, 1].square())

    return by(forward), loader(texts(), padded), class_losses, {}


# What else a collate function computes over its examples.


def counted(rows: list[tuple[Tensor, int]]) -> dict[str, Any]:
    batch = padded(rows)
    return {**batch, "count": int(batch["mask"].sum())}


@mixing
def divided_by_the_batch_s_number_of_tokens() -> Training:
    return language_model(), loader(texts(), counted), lambda m, b: next_token_losses(m, b).sum(1) / b["count"], {}


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@mixing
def mixup() -> Training:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return 0.7 * x + 0.3 * x.flip(0), y

    return network(), loader(features(), collate), plain, {}


@mixing
def mixup_at_random() -> Training:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y

    return network(), loader(features(), collate), plain, {}


@mixing
def features_standardized_by_the_batch() -> Training:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return (x - x.mean(0)) / x.std(0), y

    return network(), loader(features(), collate), plain, {}


@mixing
def class_weights_counted_in_the_batch() -> Training:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x, y, len(y) / torch.bincount(y, minlength=CLASSES).clamp(min=1)

    return network(), loader(features(), collate), lambda m, b: plain(m, b) * b[2][b[1]], {}


class Transformed(torch.utils.data.Dataset[Any]):
    """Reads several examples at once, and centres them, as a transform over a batch does."""

    def __init__(self, data: list[tuple[Tensor, int]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        return self.data[row]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        x = torch.stack([self.data[row][0] for row in rows])
        return [(each, self.data[row][1]) for each, row in zip(x - x.mean(0), rows, strict=True)]


@mixing
def centred_where_the_data_set_reads_several() -> Training:
    return network(), loader(Transformed(features()), default_collate), plain, {}


# Batches of every structure, in which a model takes the mean of the batch away.


def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x - x.mean(0)), y, reduction="none")


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


STRUCTURES: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "lists of one entry each": (
        lambda rows: ([x for x, _ in rows], [{"y": torch.tensor(y)} for _, y in rows]),
        lambda b: (torch.stack(b[0]), torch.stack([each["y"] for each in b[1]])),
    ),
    "an object": (
        lambda rows: types.SimpleNamespace(**dict(zip(("x", "y"), default_collate(rows), strict=True))),
        lambda b: (b.x, b.y),
    ),
    "a dataclass": (lambda rows: Pair(*default_collate(rows)), lambda b: (b.x, b.y)),
    "strings beside tensors": (
        lambda rows: {"x": default_collate(rows)[0], "y": default_collate(rows)[1], "names": ["a"] * len(rows)},
        lambda b: (b["x"], b["y"]),
    ),
    "strings": (
        lambda rows: [",".join(map(str, [*x.tolist(), y])) for x, y in rows],
        lambda b: (
            torch.tensor([[float(n) for n in row.split(",")[:-1]] for row in b]),
            torch.tensor([int(row.split(",")[-1]) for row in b]),
        ),
    ),
    "nested, strided": (
        lambda rows: (torch.nested.nested_tensor([x for x, _ in rows]), torch.tensor([y for _, y in rows])),
        lambda b: (b[0].to_padded_tensor(0.0), b[1]),
    ),
    "nested, jagged": (
        lambda rows: (
            torch.nested.nested_tensor([x for x, _ in rows], layout=torch.jagged),
            torch.tensor([y for _, y in rows]),
        ),
        lambda b: (b[0].values().view(len(b[1]), -1), b[1]),
    ),
}


def structured(name: str, loss: Callable[..., Tensor]) -> Callable[[], Training]:
    collate, read = STRUCTURES[name]
    return lambda: (network(), loader(features(), collate), lambda m, b: loss(m, *read(b)), {})


MIXING |= {f"centred, {name}": structured(name, centred) for name in STRUCTURES}
HONEST |= {name: structured(name, lambda m, x, y: F.cross_entropy(m(x), y, reduction="none")) for name in STRUCTURES}


@mixing
def divided_by_the_number_of_boxes() -> Training:
    """Losses of a detector: each image has its own number of targets."""

    def collate(rows: list[Any]) -> Any:
        return [text for text, _ in rows], [{"boxes": text.float().unsqueeze(1)} for text, _ in rows]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        count = sum(len(each["boxes"]) for each in batch[1])
        return torch.stack([(model(each["boxes"]) ** 2).sum() for each in batch[1]]) / count

    return nn.Linear(1, 2), loader(texts(), collate), loss_fn, {}


# Users: the engine knows rows by their places.

USERS = {"unit_ids": [row // 2 for row in range(64)], "batch_size": 8}


def sorted_by_length(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
    return {**padded([rows[row] for row in order]), "order": torch.tensor(order)}


def packed() -> nn.Module:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        rows = pack_padded_sequence(m.emb(batch["ids"]), batch["lengths"], batch_first=True)
        return m.head(m.rnn(rows)[1][0])

    return by(forward, rnn=nn.GRU(6, 6, batch_first=True))


@mixing
def users_rows_sorted_by_length() -> Training:
    return packed(), loader(texts(), sorted_by_length), class_losses, USERS


@mixing
def two_users_rows_sorted_by_length() -> Training:
    """Halves by length show nothing of a sort by length: each user is a half."""
    data = [text for pair in range(2) for text in texts(2, (4 + 5 * pair, 9 + 5 * pair))]
    return packed(), loader(data, sorted_by_length), class_losses, {"unit_ids": [0, 0, 1, 1], "batch_size": 2}


@honest
def users_rows_in_their_order() -> Training:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        rows = pack_padded_sequence(m.emb(batch["ids"]), batch["lengths"], batch_first=True, enforce_sorted=False)
        return m.head(m.rnn(rows)[1][0])

    return by(forward, rnn=nn.GRU(6, 6, batch_first=True)), loader(texts(), padded), class_losses, USERS


@honest
def rows_sorted_by_length() -> Training:
    return packed(), loader(texts(), sorted_by_length), class_losses, {}


@honest
def averaged_over_own_tokens() -> Training:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return next_token_losses(model, batch).sum(1) / (batch["lengths"] - 1)

    return language_model(), loader(texts(), padded), loss_fn, {}


@honest
def mean_pooling_with_a_mask() -> Training:
    model = by(lambda m, b: m.head(masked_mean(m.drop(m.emb(b["ids"])), b)), drop=nn.Dropout(0.2))
    return model, loader(texts(), padded), class_losses, {}


@honest
def padded_to_a_fixed_length() -> Training:
    def collate(rows: list[Any]) -> Any:
        batch = padded(rows)
        return {**batch, "ids": F.pad(batch["ids"], (0, 12 - batch["ids"].shape[1]))}

    return by(lambda m, b: m.head(m.emb(b["ids"]).mean(1))), loader(texts(), collate), class_losses, {}


@honest
def attention_with_a_mask() -> Training:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        return m.head(m.layer(m.emb(batch["ids"]), src_key_padding_mask=~batch["mask"])[:, 0])

    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    return by(forward, layer=layer), loader(texts(), padded), class_losses, {}


@honest
def tokens_masked_at_random() -> Training:
    """A masked language model: the collate function draws which tokens are to be guessed."""

    def collate(rows: list[Any]) -> Any:
        batch = padded(rows)
        guessed = (torch.rand(batch["ids"].shape) < 0.3) & batch["mask"]
        return {"ids": batch["ids"].masked_fill(guessed, 0), "y": batch["ids"].masked_fill(~guessed, -100)}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["y"], reduction="none", ignore_index=-100)
        return losses.sum(1) / (batch["y"] >= 0).sum(1).clamp(min=1)

    return language_model(), loader(texts(), collate), loss_fn, {}


class Augmented(torch.utils.data.Dataset[Any]):
    """Features with noise of torch's, Python's and numpy's random numbers, drawn when an example is read."""

    def __init__(self) -> None:
        self.data = features()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        x, y = self.data[row]
        return x + torch.randn(5) + random.random() + float(np.random.rand()), y


@honest
def augmented_at_random() -> Training:
    return network(), loader(Augmented(), default_collate), plain, {}


@honest
def augmented_in_a_subset() -> Training:
    part = torch.utils.data.Subset(Augmented(), range(1, 60))
    return network(), loader(part, default_collate), plain, {}


class Drawing(Augmented):
    """Draws from a generator of its own, which no seed of torch's reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, row: int) -> Any:
        x, y = self.data[row]
        return x + torch.randn(5, generator=self.generator), y


@honest
def augmented_by_a_generator_of_its_own() -> Training:
    return network(), loader(Drawing(), default_collate), plain, {}
