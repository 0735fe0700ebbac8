"""select: a run may spend what is charged for a run and no more, by whatever engines, in train and in score."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import ghostclip
from ghostclip import accounting
from ghostclip.errors import PrivacyError
from ghostclip.events import Event, SampledGaussian, Selection
from ghostclip.ledger import Ledger
from ghostclip.selection import search

FEATURES = torch.arange(40.0).view(20, 2) / 40
RUN: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.2, "steps": 5}
SEARCH = Selection((SampledGaussian(0.2, 1.3, 5),), 4)

pytestmark = [pytest.mark.usefixtures("drawn"), pytest.mark.usefixtures("coarse_losses")]


@pytest.fixture
def runs() -> int:
    return 2


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """Draws so many runs."""
    monkeypatch.setattr(search, "draw_runs", lambda mean, law: runs)


def searched(train: Callable[[Any], Any], score: Callable[[Any], float] = lambda _: 1.0, **changes: Any) -> Any:
    return ghostclip.select(train, ["a", "b"], score=score, expected_runs=4, delta=1e-5, **{**RUN, **changes})


def engine_for(model: torch.nn.Module | None = None, **options: Any) -> ghostclip.PrivacyEngine:
    """On 20 rows, batches of 4."""
    model = model or torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(FEATURES)
    return ghostclip.PrivacyEngine(model, optimizer, data, **{"batch_size": 4, "noise_multiplier": 1.3, **options})


def take(engine: ghostclip.PrivacyEngine, steps: int = 5) -> dict[str, torch.Tensor]:
    for batch in islice(engine.batches(), steps):
        engine.step(batch, lambda model, batch: model(batch[0]).square().mean(1))
    return engine.model.state_dict()


def trained(*engines: dict[str, Any], steps: int = 5) -> Callable[[Any], list[Any]]:
    """A train with so many steps of each of some engines."""
    return lambda _: [take(engine_for(**options), steps) for options in engines]


def spent(*events: Event) -> float:
    return accounting.epsilon_of(events, delta=1e-5)


@pytest.mark.parametrize(
    ("engines", "found"),
    [
        ([{"noise_multiplier": 1.2}], "5 steps .* noise multiplier 1.2"),
        ([{"batch_size": 5}, {"noise_multiplier": 9.0}], "4 steps .* at rate 0.25 .*; 5 steps"),
        ([{"noise": "test", "seed": 1}], "spent epsilon inf"),
        ([{"unit_ids": range(20)}], "protect something else"),
        ([{"noise_multiplier": 20.0, "sampling": "truncated", "max_batch_size": 9}], "but more in Rényi divergences"),
    ],
)
def test_a_run_that_spends_more_than_is_charged_is_refused_before_its_score(
    engines: list[dict[str, Any]], found: str
) -> None:
    asked: list[Any] = []
    with pytest.raises(PrivacyError, match=f"{found}.* a run is charged for 5 steps .* Give select the noise_mult"):
        searched(trained(*engines), asked.append)
    assert asked == []


def in_a_thread(train: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def work(settings: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(train, settings).result()

    return work


def by_an_earlier_engine(options: dict[str, Any]) -> Callable[[Any], Any]:
    """With steps before the search, which are not the search's own."""
    engine = engine_for(**options)
    take(engine)
    return lambda _: take(engine)


@pytest.mark.parametrize("runs", [1])
@pytest.mark.parametrize(
    "train", [lambda options: in_a_thread(trained(options)), by_an_earlier_engine], ids=["in a thread", "built before"]
)
def test_engines_that_charge_elsewhere_are_seen(train: Callable[[dict[str, Any]], Any]) -> None:
    assert searched(train({})).score == 1.0
    with pytest.raises(PrivacyError, match=r"5 steps .* noise multiplier 1.2, and a run is charged for 5 steps"):
        searched(train({"noise_multiplier": 1.2}))


def test_a_score_is_a_number() -> None:
    with pytest.raises(TypeError, match="score must return a number; got NoneType"):
        searched(trained({}), lambda _: None)


def test_a_run_of_no_larger_epsilon_is_refused_where_a_search_over_such_runs_spends_more() -> None:
    """One example a batch, as a search over batch sizes at equal epsilon tries: both 0.67, searches 1.13 and 1.42."""
    declared, other = SampledGaussian(0.2, 3.0, 5), SampledGaussian(0.05, 1.17)
    assert spent(other) < spent(declared)
    assert spent(replace(SEARCH, events=(other,))) > 1.2 * spent(replace(SEARCH, events=(declared,)))
    with pytest.raises(PrivacyError, match=r"charged for a run, but more in Rényi divergences.*1 step .* rate 0.05"):
        searched(trained({"batch_size": 1, "noise_multiplier": 1.17}, steps=1), noise_multiplier=3.0)


@pytest.mark.parametrize("options", [{}, {"noise_multiplier": 1.5}, {"batch_size": 3}])
def test_a_run_that_spends_what_is_charged_or_less_is_accepted(options: dict[str, Any]) -> None:
    assert searched(trained(options)).events == (SEARCH,)


