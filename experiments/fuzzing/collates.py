"""Data sets of texts, series, numbers and images, functions that collate them, and small models that read the batches.

A collated batch is a dict: "x" [B, T, ...] or [B, ...], "mask" [B, T] (what a text's own tokens are), "labels" [B],
"weights" [B] (factors of the losses) and "rows" [B] (place of each row before sorting). Honest collates change no
example's loss because of others in its batch; each dishonest one makes a mistake that programs make.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

__all__ = ["COLLATES", "HOOKS", "PACKINGS", "Collate", "Rows", "draw_data", "losses_of", "model_for"]

TOKENS, WIDTH, FIXED, CLASSES = 12, 4, 12, 3
Batch = dict[str, Any]


class Rows(Dataset):
    """Examples in memory, each with a name that stays when others are added or left out.

    Args:
        examples: {"x": Tensor, "label": int, "name": int}.
        augment: how `__getitem__` changes them: "no", "own" (by random numbers of the example's name) or "global" (by
            torch's generator).
    """

    def __init__(self, examples: list[dict[str, Any]], augment: str = "no") -> None:
        self.examples, self.augment = examples, augment

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: int) -> dict[str, Any]:
        example = dict(self.examples[place])
        if self.augment != "no":
            own = torch.Generator().manual_seed(example["name"]) if self.augment == "own" else None
            x = example["x"]
            other = torch.randint(TOKENS, x.shape, generator=own) if not x.is_floating_point() else x + 0.1
            example["x"] = other.where(torch.rand(x.shape, generator=own) < 0.3, x)
        return example


def draw_data(kind: str, count: int, generator: torch.Generator, longest: int = 8) -> list[dict[str, Any]]:
    """Examples of a kind, the last one as long as ``longest``, if it has a length."""
    found = []
    for name in range(count):
        length = longest if name == count - 1 else int(torch.randint(2, 8, (), generator=generator))
        sizes = {"texts": (length,), "series": (length, 3), "numbers": (5,), "images": (2, 6, 6)}[kind]
        x = torch.randn(sizes, generator=generator, dtype=torch.float64)
        if kind == "texts":
            x = torch.randint(1, TOKENS, sizes, generator=generator)
        found.append({"x": x, "label": int(torch.randint(CLASSES, (), generator=generator)), "name": name})
    return found


def stacked(rows: list[dict[str, Any]], pad_to: int | None = None) -> Batch:
    """All that the collates begin with: padded at the end where examples have lengths, with a mask."""
    xs = [row["x"] if pad_to is None else row["x"][:pad_to] for row in rows]
    batch = {
        "labels": torch.tensor([row["label"] for row in rows]),
        "weights": torch.ones(len(rows), dtype=torch.float64),
        "rows": torch.arange(len(rows)),
    }
    if (xs[0].dim() == 1 and xs[0].is_floating_point()) or xs[0].dim() == 3:
        return {**batch, "x": torch.stack(xs), "mask": None}
    length = max(map(len, xs)) if pad_to is None else pad_to
    x = torch.zeros(len(xs), length, *xs[0].shape[1:], dtype=xs[0].dtype)
    mask = torch.zeros(len(xs), length, dtype=torch.bool)
    for row, own in enumerate(xs):
        x[row, : len(own)], mask[row, : len(own)] = own, True
    return {**batch, "x": x, "mask": mask}


def unmasked(batch: Batch) -> Batch:
    return {**batch, "mask": torch.ones_like(batch["mask"])}


def by_length(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Tensor]:
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]["x"]))
    return [rows[row] for row in order], torch.tensor(order)


def sorted_back(rows: list[dict[str, Any]]) -> Batch:
    ordered, places = by_length(rows)
    return {**stacked(ordered), "rows": places}


def per_token(batch: Batch) -> Batch:
    """Losses over the number of tokens of the batch."""
    return {**batch, "weights": batch["weights"] * 20 / batch["mask"].sum()}


def class_weighted(batch: Batch) -> Batch:
    counts = torch.bincount(batch["labels"], minlength=CLASSES).clamp(min=1)
    return {**batch, "weights": (len(batch["labels"]) / counts)[batch["labels"]].double()}


def standardized(batch: Batch) -> Batch:
    x = batch["x"]
    return {**batch, "x": (x - x.mean(0)) / (x.std(0, correction=0) + 0.1)}


def mixed_up(batch: Batch) -> Batch:
    return {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"].roll(1, 0)}


def scaled_by_largest(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] / batch["x"].abs().max()}


def masked_at_random(rows: list[dict[str, Any]]) -> Batch:
    batch = stacked(rows)
    return {**batch, "x": batch["x"].where(torch.rand(batch["x"].shape[:2]) < 0.8, 0)}


@dataclass(frozen=True)
class Collate:
    """One way to collate.

    Attributes:
        name: what it is.
        collate: rows -> batch.
        kinds: of data that it takes.
        honest: whether an example's loss is its own; "without users": unless rows are grouped by users.
        random: whether the same rows come out otherwise each time, so that two data sets can't be compared.
        augment: of `Rows`.
    """

    name: str
    collate: Callable[[list[dict[str, Any]]], Batch]
    kinds: tuple[str, ...]
    honest: bool | str = True
    random: bool = False
    augment: str = "no"


LONG, FLAT, FLOATS = ("texts", "series"), ("numbers", "images"), ("series", "numbers", "images")
COLLATES = (
    Collate("padded, with a mask", stacked, LONG),
    Collate("padded to a fixed length", lambda rows: unmasked(stacked(rows, FIXED)), LONG),
    Collate("sorted by length", lambda rows: stacked(by_length(rows)[0]), LONG, honest="without users"),
    Collate("sorted by length, with row numbers", sorted_back, LONG),
    Collate("stacked", stacked, FLAT),
    Collate("scaled by a constant", lambda rows: {**(batch := stacked(rows)), "x": batch["x"] / 3}, FLAT),
    Collate("augmented by row", stacked, (*LONG, *FLAT), augment="own"),
    Collate("augmented at random", stacked, (*LONG, *FLAT), random=True, augment="global"),
    Collate("masked at random", masked_at_random, ("texts",), random=True),
    Collate("padded, without a mask", lambda rows: unmasked(stacked(rows)), LONG, honest=False),
    Collate("losses over the batch's tokens", lambda rows: per_token(stacked(rows)), LONG, honest=False),
    Collate("classes weighted by the batch", lambda rows: class_weighted(stacked(rows)), (*LONG, *FLAT), honest=False),
    Collate("standardized by the batch", lambda rows: standardized(stacked(rows)), FLAT, honest=False),
    Collate("mixed up", lambda rows: mixed_up(stacked(rows)), FLAT, honest=False),
    Collate("scaled by the largest", lambda rows: scaled_by_largest(stacked(rows)), FLOATS, honest=False),
)


def as_nested(batch: Batch) -> Batch:
    """Padded rows in a jagged tensor, each as long as its mask says."""
    if batch["mask"] is None:
        return batch
    lengths = batch["mask"].sum(1).tolist()
    parts = [row[:length] for row, length in zip(batch["x"], lengths, strict=True)]
    return {**batch, "x": torch.nested.nested_tensor(parts, layout=torch.jagged), "mask": torch.tensor(lengths)}


def as_lists(batch: Batch) -> Batch:
    """One entry for each example, as detection models are given."""
    return {name: None if value is None else list(value.unbind()) for name, value in batch.items()}


# What a batch is packed in.
PACKINGS: dict[str, Callable[[Batch], Any]] = {
    "dict": lambda batch: batch,
    "tuple": lambda batch: tuple(batch.values()),
    "object": lambda batch: SimpleNamespace(**batch),
    "lists": as_lists,
    "nested": as_nested,
    "dict with texts": lambda batch: {**batch, "names": [f"row {row}" for row in range(len(batch["labels"]))]},
}


def unpacked(batch: Any) -> Batch:
    """The dict of a batch in any packing."""
    if isinstance(batch, tuple):
        batch = dict(zip(("labels", "weights", "rows", "x", "mask"), batch, strict=True))
    elif isinstance(batch, SimpleNamespace):
        batch = vars(batch)
    batch = {name: torch.stack(value) if isinstance(value, list) and name != "names" else value
             for name, value in batch.items()}  # fmt: skip
    if batch["x"].is_nested:
        lengths, x = batch["mask"], batch["x"].to_padded_tensor(0)
        batch |= {"x": x, "mask": torch.arange(x.shape[1])[None] < lengths[:, None]}
    return batch


# What a tensor's hook does with the gradient of hidden values [B, WIDTH], and whether it minds other examples.
HOOKS: dict[str, tuple[Callable[[Tensor], Tensor] | None, bool]] = {
    "none": (None, True),
    "scaled": (lambda grad: 0.5 * grad, True),
    "masked": (lambda grad: grad * torch.tensor([1.0, 0.0] * (WIDTH // 2), dtype=grad.dtype), True),
    "centred": (lambda grad: grad - grad.mean(0), False),
}


class Network(nn.Module):
    """An entry, a body over positions, a mean over own positions, and a head."""

    def __init__(self, kind: str, body: str, hook: str) -> None:
        super().__init__()
        self.body, self.hook = body, HOOKS[hook][0]
        entries = {
            "texts": lambda: nn.Embedding(TOKENS, WIDTH), "series": lambda: nn.Linear(3, WIDTH),
            "numbers": lambda: nn.Linear(5, WIDTH), "images": lambda: nn.Conv2d(2, WIDTH, 3),
        }  # fmt: skip
        self.entry, self.head = entries[kind](), nn.Linear(WIDTH, CLASSES)
        if body == "lstm":
            self.inner: nn.Module = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        elif body == "transformer":
            self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        else:
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.entry(x)
        h = h.flatten(2).mean(2) if h.dim() == 4 else h
        if self.body == "lstm":
            h = self.inner(h)[0]
        elif self.body == "transformer":
            h = self.inner(h, src_key_padding_mask=~mask)
        else:
            h = self.inner(h)
        if mask is not None:
            own = mask.to(h.dtype)[:, :, None]
            h = (h * own).sum(1) / own.sum(1)
        if self.hook is not None and h.requires_grad:
            h.register_hook(self.hook)
        return self.head(h)


def model_for(choose: random.Random, kind: str, hook: str) -> Network:
    """A small network in float64 for a kind of data."""
    body = choose.choice(["layer", "lstm", "transformer"] if kind in LONG else ["layer"])
    return Network(kind, body, hook).double()


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """The losses [B] of rows in the order in which they were before they were sorted."""
    batch = unpacked(batch)
    back = batch["rows"].argsort()
    x, mask, labels, weights = (
        None if batch[name] is None else batch[name][back] for name in ("x", "mask", "labels", "weights")
    )
    return F.cross_entropy(model(x, mask), labels, reduction="none") * weights
