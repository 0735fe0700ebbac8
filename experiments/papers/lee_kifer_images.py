"""Training time by image size (Lee & Kifer 2020, figure 9).

Claim: with ResNet-18, batch norm frozen, reweighting's advantage over the naive loop declines from images of 32 x 32
pixels to 256 x 256; the paper's batch has 32 examples.

    python -m experiments.papers.lee_kifer_images [--paper] [--seconds S] [--out FOLDER]

The small setting has batches of 4.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.papers.lee_kifer import Figure, Quoted, faster, plain_list
from experiments.papers.lee_kifer import main as run
from experiments.papers.timing import Setting, ratio
from experiments.papers.workloads import IMAGE_SIDES


def _settings(batch_size: int) -> tuple[Setting, ...]:
    return tuple(
        Setting(f"{side} x {side}", f"resnet18-frozen-{side}px", batch_size, place=side, curve="ResNet-18")
        for side in IMAGE_SIDES
    )


def _loop(found: Mapping[str, Any]) -> str:
    """What the loop costs, and what ours do, over ordinary training."""
    parts = []
    for name in ("nxbp", "reweight", "cached"):
        values = {label: ratio(row, name) for label, row in found.items()}
        parts.append(f"{name} " + ", ".join(f"{value:.3g}" for value in values.values() if value is not None))
    return "over non-private, from the smallest images to the largest: " + "; ".join(parts)


FIGURE = Figure(
    name="lee_kifer_images",
    title="Training time by image size",
    about=__doc__.split("\n\n")[1],
    quoted=(
        Quoted("section 6.6", "the advantage over nxBP decreases with larger images",
               lambda found: "reweight over nxBP: " + plain_list(faster(found))),
        Quoted("section 6.6", "because of the extra computation in each layer", _loop),
        Quoted("section 6.8", "for very large images nxBP may be preferable",
               lambda found: "cached over nxBP: " + plain_list(faster(found, "cached"))),
    ),
    small=_settings(4),
    paper=_settings(32),
    axis="image size, pixels a side",
    reasons=(
        "Two things shrink the advantage, and the table has both: a single larger image keeps the machine busy, so the "
        "loop's time over non-private falls; and norms may cost more. Whether they do is in the columns of reweight "
        "and cached. The paper computes a convolution's norms from per-example gradients of unfolded images; here "
        "each layer has several ways, and the planner takes the one that it measured to be fastest.",
    ),
    examples=50_000,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Times and writes."""
    return run(FIGURE, arguments)


if __name__ == "__main__":
    sys.exit(main())
