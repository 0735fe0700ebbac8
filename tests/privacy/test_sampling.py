"""Sampling: the distribution of batches, their division, what is kept of a DataLoader, and what is refused."""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from drawn_rows import members, rows
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ghostclip.errors import PrivacyError
from ghostclip.events import FixedSizeGaussian, SampledGaussian, TruncatedGaussian
from ghostclip.sampling import LogicalBatches, scheme_named
from ghostclip.sampling.loading import rows_digest
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


def taken_over(loader: DataLoader[Any], **arguments: Any) -> LogicalBatches:
    with pytest.warns(UserWarning, match="is replaced by Poisson sampling"):
        return LogicalBatches(loader, **arguments)


# How often an example is in a batch, and two together, of 8 examples in batches of 2, or cut down to 2.
TWO_OR_MORE = stats.binom.sf(1, 8, 0.25)
RATES = {
    "poisson": (1 / 4, 1 / 16),
    "without_replacement": (1 / 4, 1 / 28),
    "truncated": ((stats.binom.pmf(1, 8, 0.25) + 2 * TWO_OR_MORE) / 8, TWO_OR_MORE / 28),
}


@pytest.mark.parametrize("sampling", RATES)
def test_batches_are_drawn_anew_from_all_and_no_set_is_favoured(sampling: str) -> None:
    steps, size, (alone, together) = 4000, 8, RATES[sampling]
    options: dict[str, Any] = {"max_physical_batch_size": 2} if sampling == "truncated" else {}
    found = members(LogicalBatches(Squares(size), batch_size=2, sampling=sampling, **options), steps)
    rare = RARE / (size * (size + 3) / 2)  # of all that is asked here together
    for example in range(size):
        own = found[:, example]
        assert stats.binomtest(int(own.sum()), steps, alone).pvalue > rare
        assert stats.pearsonr(own[:-1].astype(float), own[1:].astype(float)).pvalue > rare
    for left, right in itertools.combinations(range(size), 2):
        both = found[:, left] & found[:, right]
        assert stats.binomtest(int(both.sum()), steps, together).pvalue > rare


def test_sizes_are_binomial_and_empty_batches_come_at_their_rate() -> None:
    steps, size = 4000, 10
    found = members(LogicalBatches(Squares(size), batch_size=2), steps).sum(1)
    law = stats.binom(size, 0.2)
    counts = np.bincount(found, minlength=size + 1)
    pooled = [*counts[:6], counts[6:].sum()]
    assert stats.chisquare(pooled, steps * np.array([*law.pmf(range(6)), law.sf(5)])).pvalue > RARE
    assert stats.binomtest(int(counts[0]), steps, (1 - 0.2) ** size).pvalue > RARE


# By how much the larger one of two neighbours is larger than the data set that is there, where it may be.
LARGER = {"add_or_remove_one": 1, "replace_one": 0}


@pytest.mark.parametrize(("size", "batch_size", "steps"), [(40, 4, 10), (5, 2, 2), (10, 7, 1)])
@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_each_way_to_sample_has_its_own_event(neighboring: str, size: int, batch_size: int, steps: int) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "max_physical_batch_size": 7, "neighboring": neighboring}
    said = {"sample_rate": batch_size / size, "noise_multiplier": 1.5, "relation": neighboring}
    expected = {
        "poisson": SampledGaussian(**said),
        "without_replacement": FixedSizeGaussian(**said),
        "truncated": TruncatedGaussian(**said, dataset_size=size + LARGER[neighboring], max_batch_size=7),
    }
    for sampling, event in expected.items():
        loader = LogicalBatches(Squares(size), **options, sampling=sampling)
        assert loader.event(1.5) == event
        assert loader.event(1.5).sampling == sampling
        assert len(loader) == steps == len(list(loader))
        assert all(sum(batch.sizes) <= 7 for batch in loader) or sampling == "poisson"


def test_the_replacement_of_a_sampler_is_said_once_and_names_the_way() -> None:
    with pytest.warns(UserWarning, match="RandomSampler is replaced by sampling without replacement .4 diff") as said:
        list(LogicalBatches(DataLoader(Squares(), 4, shuffle=True), sampling="without_replacement"))
    assert len(said) == 1
    assert "each user is in a batch" in scheme_named("poisson", 10, 2, unit="user").words


