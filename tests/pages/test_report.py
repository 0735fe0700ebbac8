"""The report: a page that needs no network, plots that are images, JSON that says what is not private."""

import io
import json
import math
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib import image
from torch.utils.data import TensorDataset

from ghostclip import report
from ghostclip.cli.summary import confusion, misread_digits, run_table
from ghostclip.datasets import Data
from ghostclip.report import NormSnapshot, PrivacyCurve, Record, ShownExample, TrainingRun, plots

pytestmark = pytest.mark.usefixtures("coarse_losses")

EPSILONS, LOSSES = {"PLD": 7.99, "RDP": 8.75}, [2.3, math.nan, 1.25]
PRIVATE = TrainingRun(
    "private, epsilon 8", "cached", 0.934, 2, 40, 3.25, 1234.5, 1.51, EPSILONS, LOSSES, "standard", "sgd", 0.4664, 512,
    seed=4, accuracies=[0.5, 0.934], calibration_seconds=2.2, compilation_seconds=4.4,
)  # fmt: skip
PLAIN = TrainingRun(
    "non-private <b>", "nonprivate", 0.985, 2, 40, 1.0, 5000.0, losses=[2.0, 1.0, 0.5], seed=4, accuracies=[0.9, 0.985]
)
RECORD = Record(
    title="CNN on digits",
    settings={"model": "cnn", "delta": 1e-5, "data folder": None},
    runs=[PRIVATE, PLAIN],
    speeds={"nonprivate": 5000.0, "cached": 2500.0},
    speed_batch_size=64,
    privacy=PrivacyCurve([0, 20, 40], {"PLD": [0, 5, 7.99], "RDP": [0, 6, 8.75]}, 1e-5, 8.0),
    norms=NormSnapshot([0.5, 2.0, 4.0, math.inf], 1.0),
    machine={"torch": "2"},
    versions={"scipy": "1.2.3"},
    command="ghostclip train --report 'my folder'",
    date="2024-05-06 07:08 UTC",
)
OTHER_SEED = replace(
    PRIVATE, seed=5, accuracy=0.954, accuracies=[math.nan, 0.954], seconds=4.25, calibration_seconds=0.0
)
LOWER = replace(
    PRIVATE, name="private, epsilon 3", epsilons={"PLD": 2.99, "RDP": 3.5}, accuracy=0.8, calibration_seconds=1.0
)


def test_the_table_of_a_command_has_accuracy_epsilon_and_time():
    shown = run_table([PRIVATE, OTHER_SEED, PLAIN], 1e-5, RECORD.speeds, 64).splitlines()
    assert [re.split("  +", line.strip()) for line in (shown[0], *shown[2:4])] == [
        ["training", "mean accuracy", "range of 2 runs", "epsilon", "seconds", "step time"],
        ["private, epsilon 8", "94.4%", "93.4% to 95.4%", "7.99", "3.8", "2.00"],
        ["non-private <b>", "98.5%", "98.5% to 98.5%", "none", "1.0", "1.00"],
    ]
    assert shown[5] == "step time is over an ordinary step's of the same 64 examples"
    assert "step time" not in run_table([PLAIN], 1e-5, {}, 0)


def test_another_network_beside_the_main_one_has_a_line_over_epsilon_and_no_step_time():
    runs = [PRIVATE, LOWER, *(replace(run, name=f"linear {run.name}", model="linear") for run in (PRIVATE, LOWER))]
    shown = run_table(runs, 1e-5, RECORD.speeds, 64).splitlines()
    assert [line.split()[-1] for line in shown[2:6]] == ["2.00", "2.00", "-", "-"]
    drawn = {plot.file: plot for plot in report._plots(replace(RECORD, runs=runs))}
    assert "private, epsilon 7.99: 93.4%; linear, epsilon 2.99: 80.0%" in drawn["accuracy_by_epsilon.png"].alt
    assert all("linear" not in drawn[name].alt for name in ("accuracy.png", "loss.png"))
    assert decoded(drawn["accuracy_by_epsilon.png"].draw())[0] > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A report in a folder that did not exist."""
    path = tmp_path_factory.mktemp("reports") / "a" / "b"
    assert report.write(RECORD, path) == path / "index.html"
    return path


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """The page of the record with changes; without plots, which take nearly all of the time."""
    monkeypatch.setattr(report, "_plots", lambda record: [])
    return lambda **changes: report.write(replace(RECORD, **changes), tmp_path).read_text()


def tables(page: str) -> list[list[list[str]]]:
    """The cells of every table, row by row."""
    cell = "<t[hd](?: [^>]*)?>(.*?)</t[hd]>"
    return [
        [re.findall(cell, row) for row in re.findall("<tr.*?>(.*?)</tr>", table, re.DOTALL)]
        for table in re.findall("<table.*?>(.*?)</table>", page, re.DOTALL)
    ]


def decoded(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG."""
    height, width, *_ = image.imread(io.BytesIO(png), format="png").shape
    return width, height


