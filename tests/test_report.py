"""The report: a page that needs no network, plots that are images, JSON that says what is not private."""

import json
import math
import re
import struct
import zlib
from base64 import b64decode
from pathlib import Path

import pytest

from ghostclip import report
from ghostclip.report import NormSnapshot, PrivacyCurve, Record, TrainingRun, plots

EPSILONS, LOSSES = {"PLD": 7.99, "RDP": 8.75}, [2.3, math.nan, 1.25]
PRIVATE = TrainingRun(
    "private, epsilon 8", "cached", 0.934, 20, 40, 3.25, 1234.5, 1.51, EPSILONS, LOSSES, "standard", "sgd", 0.4664, 512
)
PLAIN = TrainingRun("non-private <b>", "nonprivate", 0.985, 20, 40, 1.0, 5000.0, losses=[2.0, 1.0, 0.5])
RECORD = Record(
    title="CNN on digits",
    settings={"model": "cnn", "delta": 1e-5, "data folder": None},
    runs=[PRIVATE, PLAIN],
    speeds={"nonprivate": 5000.0, "cached": 2500.0},
    speed_batch_size=64,
    privacy=PrivacyCurve([0, 20, 40], {"PLD": [0, 5, 7.99], "RDP": [0, 6, 8.75]}, 1e-5, 8.0),
    norms=NormSnapshot([0.5, 2.0, 4.0, math.inf], 1.0),
    machine={"torch": "2"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A report in a folder that did not exist."""
    path = tmp_path_factory.mktemp("reports") / "a" / "b"
    assert report.write(RECORD, path) == path / "index.html"
    return path


def decoded(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG whose chunks are all whole."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, size = 8, (0, 0)
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        body = png[place + 4 : place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length : place + 12 + length])[0] == zlib.crc32(body)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[4:12])
        place += 12 + length
    return size


def test_files(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "report.json", "loss.png", "epsilon.png", "norms.png"}
    for plot in folder.glob("*.png"):
        width, height = decoded(plot.read_bytes())
        assert width > height > 400


def test_page_holds_its_plots_and_fetches_nothing(folder):
    page = (folder / "index.html").read_text()
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [b64decode(one) for one in embedded] == [
        (folder / name).read_bytes() for name in ("loss.png", "epsilon.png", "norms.png")
    ]
    without = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"https?:|//|<script|<link|@import|url\(", without)


def test_page_tells_the_figures_and_what_is_not_private(folder):
    page = (folder / "index.html").read_text()
    for text in (
        "93.4%",
        "98.5%",
        "7.990",
        "8.750",
        "1.510",
        "1,234",
        "2,500",
        "2.00",
        "one batch of 64",
        "1e-05",
        "75.0% of the examples are clipped",
        "<td>sgd</td><td>0.4664</td><td>512</td>",
        "another run gives another accuracy",
        "Dashed: the target",
    ):
        assert text in page
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert [caption.endswith("Not private.") for caption in captions] == [True, False, True]
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
    assert found["examples_per_second"] == {"nonprivate": 5000.0, "cached": 2500.0}


def test_a_run_without_privacy_has_no_privacy_plots(tmp_path):
    report.write(Record("plain", {}, [PLAIN]), tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"loss.png"}
    page = (tmp_path / "index.html").read_text()
    assert "epsilon.png" not in page
    assert "drawn afresh" not in page


@pytest.mark.parametrize("norms", [[], [0.0], [0.0, math.nan], [1e-9, 1e9], [1.0] * 5])
def test_norm_plot_takes_any_norms(norms):
    assert decoded(plots.norm_plot(norms, 1.0))[0] > 0


def test_norm_bins_meet_at_the_clipping_norm():
    edges = plots._log_edges(plots.np.asarray([0.01, 30.0]), 0.7)
    assert 0.7 in edges
    assert (plots.np.diff(edges) > 0).all()
    assert edges[-1] == pytest.approx(30.0)


@pytest.mark.parametrize("losses", [{}, {"empty": (1, [math.nan])}, {"one": (3, [2.0])}, {"none": (2, [])}])
def test_loss_plot_takes_gaps(losses):
    assert decoded(plots.loss_plot(losses))[0] > 0


def test_smoothing_keeps_a_constant_and_skips_gaps():
    smooth = plots._smoothed([3.0, math.nan, 3.0, 3.0])
    assert smooth.tolist() == [3.0] * 4


def test_an_unwritable_folder_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        report.prepare(tmp_path / "file" / "report")


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(report.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="has 1000 bytes left"):
        report.prepare(tmp_path)