class Keyed(Dataset[Any]):
    """Rows by keys of any kind, whose number it doesn't say."""

    def __getitem__(self, key: Any) -> Any:
        return torch.zeros(2)

    def __len__(self) -> int:
        raise NotImplementedError


SQUARES = Squares()
ROWS: dict[str, tuple[bool, Any]] = {
    "subset": (True, Subset(SQUARES, [0, 1, 1, *range(5, 20)])),
    "twice": (True, ConcatDataset([SQUARES, SQUARES])),
    "subset of a subset": (True, Subset(Subset(SQUARES, [3, 4, 3, *range(5, 20)]), range(16))),
    "with a part": (True, ConcatDataset([SQUARES, Subset(SQUARES, [7])])),
    "nested": (True, ConcatDataset([ConcatDataset([SQUARES]), SQUARES])),
    "each once": (False, Subset(SQUARES, range(20))),
    "beyond the length": (False, Subset(Keyed(), [100, 103, *range(18)])),
    "words": (False, Subset(Keyed(), [f"{key}" for key in range(20)])),
    "of another one": (False, ConcatDataset([Squares(), Subset(SQUARES, range(3))])),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_come_several_times_are_named(name: str, recwarn: pytest.WarningsRecorder) -> None:
    twice, data = ROWS[name]
    assert len(LogicalBatches(data, batch_size=4)) == round(len(data) / 4)
    LogicalBatches(data, batch_size=4, unit_ids=[*range(len(data))])
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == twice
    assert all(re.search("has rows several times.* unit_ids=", each) for each in said)


ARROW: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {
    "picked twice": (True, lambda d, data: data.select([0, 1, 1, *range(5, 20)])),
    "concatenated": (True, lambda d, data: d.concatenate_datasets([data, data])),
    "interleaved": (True, lambda d, data: d.interleave_datasets(
        [data, d.Dataset.from_dict({"number": [20], "word": ["a"]})], stopping_strategy="all_exhausted")),
    "overlapping": (True, lambda d, data: d.concatenate_datasets([data.select(range(9)), data.select(range(8, 20))])),
    "with another column": (True, lambda d, data: d.concatenate_datasets([data, data]).remove_columns("word")),
    "shuffled": (True, lambda d, data: d.concatenate_datasets([data, data]).shuffle(seed=1)),
    "a subset of one": (True, lambda d, data: Subset(data.select([*range(19), 3]), range(1, 20))),
    "with a part": (True, lambda d, data: ConcatDataset([data, data.select([7, 3])])),
    "whole": (False, lambda d, data: data),
    "shuffled once": (False, lambda d, data: data.shuffle(seed=1)),
    "parts": (False, lambda d, data: d.concatenate_datasets([data.select(range(9)), data.select([10, 9, 15])])),
    "a subset that leaves it out": (False, lambda d, data: Subset(data.select([*range(19), 3]), [-1, *range(3)])),
    "alike": (False, lambda d, data: d.concatenate_datasets([data, d.Dataset.from_dict(data.to_dict())])),
}  # fmt: skip


@pytest.mark.parametrize("name", ARROW)
def test_rows_that_an_arrow_table_has_several_times_are_named(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """By where they lie in memory: rows that are only alike are of others."""
    datasets = pytest.importorskip("datasets")
    twice, made = ARROW[name]
    data = datasets.Dataset.from_dict({"number": [*range(20)], "word": [str(row) for row in range(20)]})
    LogicalBatches(made(datasets, data), batch_size=4)
    assert ["has rows several times" in str(warning.message) for warning in recwarn] == [True] * twice


def test_digests_tell_rows_apart_and_no_list_of_all_rows_is_made() -> None:
    many = ConcatDataset([TensorDataset(torch.zeros(1).expand(10**12)) for _ in range(2)])
    picked = [Subset(Keyed(), keys) for keys in (range(12), range(24, 36), [f"{key}" for key in range(12)])]
    digests = [rows_digest(each) for each in (*picked, many, Subset(many, [1, 2]), Subset(many, [1, 10**12 + 2]))]
    assert len({*digests}) == len(digests)
    assert rows_digest(Squares()) == ""
    LogicalBatches(Subset(many, range(20)), batch_size=4)


def test_digests_tell_rows_of_an_arrow_table_apart() -> None:
    datasets = pytest.importorskip("datasets")
    arrow = datasets.Dataset.from_dict({"number": [*range(20)]})
    digests = [rows_digest(arrow.shuffle(seed=seed)) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
    assert rows_digest(arrow) == ""


def test_a_seed_repeats_the_batches_and_goes_on_over_epochs() -> None:
    first, second = (members(LogicalBatches(Squares(20), batch_size=5, seed=7), 8) for _ in range(2))
    assert (first == second).all()
    assert (first[:4] != first[4:]).any()


def test_physical_batches_are_a_division_of_the_logical_one() -> None:
    loader = LogicalBatches(Squares(), batch_size=20, max_physical_batch_size=6)
    for batch in loader:
        parts = list(batch.physical())
        sizes = [len(part[0]) for part in parts]
        assert sizes == batch.sizes
        assert all(size == 6 for size in sizes[:-1])
        assert all(1 <= size <= 6 for size in sizes)
        numbers = torch.cat([part[0] for part in parts])
        assert numbers.tolist() == rows(batch)
        assert len({*rows(batch)}) == len(numbers)
        assert torch.equal(torch.cat([part[1] for part in parts]), numbers**2)


def _pair_up(examples: list[tuple[int, int]]) -> dict[str, list[int]]:
    return {"number": [a for a, _ in examples], "square": [b for _, b in examples], "worker": [_worker_number()]}


def _worker_number() -> int:
    info = torch.utils.data.get_worker_info()
    return info.id + info.dataset.first  # type: ignore[attr-defined,union-attr]


def _start_at_100(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.first = 100  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_batch_size_collation_and_workers_of_a_loader_are_kept() -> None:
    given = DataLoader(
        SQUARES, batch_sampler=BatchSampler(RandomSampler(SQUARES), 10, False), collate_fn=_pair_up,
        num_workers=2, worker_init_fn=_start_at_100, persistent_workers=True,
    )  # fmt: skip
    loader, seen = taken_over(given, max_physical_batch_size=3), set()
    assert loader.batch_size == 10
    for _ in range(2):
        for step, batch in enumerate(loader):
            for part, size in zip(batch.physical(), batch.sizes, strict=True):
                assert len(part["number"]) == size
                assert part["square"] == [number**2 for number in part["number"]]
                seen |= set(part["worker"])
                if step == 1:
                    break
    assert seen == {100, 101}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class OwnOrder(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (
            DataLoader(Squares(), 4, sampler=WeightedRandomSampler([1.0] * 40, 40)),
            "by WeightedRandomSampler, which .*For rare classes weight the losses",
        ),
        (
            DataLoader(Squares(), 4, sampler=SubsetRandomSampler(range(5))),
            "by SubsetRandomSampler, which .*give torch.utils.data.Subset",
        ),
        (DataLoader(Squares(), 4, sampler=range(40)), "by range, which"),
        (DataLoader(Squares(), batch_sampler=OwnBatches(SequentialSampler(SQUARES), 4, False)), "by OwnBatches, which"),
        (DataLoader(Squares(), batch_sampler=[[0, 1], [2]]), "by list, which"),
        (DataLoader(Squares(), batch_sampler=BatchSampler(SubsetRandomSampler([1]), 4, False)), "by SubsetRandomSamp"),
        (DataLoader(Squares(), 4, sampler=RandomSampler(range(30))), "takes the first 30 of 40 examples"),
        (DataLoader(Squares(), 4, sampler=SequentialSampler(range(10))), "would take any of them; pass a plain"),
        (DataLoader(Squares(), batch_size=None), "has batch_size=None"),
        (OwnOrder(Squares(), 4), r"by OwnOrder\.__iter__, which"),
    ],
)
def test_other_samplers_are_refused_with_a_remedy(loader: DataLoader[Any], says: str) -> None:
    with pytest.raises(PrivacyError, match=r"pass a plain DataLoader .* or the dataset itself") as caught:
        LogicalBatches(loader, batch_size=4)
    assert re.search(says, str(caught.value))


CUT: dict[str, Any] = {"sampling": "truncated"}


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "the dataset is empty"),
        (Stream(), {}, ".*can't be read at random.*map-style dataset"),
        (DataLoader(Stream(), 2), {}, ".*can't be read at random.*map-style dataset"),
        (SQUARES, {"batch_size": None}, "batch_size must be given with a dataset"),
        (SQUARES, {"batch_size": 41}, r"batch_size must be at most len\(dataset\) = 40; got 41"),
        (DataLoader(SQUARES, batch_sampler=[[0, 1], [2]]), {"batch_size": None}, ".* no batch_size to take over"),
        *((SQUARES, {"batch_size": wrong}, "batch_size must be a whole number") for wrong in (0, 2.5, math.nan)),
        (SQUARES, {"max_physical_batch_size": 0}, "max_physical_batch_size must be a whole number"),
        (SQUARES, {"sampling": "shuffled"}, "sampling must be one of 'poisson', 'without_replacement', 'truncated', "
                                            "'cyclic_poisson', 'cyclic'; got"),
        (SQUARES, {"sampling": None}, "sampling must be one of"),
        (SQUARES, {"neighboring": "replace"}, "neighboring must be one of 'add_or_remove_one', 'replace_one'; got 're"),
        (SQUARES, {"max_batch_size": 20}, 'max_batch_size must be left out unless sampling="truncated"; got 20'),
        (SQUARES, CUT, r"max_batch_size must be given with sampling=.truncated."),
        (SQUARES, CUT | {"max_batch_size": 9}, "max_batch_size must be at least batch_size = 10"),
        (SQUARES, CUT | {"max_batch_size": math.nan}, "max_batch_size must be a whole number >= 1"),
        (SQUARES, CUT | {"max_physical_batch_size": 9}, "max_batch_size must be at least batch_size = 10"),
    ],
)  # fmt: skip
def test_arguments_are_checked(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, PrivacyError), match=f"^{message}"):
        LogicalBatches(data, **{"batch_size": 10, **options})


