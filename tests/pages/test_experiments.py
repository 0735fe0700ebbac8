"""The scripts behind published figures run, in a setting that takes seconds, and write what they say."""

import importlib
import json
import math
import random
import re
from statistics import mean

import pytest
import torch
from data_files import ADULT_ROW
from scripts import ROOT, ran, script
from torch.nn import functional as F

from experiments.zoo import page as zoo
from ghostclip import accounting
from ghostclip.engine.budget import Spending
from ghostclip.events import SampledGaussian
from ghostclip.native import library
from ghostclip.noise import BandedToeplitz
from ghostclip.selection.kept import KeptRuns, Runs

needs_compiler = pytest.mark.skipif(library("gram") is None, reason="no C compiler here")
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def changed(monkeypatch, name, **values):
    """The script with other numbers in place of its own."""
    module = script(name)
    for each, value in values.items():
        monkeypatch.setattr(module, each, value)
    return module


@pytest.mark.slow
def test_end_to_end_writes_a_row_for_each_setting(tmp_path, monkeypatch):
    module = changed(monkeypatch, "end_to_end", EXAMPLES=40, SETTINGS={"default": (20, False)})
    module.main(["--models", "mlp", "--epochs", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert 0 < row["lowest"] <= row["over_plain"] <= row["highest"]
    assert row["epsilon_seconds"] > 0
    assert "\n| mlp | 20 | " in (tmp_path / "end_to_end.md").read_text()


def test_tables_that_are_older_than_what_a_step_runs_are_refused(tmp_path, monkeypatch, capsys):
    later, pages = ["2222222 Sum twice", "1111111 Measure faster"], {"README.md": lambda: "a table"}
    module = changed(monkeypatch, "readme_table", ROOT=tmp_path, PAGES=pages, changed_since=lambda commit: later)
    page = tmp_path / "README.md"
    page.write_text(f"{module.START}\n{module.END}")
    assert module.main([]) == 1
    said = capsys.readouterr().err
    assert "before '1111111 Measure faster' and 1 more commits" in said
    assert said.endswith("run make bench first\n")
    assert "a table" not in page.read_text()
    later.clear()
    assert module.main([]) == 0
    assert "a table" in page.read_text()


@needs_compiler
def test_kernels_are_timed_beside_their_twins(tmp_path):
    words = ["--kernels", "rows of tables", "noise", "--workloads", "mlp", "--seconds", "0", "--batch-size", "4"]
    results, page = ran(script("kernels"), tmp_path, *words)
    assert [(row["file"], row["workload"], row["batch_size"]) for row in results["rows"]] == [
        ("native/rows.c", "mlp", 4), ("native/normal.c", "mlp", 4),
    ]  # fmt: skip
    assert all(row["ratio"]["rounds"] >= 3 and row["ratio"]["median"] > 0 for row in results["rows"])
    assert "| noise | `native/normal.c` |" in page


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:`.*` is deprecated:FutureWarning")
def test_adapters_are_measured_beside_ordinary_steps(tmp_path):
    pytest.importorskip("peft")
    module = script("large_lora")
    module.main(["--workload", "tiny", "--seconds", "0", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "large_lora.json").read_text())
    assert list(found["ways"]) == list(module.NAMES)
    for row in found["ways"].values():
        assert row["peak"] == row["above_model"] + found["model_bytes"]
        assert row["time"]["median"] > 0
    assert found["trained"] < found["parameters"] / 2
    assert f"| {module.PRIVATE} | " in (tmp_path / "large_lora.md").read_text()
    module.main(["--workload", "tiny", "--training", "3", "--out", str(tmp_path)])
    seconds = json.loads((tmp_path / "large_lora_training.json").read_text())["seconds"]
    assert [len(each) for each in seconds.values()] == [3, 3]
    row = (tmp_path / "large_lora_training.md").read_text().splitlines()[8].split(" | ")
    ratio = sum(seconds[module.PRIVATE]) / sum(seconds[module.ORDINARY])
    assert row[0] == "| 3"
    assert float(row[3].rstrip("| ")) == pytest.approx(ratio, abs=0.006)


@pytest.mark.slow
def test_models_with_dropout_take_turns(tmp_path, monkeypatch):
    """Here all contenders are uncompiled ones."""
    pytest.importorskip("transformers")
    module = script("compiled_dropout")
    for compiled, eager in {"nonprivate-compiled": "nonprivate", "compiled": "cached"}.items():
        monkeypatch.setitem(module.CONTENDERS, compiled, module.CONTENDERS[eager])
    found, page = ran(module, tmp_path, "--seconds", "0")
    assert [(row["workload"], row["dropout"]) for row in found["rows"]] == [
        ("hf-gpt2", 0.0), ("hf-bert", 0.0), ("hf-gpt2", 0.1), ("hf-bert", 0.1)
    ]  # fmt: skip
    assert all(each["over"]["median"] > 0 for row in found["rows"] for each in row["contenders"].values())
    assert sum(line.startswith(("| GPT-2", "| BERT")) for line in page.splitlines()) == 4


def test_mixing_is_seen_and_the_alarm_is_quiet(tmp_path, monkeypatch):
    name = "minus the mean over the batch"
    module = changed(monkeypatch, "ownership", STARTS=(1, 3))
    monkeypatch.setattr(module, "KINDS", {name: module.KINDS[name]})
    monkeypatch.setattr(module, "NORMS", dict(list(module.NORMS.items())[:1]))
    found, page = ran(module, tmp_path, "--seeds", "2", "--draws", "2000", "--sizes", "64")
    assert all(row["refused_in"] == [0, 0] for row in found["mixing"])
    assert [row["either"] for row in found["alarms"]] == [0]
    assert f"| {name} | 1 | 1 | 1 | 1 |" in page


@pytest.mark.slow
@forks
def test_kills_leave_no_release_uncharged(tmp_path):
    results, page = ran(script("kills"), tmp_path, "--kills", "20")
    assert results["kills"] >= 20
    assert results["resumed_from_a_checkpoint"] > 0
    assert all(0 <= row["least_added"] <= row["most_added"] <= results["block"] for row in results["points"].values())
    assert min(results[part]["kills"] for part in ("correlated", "searches")) >= 10
    assert all(row["most_added"] <= 1 for row in results["searches"]["points"].values())
    assert page.count("| at a random moment |") == 3


@forks
def test_kills_notice_a_search_that_draws_again(tmp_path, monkeypatch):
    """Where runs aren't kept, an interrupted search draws others, and each draw is another search."""
    kills = script("kills")
    monkeypatch.setattr(KeptRuns, "begin", lambda self, draw: self._save(found := Runs("search", draw())) or found)
    plan = ["at the score of a run"] * 12
    with pytest.raises(kills.Broken, match="searches charged, begun"):
        kills.one_search(tmp_path, plan, {plan[0]: []}, random.Random(1))


@forks
def test_kills_notice_a_run_that_forgets(tmp_path, monkeypatch):
    kills = changed(monkeypatch, "kills", spent_in=lambda place: 10**6)
    with pytest.raises(kills.Broken, match="1000000 charged"):
        kills.one_run(tmp_path, [kills.RANDOM], {kills.RANDOM: []}, random.Random(1))


@forks
def test_kills_notice_a_step_that_is_not_charged(tmp_path, monkeypatch):
    kills, charge, place = script("kills"), Spending.charge, "between two steps"
    monkeypatch.setattr(Spending, "charge", lambda self, *of: None if self._own.total() == 3 else charge(self, *of))
    with pytest.raises(kills.Broken, match="releases"):
        kills.one_run(tmp_path, [place] * 3, {place: []}, random.Random(1))


def test_overhead_is_a_share_of_the_step_of_the_same_round(tmp_path, monkeypatch):
    module = changed(monkeypatch, "privacy_overhead", PLANNED=2000)  # 100,000 take a matrix of noise 20 s to be made
    results, page = ran(module, tmp_path, "--workloads", "mlp", "--batch-size", "4", "--seconds", "0.2")
    found = results["workloads"]["mlp"]
    assert {*module.STEPS, "noise", "ledger", "ledger, every step", "together"} <= set(found["ms"])
    ms = {part: spread["median"] for part, spread in found["ms"].items()}
    assert ms["noise"] < ms["together"]
    assert "standard noise and ledger in blocks" in page


# Scripts, and the pages that have the tables of their results.
TABLES = {"accuracy": "accuracy", "learning": "learning", "mislabelled": "observation", "ownership": "ownership"}
TABLES |= {"trace_cost": "observation"}


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_tables_that_its_script_makes_of_the_results(name):
    results = ROOT / "experiments" / "results" / name
    text, page = results.with_suffix(".md").read_text(), (ROOT / "docs" / f"{TABLES[name]}.md").read_text()
    assert text == script(name).markdown(json.loads(results.with_suffix(".json").read_text()))
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert tables
    assert all(f"\n\n{table}\n" in f"{page}\n" for table in tables)


def test_the_page_of_models_is_that_of_the_results():
    results = json.loads((ROOT / "experiments" / "results" / "supported_models.json").read_text())
    assert zoo.page(results) == (ROOT / "docs" / "supported_models.md").read_text()


@pytest.mark.usefixtures("coarse_losses")
def test_correlated_noise_at_equal_epsilon(tmp_path, monkeypatch):
    """A small run, and the published page, which is that of its figures."""
    module = script("correlated_noise")
    published = json.loads((module.RESULTS / f"{module.FILE}.json").read_text())
    assert (module.RESULTS / f"{module.FILE}.md").read_text() == module.markdown(published)
    assert published["errors"]["8 bands"] == pytest.approx(BandedToeplitz(bands=8).error(published["steps"]), rel=1e-6)
    small = {"EPSILONS": (4.0,), "EPOCHS": (1,), "BANDS": (1, 8), "WORKLOADS": {"sums": (0.0, False)}}
    module = changed(monkeypatch, "correlated_noise", WORKLOAD_STEPS=64, **small)
    results, _ = ran(module, tmp_path, "--steps", "64")
    (row,), errors = results["rows"], results["errors"]
    ratio = errors["8 bands"] / errors["1 bands"] * row["noise_multiplier"][1] / row["noise_multiplier"][0]
    assert row["over_dpsgd"] == [1.0, pytest.approx(ratio)]
    assert row["rule"] == 32.0
    # The published closed form of the square root's largest error.
    squares = [(math.comb(2 * k, k) / 4**k) ** 2 for k in range(64)]
    assert results["square root"]["largest"] == pytest.approx(sum(squares))
    assert results["first of square root"]["mean"] > errors["8 bands"] > results["square root"]["mean"]
    assert errors["3 buffers"] < results["square root"]["mean"]
    # For prefix sums nothing is better, and dense matrices give the same errors.
    one, *eight = results["workloads"][0]["errors"]
    assert [one, *eight] == pytest.approx([errors["1 bands"], errors["8 bands"], errors["8 bands"]], rel=1e-6)


@pytest.mark.usefixtures("coarse_losses")
@pytest.mark.slow
def test_accuracy_at_equal_epsilon_is_tuned_tested_and_taken_up_again(tmp_path, monkeypatch):
    module = changed(monkeypatch, "accuracy", EPSILONS=(3.0,), LEAST=2)
    words = ["--only", module.STATISTICS, module.LINEAR, "--seeds", "2"]
    results, page = ran(module, tmp_path, *words)
    names = {module.STATISTICS, module.LINEAR}
    assert {key.split("|")[1] for key in results["runs"]} == names
    for name in names:
        factor, validated = module.tuned(results["runs"], "images", name, 3.0)
        assert validated == max(
            mean(results["runs"][f"images|{name}|3|{each:g}|{1000 + seed}"] for seed in range(3))
            for each in module.ROWS[name].rates
        )
        found = [results["runs"][f"images|{name}|3|{factor:g}|{seed}"] for seed in (0, 1)]
        assert module.tested(results["runs"], "images", name, 3.0) == found
        assert 0.9 < min(found) < 1
    assert f"| {module.LINEAR} is better than {module.STATISTICS} | measured before | +" in page
    # Nothing is run twice.
    monkeypatch.setattr(module, "accuracy", None)
    assert ran(module, tmp_path, *words)[0]["runs"] == results["runs"]


@pytest.mark.usefixtures("coarse_losses")
def test_the_fixed_order_runs_on_adult_s_files(tmp_path, monkeypatch):
    module = changed(monkeypatch, "accuracy", STREAM_EPSILONS=(8.0,))
    monkeypatch.setattr(importlib.import_module("equal_epsilon.cyclic"), "BATCH", 30)
    rows = [ADULT_ROW.format(income=income) for income in ("<=50K", ">50K") for _ in range(60)]
    for name in ("adult.data", "adult.test"):
        (tmp_path / name).write_text("\n".join(rows))
    words = ["--data", "adult", "--root", str(tmp_path), "--only", "Poisson", "cyclic, BLT", "--seeds", "2"]
    module.main([*words, "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "accuracy-adult.json").read_text())["runs"]
    assert {key.split("|")[1] for key in runs} == {"Poisson", "cyclic, BLT"}
    # Rows of one kind: half of the labels are right.
    assert set(runs.values()) == {0.5}
    page = (tmp_path / "accuracy-adult.md").read_text()
    assert page.startswith("Logistic regression, Adult, one epoch")
    assert "| cyclic, BLT | batches in a fixed order, BLT with 3 buffers | 2 | 50.00 (0.00) |" in page


@pytest.mark.usefixtures("coarse_losses")
def test_noisy_statistics_are_a_ridge_regression_and_move_by_at_most_one():
    statistics = importlib.import_module("equal_epsilon.statistics")
    torch.manual_seed(0)
    features, labels = F.normalize(torch.randn(60, 5, dtype=torch.float64)), torch.arange(60) % 3
    exact = torch.linalg.lstsq(features, F.one_hot(labels, 3).double()).solution
    torch.testing.assert_close(statistics.ridge(features, labels, 3, 1e-12, (1.0, 0)), exact, rtol=1e-6, atol=1e-8)
    # Noise of the same size in each coordinate of an isometry of symmetric matrices: x x^T has norm 1 there.
    draws = torch.stack([statistics.symmetric_noise(5, torch.Generator().manual_seed(seed)) for seed in range(4000)])
    assert torch.equal(draws, draws.transpose(1, 2))
    expected = (torch.ones(5, 5) + torch.eye(5)).double() / 2
    torch.testing.assert_close(draws.var(0), expected, rtol=0.12, atol=0)
    noise, mean_noise = statistics.noise_of_each(3.0, 1e-5, 0.1)
    events = [SampledGaussian(1.0, noise, 2), SampledGaussian(1.0, mean_noise)]
    assert 2.99 < accounting.epsilon_of(events, delta=1e-5) <= 3.0
    assert mean_noise**-2 / (mean_noise**-2 + 2 * noise**-2) == pytest.approx(0.1)


ERRORS = {"worst": 1e-14, "floor": 1e-15, "neighbours": 0.999999, "steps": 3, "parameters": 10, "measured": False}


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (ERRORS, "exact"),
        (ERRORS | {"worst": 1e-7}, "WRONG"),
        (ERRORS | {"neighbours": 1.0001}, "WRONG"),
        (ERRORS | {"neighbours": float("nan")}, "WRONG"),
        (ERRORS | {"steps": 2}, "WRONG"),
        ({"refused": "mixes"}, "refused"),
        ({"failed": "KeyError"}, "fails"),
        ({}, "fails"),
    ],
)
def test_the_verdict_on_a_model_is_by_all_figures(errors, said):
    assert zoo.verdict({"errors": errors}) == said
