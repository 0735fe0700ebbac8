"""Noise in the sum of updates under banded correlation, over that of DP-SGD at equal epsilon.

    python experiments/correlated_noise.py [--steps N] [--out FOLDER]

writes correlated_noise.json and correlated_noise.md. Nothing is timed or drawn: noise multipliers are by PLD, errors by
`BandedToeplitz.error`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ghostclip import accounting
from ghostclip.noise import BandedToeplitz, BufferedToeplitz

RESULTS = Path(__file__).parent / "results"
FILE = "correlated_noise"
BANDS, BUFFERS = (1, 8, 32), (1, 3)
EPSILONS, EPOCHS, DELTA = (1.0, 4.0, 16.0), (1, 4, 16), 1e-6


def compared(epsilon: float, epochs: int, steps: int) -> dict[str, Any]:
    """The noise multiplier of each number of bands, and its noise in sums over that of one band."""
    rate = epochs / steps
    sigma = {
        bands: accounting.noise_multiplier(
            target_epsilon=epsilon, sample_rate=rate, steps=steps, delta=DELTA, sampling="cyclic_poisson", bands=bands
        )
        for bands in BANDS
    }
    noise = {bands: sigma[bands] * BandedToeplitz(bands=bands).error(steps) for bands in BANDS}
    return {
        "epsilon": epsilon, "epochs": epochs, "noise_multiplier": [sigma[bands] for bands in BANDS],
        "over_dpsgd": [noise[bands] / noise[1] for bands in BANDS],
        "rule": max(1.0, epsilon * math.sqrt(steps) / epochs),
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """Two tables: errors, and noise at equal epsilon."""
    steps = results["steps"]
    errors = " | ".join(f"{error:.4g}" for error in results["errors"].values())
    lines = [
        "# Correlated noise",
        "",
        f"Root mean squared error of the prefix sums of {steps:,} steps of noise of variance 1 (`error`).",
        "",
        "| " + " | ".join(results["errors"]) + " |",
        "| --- " * len(results["errors"]) + "|",
        f"| {errors} |",
        "",
        f"Noise multiplier times that error, over DP-SGD's (one band), at equal epsilon and delta {DELTA:g} with "
        "cyclic Poisson sampling. In brackets the noise multiplier. The last column is the published rule of thumb for "
        "the best number of bands, epsilon sqrt(steps) / epochs (McKenna 2024, arXiv 2405.15913).",
        "",
        "| epsilon | epochs | " + " | ".join(f"{bands} bands" for bands in BANDS) + " | rule |",
        "| --- " * (len(BANDS) + 3) + "|",
    ]
    for row in results["rows"]:
        pairs = zip(row["over_dpsgd"], row["noise_multiplier"], strict=True)
        cells = [f"{ratio:.3f} ({sigma:.3f})" for ratio, sigma in pairs]
        lines.append(f"| {row['epsilon']:g} | {row['epochs']} | {' | '.join(cells)} | {row['rule']:.0f} |")
    return "\n".join([*lines, "", f"Computed by `python experiments/{FILE}.py`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2_000, help="of training (default: 2000)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    steps = options.steps
    errors = {f"{bands} bands": BandedToeplitz(bands=bands).error(steps) for bands in BANDS}
    errors |= {f"{buffers} buffers": BufferedToeplitz(buffers=buffers).error(steps) for buffers in BUFFERS}
    rows = [compared(epsilon, epochs, steps) for epsilon in EPSILONS for epochs in EPOCHS]
    results = {"steps": steps, "errors": errors, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
