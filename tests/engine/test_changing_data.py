"""Data whose examples can't be numbered, or whose number changes, are refused in one sentence."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pandas
import private_runs as runs
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ghostclip import PrivacyError
from ghostclip.sampling import LogicalBatches

SIZE = 24
COLUMNS: dict[str, Any] = {"x": torch.randn(SIZE, 5), "y": torch.arange(SIZE) % 3}


@pytest.mark.parametrize("wrap", [lambda data: data, DataLoader], ids=["bare", "in a loader"])
@pytest.mark.parametrize(
    "data",
    [COLUMNS, UserDict(COLUMNS), {1: COLUMNS["x"], 2: COLUMNS["y"]}, pandas.DataFrame({"y": COLUMNS["y"]})],
    ids=lambda data: type(data).__name__,
)
def test_columns_are_refused_with_the_remedy(data: Any, wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"columns.*TensorDataset.*list of dicts"):
        LogicalBatches(wrap(data), batch_size=2)


def test_a_dict_of_examples_by_their_numbers_is_a_data_set() -> None:
    data = dict(enumerate(runs.data(SIZE)))
    taken = {int(y) for batch in LogicalBatches(data, batch_size=SIZE) for part in batch.physical() for y in part[1]}
    assert taken == {0, 1, 2}


# What becomes of a list of 24 examples.
CHANGES: dict[str, Callable[[list[Any]], Any]] = {"empty": list.clear, "one more": lambda rows: rows.append(rows[0])}
CHANGED = r"the data set has \d+ examples and had 24 when the engine was built"


@pytest.mark.filterwarnings("ignore:the DataLoader's .* is replaced")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.one_in(2)
@pytest.mark.usefixtures("coarse_losses")
def test_another_number_of_examples_is_refused_at_the_next_batch(workers: int | None, change: str) -> None:
    rows: list[Any] = list(runs.data(SIZE))
    data = rows if workers is None else DataLoader(rows, batch_size=8, num_workers=workers)
    engine = runs.engine_for(runs.network(), None, data, noise_multiplier=1.0, clipping=1.0)
    loop = iter(engine.batches())
    engine.step(next(loop), runs.losses_of)
    CHANGES[change](rows)
    for epoch in (loop, loop, iter(engine.batches())):
        with pytest.raises(PrivacyError, match=CHANGED):
            next(epoch)
    assert engine.steps_taken == 1
    assert engine.epsilon() > 0


def test_tensors_that_a_data_set_is_given_later_are_loaded() -> None:
    data = runs.data(SIZE)
    batches = LogicalBatches(data, batch_size=SIZE)
    for value in (1.0, 2.0):
        data.tensors = (torch.full((SIZE, 1), value),)
        (part,) = next(iter(batches)).physical()
        assert torch.equal(part[0], data.tensors[0])


@pytest.mark.parametrize("kind", [list, lambda rows: dict(enumerate(rows))], ids=["list", "dict"])
@pytest.mark.parametrize("take", [runs.gather, lambda engine, batch: engine.step(batch, runs.losses_of)])
def test_examples_that_are_gone_when_they_are_loaded_are_refused(take: Any, kind: Any) -> None:
    rows = kind(runs.data(SIZE))
    engine = runs.engine_for(runs.network(), None, rows, batch_size=SIZE, noise_multiplier=1.0, clipping=1.0)
    batch = next(iter(engine.batches()))
    rows.clear()
    with pytest.raises(PrivacyError, match=CHANGED) as caught:
        take(engine, batch)
    assert isinstance(caught.value.__context__, LookupError)
    assert engine.steps_taken == 0


def test_a_data_set_s_own_failure_stays_its_own() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, row: int) -> Any:
            raise IndexError("broken")

    batches = LogicalBatches(Broken(), batch_size=SIZE)
    with pytest.raises(IndexError, match="broken"):
        next(next(iter(batches)).physical())
