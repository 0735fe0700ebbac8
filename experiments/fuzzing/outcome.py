"""What came of a case."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["EXPLAINED", "Outcome", "in_short"]

# What refusals say that depend on the numbers of a batch.
EXPLAINED = (
    "give loss_scale",
    "spoils the gradients of others",
    "that kept numbers that are not finite",
    "begin with a batch of another size",
    "this batch doesn't show how",
    "or give an input that all of them share",
    # A frozen layer over a parameter of as many rows as there are examples: the graph doesn't hold what a product is
    # added to, which may be the layer's frozen bias or data.
    "(Addmm, result of shape",
)


@dataclass
class Outcome:
    """What came of one case.

    Attributes:
        counts: batches (or pairs) by what they were, "batches" and "pairs" in all among them.
        refusals: how often each message came.
        findings: differences that nothing explains, in words.
        worst_error: largest relative error of a norm, {type: error}, of examples that are judged sharply.
        worst_share: largest share of the sensitivity that one of them contributed.
    """

    seed: int
    recipe: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    worst_error: dict[str, float] = field(default_factory=dict)
    worst_share: float = 0.0


def in_short(error: BaseException) -> str:
    """An error's message without what is different each time."""
    first = str(error).strip().split("\n")[0]
    first = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|`[^`]*`", "..", first)
    first = re.sub(r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", "N", first)
    return f"{type(error).__name__}: {first[:110]}"
