"""Sampling: the distribution of batches, their division, what is kept of a DataLoader, and what is refused."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ghostclip.errors import PrivacyError
from ghostclip.events import FixedSizeGaussian, SampledGaussian, TruncatedGaussian
from ghostclip.sampling import LogicalBatch, LogicalBatches, scheme_named
from ghostclip.sampling.logical import Unowned

# A false alarm once in a hundred thousand runs for each test.
RARE = 1e-5


class Squares(Dataset[int]):
    """Example i is the pair (i, i * i)."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def members(loader: LogicalBatches, steps: int) -> np.ndarray:
    """[steps, examples] of booleans: who was in which logical batch."""
    found: list[np.ndarray] = []
    while len(found) < steps:
        for batch in loader:
            row = np.zeros(loader.dataset_size, bool)
            for numbers in batch.physical():
                assert not row[numbers[0]].any()
                row[numbers[0]] = True
            assert row.sum() == sum(batch.sizes)
            found.append(row)
    return np.array(found[:steps])


def numbered(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def taken_over(loader: DataLoader[Any], **arguments: Any) -> LogicalBatches:
    with pytest.warns(UserWarning, match="is replaced by Poisson sampling"):
        return LogicalBatches(loader, **arguments)


def test_examples_are_included_at_the_sampling_rate_and_independently() -> None:
    steps, size = 6000, 12
    found = members(LogicalBatches(numbered(size), batch_size=3), steps)
    expected = np.array([steps * 0.75, steps * 0.25])
    rare = RARE / (size * (size + 1) / 2)  # of all that is asked here together
    for example in range(size):
        count = found[:, example].sum()
        assert stats.chisquare([steps - count, count], expected).pvalue > rare
    for left in range(size):
        for right in range(left):
            table = np.histogram2d(found[:, left], found[:, right], 2)[0]
            assert stats.chisquare(table.ravel(), steps * np.outer([0.75, 0.25], [0.75, 0.25]).ravel()).pvalue > rare


def test_sizes_are_binomial_and_empty_batches_come_at_their_rate() -> None:
    """Row "empty Poisson batch skipped": they are handed out like any other."""
    steps, size = 6000, 10
    found = members(LogicalBatches(numbered(size), batch_size=2), steps).sum(1)
    law = stats.binom(size, 0.2)
    counts = np.bincount(found, minlength=size + 1)
    pooled = [*counts[:6], counts[6:].sum()]
    assert stats.chisquare(pooled, steps * np.array([*law.pmf(range(6)), law.sf(5)])).pvalue > RARE
    assert stats.binomtest(int(counts[0]), steps, (1 - 0.2) ** size).pvalue > RARE


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["without_replacement", pytest.param("truncated", marks=pytest.mark.slow)])
def test_of_a_given_size_all_sets_are_equally_likely(sampling: str) -> None:
    """Of pairs of a fixed size, and of Poisson samples that were cut down to two."""
    steps, size = 6000, 5
    options: dict[str, Any] = {"batch_size": 2, "sampling": sampling, "max_physical_batch_size": 2}
    found = members(LogicalBatches(numbered(size), **options), steps)
    pairs = found[found.sum(1) == 2]
    counts = np.array([(pairs[:, left] & pairs[:, right]).sum() for left in range(size) for right in range(left)])
    assert counts.sum() == len(pairs)
    assert stats.chisquare(counts).pvalue > RARE
    if sampling == "without_replacement":
        assert len(pairs) == steps
    else:
        law = stats.binom(size, 0.4)
        sizes = np.bincount(found.sum(1), minlength=3)
        assert len(sizes) == 3
        assert stats.chisquare(sizes, steps * np.array([law.pmf(0), law.pmf(1), law.sf(1)])).pvalue > RARE


