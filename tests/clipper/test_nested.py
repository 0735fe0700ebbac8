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
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine, UnsupportedModelError
from ghostclip.clipper.cutting import cut, leaves_of, take_rows
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


class OnNested(Padded):
    def forward(self, texts: Tensor) -> Tensor:
        return self.out(torch.stack([each.mean(0) for each in self.hidden(texts).unbind()]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_on_nested_tensors_are_refused(layout: str) -> None:
    engine = engine_of(OnNested(), layout)
    with pytest.raises(UnsupportedModelError, match="got a nested"):
        engine.step(next(iter(engine.batches())), loss_fn)


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


def ragged(layout: torch.layout, ragged_dim: int = 1) -> Tensor:
    parts = [torch.randn(length, 3) for length in (2, 5, 1, 4)]
    found = torch.nested.nested_tensor(parts, layout=layout)
    return found.transpose(1, 2) if ragged_dim == 2 else found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ragged_dim", [1, 2])
@pytest.mark.parametrize("rows", [[0], [2, 3], [3, 0, 0, 1], [1, 2]])
def test_rows_of_nested_tensors(layout: str, ragged_dim: int, rows: list[int]) -> None:
    whole = ragged(LAYOUTS[layout], ragged_dim)
    found = take_rows(whole, torch.tensor(rows))
    assert found.layout == whole.layout
    torch.testing.assert_close(list(found.unbind()), [whole.unbind()[row] for row in rows], rtol=0, atol=0)
    if rows == [2, 3]:
        parts = slice_rows({"x": whole, "y": torch.arange(4)}, 4, 2, 4)
        torch.testing.assert_close(list(parts["x"].unbind()), list(found.unbind()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("whole", "examples", "message"),
    [
        (lambda: torch.nested.nested_tensor_from_jagged(torch.randn(8, 3), torch.tensor([0, 4, 8]),
                                                        torch.tensor([2, 3])), 2, "lengths of its own"),
        *((lambda layout=layout: ragged(layout), 5, "a nested tensor of 4 rows") for layout in LAYOUTS.values()),
    ],
)  # fmt: skip
def test_what_is_not_divided(whole: Callable[[], Tensor], examples: int, message: str) -> None:
    """Jagged tensors with holes, and other numbers of rows than examples."""
    with pytest.raises(TypeError, match=message):
        slice_rows([whole()], examples, 0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_dense_tensors_are_leaves(layout: str) -> None:
    nested, dense = ragged(LAYOUTS[layout]), torch.zeros(4, 2)
    assert leaves_of([nested, dense]) is None
    found = leaves_of([dense])
    assert found is not None
    assert found[2] == 4


def test_packed_sequences_of_other_numbers_of_parts_are_no_examples():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert cut(packed, 3, [0, 2]) is packed
    assert cut(packed, 2, [1]).batch_sizes.tolist() == [1, 1]
