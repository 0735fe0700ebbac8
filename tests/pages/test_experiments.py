"""The scripts behind published figures run, in a setting that takes seconds, and write what they say."""

import json
import random
import re

import pytest
from scripts import ROOT, ran, script

from ghostclip.engine.budget import Spending
from ghostclip.native import library
from ghostclip.noise import BandedToeplitz
from ghostclip.selection.kept import KeptRuns, Runs

needs_compiler = pytest.mark.skipif(library("gram") is None, reason="no C compiler here")
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.slow
def test_end_to_end_writes_a_row_for_each_setting(tmp_path, monkeypatch):
    module = script("end_to_end")
    monkeypatch.setattr(module, "EXAMPLES", 40)
    monkeypatch.setattr(module, "SETTINGS", {"default": (20, False)})
    module.main(["--models", "mlp", "--epochs", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert 0 < row["lowest"] <= row["over_plain"] <= row["highest"]
    assert row["epsilon_seconds"] > 0
    assert "\n| mlp | 20 | " in (tmp_path / "end_to_end.md").read_text()


def test_tables_that_are_older_than_what_a_step_runs_are_refused(tmp_path, monkeypatch, capsys):
    module = script("readme_table")
    page = tmp_path / "README.md"
    page.write_text(f"{module.START}\n{module.END}")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PAGES", {"README.md": lambda: "a table"})
    later = ["2222222 Sum twice", "1111111 Measure faster"]
    monkeypatch.setattr(module, "changed_since", lambda commit: later)
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


def test_mixing_is_seen_and_the_alarm_is_quiet(tmp_path, monkeypatch):
    module, name = script("ownership"), "minus the mean over the batch"
    monkeypatch.setattr(module, "KINDS", {name: module.KINDS[name]})
    monkeypatch.setattr(module, "STARTS", (1, 3))
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
    assert results["correlated"]["kills"] >= 10
    assert results["searches"]["kills"] >= 10
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
@pytest.mark.parametrize("forgets", [False, True])
def test_kills_notice_a_step_that_is_not_charged_and_a_run_that_forgets(forgets, tmp_path, monkeypatch):
    kills, charge = script("kills"), Spending.charge
    place = kills.RANDOM if forgets else "between two steps"
    if forgets:
        monkeypatch.setattr(kills, "spent_in", lambda place: 10**6)
    else:
        monkeypatch.setattr(Spending, "charge", lambda self, *of: None if self._own.total() == 3 else charge(self, *of))
    with pytest.raises(kills.Broken, match="1000000 charged" if forgets else "releases"):
        kills.one_run(tmp_path, [place] * (1 if forgets else 3), {place: []}, random.Random(1))


def test_overhead_is_a_share_of_the_step_of_the_same_round(tmp_path):
    module = script("privacy_overhead")
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


@pytest.mark.usefixtures("coarse_losses")
def test_correlated_noise_at_equal_epsilon(tmp_path, monkeypatch):
    """A small run, and the published page, which is that of its figures."""
    module = script("correlated_noise")
    published = json.loads((module.RESULTS / f"{module.FILE}.json").read_text())
    assert (module.RESULTS / f"{module.FILE}.md").read_text() == module.markdown(published)
    assert published["errors"]["8 bands"] == pytest.approx(BandedToeplitz(bands=8).error(published["steps"]), rel=1e-6)
    small = {"EPSILONS": (4.0,), "EPOCHS": (1,), "BANDS": (1, 8), "WORKLOADS": {"sums": (0.0, False)}}
    for name, values in (small | {"WORKLOAD_STEPS": 64}).items():
        monkeypatch.setattr(module, name, values)
    results, _ = ran(module, tmp_path, "--steps", "64")
    (row,), errors = results["rows"], results["errors"]
    ratio = errors["8 bands"] / errors["1 bands"] * row["noise_multiplier"][1] / row["noise_multiplier"][0]
    assert row["over_dpsgd"] == [1.0, pytest.approx(ratio)]
    assert row["rule"] == 32.0
    # For prefix sums nothing is better, and dense matrices give the same errors.
    one, *eight = results["workloads"][0]["errors"]
    assert [one, *eight] == pytest.approx([errors["1 bands"], errors["8 bands"], errors["8 bands"]], rel=1e-6)
