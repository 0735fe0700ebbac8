"""Published values of epsilon beside ours: by PLD, and by Renyi divergences with the old and the new conversion.

The conversion explains most differences. Papers before 2020 turn a Renyi divergence of order a into epsilon by adding
log(1/delta) / (a - 1) (Mironov 2017, proposition 3). The conversion of Canonne, Kamath and Steinke (2020, proposition
12), which dp-accounting and Opacus use today, adds less. PLD composes the privacy loss itself and adds least.

    python -m experiments.papers.epsilons [--out FOLDER]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from experiments.papers.report import RESULTS, page, store, table
from ghostclip import accounting

# A PRV accountant's figure is an upper bound that is at most so much above the exact value, which PLD is close to; and
# PLD's own rounding upwards, relative, which shows where epsilon is in the hundreds.
PRV_SLACK, PLD_ROUNDING = 0.011, 1e-4


class Published(NamedTuple):
    """One published epsilon.

    Attributes:
        source: where it is printed.
        examples, batch: whose quotient is the sampling rate.
        sigma, steps, delta: of the training.
        epsilon: as printed.
        accountant: that it was computed by.
    """

    source: str
    examples: int
    batch: int
    sigma: float
    steps: int
    delta: float
    epsilon: float
    accountant: str


TENSORFLOW = "TensorFlow Privacy, MNIST tutorial's table"
OPACUS = "Opacus, MNIST example's README"
PUBLISHED = (
    Published("Abadi et al. 2016, section 3.2", 100, 1, 4.0, 10_000, 1e-5, 1.26, "moments, old conversion"),
    Published(TENSORFLOW, 60_000, 256, 1.3, 3_515, 1e-5, 1.19, "Renyi, old conversion"),
    Published(TENSORFLOW, 60_000, 256, 1.1, 14_062, 1e-5, 3.01, "Renyi, old conversion"),
    Published(TENSORFLOW, 60_000, 256, 0.7, 10_546, 1e-5, 7.10, "Renyi, old conversion"),
    Published(OPACUS, 60_000, 240, 1.3, 3_750, 1e-5, 1.16, "Renyi, old conversion"),
    Published(OPACUS, 60_000, 240, 1.1, 15_000, 1e-5, 2.91, "Renyi, old conversion"),
    Published(OPACUS, 60_000, 240, 0.7, 11_250, 1e-5, 6.86, "Renyi, old conversion"),
)
# (sigma, rate, steps): epsilon at delta 1e-6 by Microsoft's prv_accountant, as Opacus's tests list it
# (opacus/tests/prv_accountant.py), rounded to seven digits.
PRV = {
    (0.8, 0.001, 100): 0.2704034, (1.5, 0.001, 100): 0.0393694, (2.0, 0.001, 100): 0.0291045,
    (3.0, 0.001, 100): 0.0215201, (0.8, 0.05, 100): 6.7410519, (1.5, 0.05, 100): 1.9538531,
    (2.0, 0.05, 100): 1.2836374, (3.0, 0.05, 100): 0.7679338, (0.8, 0.2, 100): 24.3336642,
    (1.5, 0.2, 100): 8.4989779, (2.0, 0.2, 100): 5.6720556, (3.0, 0.2, 100): 3.3812205,
    (0.8, 0.001, 1000): 0.4777713, (1.5, 0.001, 1000): 0.0998207, (2.0, 0.001, 1000): 0.0712188,
    (3.0, 0.001, 1000): 0.0476159, (0.8, 0.05, 1000): 19.5258428, (1.5, 0.05, 1000): 6.2099692,
    (2.0, 0.05, 1000): 4.1727999, (3.0, 0.05, 1000): 2.5275743, (0.8, 0.001, 20000): 1.2960093,
    (1.5, 0.001, 20000): 0.4370051, (2.0, 0.001, 20000): 0.3058380, (3.0, 0.001, 20000): 0.1940310,
    (0.8, 0.05, 20000): 140.6552098, (1.5, 0.05, 20000): 38.3066179, (2.0, 0.05, 20000): 24.4217186,
    (3.0, 0.05, 20000): 13.9611147, (0.8, 0.001, 50000): 2.0345148, (1.5, 0.001, 50000): 0.7042184,
    (2.0, 0.001, 50000): 0.4913549, (3.0, 0.001, 50000): 0.3096942, (0.8, 0.05, 50000): 291.3843255,
    (1.5, 0.05, 50000): 73.1901767, (2.0, 0.05, 50000): 45.2369959, (3.0, 0.05, 50000): 24.9420056,
    (0.8, 0.001, 100000): 2.9246221, (1.5, 0.001, 100000): 1.0152881, (2.0, 0.001, 100000): 0.7067199,
    (3.0, 0.001, 100000): 0.4436717,
}  # fmt: skip
PRV_DELTA = 1e-6


def by_old_conversion(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon by Renyi divergences of dp-accounting, converted as in Mironov 2017, proposition 3."""
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    pairs = zip(accountant._orders, accountant._rdp, strict=True)
    return min(float(value) + math.log(1 / delta) / (order - 1) for order, value in pairs if order > 1)


