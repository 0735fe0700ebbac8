"""The noise's law and independence by the checks of experiments/noise_statistics.py, and that these catch faults.

A check fails below p = 1e-6: with the p-values of all kinds together (about 280), once in 3,500 runs of true noise.
"""

from pathlib import Path

import numpy as np
import pytest
from scripts import ran, script

statistics = script("noise_statistics")


@pytest.mark.parametrize(
    "numbers", [pytest.param(20_000, id="quick"), pytest.param(1_000_000, marks=pytest.mark.slow, id="million")]
)
@pytest.mark.parametrize("kind", statistics.KINDS)
def test_noise_is_gaussian_and_independent(kind: str, numbers: int) -> None:
    found = statistics.examine(kind, numbers, 1)
    assert {"chi-square", "Kolmogorov-Smirnov", "neighbours", "layers", "steps", "processes"} <= set(found["p"])
    assert {name: min(values) for name, values in found["p"].items() if min(values) < statistics.RARE} == {}
    assert found["repeated"] == 0


def gaussian(size: int = 100_000) -> np.ndarray:
    return np.random.default_rng().standard_normal(size)


@pytest.mark.parametrize(
    ("kind", "fault", "caught_by"),
    [
        ("standard", lambda numbers: 1.03 * numbers, "variance"),
        ("standard", lambda numbers: numbers + 0.03, "mean"),
        ("standard", lambda numbers: numbers.clip(-2.9, 2.9), "beyond 3"),
        ("standard", lambda numbers: np.where(np.abs(numbers) < 0.05, 0.0, numbers), "chi-square"),
        ("standard", lambda numbers: np.sign(numbers) * np.abs(numbers) ** 1.1, "Kolmogorov-Smirnov"),
        ("hardened", lambda numbers: np.rint(numbers / (2 * statistics.STEP)) * 2 * statistics.STEP, "residues"),
    ],
)
def test_a_wrong_law_is_caught(kind: str, fault: object, caught_by: str) -> None:
    assert statistics.law(kind, fault(gaussian()))[caught_by] < statistics.RARE


def test_noise_that_is_not_independent_or_comes_again_is_caught() -> None:
    drawn, other = gaussian(80_000).reshape(2, 2, 20_000), gaussian(20_000)
    assert min(p for some in statistics.independence(drawn, other).values() for p in some) > statistics.RARE
    same_steps = np.stack([drawn[0], drawn[0]])
    same_sizes = np.stack([np.stack([drawn[0, 0], -drawn[0, 0]]), drawn[1]])
    assert min(statistics.independence(same_steps, other)["steps"]) < statistics.RARE
    assert min(statistics.independence(same_sizes, other)["layers"]) < statistics.RARE
    assert min(statistics.independence(drawn, drawn[1, 0])["processes"]) < statistics.RARE
    again = drawn.copy()
    again[1, 1, 4000:4024] = drawn[0, 0, 16:40]
    assert (statistics.repeated(drawn), statistics.repeated(again)) == (0, 3)
    held = np.repeat(drawn[0, 0], 2)[:20_000]
    assert min(statistics.independence(np.stack([[held, other], drawn[1]]), other)["neighbours"]) < statistics.RARE


@pytest.mark.slow
def test_the_script_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results, page = ran(statistics, tmp_path, "--numbers", "2000", "--repeats", "1", "--seconds", "0.1")
    assert set(results["kinds"]) == set(results["summary"]["least"]) == set(statistics.KINDS)
    assert results["summary"]["failures"] == 0
    assert results["costs"]["cnn_share"]["hardened"]["median"] > 0
    assert (tmp_path / "noise_statistics.png").read_bytes().startswith(b"\x89PNG")
    assert page in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["standard", "hardened"])
def test_the_tails_of_thirty_million_numbers(kind: str) -> None:
    counts = np.zeros(3, int)
    for _ in range(30):
        sizes = np.abs(statistics.steps_of(kind, 250_000))
        counts += [int((sizes > bound).sum()) for bound in (4.0, 4.5, 5.0)]
    for bound, count in zip((4.0, 4.5, 5.0), counts, strict=True):
        expected = 2 * statistics.stats.norm.sf(bound)
        assert statistics.stats.binomtest(int(count), 30_000_000, expected).pvalue > statistics.RARE
