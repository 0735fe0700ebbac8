"""Training time by architecture (Lee & Kifer 2020, figure 5).

Claim: on five architectures, with batches of 32, reweighting takes far less time than the naive loop over single
examples. The networks are the paper's: MLP, CNN, RNN and LSTM on images, a Transformer block on texts.

    python -m experiments.papers.lee_kifer_architectures [--paper] [--seconds S] [--out FOLDER]

``--paper`` adds colour images of CIFAR-10's size. FMNIST's images have the size of MNIST's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.papers.lee_kifer import Figure, Quoted, faster, plain_list
from experiments.papers.lee_kifer import main as run
from experiments.papers.timing import Setting, median

NETWORKS = ("mlp", "cnn", "rnn", "lstm", "transformer")
SMALL = tuple(Setting(name, name, 32) for name in NETWORKS)
COLOUR = tuple(Setting(f"{name}-cifar10", f"{name}-cifar10", 32) for name in NETWORKS[:-1])


def _all_faster(found: Mapping[str, Any]) -> str:
    values = faster(found)
    ahead = sum(value > 1 for value in values.values())
    return f"reweight over nxBP on {ahead} of {len(values)}: {plain_list(values)}"


def _slowest(found: Mapping[str, Any]) -> str:
    times = {label: median(row, "reweight") or 0.0 for label, row in found.items() if row["workload"] in NETWORKS[:-1]}
    return "reweight, ms a step: " + ", ".join(f"{label} {ms:.3g}" for label, ms in times.items())


FIGURE = Figure(
    name="lee_kifer_architectures",
    title="Training time by architecture",
    about=__doc__.split("\n\n")[1],
    quoted=(
        Quoted("section 6.2", "training time falls significantly on all five architectures", _all_faster),
        Quoted("section 6.2", "LSTM takes significantly longer than the others", _slowest),
    ),
    small=SMALL,
    paper=SMALL + COLOUR,
    axis="network",
    reasons=(
        "The LSTM is slow in the paper since its gates' values can't be had from cuDNN's layer. Ours takes torch's "
        "fused forward pass, computes the gates of all time steps again in one product, and goes back through time in "
        "a C function, so it costs little more than the layer does without privacy.",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times and writes."""
    return run(FIGURE, arguments)


if __name__ == "__main__":
    sys.exit(main())
