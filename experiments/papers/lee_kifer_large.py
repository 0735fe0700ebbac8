"""Training time of ResNet and VGG (Lee & Kifer 2020, figure 8).

Claim: with batches of 20 and batch norm frozen, reweighting is faster than nxBP and multiLoss on networks of millions
of parameters. The improvement is significant for images of 64 x 64 pixels and diminishes for 256 x 256.

    python -m experiments.papers.lee_kifer_large [--paper] [--seconds S] [--out FOLDER]

The small setting has ResNet-18, and VGG11 with one linear layer on 32 x 32 pixels. ``--paper`` has ResNet-18, -34, -50
and -101 and VGG11 and VGG16 as published, on images of 64 x 64 and 256 x 256.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.papers.lee_kifer import Figure, Quoted, faster, plain_list
from experiments.papers.lee_kifer import main as run
from experiments.papers.timing import Setting, ratio
from experiments.papers.workloads import RESNETS, VGGS

SMALL = (Setting("ResNet-18, 64 px", "resnet18-frozen-64px", 20), Setting("VGG11, 32 px", "vgg11", 20))
PAPER = tuple(
    Setting(label.format(side), name.format(side), 20) for side in (64, 256)
    for label, name in (*((f"ResNet-{depth}, {{}} px", f"resnet{depth}-frozen-{{}}px") for depth in RESNETS),
                        *((f"VGG{depth}, {{}} px", f"vgg{depth}-{{}}px") for depth in VGGS))
)  # fmt: skip


def _against_both(found: Mapping[str, Any]) -> str:
    loop = plain_list(faster(found))
    losses = {}
    for label, row in found.items():
        slow, quick = ratio(row, "multiloss"), ratio(row, "reweight")
        if slow and quick:
            losses[label] = slow / quick
    return f"reweight over nxBP: {loop}; over multiLoss: {plain_list(losses)}"


FIGURE = Figure(
    name="lee_kifer_large",
    title="Training time of ResNet and VGG",
    about=__doc__.split("\n\n")[1],
    quoted=(
        Quoted("section 6.5", "ReweightGP is faster than nxBP and multiLoss, significantly so on 64 x 64 pixels",
               _against_both),
        Quoted("section 6.5", "multiLoss runs out of memory on VGG, and on ResNet-101 with large images",
               lambda found: "it doesn't here: it keeps one example's gradients at a time"),
    ),
    small=SMALL,
    paper=PAPER,
    axis="network",
    reasons=(
        "The paper takes frozen batch norm's statistics from pretrained models; ours are the initial ones, which cost "
        "the same time. VGG has no batch norm here.",
        "The networks of the figure are not listed in the text; `--paper` has those that the authors' code offers.",
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Times and writes."""
    return run(FIGURE, arguments)


if __name__ == "__main__":
    sys.exit(main())
