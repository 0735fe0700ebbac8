"""select: runs are drawn before any takes place, charged once before the first, and no interruption changes that."""

import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ledgers import in_child
from scipy import stats

import ghostclip
from ghostclip import accounting, checkpoint
from ghostclip.errors import LedgerError, PrivacyError
from ghostclip.events import SampledGaussian, Selection
from ghostclip.ledger import Ledger
from ghostclip.selection import NoisyScore, draws, search
from ghostclip.selection.kept import folder_of
from ghostclip.selection.scores import asking

SETTING: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.05, "steps": 100, "delta": 1e-5}
EVENT = Selection((SampledGaussian(0.05, 1.3, 100),), 4)
CANDIDATES = ["a", "b", "c"]


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Draws five runs, and notes each draw."""
    drawn: list[float] = []
    monkeypatch.setattr(search, "draw_runs", lambda mean, law: (drawn.append(mean), 5)[1])
    return drawn


class Trainings:
    """Counts runs; each one's result is its number, and its score is by a rule."""

    def __init__(self, score: Callable[[int], float] = float, fail_at: int | None = None) -> None:
        self.settings: list[str] = []
        self.by, self.fail_at = score, fail_at
        self.before: Callable[[], None] = lambda: None

    def train(self, settings: str) -> dict[str, Any]:
        self.before()
        if len(self.settings) == self.fail_at:
            self.fail_at = None
            raise KeyboardInterrupt
        self.settings.append(settings)
        return {"run": len(self.settings), "weight": torch.tensor([float(len(self.settings))])}

    def score(self, result: dict[str, Any]) -> float:
        return self.by(result["run"])

    def select(self, path: Path | None, train: Any = None, **changes: Any) -> Any:
        options = {"candidates": CANDIDATES, **SETTING, "expected_runs": 4, "score": self.score, **changes}
        return ghostclip.select(train or self.train, ledger=path, **options)


def charges(path: Path) -> int:
    return len(Ledger(path).contents.charges)


@pytest.mark.usefixtures("five")
def test_the_best_run_is_returned_and_all_are_charged_once(path: Path) -> None:
    runs = Trainings(lambda run: -abs(run - 3))
    best = runs.select(path)
    assert len(runs.settings) == 5
    assert (best.result["run"], best.score, best.settings) == (3, 0.0, runs.settings[2])
    assert Ledger(path).events == [EVENT] == list(best.events)
    spent = accounting.selection_epsilon(**SETTING, expected_runs=4)
    assert best.epsilon == spent
    assert best.epsilon_added_up == accounting.epsilon(**{**SETTING, "steps": 400})
    assert f"epsilon {spent:.4g} (RDP)" in best.guarantee()
    assert not folder_of(Ledger(path)).exists()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.usefixtures("five")
def test_a_ledger_counts_what_else_is_in_it(path: Path) -> None:
    ghostclip.ledger.Ledger(path, block=1).account().charge(SampledGaussian(0.05, 2.0))
    best = Trainings().select(Ledger(path))
    assert best.epsilon == accounting.epsilon_of([EVENT, SampledGaussian(0.05, 2.0)], delta=1e-5)
    assert Trainings().select(path).epsilon > best.epsilon  # another search
    assert charges(path) == 3


@pytest.mark.usefixtures("five")
def test_the_charge_and_all_settings_are_on_the_disk_before_the_first_run(path: Path) -> None:
    runs, seen = Trainings(), []
    runs.before = lambda: seen.append((charges(path), checkpoint.load(folder_of(Ledger(path))).private["runs"]))
    runs.select(path)
    assert {count for count, _ in seen} == {1}
    drawn = seen[0][1]["settings"]
    assert [CANDIDATES[number] for number in drawn] == runs.settings
    assert all(state["settings"] == drawn for _, state in seen)
    assert [state["done"] for _, state in seen] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("score", [float, lambda run: -float(run), lambda run: math.inf, lambda run: math.nan])
