"""`ghostclip` runs that are kept: resumed, charged to a ledger, searched by `tune`, and audited."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import as_json, mistake, ran
from data_files import digits
from ledgers import EVENT, charged

from ghostclip import accounting, checkpoint, datasets
from ghostclip.cli import main, methods, train, tune
from ghostclip.events import SampledGaussian, Selection
from ghostclip.ledger import Ledger
from ghostclip.noise import noise_source
from ghostclip.selection import search

pytestmark = pytest.mark.usefixtures("coarse_losses")

# Two epochs of three steps.
RUN = ["train", "--model", "mlp", "--noise-multiplier", "1", "--batch-size", "500", "--epochs", "2"]
STEPS = 6
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def epsilon_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end only, since it takes longer than the steps."""
    monkeypatch.setattr(train, "MARKS", 1)


def steps_at(folder: Path) -> int:
    return checkpoint.load(folder).public["progress"]["steps"]


def trained(capsys: Capsys, *arguments: Any) -> dict[str, Any]:
    found = as_json(capsys, *RUN, *arguments)
    (run,), (losses,) = found["runs"], found["not_private"]["losses"].values()
    return run | {"losses": losses}


def test_an_interrupted_run_goes_on_and_forgets_nothing(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, losses_of, calls = tmp_path / "run", methods.cross_entropy, itertools.count(1)

    def interrupted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        # The self-check calls the loss function three times more in each of these steps, and once more in the first.
        if next(calls) == 20:
            raise KeyboardInterrupt
        return losses_of(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(methods, "cross_entropy", interrupted)
        assert main([*RUN, "--checkpoint", str(folder)]) == 130
    assert f"the run is kept at {folder}; add --resume" in capsys.readouterr().err
    done = steps_at(folder)
    assert 3 <= done < STEPS
    run = trained(capsys, "--checkpoint", folder, "--resume")
    assert run["steps"] == len(run["losses"]) == STEPS
    setting = {"noise_multiplier": 1.0, "sample_rate": 500 / 1437, "steps": STEPS, "delta": 1e-5}
    assert run["epsilons"]["PLD"] == accounting.epsilon(**setting)
    assert "nothing was trained" not in capsys.readouterr().err
    assert main([*RUN, "--checkpoint", str(folder), "--resume"]) == 0
    assert f"the run at {folder} had ended: nothing was trained" in capsys.readouterr().err
    assert steps_at(folder) == STEPS
    assert sum(event.count for event in Ledger(f"{folder}.ledger").events) == STEPS


def test_a_target_holds_for_all_that_is_in_a_ledger(capsys: Capsys, tmp_path: Path) -> None:
    path, words = tmp_path / "all.ledger", [each for each in RUN if each not in ("--noise-multiplier", "1")]
    trained(capsys, "--ledger", path)
    assert main([*words, "--epsilon", "8", "--ledger", str(path)]) == 2
    assert "one more step would pass max_epsilon = 8" in capsys.readouterr().err
    events = Ledger(path).events
    assert STEPS <= sum(event.count for event in events) < 2 * STEPS
    assert accounting.epsilon_of(events, delta=1e-5) <= 8


def test_a_checkpoint_every_so_many_steps(capsys: Capsys, tmp_path: Path) -> None:
    trained(capsys, "--checkpoint", tmp_path / "run", "--every", 4, "--ledger", tmp_path / "other.ledger")
    assert steps_at(tmp_path / "run") == STEPS
    assert steps_at(checkpoint.previous_of(tmp_path / "run")) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.ledger", "run", "run.previous"]


def test_other_settings_are_refused_by_name(capsys: Capsys, tmp_path: Path) -> None:
    where = ["--checkpoint", str(tmp_path / "run")]
    assert main([*RUN, *where, "--epochs", "1"]) == 0
    done = steps_at(tmp_path / "run")
    for option, other, said in (
        ("--noise-multiplier", "2", "noise_multiplier is 1.0 in it and 2.0 here"),
        ("--learning-rate", "5", "as it was begun, with --learning-rate 2.5"),
        ("--seed", "3", "as it was begun, with --seed 0; got 3"),
    ):
        assert main([*RUN, *where, "--resume", option, other]) == 2
        assert said in capsys.readouterr().err
    assert steps_at(tmp_path / "run") == done


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def test_what_each_run_spent_and_what_it_adds_up_to(path: Path, capsys: Capsys) -> None:
    first = charged(Ledger(path).account(), 40)
    first.close()
    charged(Ledger(path).account("hardened"), 2).close()
    words = ["ledger", path, "--delta", "1e-6", "--accountant", "rdp"]
    shown, found = ran(capsys, *words), as_json(capsys, *words)
    assert f"{path}: 6 records, each whole and in its place; the last hash is {Ledger(path).head.hash}" in shown
    assert "standard noise, from 2" in shown
    assert ": 40 steps over Poisson samples at rate 0.01 with noise multiplier 1.1\n" in shown
    assert ": 2 steps over Poisson samples at rate 0.01" in shown
    expected = accounting.epsilon_of([replace(EVENT, count=42)], delta=1e-6, accountant="rdp")
    assert f"epsilon {expected:.4g} (RDP) at delta 1e-06, after 42 steps" in shown
    assert (found["records"], found["torn_bytes"], found["epsilon"]) == (6, 0, expected)
    row, _ = found["runs"]
    assert (row["run"], row["reserved"], row["returned"], row["steps"]) == (first.run, 64, 24, 40)
    assert (row["noise_multiplier"], row["sample_rate"], row["neighboring"]) == (1.1, 0.01, "add_or_remove_one")


def test_a_torn_line_is_reported_and_left_alone(path: Path, capsys: Capsys) -> None:
    charged(Ledger(path, block=4).account(), 4).close()
    whole = path.read_bytes() + b'{"record":{"n":2,'
    path.write_bytes(whole)
    assert "A crash cut the last line short after 17 bytes" in ran(capsys, "ledger", path, "--accountant", "rdp")
    assert path.read_bytes() == whole


def test_damage_and_missing_files_are_one_line(path: Path, capsys: Capsys) -> None:
    assert "run.ledger can't be read: No such file or directory" in mistake(capsys, "ledger", path)
    charged(Ledger(path).account(), 1).close()
    path.write_bytes(path.read_bytes().replace(b'"count":32', b'"count":12'))
    assert "is damaged at line 2: its CRC is wrong" in mistake(capsys, "ledger", path)


TUNE = ["tune", "--model", "mlp", "--epochs", "1", "--batch-size", "479", "--noise-multiplier", "2"]
SEARCH = [*TUNE, "--expected-runs", "3"]
SELECTION = Selection((SampledGaussian(479 / 1437, 2.0, 3),), 3.0)


@pytest.fixture
def two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_runs", lambda *_: 2)


@pytest.mark.usefixtures("two_runs")
def test_the_best_run_is_told_and_the_search_is_charged_once(path: Path, capsys: Capsys) -> None:
    saved = path.with_name("model.pt")
    words = ["--learning-rates", "0.1,0.5", "--max-norms", "0.5", "--save", saved]
    found = as_json(capsys, *SEARCH, "--ledger", path, *words)
    assert found["settings"]["learning_rate"] in (0.1, 0.5)
    assert found["settings"]["max_norm"] == 0.5
    assert 0 < found["accuracy"] <= 1
    assert Ledger(path).events == [SELECTION]
    run = {"noise_multiplier": 2.0, "sample_rate": 479 / 1437, "steps": 3}
    assert found["epsilon"] == accounting.selection_epsilon(**run, expected_runs=3, delta=1e-5)
    assert found["epsilon_of_one_run"] < found["epsilon"]
    assert all(tensor.isfinite().all() for tensor in torch.load(saved).values())


@pytest.mark.usefixtures("two_runs")
def test_an_interrupted_search_goes_on(path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tune.train, []

    def interrupted(*given: Any) -> Any:
        calls.append(given[0].learning_rate)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(tune, "train", interrupted)
    ran(capsys, *SEARCH, "--ledger", path, status=130)
    for other in (["--optimizer", "adam"], ["--seed", "1"]):
        words = [*SEARCH, *other, "--learning-rate", str(calls[0])]
        assert "is of an unfinished search with other arguments" in mistake(capsys, *words, "--ledger", path)
    ran(capsys, *SEARCH, "--ledger", path)
    assert len(calls) == 3
    assert Ledger(path).events == [SELECTION]


def test_no_run_is_told_and_charged(path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_runs", lambda *_: 0)
    assert ran(capsys, *SEARCH, "--ledger", path).startswith("no run was drawn; the search spends epsilon ")
    assert Ledger(path).events == [SELECTION]


@pytest.mark.usefixtures("two_runs")
def test_the_text_of_a_search_has_the_guarantee_and_of_its_ledger_no_step(path: Path, capsys: Capsys) -> None:
    words = ["--distribution", "geometric", "--ledger", path]
    best, guarantee, compared, *_ = ran(capsys, *SEARCH, *words).splitlines()
    assert best.startswith("best run: learning rate ")
    assert "the best of a random number of runs (geometric distribution of mean 3)" in guarantee
    assert compared.startswith("One run spends epsilon ")
    _, run, _ = ran(capsys, "ledger", path).splitlines()
    assert ": the best of a random number of runs (geometric distribution of mean 3), each of 3 steps over" in run


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
def test_mistakes_of_a_search_are_told_in_one_line(words: list[str], message: str, path: Path, capsys: Capsys) -> None:
    assert message in mistake(capsys, *TUNE, "--ledger", path, *words)
    assert not path.exists()


AUDIT = ["audit", "--model", "mlp", "--epochs", "1", "--noise-multiplier", "1", "--batch-size", "400"]
# So sure that a sound engine does not fail by chance.
SURE = [*AUDIT, "--draws", "300", "--confidence", "0.9999999"]


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of 400 digits instead of all of them."""
    fewer = digits(400)
    monkeypatch.setattr(datasets, "load", lambda *given: fewer)


@pytest.mark.slow
@pytest.mark.usefixtures("few_digits")
def test_a_sound_training_is_consistent(capsys: Capsys, tmp_path: Path) -> None:
    out, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    found = as_json(capsys, *SURE, "--canaries", "20", "--out", out, "--plot", plot)
    assert found["violated"] is False
    assert (found["settings"]["model"], found["settings"]["data"]) == ("mlp", "digits")
    assert found["one_run"]["canaries"] == 20
    assert found["audited_epsilon"] < found["claimed_epsilon"]
    assert json.loads(out.read_text()) == found
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("few_digits")
def test_a_violation_is_exit_status_1_and_is_said(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    standard = type(noise_source("standard"))
    release = standard.release
    monkeypatch.setattr(standard, "release", lambda self, sums, std, divisor=1.0: release(self, sums, 0.0, divisor))
    assert main([*AUDIT, "--draws", "300", "--canaries", "0"]) == 1
    printed = capsys.readouterr()
    last = printed.out.splitlines()[-1]
    assert last.startswith("VIOLATED: the audit found epsilon >= ")
    assert "at confidence 0.95, above the claimed" in last
    assert "white box: 100%" in printed.err


@pytest.mark.slow
@pytest.mark.usefixtures("few_digits")
def test_either_attack_alone(capsys: Capsys) -> None:
    found = as_json(capsys, *SURE, "--canaries", "0", "--steps-per-trial", "2", "--method", "reweight")
    assert found["one_run"] is None
    assert found["white_box"]["trials"] == 150
    assert main([*AUDIT, "--draws", "0", "--canaries", "10"]) in (0, 1)
    assert "white box" not in capsys.readouterr().out
