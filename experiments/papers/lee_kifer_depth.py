"""Training time by network depth (Lee & Kifer 2020, figure 7).

Claim: on MLPs of 2, 4, 6 and 8 hidden layers, with batches of 128, reweighting is significantly faster than the naive
loop, by up to 94x. Images have the sizes of MNIST and FMNIST (28 x 28) and of CIFAR-10 (3 x 32 x 32).

    python -m experiments.papers.lee_kifer_depth [--paper] [--seconds S] [--out FOLDER]

``--paper`` measures longer; the sizes are the paper's in both settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.papers.lee_kifer import Figure, Quoted, faster, plain_list
from experiments.papers.lee_kifer import main as run
from experiments.papers.timing import Setting
from experiments.papers.workloads import DEPTHS

IMAGES = {"28px": "28 x 28", "cifar10": "3 x 32 x 32"}
SMALL = tuple(
    Setting(f"{depth}, {said}", f"mlp-{depth}-{kind}", 128, place=depth, curve=said) for kind, said in IMAGES.items()
    for depth in DEPTHS
)  # fmt: skip


def _shallow(found: Mapping[str, Any]) -> str:
    label = f"2, {IMAGES['28px']}"
    return f"{label}: reweight {faster(found)[label]:.3g}x, cached {faster(found, 'cached')[label]:.3g}x"


FIGURE = Figure(
    name="lee_kifer_depth",
    title="Training time by network depth",
    about=__doc__.split("\n\n")[1],
    quoted=(
        Quoted("section 6.4", "94x as fast as nxBP on FMNIST with 2 hidden layers", _shallow),
        Quoted("section 6.4", "significantly faster than nxBP on all three data sets",
               lambda found: "reweight over nxBP: " + plain_list(faster(found))),
    ),
    small=SMALL,
    paper=SMALL,
    axis="hidden layers",
    reasons=(
        "The paper doesn't give the widths of its deeper MLPs; ours have 128 and 256 units in turns, as its MLP of two "
        "layers has.",
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Times and writes."""
    return run(FIGURE, arguments)


if __name__ == "__main__":
    sys.exit(main())
