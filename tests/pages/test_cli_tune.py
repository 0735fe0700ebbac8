"""ghostclip tune: what it prints, what it charges, and that an interrupted search goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ghostclip import accounting
from ghostclip.cli import main, tune
from ghostclip.events import SampledGaussian, Selection
from ghostclip.ledger import Ledger
from ghostclip.selection import search

QUICK = ["tune", "--model", "mlp", "--epochs", "1", "--batch-size", "479", "--noise-multiplier", "2"]
RUN: dict[str, Any] = {"noise_multiplier": 2.0, "sample_rate": 479 / 1437, "steps": 3}
EVENT = Selection((SampledGaussian(479 / 1437, 2.0, 3),), 3.0)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger; two runs are drawn."""
    monkeypatch.setattr(search, "draw_runs", lambda *_: 2)
    return tmp_path / "search.ledger"


def searched(capsys: Any, path: Path, *words: str) -> dict[str, Any]:
    status = main([*QUICK, "--expected-runs", "3", "--ledger", str(path), "--json", *words])
    assert status == 0
    return json.loads(capsys.readouterr().out)


def test_the_best_run_is_told_and_the_search_is_charged_once(path: Path, capsys: Any) -> None:
    saved = path.with_name("model.pt")
    found = searched(capsys, path, "--learning-rates", "0.1,0.5", "--max-norms", "0.5", "--save", str(saved))
    assert found["settings"]["learning_rate"] in (0.1, 0.5)
    assert found["settings"]["max_norm"] == 0.5
    assert 0 < found["accuracy"] <= 1
    assert Ledger(path).events == [EVENT]
    assert found["epsilon"] == accounting.selection_epsilon(**RUN, expected_runs=3, delta=1e-5)
    assert found["epsilon_of_one_run"] < found["epsilon"]
    assert all(tensor.isfinite().all() for tensor in torch.load(saved).values())


def test_an_interrupted_search_goes_on(path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tune.train, []

    def interrupted(*given: Any) -> Any:
        calls.append(given[0].learning_rate)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(tune, "train", interrupted)
    assert main([*QUICK, "--expected-runs", "3", "--ledger", str(path)]) == 130
    searched(capsys, path)
    assert len(calls) == 3
    assert Ledger(path).events == [EVENT]


def test_no_run_is_told_and_charged(path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_runs", lambda *_: 0)
    assert main([*QUICK, "--expected-runs", "3", "--ledger", str(path)]) == 0
    assert capsys.readouterr().out.startswith("no run was drawn; the search spends epsilon ")
    assert Ledger(path).events == [EVENT]


def test_the_text_has_the_guarantee(path: Path, capsys: Any) -> None:
    assert main([*QUICK, "--expected-runs", "3", "--distribution", "geometric"]) == 0
    best, guarantee, compared = capsys.readouterr().out.splitlines()
    assert best.startswith("best run: learning rate ")
    assert "the best of a random number of runs (geometric distribution of mean 3)" in guarantee
    assert compared.startswith("One run spends epsilon ")
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--expected-runs", "0.5"], "expected_runs must be a finite number >= 1; got 0.5"),
        (["--distribution", "binomial"], "expected poisson, geometric, logarithmic or a number; got 'binomial'"),
        (["--distribution", "-1"], "distribution must be a finite number > 0"),
        (["--learning-rate", "1", "--learning-rates", "1", "2"], "give --learning-rate for one value"),
        (["--learning-rates", "0.1,x"], "expected numbers such as 0.1 1 or 0.1,1; got '0.1,x'"),
        (["--max-norms", "0"], "max_norm must be a finite number > 0"),
        (["--noise-multiplier", "0"], "tune is for private training"),
        (["--model", "oriented"], "releases a mean of features, too, which the charge of a search doesn't cover"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], message: str, path: Path, capsys: Any) -> None:
    assert main([*QUICK, "--ledger", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not path.exists()
