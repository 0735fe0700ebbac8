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
from PIL import Image
from private_runs import losses_of as plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, default_collate

CLASSES, WORDS = 3, 30
Training = tuple[nn.Module, DataLoader[Any], Callable[[nn.Module, Any], Tensor], dict[str, Any]]
MIXING: dict[str, Callable[[], Training]] = {}
HONEST: dict[str, Callable[[], Training]] = {}


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


def of_texts(
    model,
    losses=class_losses,
    collate=padded,
    **options,
):
    return lambda: (model(), loader(texts(), collate), losses, options)


def token_losses_over(count: Callable[[dict[str, Any]], Any]) -> Callable[..., Tensor]:
    return lambda model, batch: next_token_losses(model, batch).sum(1) / count(batch)


# Padding to the longest text of the batch.


def counted(rows: list[tuple[Tensor, int]]) -> dict[str, Any]:
    batch = padded(rows)
    return {**batch, "count": int(batch["mask"].sum())}


MIXING |= {
    "token_losses_averaged_over_the_padded_length": of_texts(
        language_model, token_losses_over(lambda batch: batch["ids"].shape[1] - 1)
    ),
    "mean_pooling_without_a_mask": of_texts(lambda: by(lambda m, b: m.head(m.emb(b["ids"]).mean(1)))),
    "divided_by_the_batch_s_number_of_tokens": of_texts(
        language_model, token_losses_over(lambda batch: batch["count"]), counted
    ),
}
HONEST |= {
    "averaged_over_own_tokens": of_texts(language_model, token_losses_over(lambda batch: batch["lengths"] - 1)),
    "mean_pooling_with_a_mask": of_texts(
        lambda: by(lambda m, b: m.head(masked_mean(m.drop(m.emb(b["ids"])), b)), drop=nn.Dropout(0.2))
    ),
}


def guessed(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """For a masked language model: the collate function draws which tokens are to be guessed."""
    batch = padded(rows)
    hidden = (torch.rand(batch["ids"].shape) < 0.3) & batch["mask"]
    return {"ids": batch["ids"].masked_fill(hidden, 0), "y": batch["ids"].masked_fill(~hidden, -100)}


def guessing_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["y"], reduction="none", ignore_index=-100)
    return losses.sum(1) / (batch["y"] >= 0).sum(1).clamp(min=1)


HONEST["tokens_masked_at_random"] = of_texts(language_model, guessing_losses, guessed)


# What else a collate function computes over its examples.


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def of_features(data, collate=default_collate):
    return lambda: (network(), loader(data(), collate), plain, {})


