"""Plots of traces, and the scripts behind the figures of docs/observation.md, whose tables are the results'."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
from scripts import ran, script

from ghostclip import clipping as c
from ghostclip import traces
from ghostclip.report import trace_plots

matplotlib = pytest.importorskip("matplotlib")


def trace_of(path: Path, clipping: Any, **changes: Any) -> dict[str, Any]:
    engine = runs.engine_for(runs.network(), clipping=clipping, noise_multiplier=1.0, self_check=False, **changes)
    engine.trace(path, every=2)
    runs.train(engine, 3 * len(engine.batches()))
    return traces.read(path)


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    return trace_of(tmp_path / "t.npz", c.Composed(c.ByLayer(), c.Quantiles(0.3)))


@pytest.fixture
def drawn(monkeypatch: Any) -> list[Any]:
    """Figures that were drawn, instead of their bytes alone."""
    figures: list[Any] = []
    monkeypatch.setattr(trace_plots, "_png", lambda figure: figures.append(figure) or b"")
    return figures


def texts(figure: Any) -> str:
    return " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_all_plots_are_written_as_png_files(tmp_path: Path) -> None:
    files = trace_plots.write(tmp_path / "t.npz", tmp_path / "deep" / "plots")
    names = ["cosine", "fraction_clipped", "median_norm", "norms", "snr", "thresholds"]
    assert sorted(file.name for file in files) == [f"{name}.png" for name in names]
    for file in files:
        pixels = matplotlib.image.imread(io.BytesIO(file.read_bytes()))
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


@pytest.mark.parametrize("value", ["median_norm", "snr"])
def test_a_heatmap_has_a_row_for_each_group_and_says_what_it_is(value: str, found: Any, drawn: list[Any]) -> None:
    trace_plots.heatmap(found, value)
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "2", "all"]
    shown = axes.collections[0].get_array()
    medians = [[np.median(each) if len(each) else np.nan for each in norms] for norms in found["norms"]]
    expected = np.array(medians if value == "median_norm" else found[value]).T
    np.testing.assert_allclose(np.ma.filled(shown.astype(float), np.nan), expected)
    assert "not private" in texts(drawn[0])


def test_histograms_count_every_finite_norm_and_show_thresholds(found: dict[str, Any], drawn: list[Any]) -> None:
    trace_plots.histograms(found)
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["all", "0", "2"]
    for axes, place in zip(panels, (2, 0, 1), strict=True):
        bars = [patch for patch in axes.patches if isinstance(patch, matplotlib.patches.Rectangle)][:40]
        assert sum(bar.get_height() for bar in bars) == found["examples"].sum()
        assert [line.get_xdata()[0] for line in axes.lines] == [found["threshold"][-1, place]]
    assert "not private" in texts(drawn[0])


def test_paths_are_those_of_groups_with_a_threshold(found: dict[str, Any], drawn: list[Any], tmp_path: Path) -> None:
    trace_plots.threshold_paths(found)
    lines = drawn[0].axes[0].lines
    assert [line.get_label() for line in lines[:-1:2]] == ["0", "2", "all"]
    np.testing.assert_array_equal(lines[0].get_ydata(), found["threshold"][:, 0])
    trace_plots.threshold_paths(trace_of(tmp_path / "flat.npz", 0.3))
    assert [line.get_label() for line in drawn[1].axes[0].lines[:-1:2]] == ["all"]


@pytest.mark.slow
def test_steps_without_examples_and_a_single_step_are_drawn(tmp_path: Path) -> None:
    found = trace_of(tmp_path / "t.npz", 0.3, batch_size=1)
    assert 0 in found["examples"]
    first = found | {name: found[name][:1] for name in ("step", "norms", *traces.BY_GROUP)}
    for each in (found, first, first | {"norms": [found["norms"][0][:, :0]]}):
        for draw in (trace_plots.heatmap, trace_plots.histograms, trace_plots.threshold_paths):
            assert draw(each).startswith(b"\x89PNG")


def test_the_cost_of_a_trace_is_measured(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("pyarrow")
    words = ["--workloads", "mlp", "--batch-size", "8", "--seconds", "0.1", "--out", str(tmp_path)]
    assert script("trace_cost").main(words) in (0, 1)
    row = json.loads((tmp_path / "trace_cost.json").read_text())["workloads"]["mlp"]
    assert row["ms"]["engine.step, traced to npz"]["rounds"] >= 3
    assert "\n| mlp | 8 | " in (tmp_path / "trace_cost.md").read_text()


@pytest.mark.slow
def test_mislabelled_digits_are_found(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    results, _ = ran(script("mislabelled"), tmp_path, "--seeds", "1", "--epochs", "5")
    assert results["flipped"] == 90
    assert results["epochs"][-1]["norm"]["found"]["median"] > 0.6
    assert results["epochs"][-1]["norm"]["area"]["median"] > 0.95
    assert (tmp_path / "mislabelled.png").read_bytes().startswith(b"\x89PNG")