def ours(sigma: float, rate: float, steps: int, delta: float) -> dict[str, float]:
    """Epsilon by each accountant."""
    setting: dict[str, Any] = {"noise_multiplier": sigma, "sample_rate": rate, "steps": steps, "delta": delta}
    return {
        "old conversion": by_old_conversion(sigma, rate, steps, delta),
        "rdp": accounting.epsilon(**setting, accountant="rdp"),
        "pld": accounting.epsilon(**setting, accountant="pld"),
    }


def within_prv(pld: float, prv: float) -> bool:
    """Whether PLD's figure is what the bound of a PRV accountant allows."""
    return prv - PRV_SLACK - PLD_ROUNDING * prv <= pld <= prv + PLD_ROUNDING * prv


def compute() -> dict[str, Any]:
    """All figures."""
    rows = [row._asdict() | ours(row.sigma, row.batch / row.examples, row.steps, row.delta) for row in PUBLISHED]
    prv = [
        {"sigma": sigma, "rate": rate, "steps": steps, "prv": epsilon,
         "pld": accounting.epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=PRV_DELTA)}
        for (sigma, rate, steps), epsilon in PRV.items()
    ]  # fmt: skip
    return {"published": rows, "prv": prv}


def write(results: dict[str, Any], folder: Path) -> None:
    """The page."""
    rows = [
        [row["source"], f"{row['batch']}/{row['examples']}", f"{row['sigma']:g}", f"{row['steps']}",
         f"{row['delta']:g}", f"{row['epsilon']:.2f}", row["accountant"],
         *(f"{row[name]:.4f}" for name in ("old conversion", "rdp", "pld"))]
        for row in results["published"]
    ]  # fmt: skip
    head = ["source", "rate", "sigma", "steps", "delta", "published", "computed there by", "ours, Renyi with the old "
            "conversion", "ours, accountant=\"rdp\"", "ours, \"pld\""]  # fmt: skip
    below = [row["prv"] - row["pld"] for row in results["prv"] if row["prv"] < 200]
    above = [row for row in results["prv"] if row["prv"] >= 200]
    prv = (
        f"Opacus tests its PRV accountant on {len(results['prv'])} settings against Microsoft's prv_accountant, at "
        f"delta {PRV_DELTA:g}. Their figures are upper bounds with an allowance of 0.01. Ours by PLD lie "
        f"{min(below):.4f} to {max(below):.4f} below them"
        + "".join(f"; at an epsilon of {row['prv']:.2f} ours is {row['pld']:.2f}" for row in above)
        + "."
    )
    page("epsilons", "Published values of epsilon", [__doc__.split("\n\n")[1], table(head, rows), prv], folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Computes, writes, and returns 1 where PLD lies outside of what a PRV accountant allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    results = compute()
    store("epsilons", results, options.out)
    write(results, options.out)
    wrong = [row for row in results["prv"] if not within_prv(row["pld"], row["prv"])]
    print(f"{len(results['published'])} published values; PLD outside of the PRV accountant's range: {len(wrong)}")
    for row in wrong:
        print(row)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