class Features(torch.utils.data.Dataset[Any]):
    """Rows (x, y), of which x is read by ``read``."""

    def __init__(self, read: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.data, self.read = features(), read

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        x, y = self.data[row]
        return self.read(x), y


class AtOnce(Features):
    """Reads several examples at once, as two tensors, which a collate function leaves, or as a list."""

    def __init__(self, read: Callable[[Tensor], Tensor], listed: bool = False) -> None:
        super().__init__(read)
        self.listed = listed

    def __getitems__(self, rows: list[int]) -> Any:
        x, y = default_collate([self.data[row] for row in rows])
        return [*zip(self.read(x), y, strict=True)] if self.listed else (self.read(x), y)


def noisy(x: Tensor) -> Tensor:
    """By torch's, Python's and numpy's random numbers."""
    return x + torch.randn(x.shape) + random.random() + float(np.random.rand())


def by_its_own_generator() -> Features:
    """Which no seed of torch's reaches."""
    generator = torch.Generator().manual_seed(0)
    return Features(lambda x: x + torch.randn(5, generator=generator))


def mixed(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def mixup(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return mixed(x), y


def mixed_in_pairs(x: Tensor) -> Tensor:
    """Of neighbouring rows."""
    other = torch.arange(len(x)) ^ 1
    return 0.7 * noisy(x) + 0.3 * x[other.clamp(max=len(x) - 1)]


def by_content(x: Tensor) -> Tensor:
    """Of which another number of random numbers is drawn for another row."""
    return torch.stack([row + torch.randn(5 + int(row.sum() > 0))[:5] for row in x])


def centred(x: Tensor) -> Tensor:
    return (x := noisy(x)) - x.mean(0)


def as_read(batch: Any) -> Any:
    return batch


class Stored(AtOnce):
    """Gives the x of each row as another kind of object."""

    def __init__(self, read: Callable[[Tensor], Tensor], store: Callable[[Tensor], Any]) -> None:
        super().__init__(read, listed=True)
        self.store = store

    def __getitems__(self, rows: list[int]) -> Any:
        return [(self.store(x), y) for x, y in super().__getitems__(rows)]


# Of a row x: (the object that the data set gives, its numbers again).
STORED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "images": (lambda x: Image.fromarray(x.numpy()[None]), np.array),
    "texts": (lambda x: " ".join(map(str, x.tolist())), str.split),
    "arrays of texts": (lambda x: np.array(list(map(str, x.tolist()))), np.array),
}


def stored(kind: str, read: Callable[[Tensor], Tensor]) -> Callable[[], Training]:
    store, numbers = STORED[kind]

    def collate(rows: list[Any]) -> Any:
        found = [torch.from_numpy(np.array(numbers(x), dtype=np.float32)).view(-1) for x, _ in rows]
        return torch.stack(found), default_collate([y for _, y in rows])

    return of_features(lambda: Stored(read, store), collate)


MIXING |= {
    "mixup": of_features(features, mixup),
    "centred_where_the_data_set_reads_several": of_features(lambda: AtOnce(lambda x: x - x.mean(0), listed=True)),
    "mixup_where_the_data_set_reads_several": of_features(lambda: AtOnce(mixed, listed=True)),
    "mixup_of_pairs_where_the_data_set_reads_several": of_features(lambda: AtOnce(mixed_in_pairs, listed=True)),
    "centred_and_augmented_where_the_data_set_reads_several": of_features(lambda: AtOnce(centred, listed=True)),
    "mixup_where_the_data_set_reads_a_batch": of_features(lambda: AtOnce(mixed), as_read),
} | {f"mixup_where_the_data_set_reads_several, {kind}": stored(kind, mixed) for kind in STORED}
HONEST |= {
    "augmented_at_random": of_features(lambda: Features(noisy)),
    "augmented_by_a_generator_of_its_own": of_features(by_its_own_generator),
    "augmented_where_the_data_set_reads_several": of_features(lambda: AtOnce(noisy, listed=True)),
    "augmented_twice_by_content_where_the_data_set_reads_several": of_features(
        lambda: AtOnce(lambda x: by_content(by_content(x)), listed=True)
    ),
    "augmented_by_content_where_the_data_set_reads_several": of_features(lambda: AtOnce(by_content, listed=True)),
    "augmented_where_the_data_set_reads_a_batch": of_features(lambda: AtOnce(noisy), as_read),
} | {f"augmented_where_the_data_set_reads_several, {kind}": stored(kind, noisy) for kind in STORED}


# Batches of every structure, in which a model takes the mean of the batch away.


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
    "nested, jagged": (
        lambda rows: (
            torch.nested.nested_tensor([x for x, _ in rows], layout=torch.jagged),
            torch.tensor([y for _, y in rows]),
        ),
        lambda b: (b[0].values().view(len(b[1]), -1), b[1]),
    ),
}


def structured(name: str, of_x: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[[], Training]:
    collate, read = STRUCTURES[name]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        return plain(model, [of_x(x), y])

    return lambda: (network(), loader(features(), collate), loss_fn, {})


MIXING |= {f"centred, {name}": structured(name, lambda x: x - x.mean(0)) for name in STRUCTURES}
HONEST |= {name: structured(name) for name in STRUCTURES}


# Users: the engine knows rows by their places.

USERS = {"unit_ids": [row // 2 for row in range(64)], "batch_size": 8}


def sorted_by_length(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
    return {**padded([rows[row] for row in order]), "order": torch.tensor(order)}


def packed(enforce_sorted: bool) -> Callable[[], nn.Module]:
    def forward(m: Wired, batch: dict[str, Tensor]) -> Tensor:
        options = {"batch_first": True, "enforce_sorted": enforce_sorted}
        return m.head(m.rnn(pack_padded_sequence(m.emb(batch["ids"]), batch["lengths"], **options))[1][0])

    return lambda: by(forward, rnn=nn.GRU(6, 6, batch_first=True))


def two_users() -> Training:
    """Halves by length show nothing of a sort by length: each user is a half."""
    data = [text for pair in range(2) for text in texts(2, (4 + 5 * pair, 9 + 5 * pair))]
    options = {"unit_ids": [0, 0, 1, 1], "batch_size": 2}
    return packed(True)(), loader(data, sorted_by_length), class_losses, options


MIXING |= {
    "users_rows_sorted_by_length": of_texts(packed(True), collate=sorted_by_length, **USERS),
    "two_users_rows_sorted_by_length": two_users,
}
HONEST |= {
    "users_rows_in_their_order": of_texts(packed(False), **USERS),
    "rows_sorted_by_length": of_texts(packed(True), collate=sorted_by_length),
}


# Rows that a collate function gives other places, or brings twice into one batch, at random.


def shuffled_by_torch(rows: list[Any]) -> Any:
    return default_collate([rows[place] for place in torch.randperm(len(rows))])


def shuffled_by_python(rows: list[Any]) -> Any:
    return default_collate(random.sample(rows, len(rows)))


def drawn_anew(rows: list[Any]) -> Any:
    """A bootstrap."""
    return default_collate(random.choices(rows, k=len(rows)))


def one_in_the_place_of_another(rows: list[Any]) -> Any:
    order = torch.randperm(len(rows)).tolist()
    return default_collate([rows[place] for place in [*order[:-1], order[0]]])


MIXING |= {
    "users_rows_shuffled_by_torch": lambda: (*of_features(features, shuffled_by_torch)()[:3], USERS),
    "one_row_in_the_place_of_another": of_features(features, one_in_the_place_of_another),
    "rows_drawn_anew": of_features(features, drawn_anew),
}
HONEST |= {
    "rows_shuffled_by_python": of_features(features, shuffled_by_python),
}


def divided_by_the_number_of_boxes() -> Training:
    """Losses of a detector: each image has its own number of targets."""

    def collate(rows: list[Any]) -> Any:
        return [text for text, _ in rows], [{"boxes": text.float().unsqueeze(1)} for text, _ in rows]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        count = sum(len(each["boxes"]) for each in batch[1])
        return torch.stack([(model(each["boxes"]) ** 2).sum() for each in batch[1]]) / count

    return nn.Linear(1, 2), loader(texts(), collate), loss_fn, {}


MIXING["divided_by_the_number_of_boxes"] = divided_by_the_number_of_boxes


def classes_counted() -> Training:
    """Weights by the counts of two classes, of which the short texts and the long ones have as many."""
    data = [(torch.randint(1, WORDS, (length,)), length % 2) for length in range(4, 12)]

    def collate(rows: list[Any]) -> Any:
        batch = padded([(F.pad(text, (0, 12 - len(text))), y) for text, y in rows])
        return {**batch, "weights": len(rows) / torch.bincount(batch["y"], minlength=2)}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return class_losses(model, batch) * batch["weights"][batch["y"]]

    return by(lambda m, b: m.head(m.emb(b["ids"]).mean(1))), loader(data, collate), loss_fn, {"batch_size": 8}


def differences_of_long_sums() -> Training:
    """Two scores of 1e4 and more that are subtracted, as log-probabilities of long texts are: rounding, and no more."""

    def collate(rows: list[Any]) -> Any:
        x = pad_sequence(rows, batch_first=True)
        return x, (x != 0).any(2)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, mask = batch
        one, two = ((100 + model(part)[..., 0]) * mask for part in (x, x * 1.01))
        return F.softplus(one.sum(1) - two.sum(1))

    data = [torch.randn(int(length), 8) for length in torch.randint(50, 400, (64,))]
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loader(data, collate), loss_fn, {}


MIXING["weighted_by_counts_that_halves_share"] = classes_counted
HONEST["differences_of_long_sums"] = differences_of_long_sums
