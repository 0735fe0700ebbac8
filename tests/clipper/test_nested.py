"""Nested tensors in batches: steps against a loop by hand, in pieces, compiled, traced, with users; empty batches."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.engine.micro_batching import slice_rows
from ghostclip.errors import is_out_of_memory

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}
NORM = 0.3


def texts(count: int = 24) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(2 + place % 4, 3, generator=generator, dtype=torch.float64), place % 2) for place in range(count)
    ]


def collate(layout: torch.layout) -> Callable[[Any], dict[str, Any]]:
    def collated(rows: list[Any]) -> dict[str, Any]:
        texts = torch.nested.nested_tensor([text for text, _ in rows], layout=layout)
        return {"texts": texts, "labels": torch.tensor([label for _, label in rows])}

    return collated


class Padded(nn.Module):
    """The mean of each text's own tokens, of a padded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, texts: Tensor) -> Tensor:
        padded = texts.to_padded_tensor(0.0)
        mask = (padded != 0).any(2, keepdim=True).to(padded.dtype)
        return self.out((self.hidden(padded).tanh() * mask).sum(1) / mask.sum(1))


class Values(Padded):
    """The same of the values of a jagged tensor."""

    def forward(self, texts: Tensor) -> Tensor:
        lengths = texts.offsets().diff()  # type: ignore[attr-defined]
        tokens = self.hidden(texts.values()).tanh()
        total = tokens.new_zeros(len(lengths), 4).index_add(0, owners(lengths), tokens)
        return self.out(total / lengths[:, None])


def owners(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["texts"]), batch["labels"], reduction="none")


def engine_of(model: nn.Module, layout: str, **options: Any) -> PrivacyEngine:
    data = DataLoader(texts(), batch_size=8, collate_fn=collate(LAYOUTS[layout]))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.5)
    options = {"noise": "test", "seed": 1, "noise_multiplier": 0.0, "self_check": False, "clipping": NORM, **options}
    with pytest.warns(UserWarning, match="is replaced by Poisson"):
        return PrivacyEngine(model, optimizer, data, **options)


def by_hand(model: nn.Module, parts: list[Any]) -> list[Tensor]:
    """The clipped mean over parts of a logical batch, by one backward for each example."""
    sizes = [len(part["labels"]) for part in parts]
    ones = [slice_rows(part, n, row, row + 1) for part, n in zip(parts, sizes, strict=True) for row in range(n)]
    losses = torch.cat([loss_fn(model, one) for one in ones])
    return [total / 8 for total in oracle.clipped_sum(oracle.grads_of_single_losses(model, losses), NORM).values()]


def assert_steps_by_hand(engine: PrivacyEngine, steps: int = 3, **options: Any) -> None:
    """Takes steps, each of which moves the parameters by what the loop gives."""
    model: nn.Module = engine.model
    parts: list[Any] = []
    for _ in range(steps):
        batch = next(iter(engine.batches()))
        parts.clear()
        batch.pass_through(lambda part: parts.append(copy.copy(part)) or part)
        before = copy.deepcopy(model)
        engine.step(batch, loss_fn, **options)
        wanted = by_hand(before, parts)
        moved = [(p - q).detach() / 0.5 for p, q in zip(before.parameters(), model.parameters(), strict=True)]
        torch.testing.assert_close(moved, [each.detach() for each in wanted], rtol=1e-9, atol=1e-12)


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in physical batches": {"max_physical_batch_size": 3},
    "auto": {"max_physical_batch_size": "auto"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*OPTIONS, "compiled", "traced"])
def test_steps_are_those_of_a_loop(layout: str, name: str, tmp_path: Path) -> None:
    """Compiled steps leave nested batches to eager ones."""
    torch.manual_seed(0)
    engine = engine_of(Padded(), layout, **OPTIONS.get(name, {}))
    if name == "compiled":
        engine.compile()
    elif name == "traced":
        engine.trace(tmp_path / "trace.npz")
    assert_steps_by_hand(engine)


@pytest.mark.parametrize("index", [lambda part: owners(part["texts"].offsets().diff()), None])
def test_values_with_and_without_the_example_of_each_row(index: Any) -> None:
    torch.manual_seed(0)
    assert_steps_by_hand(engine_of(Values(), "jagged"), batch_index=index)


def test_memory_that_runs_out_for_rows_with_an_index_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = engine_of(Values(), "jagged")
    monkeypatch.setattr(Values, "forward", scarce)
    index = lambda part: owners(part["texts"].offsets().diff())  # noqa: E731
    with pytest.raises(
        torch.OutOfMemoryError, match=r"can't be divided: batch_index.*max_physical_batch_size"
    ) as found:
        engine.step(next(iter(engine.batches())), loss_fn, batch_index=index)
    assert is_out_of_memory(found.value)


def test_what_is_not_divided() -> None:
    """Jagged tensors with holes, and other numbers of rows than examples."""
    offsets, lengths = torch.tensor([0, 4, 8]), torch.tensor([2, 3])
    with pytest.raises(TypeError, match="lengths of its own"):
        slice_rows([torch.nested.nested_tensor_from_jagged(torch.randn(8, 3), offsets, lengths)], 2, 0, 1)
    for layout in LAYOUTS.values():
        whole = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=layout)
        with pytest.raises(TypeError, match="a nested tensor of 2 rows"):
            slice_rows([whole], 5, 0, 1)
