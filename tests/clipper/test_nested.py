"""Nested tensors in batches: steps against a loop by hand, in pieces, compiled, traced, with users; empty batches."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from case_models import Wired
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
    return lambda rows: {
        "texts": torch.nested.nested_tensor([text for text, _ in rows], layout=layout),
        "labels": torch.tensor([label for _, label in rows]),
    }


def padded(m: Any, texts: Tensor) -> Tensor:
    """The mean of each text's own tokens, of a padded tensor."""
    padded = texts.to_padded_tensor(0.0)
    mask = (padded != 0).any(2, keepdim=True).to(padded.dtype)
    return m.out((m.hidden(padded).tanh() * mask).sum(1) / mask.sum(1))


def of_values(m: Any, texts: Any) -> Tensor:
    """The same of the values of a jagged tensor."""
    lengths, tokens = texts.offsets().diff(), m.hidden(texts.values()).tanh()
    total = tokens.new_zeros(len(lengths), 4).index_add(0, owners(lengths), tokens)
    return m.out(total / lengths[:, None])


def owners(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["texts"]), batch["labels"], reduction="none")


def index_of(part: Any) -> Tensor:
    return owners(part["texts"].offsets().diff())


def engine_of(wiring: Callable[..., Tensor], layout: str, **options: Any) -> PrivacyEngine:
    torch.manual_seed(0)
    model = Wired(wiring, hidden=nn.Linear(3, 4), out=nn.Linear(4, 2)).double()
    data = DataLoader(texts(), batch_size=8, collate_fn=collate(LAYOUTS[layout]))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["whole", "in physical batches", "auto", "compiled", "traced"])
def test_steps_are_those_of_a_loop(layout: str, name: str, tmp_path: Path) -> None:
    """Compiled steps leave nested batches to eager ones."""
    sizes = {"in physical batches": 3, "auto": "auto"}
    engine = engine_of(padded, layout, max_physical_batch_size=sizes.get(name))
    if name == "compiled":
        engine.compile()
    elif name == "traced":
        engine.trace(tmp_path / "trace.npz")
    assert_steps_by_hand(engine)


@pytest.mark.parametrize("index", [index_of, None])
def test_values_with_and_without_the_example_of_each_row(index: Any) -> None:
    assert_steps_by_hand(engine_of(of_values, "jagged"), batch_index=index)


def test_memory_that_runs_out_for_rows_with_an_index_is_said() -> None:
    def scarce(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine, said = engine_of(of_values, "jagged"), r"can't be divided: batch_index.*max_physical_batch_size"
    with pytest.raises(torch.OutOfMemoryError, match=said) as found:
        engine.step(next(iter(engine.batches())), scarce, batch_index=index_of)
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
