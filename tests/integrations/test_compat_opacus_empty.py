"""An empty sample's batch under Opacus's interface: as collate_fn makes batches, without rows or with one of ones."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from opacus_programs import small
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from ghostclip.compat.opacus import BatchMemoryManager, PrivacyEngine
from ghostclip.compat.opacus.empty_batch import empty_batch
from ghostclip.sampling.schemes import Poisson

DATA = [(torch.arange(1.0, 2 + place % 3), f"text {place}", place % 3) for place in range(12)]


class Fields(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    names: list[str]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.names)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    pad: int = 0


def padded(rows: list[Any]) -> Tensor:
    return pad_sequence([row[0] for row in rows], batch_first=True)


def names(rows: list[Any]) -> list[str]:
    return [row[1] for row in rows]


def labels(rows: list[Any]) -> Tensor:
    return torch.tensor([row[2] for row in rows])


def bag(rows: list[Any]) -> Any:
    sizes = torch.tensor([0, *(len(row[0]) for row in rows)])
    return torch.cat([row[0] for row in rows]), sizes.cumsum(0)


NONE_2D, NONE = torch.zeros(0, 1), torch.zeros(0, dtype=torch.long)
# By name: collate_fn, and what it is to be without examples; the first has one number.
KINDS: dict[str, tuple[Callable[[list[Any]], Any], Any]] = {
    "tensors": (lambda rows: (padded(rows), labels(rows)), (NONE_2D, NONE)),
    "a tensor for all": (lambda rows: (padded(rows), torch.arange(4.0)), (NONE_2D, torch.arange(4.0))),
    "strings": (lambda rows: [padded(rows), names(rows)], [NONE_2D, []]),
    "whole numbers": (lambda rows: {"x": padded(rows), "ids": [row[2] for row in rows]}, {"x": NONE_2D, "ids": []}),
    "a count": (lambda rows: [padded(rows), len(rows), 1.0 / len(rows)], [NONE_2D, 0, 0.0]),
    "None and settings": (lambda rows: [labels(rows), None, 7, "task", True, 0.5], [NONE, None, 7, "task", True, 0.5]),
    "a list of dicts": (lambda rows: (padded(rows), [{"name": row[1]} for row in rows]), (NONE_2D, [])),
    "arrays": (lambda rows: padded(rows).numpy(), NONE_2D.numpy()),
    "offsets": (bag, (torch.zeros(0), torch.zeros(1, dtype=torch.long))),
    "named tuple": (lambda rows: Fields(padded(rows), labels(rows)), Fields(NONE_2D, NONE)),
    "default dict": (lambda rows: defaultdict(list, x=names(rows)), defaultdict(list, x=[])),
    "BatchEncoding": (lambda rows: BatchEncoding({"x": padded(rows), "y": labels(rows)}),
                      BatchEncoding({"x": NONE_2D, "y": NONE})),
    "ModelOutput": (lambda rows: SequenceClassifierOutput(logits=padded(rows)),
                    SequenceClassifierOutput(logits=NONE_2D)),
    "dataclass": (lambda rows: Record(padded(rows), names(rows)), Record(NONE_2D, [])),
    "frozen dataclass": (lambda rows: Frozen(padded(rows)), Frozen(NONE_2D)),
    "packed sequence": (lambda rows: pack_sequence([row[0] for row in rows], enforce_sorted=False),
                        PackedSequence(torch.zeros(0), torch.zeros(1, dtype=torch.long), NONE, NONE)),
}  # fmt: skip


def plain(value: Any, values: bool = True) -> Any:
    """Types and shapes in plain data, to be compared, and values."""
    if isinstance(value, (Tensor, np.ndarray)):
        return type(value), value.dtype, tuple(value.shape), value.tolist() if values else None
    if hasattr(value, "items"):
        return type(value), {key: plain(each, values) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plain(each, values) for each in value]
    if hasattr(value, "__slots__"):
        return type(value), [plain(getattr(value, name), values) for name in value.__slots__]
    if hasattr(value, "__dict__"):
        return type(value), {key: plain(each, values) for key, each in vars(value).items()}
    return value if values else type(value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_as_collate_makes_batches(kind: str) -> None:
    """And one of one row has the shapes of one and nothing of its example."""
    collate, wanted = KINDS[kind]
    assert plain(empty_batch(DATA, collate)) == plain(wanted)
    other = [(torch.tensor([9.0]), "else", 2)]
    found, again = empty_batch(DATA, collate, one_row=True), empty_batch(other, collate, one_row=True)
    assert plain(found) == plain(again)
    assert plain(found, values=False) == plain(collate(DATA[:1]), values=False)


def test_collate_functions_may_take_examples_apart() -> None:
    def popping(rows: list[dict[str, int]]) -> dict[str, Tensor]:
        return {"y": torch.tensor([row.pop("y") for row in rows]), "x": default_collate([row["x"] for row in rows])}

    data = [{"x": 1.0, "y": 2}]
    assert {name: len(value) for name, value in empty_batch(data, popping).items()} == {"y": 0, "x": 0}
    assert data == [{"x": 1.0, "y": 2}]


def nested(rows: list[Any], **layout: Any) -> Tensor:
    return torch.nested.nested_tensor([row[0][:, None] for row in rows], **layout)


def test_jagged_tensors() -> None:
    found = empty_batch(DATA, lambda rows: nested(rows, layout=torch.jagged))
    assert found.is_nested
    assert found.to_padded_tensor(0.0).shape == (0, 0, 1)
    assert nn.Linear(1, 2)(found).values().shape == (0, 2)
    one = empty_batch(DATA, lambda rows: nested(rows, layout=torch.jagged), one_row=True)
    assert one.to_padded_tensor(0.0).tolist() == [[[1.0]]]


class Opaque:
    __slots__ = ()


CANT = {
    "strided": (nested, "nested tensor of strided layout"),
    "opaque": (lambda rows: (labels(rows), Opaque()), "holds a Opaque"),
    "types": (lambda rows: labels(rows) if len(rows) > 1 else rows, "another type"),
    "keys": (lambda rows: {str(place): row[0] for place, row in enumerate(rows)}, "keys of a dict"),
    "one example": (lambda rows: rows[0][0], "nothing in a batch grows"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", CANT)
def test_what_can_not_be_made_is_said_with_its_remedies(kind: str) -> None:
    collate, says = CANT[kind]
    with pytest.raises(TypeError, match=rf"{says}.*have collate_fn return an empty batch.*rand_on_empty=True"):
        empty_batch(DATA, lambda rows: collate(rows) if rows else rows[0])
    assert empty_batch(DATA, lambda rows: collate(rows) if rows else "none") == "none"
    if kind == "strided":
        assert [each.tolist() for each in empty_batch(DATA, collate, one_row=True).unbind()] == [[[1.0]]]


def encoded(rows: list[Any]) -> BatchEncoding:
    return BatchEncoding({"x": padded(rows).long()[:, :1], "y": labels(rows)})


def text_lists(rows: list[Any]) -> dict[str, Any]:
    return {"x": padded(rows).long()[:, :1], "y": labels(rows), "names": names(rows), "first": rows[0][1:]}


@pytest.mark.parametrize("collate", [encoded, text_lists])
@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize(
    ("limit", "parts"), [(None, [(True, 3, True)]), (2, [(True, 2, False), (True, 1, True)])], ids=["whole", "parts"]
)
def test_empty_batches_take_part_in_training(
    collate: Any, one_row: bool, limit: int | None, parts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 0, 2, 0])
    monkeypatch.setattr(Poisson, "count", lambda *_: next(counts))
    model, engine = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(4, 3)), PrivacyEngine()
    model, optimizer, loader = small(model, DATA, 3, engine, collate_fn=collate, rand_on_empty=one_row)
    if limit is not None:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer) as loader:
            pass
    seen = []
    for batch in loader:
        before = model[2].weight.detach().clone()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = not torch.equal(model[2].weight, before)
        seen.append((type(batch) is type(collate(DATA[:1])), len(batch["y"]), moved))
    none = (True, int(one_row), False)
    assert seen == [*parts, none, (True, 2, True), none]
    assert engine.accountant.history == [(0.0, 0.25, 4)]
