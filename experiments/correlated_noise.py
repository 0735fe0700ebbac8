"""Noise in the sum of updates under banded correlation, over that of DP-SGD at equal epsilon.

    python experiments/correlated_noise.py [--steps N] [--out FOLDER]

writes correlated_noise.json and correlated_noise.md. Nothing is timed or drawn: noise multipliers are by PLD, errors by
`BandedToeplitz.error`, or by dense matrices. Where package jax-privacy can be imported, the errors of what it finds are
put beside ours.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghostclip import accounting
from ghostclip.noise import BandedToeplitz, BufferedToeplitz
from ghostclip.noise.correlation import minimized

try:
    import jax
    import jax_privacy.matrix_factorization as peer
except ImportError:
    peer = None

RESULTS = Path(__file__).parent / "results"
FILE = "correlated_noise"
BANDS, BUFFERS = (1, 8, 32), (1, 3)
EPSILONS, EPOCHS, DELTA = (1.0, 4.0, 16.0), (1, 4, 16), 1e-6
# Updates by momentum, and learning rates that fall along half a cosine: {in words: (momentum, whether they fall)}.
WORKLOADS = {
    "momentum 0.9": (0.9, False), "momentum 0.99": (0.99, False),
    "cosine": (0.0, True), "momentum 0.9, cosine": (0.9, True),
}  # fmt: skip
WORKLOAD_STEPS = 400


def square_root(steps: int) -> list[float]:
    """The lower triangular square root of the matrix of ones, binom(2k, k) / 4^k, of all bands.

    Fichtenberger, Henzinger and Upadhyay 2023 (arXiv 2202.11205): its largest error is the sum of the squares.
    """
    found = [1.0]
    for age in range(1, steps):
        found.append(found[-1] * (2 * age - 1) / (2 * age))
    return found


def errors_of(coefficients: Sequence[float], steps: int) -> dict[str, float]:
    """Root mean squared and largest error of prefix sums, of the Toeplitz matrix of these diagonals as they are.

    Its columns are not scaled to norm 1; the first one, the largest, stands for the sensitivity.
    """
    diagonals = torch.zeros(steps).double()
    diagonals[: len(coefficients)] = torch.tensor(coefficients).double()
    ages = torch.arange(steps)[:, None] - torch.arange(steps)
    matrix = torch.where(ages >= 0, diagonals[ages.clamp(min=0)], 0.0)
    sums = torch.linalg.solve_triangular(matrix, torch.ones(steps, 1).double(), upper=False).flatten()
    # Noise of a sum of t steps: the first t coefficients of the Toeplitz matrix (ones) C^-1.
    variances = sums.square().cumsum(0) * diagonals.square().sum()
    return {"mean": float(variances.mean().sqrt()), "largest": float(variances.max().sqrt())}


def of_jax_privacy(steps: int) -> dict[str, dict[str, float]]:
    """The errors of the coefficients that package jax-privacy finds for as many bands and buffers."""
    jax.config.update("jax_enable_x64", True)
    bands = {f"{n} bands": peer.toeplitz.optimize_banded_toeplitz(steps, n) for n in BANDS if n > 1}
    buffers = {
        f"{n} buffers": peer.buffered_toeplitz.optimize(
            n=steps, min_sep=steps, max_participations=1, min_buffers=n, max_buffers=n
        ).toeplitz_coefs(steps)
        for n in BUFFERS
    }
    return {name: errors_of([float(each) for each in found], steps) for name, found in (bands | buffers).items()}


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


def error_of_parameters(coefficients: Tensor, momentum: float, falls: bool, steps: int) -> Tensor:
    """Root mean squared noise of the parameters, over all steps of SGD; differentiable.

    Args:
        coefficients: the diagonals, float64 [bands], the main one first.
        momentum, falls: of the updates.
        steps: of training.
    """
    ages = torch.arange(steps)[:, None] - torch.arange(steps)
    diagonals = torch.cat([coefficients, coefficients.new_zeros(steps - len(coefficients))])
    matrix = torch.where(ages >= 0, diagonals[ages.clamp(min=0)], 0.0)
    rates = (1 + torch.cos(math.pi * torch.arange(steps).double() / steps)) / 2 if falls else torch.ones(steps).double()
    updates = torch.where(ages >= 0, rates[:, None] * momentum ** ages.clamp(min=0).double(), 0.0).cumsum(0)
    noise = torch.linalg.solve_triangular((matrix / matrix.norm(dim=0)).t(), updates.t(), upper=True)
    return (noise.square().sum() / steps).sqrt()


def for_workload(bands: int, momentum: float, falls: bool, steps: int) -> list[float]:
    """That error of one band, of the coefficients for prefix sums, and of the best ones for these updates."""
    coefficients = torch.from_numpy(BandedToeplitz(bands=bands).series(steps)[:bands])
    start = coefficients[1:] / coefficients[0]

    def error(rest: Tensor) -> Tensor:
        return error_of_parameters(torch.cat([torch.ones(1).double(), rest]), momentum, falls, steps)

    best = torch.from_numpy(minimized(error, start.numpy()))
    return [float(error(each)) for each in (start[:0], start, best)]


def markdown(results: dict[str, Any]) -> str:
    """Three tables: errors, noise at equal epsilon, and what coefficients for momentum or a schedule would save."""
    steps = results["steps"]
    errors = " | ".join(f"{error:.4g}" for error in results["errors"].values())
    root = results["square root"]
    peers, peer_row, peer_note = results["by_peer"], [], []
    if peers:
        cells = [f"{peers[name]['mean']:.4g}" if name in peers else "" for name in results["errors"]]
        peer_row = [f"| {results['peer']} | {' | '.join(cells)} |"]
        peer_note = [
            f"{results['peer']} doesn't scale columns to norm 1, and chooses buffers for the largest error.",
            "",
        ]
    lines = [
        "# Correlated noise",
        "",
        f"Root mean squared error of the prefix sums of {steps:,} steps of noise of variance 1 (`error`).",
        "",
        "| found by | " + " | ".join(results["errors"]) + " |",
        "| --- " * (len(results["errors"]) + 1) + "|",
        f"| GhostClip | {errors} |",
        *peer_row,
        "",
        *peer_note,
        "Published, with as many bands as steps: the square root of the matrix of ones (Fichtenberger, Henzinger and "
        f"Upadhyay 2023, arXiv 2202.11205) has {root['mean']:.4g}, and {root['largest']:.4g} at its last step, their "
        f"largest error. {results['bands'][-1]} bands whose coefficients are the first of that matrix (banded square "
        f"root, Kalinin and Lampert 2024, arXiv 2405.13763) have {results['first of square root']['mean']:.4g}.",
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
    steps = results["workload_steps"]
    lines += [
        "",
        f"Root mean squared noise of the parameters over {steps} steps of SGD, over that of independent noise: with "
        "the coefficients for prefix sums, which `BandedToeplitz` has, and with the best ones for momentum, or for "
        "learning rates that fall along half a cosine.",
        "",
        "| updates | bands | coefficients for prefix sums | best coefficients | best over those |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["workloads"]:
        one, prefix, best = row["errors"]
        lines.append(
            f"| {row['updates']} | {row['bands']} | {prefix / one:.3f} | {best / one:.3f} | {best / prefix:.3f} |"
        )
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
    workloads = [
        {"updates": name, "bands": bands, "errors": for_workload(bands, *updates, WORKLOAD_STEPS)}
        for name, updates in WORKLOADS.items() for bands in BANDS[1:]
    ]  # fmt: skip
    root = square_root(steps)
    results = {
        "bands": BANDS, "square root": errors_of(root, steps),
        "first of square root": errors_of(root[: BANDS[-1]], steps),
        "peer": peer and f"jax-privacy {version('jax-privacy')}", "by_peer": of_jax_privacy(steps) if peer else {},
        "steps": steps, "errors": errors, "rows": rows, "workload_steps": WORKLOAD_STEPS, "workloads": workloads,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