def test_page_holds_its_plots_and_fetches_nothing(folder):
    page = (folder / "index.html").read_text()
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [b64decode(one) for one in embedded] == [
        (folder / name).read_bytes() for name in ("accuracy.png", "epsilon.png", "loss.png", "norms.png")
    ]
    without = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"https?:|//|<script|<link|@import|url\(", without)


def test_page_tells_the_figures_and_what_is_not_private(folder):
    page = (folder / "index.html").read_text()
    for text in ("93.4%", "98.5%", "7.990", "8.750", "1.510", "2,500", "2.00", "one batch of 64", "1e-05",
                 "75.0% of the examples are clipped", "<td>sgd</td><td>0.4664</td><td>512</td>",
                 "another run gives another accuracy", "Dashed: the target"):  # fmt: skip
        assert text in page
    public, kept = page.split("<h2>Not private</h2>")
    assert (public.count("<figure>"), kept.count("<figure>")) == (2, 2)
    assert "Mean loss of each step" in kept
    assert "Gradient norms at the end" in kept
    assert "computed from the training data without noise" in kept
    assert "Results of runs without noise have no privacy." in public
    assert "non-private &lt;b&gt;" in page
    assert "data folder" not in page


def test_json_is_strict_and_keeps_private_data_apart(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert found["runs"][0]["epsilons"] == {"PLD": 7.99, "RDP": 8.75}
    assert "losses" not in found["runs"][0]
    assert found["not_private"]["losses"]["private, epsilon 8"] == [2.3, "nan", 1.25]
    assert found["not_private"]["norms"]["norms"] == [0.5, 2.0, 4.0, "inf"]
    assert found["not_private"]["norms"]["clipped"] == 0.75
    assert found["not_private"]["runs"] == ["non-private <b>"]
    assert found["examples_per_second"] == {"nonprivate": 5000.0, "cached": 2500.0}


def test_the_page_names_the_generators_of_standard_noise(page_of):
    runs = [
        replace(PRIVATE, generator="ChaCha20"), replace(OTHER_SEED, generator="AES-256"), LOWER,
        replace(PRIVATE, generator="SipHash", noise="hardened"),
    ]  # fmt: skip
    page = page_of(runs=runs)
    assert "Standard noise comes from AES-256 or ChaCha20, and" in page
    assert "SipHash" not in page


def test_errors_are_counted_by_class_and_added_up_over_the_seeds(page_of, tmp_path):
    labels, classes = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 1, 0, 2, 2])
    counts = confusion(classes, labels, 3)
    pairs = list(zip(labels.tolist(), classes.tolist(), strict=True))
    assert counts == [[pairs.count((label, said)) for said in range(3)] for label in range(3)]
    runs = [replace(PRIVATE, confusion=counts), replace(OTHER_SEED, confusion=[[2, 0, 0], [0, 0, 1], [0, 0, 3]]), PLAIN]
    page = page_of(runs=runs)
    (table,) = [table for table in tables(page) if table[0] == ["", "0", "1", "2"]]
    assert table[1:] == [["0", "3", "1", ""], ["1", "", "1", "1"], ["2", "1", "", "5"]]
    assert page.count('class="wrong"') == 3
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["confusion"] == counts