def test_batches_of_a_fixed_size_are_drawn_anew_from_all() -> None:
    found = members(LogicalBatches(numbered(8), batch_size=2, sampling="without_replacement"), 3000).astype(float)
    for example in range(8):
        assert stats.binomtest(int(found[:, example].sum()), 3000, 0.25).pvalue > RARE
        assert stats.pearsonr(found[:-1, example], found[1:, example]).pvalue > RARE


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_each_way_to_sample_has_its_own_event(neighboring: str) -> None:
    """Row "shuffled or fixed-size batches accounted as Poisson": whoever samples says what is charged."""
    options: dict[str, Any] = {"batch_size": 4, "max_physical_batch_size": 7, "neighboring": neighboring}
    expected = {
        "poisson": SampledGaussian(0.1, 1.5, relation=neighboring),
        "without_replacement": FixedSizeGaussian(0.1, 1.5, relation=neighboring),
        "truncated": TruncatedGaussian(0.1, 1.5, relation=neighboring, dataset_size=40, max_batch_size=7),
    }
    for sampling, event in expected.items():
        loader = LogicalBatches(numbered(40), **options, sampling=sampling)
        assert loader.event(1.5) == event
        assert loader.event(1.5).sampling == sampling
        assert all(sum(batch.sizes) <= 7 for batch in loader) or sampling == "poisson"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampling": "shuffled"},
            "sampling must be one of 'poisson', 'without_replacement', 'truncated'; got 'shuffled'",
        ),
        ({"sampling": None}, "sampling must be one of"),
        ({"neighboring": "replace"}, "neighboring must be one of 'add_or_remove_one', 'replace_one'; got 'replace'"),
        ({"max_batch_size": 20}, 'max_batch_size must be left out unless sampling="truncated"; got 20'),
        ({"sampling": "truncated"}, r"max_batch_size must be given with sampling=.truncated."),
        ({"sampling": "truncated", "max_batch_size": 9}, "max_batch_size must be at least batch_size = 10"),
        ({"sampling": "truncated", "max_batch_size": float("nan")}, "max_batch_size must be a whole number >= 1"),
        ({"sampling": "truncated", "max_physical_batch_size": 9}, "max_batch_size must be at least batch_size = 10"),
    ],
)
def test_schemes_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        LogicalBatches(numbered(40), **{"batch_size": 10, **options})


def test_the_replacement_of_a_sampler_names_the_way() -> None:
    for sampling, name in [
        ("without_replacement", "without replacement .4 different examples"),
        ("truncated", "truncated"),
    ]:
        with pytest.warns(UserWarning, match=rf"is replaced by {'sampling ' if 'out' in sampling else ''}{name}"):
            LogicalBatches(DataLoader(Squares(), 4), sampling=sampling, max_physical_batch_size=8)
    assert "each user is in a batch" in scheme_named("poisson", 10, 2, unit="user").words


def test_successive_batches_are_independent() -> None:
    found = members(LogicalBatches(numbered(8), batch_size=2), 4000).astype(float)
    for example in range(8):
        assert stats.pearsonr(found[:-1, example], found[1:, example]).pvalue > RARE


def test_the_full_batch_is_taken_whole() -> None:
    assert members(LogicalBatches(numbered(9), batch_size=9), 3).all()


def test_numpy_and_torch_seeds_have_no_influence() -> None:
    found = []
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        found.append(members(LogicalBatches(numbered(64), batch_size=32), 2))
    assert (found[0] != found[1]).any()


def test_a_seed_repeats_the_batches_and_goes_on_over_epochs() -> None:
    first, second = (members(LogicalBatches(numbered(20), batch_size=5, seed=7), 8) for _ in range(2))
    assert (first == second).all()
    assert (first[:4] != first[4:]).any()


@pytest.mark.parametrize(("size", "batch_size", "steps"), [(100, 10, 10), (7, 2, 4), (5, 2, 2), (3, 3, 1), (10, 7, 1)])
def test_length_rate_and_event(size: int, batch_size: int, steps: int) -> None:
    loader = LogicalBatches(Squares(size), batch_size=batch_size)
    assert len(loader) == steps == len(list(loader))
    assert loader.event(1.5) == SampledGaussian(batch_size / size, 1.5, 1, "add_or_remove_one")


