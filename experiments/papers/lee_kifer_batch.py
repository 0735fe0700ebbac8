"""Training time by batch size (Lee & Kifer 2020, figure 6).

Claim: from batches of 16 to 128 examples, an epoch of ordinary training and one with reweighting get shorter, since
larger batches run in parallel; an epoch of the naive loop does not. Networks: MLP, CNN and RNN on images of 28 x 28.

    python -m experiments.papers.lee_kifer_batch [--paper] [--seconds S] [--out FOLDER]

``--paper`` measures longer; the sizes are the paper's in both settings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.papers.lee_kifer import EPOCH, Figure, Quoted, faster, plain_list
from experiments.papers.lee_kifer import main as run
from experiments.papers.timing import Setting, epoch

SIZES = (16, 32, 64, 128)
SMALL = tuple(
    Setting(f"{name}, {size}", name, size, place=size, curve=name.upper()) for name in ("mlp", "cnn", "rnn")
    for size in SIZES
)  # fmt: skip


def _change(*names: str) -> Callable[[Mapping[str, Any]], str]:
    """An epoch with the largest batch over one with the smallest, by network."""

    def said(found: Mapping[str, Any]) -> str:
        parts = []
        for network in dict.fromkeys(row["curve"] for row in found.values()):
            rows = [row for row in found.values() if row["curve"] == network]
            for name in names:
                first, last = (epoch(row, name, EPOCH) for row in (rows[0], rows[-1]))
                if first and last:
                    parts.append(f"{network} {name} {last / first:.2f}")
        sizes = [row["batch_size"] for row in found.values()]
        return f"an epoch at {max(sizes)} over one at {min(sizes)}: " + ", ".join(parts)

    return said


def _at_128(found: Mapping[str, Any]) -> str:
    values = faster({label: row for label, row in found.items() if row["batch_size"] == max(SIZES)})
    return plain_list(values) or "not timed"


FIGURE = Figure(
    name="lee_kifer_batch",
    title="Training time by batch size",
    about=__doc__.split("\n\n")[1],
    quoted=(
        Quoted("section 6.3", "an epoch of Non-private and of ReweightGP gets shorter with larger batches",
               _change("nonprivate", "reweight")),
        Quoted("section 6.3", "that of nxBP stays the same", _change("nxbp")),
        Quoted("abstract", "54x to 94x as fast as the naive way with batches of 128", _at_128),
    ),
    small=SMALL,
    paper=SMALL,
    axis="batch size",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Times and writes."""
    return run(FIGURE, arguments)


if __name__ == "__main__":
    sys.exit(main())