def test_leaving_a_logical_batch_is_reported_and_the_next_one_is_whole() -> None:
    loader = LogicalBatches(Squares(), batch_size=20, max_physical_batch_size=2, seed=1)
    loader.owner = owner = Mock(Unowned)
    whole = [
        torch.cat([part[0] for part in batch.physical()]) for batch in LogicalBatches(Squares(), batch_size=20, seed=1)
    ]
    epoch = iter(loader)
    left = next(epoch)
    for _ in left.physical():
        break
    assert torch.equal(torch.cat([part[0] for part in next(epoch).physical()]), whole[1])
    owner.left.assert_called_once_with(left, None)


def test_a_batch_is_used_once_and_in_its_turn() -> None:
    first, second = list(LogicalBatches(Squares(), batch_size=20))
    with pytest.raises(PrivacyError, match="left when the next one was taken"):
        list(first.physical())
    with pytest.raises(PrivacyError, match="was called before"):
        first.physical()
    assert second.handed == 0


def test_loops_over_persistent_workers_do_not_read_from_each_other() -> None:
    data = DataLoader(Squares(), num_workers=1, persistent_workers=True)
    loader = taken_over(data, batch_size=20, max_physical_batch_size=2)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    for loop in (newer, older):
        batch = next(loop)
        found = [number for numbers, _ in batch.physical() for number in numbers.tolist()]
        assert len(set(found)) == len(found) == sum(batch.sizes)


def test_a_loop_is_not_gone_on_with_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, seeded = LogicalBatches(Squares(40), batch_size=4), LogicalBatches(Squares(40), batch_size=4, seed=1)
    loops = [iter(loader), iter(seeded)]
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(PrivacyError, match=r"forked from.*the same samples.*start a new loop here"):
        next(loops[0])
    next(loops[1])
    next(iter(loader))