def test_engines_of_a_run_add_up() -> None:
    engines = trained({"noise_multiplier": 2.0}, {"noise_multiplier": 3.0})
    assert searched(engines).events == (SEARCH,)
    with pytest.raises(PrivacyError, match=r"they charged 5 steps .*; 5 steps .*, and a run is charged for 5 steps"):
        searched(engines, noise_multiplier=1.8)


def test_what_was_released_before_is_charged_once_beside_the_search(tmp_path: Path) -> None:
    path, released = tmp_path / "search.ledger", ghostclip.private_mean(FEATURES, noise_multiplier=4.0)
    train = trained({"before": [released]})
    with pytest.raises(PrivacyError, match=r"1 step over Poisson samples at rate 1 .* and before=\[...\] too"):
        searched(train)
    alone = searched(train, before=[released, released])
    first = searched(train, before=[released, released], ledger=path)
    assert alone.events == (SEARCH, released.event)
    assert Ledger(path).contents.totals[released.name] == {released.event: 1}
    assert alone.epsilon == first.epsilon == spent(SEARCH, released.event)
    assert "It includes 1 release over all examples before the training (noise multiplier 4)." in alone.guarantee()
    assert alone.epsilon_added_up == spent(SampledGaussian(0.2, 1.3, 20), released.event)
    searched(train, before=[released], ledger=path)  # another search, and the same mean
    assert Counter(Ledger(path).events) == Counter([replace(SEARCH, count=2), released.event])


def test_a_release_before_allows_no_more_for_the_steps() -> None:
    """Steps with noise multiplier 1.15 spend less than those that are charged and the mean together."""
    released, other = (ghostclip.private_mean(FEATURES, noise_multiplier=1.5) for _ in range(2))
    assert spent(SampledGaussian(0.2, 1.15, 5)) < spent(*SEARCH.events, released.event)
    for before in ([], [released]):
        with pytest.raises(PrivacyError, match=r"they charged 5 steps .* noise multiplier 1.15, and a run is charged"):
            searched(trained({"noise_multiplier": 1.15, "before": before}), before=[released])
    with pytest.raises(PrivacyError, match=r"1 step over Poisson samples at rate 1 .*, and a run is charged for 5"):
        searched(trained({"before": [other]}), before=[released])


def test_steps_that_are_taken_in_the_score_are_refused() -> None:
    """Of an engine that is built there, and of the run's own."""
    engines: list[ghostclip.PrivacyEngine] = []

    def train(_: Any) -> dict[str, torch.Tensor]:
        engines.append(engine_for())
        return take(engines[-1], 1)

    message = "engines charged 2 steps .* noise multiplier 1.3 in score, which nothing is charged for.* Train in train"
    for score in (lambda _: len(take(engine_for(), 2)), lambda _: len(take(engines[-1], 2))):
        with pytest.raises(PrivacyError, match=message):
            searched(train, score)


def test_an_engine_in_the_score_may_be_there_without_a_step() -> None:
    released = ghostclip.private_mean(FEATURES)
    score = lambda _: engine_for(before=[released]).steps_taken  # noqa: E731
    assert searched(trained({"before": [released]}), score, before=[released]).score == 0.0
    with pytest.raises(PrivacyError, match=r"engines charged 1 step over Poisson samples at rate 1 .* in score"):
        searched(trained({}), score)


def by_one_engine(path: Path) -> Callable[[Any], Any]:
    engine = engine_for()
    return lambda _: take(engine)


def by_one_model(path: Path) -> Callable[[Any], Any]:
    """With an engine in each run, of which the first is gone when the second is built."""
    model = torch.nn.Linear(2, 1)
    return lambda _: take(engine_for(model))


def by_one_checkpoint(path: Path) -> Callable[[Any], Any]:
    def train(_: Any) -> Any:
        engine = engine_for()
        if path.exists():
            engine.restore(path)
        found = take(engine)
        engine.save(path)
        return found

    return train


@pytest.mark.parametrize("make", [by_one_engine, by_one_model, by_one_checkpoint])
def test_a_run_that_goes_on_from_an_earlier_one_counts_with_its_steps(
    make: Callable[[Path], Callable[[Any], Any]], tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=r"they charged 10 steps.*begin each from new weights"):
        searched(make(tmp_path / "run"))


def test_runs_of_one_model_that_begins_anew_are_accepted() -> None:
    model = torch.nn.Linear(2, 1)
    begin = {name: value.clone() for name, value in model.state_dict().items()}

    def train(_: Any) -> Any:
        model.load_state_dict(begin)
        return take(engine_for(model))

    assert searched(train).score == 1.0


def test_a_search_inside_of_a_search_is_refused_and_charges_nothing(tmp_path: Path) -> None:
    """The outer one is charged for one training a run."""
    path = tmp_path / "inner.ledger"

    def inner(_: Any) -> float:
        found = searched(trained({}), ledger=path)
        return found.score

    message = r"called inside of another search's train or score.* candidates=list\(itertools.product\(outer, inner\)\)"
    for functions in ((inner,), (trained({}), inner)):
        with pytest.raises(PrivacyError, match=message):
            searched(*functions)
    assert not path.exists()
    assert inner("after the search") == 1.0