def test_the_page_shows_the_digits_that_are_misread_most(page_of):
    images, labels = torch.rand(6, 1, 8, 8), torch.tensor([0, 0, 1, 1, 1, 0])
    data = Data("digits", TensorDataset(images, labels), TensorDataset(images, labels), (1, 8, 8), 2)
    said = {"private": torch.tensor([0, 1, 0, 1, 0, 1]), "non-private": torch.tensor([0, 0, 1, 1, 0, 1])}
    shown = misread_digits(data, said)
    # The second 0 and the last are misread once and twice; of the 1s the first once, the last twice.
    assert shown == [
        ShownExample(images[5, 0].tolist(), 0, {"private": 1, "non-private": 1}),
        ShownExample(images[4, 0].tolist(), 1, {"private": 0, "non-private": 0}),
    ]
    assert misread_digits(replace(data, name="mnist"), said) == []
    page = page_of(shown=shown[:1], weights="some.safetensors")
    assert ["private", "1"] in next(table for table in tables(page) if "test image" in table[0])
    png = b64decode(re.search(r'base64,([^"]+)" alt="image of a 0"', page)[1])
    pixels = torch.tensor(image.imread(io.BytesIO(png), format="png"))[:, :, 0]
    torch.testing.assert_close(pixels, images[5, 0], rtol=0, atol=1 / 128)
    assert "some.safetensors" in page


GAPS = [
    *((plots.norm_plot, norms, 1.0) for norms in ([], [0.0, math.nan], [1e-9, 1e9])),
    (plots.loss_plot, {"one": (1, [math.nan])}),
    (plots.loss_plot, {}),
    (plots.accuracy_plot, {"one": [[0.5, math.nan], [0.25, 0.75]], "other": [[math.nan] * 3]}),
    (plots.accuracy_by_epsilon_plot, {"cnn": {1.0: [0.5], 8.0: [0.7, 0.9]}, "linear": {8.0: [0.8]}}),
]  # fmt: skip


@pytest.mark.parametrize("drawn", GAPS, ids=lambda drawn: drawn[0].__name__)
@pytest.mark.one_in(2)
def test_plots_take_gaps(drawn):
    plot, *values = drawn
    assert decoded(plot(*values))[0] > 0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 0.2), (1.0, 1e-5), (3.0, 0.0), (8.0, 1e-6)])
def test_the_share_of_right_guesses_is_that_of_the_mechanism_that_gives_most_away(epsilon, delta):
    """Kairouz, Oh & Viswanath's of four outcomes, of which the best guess is the likelier case; infinity has none."""
    likely = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    present = [delta, likely, 1 - delta - likely, 0.0]
    right = sum(max(pair) for pair in zip(present, reversed(present), strict=True)) / 2
    run = replace(PRIVATE, epsilons={"PLD": epsilon})
    useless = [replace(PRIVATE, epsilons={"PLD": large}) for large in (math.inf, 1e5)]
    (found,) = report._meanings([report.RunGroup([each]) for each in (run, *useless)], delta)
    assert found.right == pytest.approx(right, rel=1e-12)
    assert found.factor == math.exp(epsilon)


def test_bounds_for_attacks_are_shown_where_they_are_known(folder, page_of, tmp_path):
    curve = replace(RECORD.privacy, advantage=0.7654, true_positive_rates={0.001: 0.0321, 0.1: 0.8765})
    page = page_of(privacy=curve)
    assert "the attacker's advantage, is at most 0.765." in page
    assert [["false positives", "true positives, at most"], ["0.1%", "3.21%"], ["10%", "87.65%"]] in tables(page)
    found = json.loads((tmp_path / "report.json").read_text())["privacy"]
    assert (found["advantage"], found["true_positive_rates"]) == (0.7654, {"0.001": 0.0321, "0.1": 0.8765})
    assert "advantage" not in (folder / "index.html").read_text()


def test_each_epsilon_has_its_meaning_once_and_other_accountants_are_folded(page_of):
    linear = replace(PRIVATE, name="linear, epsilon 8", model="linear", epsilons={"PLD": 7.9901, "RDP": 8.7501})
    page = page_of(runs=[PRIVATE, LOWER, linear, PLAIN])
    (meanings,) = [table for table in tables(page) if table[0][-1].startswith("guesses")]
    assert [row[0] for row in meanings[1:]] == ["7.990", "2.990"]
    shown, folded = page.split("<details>", 1)
    assert "epsilon (RDP)" not in shown
    assert ["linear, epsilon 8", "8.750"] in next(table for table in tables(folded) if "epsilon (RDP)" in table[0])