def test_physical_batches_are_a_division_of_the_logical_one() -> None:
    loader = LogicalBatches(Squares(), batch_size=20, max_physical_batch_size=6)
    for batch in loader:
        parts = list(batch.physical())
        sizes = [len(part[0]) for part in parts]
        assert sizes == batch.sizes
        assert all(size == 6 for size in sizes[:-1])
        assert all(1 <= size <= 6 for size in sizes)
        numbers = torch.cat([part[0] for part in parts])
        assert len(set(numbers.tolist())) == len(numbers)
        assert torch.equal(torch.cat([part[1] for part in parts]), numbers**2)


def test_an_empty_batch_has_no_physical_ones() -> None:
    loader = LogicalBatches(numbered(2), batch_size=1)
    empty = next(batch for _ in range(1000) for batch in loader if not batch.sizes)
    assert list(empty.physical()) == []


def _pair_up(examples: list[tuple[int, int]]) -> dict[str, list[int]]:
    return {"number": [a for a, _ in examples], "square": [b for _, b in examples], "worker": [_worker_number()]}


def _worker_number() -> int:
    info = torch.utils.data.get_worker_info()
    return -1 if info is None else info.id + info.dataset.first  # type: ignore[attr-defined]


def _start_at_100(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.first = 100  # type: ignore[union-attr]


def test_collate_fn_and_batch_size_of_a_loader_are_kept() -> None:
    loader = taken_over(DataLoader(Squares(), batch_size=8, shuffle=True, collate_fn=_pair_up))
    assert loader.batch_size == 8
    part = next(part for batch in loader for part in batch.physical())
    assert part["square"] == [number**2 for number in part["number"]]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_workers_are_kept_and_batches_stay_in_step() -> None:
    given = DataLoader(
        Squares(), 10, collate_fn=_pair_up, num_workers=2, worker_init_fn=_start_at_100, persistent_workers=True
    )
    loader = taken_over(given, max_physical_batch_size=3)
    seen = set()
    for _ in range(2):
        for step, batch in enumerate(loader):
            for part, size in zip(batch.physical(), batch.sizes, strict=True):
                assert len(part["number"]) == size
                assert part["square"] == [number**2 for number in part["number"]]
                seen |= set(part["worker"])
                if step == 1:
                    break
    assert seen == {100, 101}


def test_options_of_a_loader_are_kept() -> None:
    generator = torch.Generator()
    given = DataLoader(Squares(), 4, num_workers=1, timeout=5, prefetch_factor=3, generator=generator, pin_memory=True)
    made = taken_over(given)._loader
    assert (made.num_workers, made.timeout, made.prefetch_factor, made.pin_memory) == (1, 5, 3, True)
    assert made.generator is generator


class Record:
    """A batch of a class of its own, which can be pinned."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples, self.pinned = examples, False

    def pin_memory(self) -> "Record":
        self.pinned = True
        return self


class Mixed(Dataset[Any]):
    """Examples of an array, a text and a number, as real data sets give them."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"array": np.full(3, index, np.float32), "text": f"number {index}", "number": index}


class AllAtOnce(Mixed):
    """Reads a whole batch by one call, which torch asks for where it is there."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("single examples are slow")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Mixed.__getitem__(self, index) for index in indices]


@pytest.mark.parametrize("kind", [Mixed, AllAtOnce])
def test_arrays_and_texts_in_dicts_come_as_default_collation_gives_them(kind: type[Mixed]) -> None:
    loader = LogicalBatches(kind(), batch_size=20, max_physical_batch_size=4)
    for batch in loader:
        for part, size in zip(batch.physical(), batch.sizes, strict=True):
            assert part["array"].shape == (size, 3)
            assert part["array"].dtype == torch.float32
            assert part["text"] == [f"number {number}" for number in part["number"].tolist()]


@pytest.mark.parametrize("collate", [Record, lambda examples: {"all": examples}, lambda examples: examples])
def test_collation_may_return_anything(collate: Any) -> None:
    loader = taken_over(DataLoader(Mixed(), 10, collate_fn=collate))
    part = next(part for batch in loader for part in batch.physical())
    assert isinstance(part, (Record, dict, list))


def test_pinning_is_asked_for_as_given() -> None:
    made = taken_over(DataLoader(Mixed(), 10, pin_memory=True))._loader
    assert made.pin_memory
    assert not LogicalBatches(Mixed(), batch_size=4)._loader.pin_memory


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_persistent_workers_prefetch_and_leave_users_together() -> None:
    given = DataLoader(Mixed(), 4, num_workers=1, persistent_workers=True, prefetch_factor=4)
    ids = [row // 3 for row in range(30)]
    loader = taken_over(given, unit_ids=ids, max_physical_batch_size=6)
    for _ in range(2):
        for batch in loader:
            rows = [row for part in batch.physical() for row in part["number"].tolist()]
            assert all(rows.count(row // 3 * 3 + place) == 1 for row in rows for place in range(3))


def test_rows_of_tensors_come_as_default_collation_gives_them() -> None:
    data = TensorDataset(torch.randn(30, 4), torch.arange(30))
    part = next(part for batch in LogicalBatches(data, batch_size=20) for part in batch.physical())
    expected = torch.utils.data.default_collate([data[number] for number in part[1].tolist()])
    assert type(part) is type(expected)
    for got, wanted in zip(part, expected, strict=True):
        assert torch.equal(got, wanted)


def test_the_replacement_is_said_once_and_at_the_callers_line() -> None:
    def build() -> LogicalBatches:
        return LogicalBatches(DataLoader(Squares(), 4, shuffle=True))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = build()
        list(loader)
    assert len(said) == 1
    assert "RandomSampler is replaced by Poisson sampling" in str(said[0].message)
    assert "probability 0.1" in str(said[0].message)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class OwnOrder(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(Squares(), 4, sampler=WeightedRandomSampler([1.0] * 40, 40)), "WeightedRandomSampler"),
        (DataLoader(Squares(), 4, sampler=SubsetRandomSampler(range(5))), "SubsetRandomSampler"),
        (DataLoader(Squares(), 4, sampler=range(40)), "range"),
        (DataLoader(Squares(), batch_sampler=OwnBatches(SequentialSampler(Squares()), 4, False)), "OwnBatches"),
        (DataLoader(Squares(), batch_sampler=[[0, 1], [2]]), "list"),
        (DataLoader(Squares(), batch_sampler=BatchSampler(SubsetRandomSampler([1]), 4, False)), "SubsetRandomSampler"),
        (DataLoader(Squares(), batch_size=None), "NoneType"),
        (OwnOrder(Squares(), 4), "OwnOrder.__iter__"),
    ],
)
def test_other_samplers_are_refused_with_a_remedy(loader: DataLoader[Any], name: str) -> None:
    with pytest.raises(PrivacyError, match=r"pass a plain DataLoader .* or the dataset itself") as caught:
        LogicalBatches(loader, batch_size=4)
    assert f"by {name}, which" in str(caught.value)


def test_a_batch_sampler_of_torchs_own_is_replaced() -> None:
    given = DataLoader(Squares(), batch_sampler=BatchSampler(RandomSampler(Squares()), 5, False))
    assert taken_over(given).batch_size == 5


def test_streams_are_refused_with_a_remedy() -> None:
    for data in (Stream(), DataLoader(Stream(), 2), iter([1, 2])):
        with pytest.raises(PrivacyError, match=r"can't be read at random.*map-style dataset"):
            LogicalBatches(data, batch_size=2)


def test_sizes_out_of_range() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        LogicalBatches([], batch_size=1)
    with pytest.raises(ValueError, match="batch_size must be given with a dataset"):
        LogicalBatches(Squares())
    with pytest.raises(ValueError, match=r"batch_size must be at most len\(dataset\) = 40; got 41"):
        LogicalBatches(Squares(), batch_size=41)
    for wrong in (0, -1, 2.5, float("nan")):
        with pytest.raises(ValueError, match=r"^batch_size must be a whole number"):
            LogicalBatches(Squares(), batch_size=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^max_physical_batch_size must be a whole number"):
            LogicalBatches(Squares(), batch_size=4, max_physical_batch_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="no batch_size to take over"):
        LogicalBatches(DataLoader(Squares(), batch_sampler=[[0, 1], [2]]))


class Noting(Unowned):
    """Takes no steps, and notes what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def ready(self, new_loop: bool) -> None:
        self.said.append("a new loop" if new_loop else "the next")

    def begin(self, batch: LogicalBatch | None) -> None:
        self.said.append(batch is not None)

    def left(self, batch: LogicalBatch) -> None:
        self.said.append(batch.handed)

    def discard(self, batch: LogicalBatch | None) -> None:
        self.said.append("discarded" if batch is None else batch.handed)


def test_leaving_a_logical_batch_is_reported_and_the_next_one_is_whole() -> None:
    loader = LogicalBatches(Squares(), batch_size=20, max_physical_batch_size=2, seed=1)
    loader.owner = owner = Noting()
    whole = [
        torch.cat([part[0] for part in batch.physical()]) for batch in LogicalBatches(Squares(), batch_size=20, seed=1)
    ]
    epoch = iter(loader)
    for _ in next(epoch).physical():
        break
    batch = next(epoch)
    parts = [part[0] for part in batch.physical()]
    assert torch.equal(torch.cat(parts), whole[1])
    batch.discard()
    assert next(epoch, None) is None
    loader.discard()
    begun = [False, True]
    expected = ["a new loop", *begun, 1, "the next", *begun, batch.handed, "the next", False, "discarded"]
    assert owner.said == expected


class FailsOnce(Squares):
    failed = False

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not self.failed:
            self.failed = True
            raise OSError("unreadable")
        return super().__getitem__(index)


def test_a_batch_that_fails_to_load_does_not_shift_the_next() -> None:
    epoch = iter(LogicalBatches(FailsOnce(), batch_size=20, max_physical_batch_size=4))
    with pytest.raises(OSError, match="unreadable"):
        next(next(epoch).physical())
    batch = next(epoch)
    assert [len(part[0]) for part in batch.physical()] == batch.sizes


def test_a_batch_is_used_once_and_in_its_turn() -> None:
    first, second = list(LogicalBatches(Squares(), batch_size=20))
    with pytest.raises(PrivacyError, match="left when the next one was taken"):
        list(first.physical())
    with pytest.raises(PrivacyError, match="was called before"):
        first.physical()
    assert second.handed == 0


def test_loops_over_persistent_workers_do_not_read_from_each_other() -> None:
    data = DataLoader(Squares(), num_workers=1, persistent_workers=True)
    with pytest.warns(UserWarning, match="is replaced"):
        loader = LogicalBatches(data, batch_size=20, max_physical_batch_size=2)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    for loop in (newer, older):
        batch = next(loop)
        found = [number for numbers, _ in batch.physical() for number in numbers.tolist()]
        assert len(set(found)) == len(found) == sum(batch.sizes)


def test_a_loop_is_not_gone_on_with_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, seeded = LogicalBatches(numbered(40), batch_size=4), LogicalBatches(numbered(40), batch_size=4, seed=1)
    loops = [iter(loader), iter(seeded)]
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(PrivacyError, match=r"forked from.*the same samples.*start a new loop here"):
        next(loops[0])
    next(loops[1])
    next(iter(loader))