def test_no_score_changes_the_number_of_runs(score: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 40 searches; K is drawn 40 times, and is how often training took place."""
    real, drawn = draws.draw_runs, []
    monkeypatch.setattr(search, "draw_runs", lambda *law: (drawn.append(real(*law)), drawn[-1])[1])
    for _ in range(40):
        runs, before = Trainings(score), len(drawn)
        best = runs.select(None)
        assert drawn[before:] == [len(runs.settings)]
        assert (best is None) == (len(runs.settings) == 0)
    assert len(set(drawn)) > 3


@pytest.mark.parametrize(
    ("scores", "first"), [([1, 3, 3, 2, 3], 2), ([math.nan] * 5, 1), ([math.nan, -1e9, 0, 0, math.nan], 3)]
)
@pytest.mark.usefixtures("five")
def test_the_first_of_equal_scores_stays_and_no_number_is_below_all(scores: list[float], first: int) -> None:
    assert Trainings(lambda run: scores[run - 1]).select(None).result["run"] == first


@pytest.mark.usefixtures("five")
def test_the_result_is_the_best_run_s_though_all_train_the_same_tensors() -> None:
    model, left = torch.nn.Linear(1, 1), [1.0, 5.0, 3.0, 2.0, 4.0]

    def train(_: str) -> dict[str, torch.Tensor]:
        torch.nn.init.constant_(model.weight, left.pop(0))
        return model.state_dict()

    best = Trainings().select(None, train=train, score=lambda result: float(result["weight"]))
    assert (best.score, float(best.result["weight"])) == (5.0, 5.0)


@pytest.mark.usefixtures("five")
def test_a_result_that_cannot_be_copied_is_refused() -> None:
    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(TypeError, match="what train returned can't be copied"):
        Trainings().select(None, train=lambda _: weight * 2, score=lambda _: 1.0)


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_an_interrupted_search_goes_on_with_the_same_runs(fail_at: int, path: Path, five: list[float]) -> None:
    runs = Trainings(lambda run: -run, fail_at)
    with pytest.raises(KeyboardInterrupt):
        runs.select(path)
    kept = [folder for folder in path.parent.glob(f"{path.name}.search*") if folder.is_dir()]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in kept} == {0o700}
    drawn = checkpoint.load(folder_of(Ledger(path))).private["runs"]["settings"]
    best = runs.select(path)
    assert [CANDIDATES[number] for number in drawn] == runs.settings  # none twice, none left out
    assert (best.result["run"], float(best.result["weight"])) == (1, 1.0)
    assert (len(five), charges(path)) == (1, 1)


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.usefixtures("five")
def test_a_killed_search_goes_on_with_the_same_runs(at: int, path: Path) -> None:
    def killed() -> None:
        runs = Trainings()
        runs.before = lambda: os._exit(7) if len(runs.settings) == at else None  # type: ignore[assignment]
        runs.select(path)

    assert in_child(killed) == 7
    assert charges(path) == 1
    rest = Trainings()
    rest.select(path)
    assert (len(rest.settings), charges(path)) == (5 - at, 1)


def test_a_search_killed_while_its_runs_are_removed_has_ended(path: Path, five: list[float]) -> None:
    remove = shutil.rmtree

    def half(folder: Path, ignore_errors: bool) -> None:
        if folder.exists() and "previous" not in folder.name:
            next(folder.iterdir()).unlink()
            os._exit(3)
        remove(folder, ignore_errors=ignore_errors)

    def killed() -> None:
        shutil.rmtree = half  # type: ignore[assignment]
        Trainings().select(path)

    assert in_child(killed) == 3
    assert Trainings().select(path) is not None
    assert charges(path) == 2


def test_a_search_that_could_not_be_charged_runs_nothing_and_is_not_drawn_again(
    path: Path, five: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Trainings()
    with monkeypatch.context() as patched:
        patched.setattr(search.Ledger, "take_in", lambda *_: (_ for _ in ()).throw(LedgerError("no disk")))
        with pytest.raises(LedgerError, match="no disk"):
            runs.select(path)
    assert (runs.settings, charges(path)) == ([], 0)
    assert runs.select(path) is not None
    assert (len(runs.settings), len(five), charges(path)) == (5, 1, 1)


def test_results_that_cannot_be_kept_are_made_again(path: Path, five: list[float], caplog: Any) -> None:
    """A model; its number of runs is the same, and the log says so once."""
    runs: list[str] = []

    def train(settings: str) -> torch.nn.Module:
        runs.append(settings)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return torch.nn.Linear(1, 1)

    with pytest.raises(KeyboardInterrupt):
        Trainings().select(path, train, score=lambda model: 0.0)
    assert "are repeated if" in caplog.text
    assert isinstance(Trainings().select(path, train, score=lambda model: 0.0).result, torch.nn.Linear)
    assert runs[:2] == runs[3:5]
    assert (len(runs), len(five), charges(path)) == (3 + 5, 1, 1)


@pytest.mark.usefixtures("five")
def test_an_unfinished_search_of_other_arguments_is_refused(path: Path) -> None:
    """As many other candidates, too: old results would get new settings. What prints by its address is the same."""
    runs, others = Trainings(fail_at=1), {"expected_runs": 5, "noise_multiplier": 2.0, "distribution": "geometric"}
    with pytest.raises(KeyboardInterrupt):
        runs.select(path, candidates=[Trainings(), 1.0])
    for name, value in {**others, "candidates": [Trainings(), 2.0]}.items():
        with pytest.raises(PrivacyError, match="unfinished search with other arguments"):
            runs.select(path, **{"candidates": [Trainings(), 1.0], name: value})
    assert (len(runs.settings), charges(path)) == (1, 1)
    assert runs.select(path, candidates=[Trainings(), 1.0]) is not None
    assert (len(runs.settings), charges(path)) == (5, 1)


def test_a_second_search_at_once_on_one_ledger_is_refused(path: Path, five: list[float]) -> None:
    """It would find the first one's runs and charge, and release another best one."""
    outer, inner = Trainings(), Trainings()

    def second() -> None:
        with pytest.raises(LedgerError, match="is going on in this process already"):
            inner.select(path)

    outer.before = lambda: ThreadPoolExecutor(1).submit(second).result()
    assert outer.select(path) is not None
    assert (inner.settings, charges(path)) == ([], 1)
    assert inner.select(path) is not None
    assert charges(path) == 2


def test_no_run_is_an_outcome_and_is_charged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_runs", lambda *_: 0)
    assert Trainings().select(path) is None
    assert Ledger(path).events == [EVENT]
    assert os.listdir(path.parent) == [path.name]


def test_other_neighbours_are_refused_before_the_draw(path: Path, five: list[float]) -> None:
    """Of what is in the ledger, and of what was released before."""
    Ledger(path, block=1).account().charge(SampledGaussian(0.5, 1.0, relation="replace_one"))
    released = ghostclip.private_mean(torch.ones(20, 2), neighboring="replace_one")
    new = path.with_suffix(".new")
    for ledger, before in ((path, []), (None, [released]), (new, [released])):
        with pytest.raises(ValueError, match="the same neighbours"):
            Trainings().select(ledger, before=before)
    assert (five, charges(path), charges(new)) == ([], 1, 0)
    assert {*os.listdir(path.parent)} == {path.name, new.name}


LAWS = [
    ("poisson", 3.0, stats.poisson(3.0)),
    ("geometric", 3.0, stats.geom(1 / 3)),
    ("geometric", 1.0, stats.geom(1.0)),
    ("logarithmic", 3.0, stats.logser(1 - accounting.success_probability(3.0, 0.0))),
    (0.5, 3.0, stats.nbinom(0.5, accounting.success_probability(3.0, 0.5))),
    (4.0, 6.0, stats.nbinom(4.0, accounting.success_probability(6.0, 4.0))),
]


@pytest.mark.parametrize(("distribution", "mean", "law"), LAWS)
def test_the_number_of_runs_has_its_distribution(distribution: str | float, mean: float, law: Any) -> None:
    """Chi-square of 4,000 draws against scipy's distributions, at a chance of 1e-6 to fail."""
    chances = law.pmf(np.arange(9))
    if distribution != "poisson":  # which alone has searches of no run
        chances = np.append(0.0, chances[1:]) / law.sf(0)
    expected = 4000 * np.append(chances, 1 - chances.sum())
    found = Counter(min(draws.draw_runs(mean, distribution), 9) for _ in range(4000))
    seen = np.array([found[count] for count in range(10)], dtype=float)
    assert seen[expected < 1e-6].sum() == 0
    kept = expected >= 1e-6
    statistic = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert statistic < stats.chi2.isf(1e-6, max(1, kept.sum() - 1))


def test_settings_are_uniform() -> None:
    found = Counter(draws.draw_settings(6000, 3))
    assert all(abs(found[number] - 2000) < 5 * math.sqrt(6000 * 2 / 9) for number in range(3))


@pytest.mark.usefixtures("five")
def test_a_score_on_private_data_gets_noise_that_every_run_is_charged_for(path: Path) -> None:
    runs = Trainings()
    best = runs.select(path, score=NoisyScore(runs.score, 20.0))
    assert Ledger(path).events == [Selection((SampledGaussian(0.05, 1.3, 100), SampledGaussian(1.0, 20.0)), 4)]
    assert best.score != best.result["run"]
    assert best.epsilon > accounting.selection_epsilon(**SETTING, expected_runs=4)


@pytest.mark.usefixtures("five")
def test_a_noisy_score_that_is_not_charged_is_refused() -> None:
    runs, noisy = Trainings(), NoisyScore(lambda result: result["run"], 20.0)
    message = r"NoisyScore was asked outside of select\(score=\.\.\.\), where nothing is charged for it"
    with pytest.raises(PrivacyError, match=message):
        runs.select(None, score=lambda result: noisy(result) - 1.0)
    with pytest.raises(PrivacyError, match=message):
        runs.select(None, train=lambda settings: {"run": noisy(runs.train(settings))}, score=noisy)
    best = runs.select(None, score=noisy)
    with pytest.raises(PrivacyError, match=message):
        noisy(best.result)  # once more, after the search


def test_the_noise_of_a_score_has_its_standard_deviation() -> None:
    """2,000 draws: a relative standard error of 1.6%; five of them."""
    score = NoisyScore(lambda result: result, 3.0, sensitivity=0.5)
    with asking(score):
        found = np.array([score(10.0) for _ in range(2000)])
        assert math.isfinite(score(math.nan))
    assert found.std() == pytest.approx(1.5, rel=0.08)
    assert found.mean() == pytest.approx(10.0, abs=5 * 1.5 / math.sqrt(2000))


OUT_OF_RANGE = {
    "expected_runs": 0, "distribution": "binomial", "noise_multiplier": 0.0, "sample_rate": 0.0, "steps": 0,
    "delta": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 3}, "train must be callable; got 3"),
        ({"score": None}, "score must be callable; got None"),
        ({"candidates": []}, "at least one setting; got none"),
        ({"candidates": {"lr": [1, 2]}}, r"candidates must be a list of settings; got \{'lr'.*itertools\.product"),
        ({"candidates": 3}, "candidates must be a list of settings; got 3"),
        ({"before": [3]}, "before must be a list of what ghostclip.private_mean returned; got 3 in it"),
        *(({name: wrong}, name) for name, wrong in OUT_OF_RANGE.items()),
    ],
)
def test_arguments_out_of_range_are_named(changes: dict[str, Any], message: str, path: Path) -> None:
    runs = Trainings()
    with pytest.raises((TypeError, ValueError), match=message):
        runs.select(path, **changes)
    assert (runs.settings, path.exists()) == ([], False)


@pytest.mark.parametrize("changes", [{"noise_multiplier": 0.0}, {"sensitivity": -1.0}, {"noise_multiplier": math.inf}])
def test_a_score_s_arguments_out_of_range_are_named(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        NoisyScore(float, **{"noise_multiplier": 1.0, **changes})
