"""How far can one example move the clipped sum? Every row of the tests' tables, every adversary, several types.

The same model on three examples and on the same with one more, whose numbers are made as nasty as floating point allows
(tests/support/paired.py). The ratio of what the sum moves by and the bound must be at most 1 + 1e-5 in float32. In
float16 and bfloat16 each p.grad is a float32 sum that is rounded once, by at most half an eps of its size: that of four
examples is at most 4 bounds long and that of three 3, so that their difference is off by at most 3.5 eps. What
`sensitivity` states, 1 + 4 eps, leaves the rest for roundings of second order.

    python experiments/sensitivity.py [--part I/N] [--out FOLDER]

writes sensitivity.json, sensitivity.md and sensitivity.png; a part replaces its own rows and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from cases import CASES  # noqa: E402
from paired import ADVERSARIES, POLICIES, SECOND_PASSES, STRATEGIES, Pair, family  # noqa: E402

from ghostclip.bench.machine import describe, in_words  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST = 1 + 1e-5
# What takes most digits away from attention and normalization.
EXTREME = {
    "3e4": lambda x: 3e4 * x,
    "1e8": lambda x: 1e8 * x,
    "constant 1e5": lambda x: torch.full_like(x, min(1e5, torch.finfo(x.dtype).max)),  # 65504 in float16
}
COLOURS = {"float32": "#0072b2", "bfloat16": "#d55e00", "float16": "#e69f00"}


def measure(number: int, dtype: str) -> dict[str, Any]:
    """The worst adversary on one row of the tables, by reweighting and by another way; or why it can't run."""
    row = CASES[number]
    found: dict[str, Any] = {"case": row.name, "dtype": dtype, "ratio": 0.0}
    try:
        pair = Pair(row, DTYPES[dtype])
    except RuntimeError as error:  # torch has no kernel of that type
        return found | {"ratio": None, "reason": str(error).splitlines()[0]}
    found["family"] = family(pair.model)
    policies = list(POLICIES)
    ways = [("flat", "reweight", "auto"), (policies[number % 5], SECOND_PASSES[number % 2], STRATEGIES[number % 3])]
    for way in ways:
        clipper = pair.clipper(*way)
        found["stated"] = clipper.sensitivity / pair.bound
        for adversary in ADVERSARIES:
            ratio = pair.ratio(clipper, adversary)
            if ratio > found["ratio"]:
                found |= {"ratio": ratio, "way": " ".join(way), "adversary": adversary}
    return found


def worst(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """{family: {dtype: its worst row}}."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["ratio"] is not None:
            best = found.setdefault(row["family"], {}).get(row["dtype"])
            if best is None or row["ratio"] > best["ratio"]:
                found[row["family"]][row["dtype"]] = row
    return found


def markdown(rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The page: worst ratios by kind of layer, and every row above what is promised."""
    table = worst(rows)
    lines = ["# How far one example moves the clipped sum, over the bound", "",
             f"{len(rows)} rows of (model, type), {len(ADVERSARIES)} adversaries each; {in_words(machine)}.", "",
             "| layers | " + " | ".join(DTYPES) + " |", "| --- |" + " --- |" * len(DTYPES)]  # fmt: skip
    for name in sorted(table):
        cells = [f"{table[name][d]['ratio']:.6f}" if d in table[name] else "" for d in DTYPES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    stated = {row["dtype"]: row["stated"] for row in rows if row["ratio"] is not None}
    lines += ["", "Promised: " + ", ".join(f"{d} {max(MOST, stated[d]):.5f}" for d in DTYPES if d in stated) + "."]
    above = [row for row in rows if row["ratio"] is not None and row["ratio"] > max(MOST, row["stated"])]
    lines += ["", f"Above it: {len(above)} rows."]
    lines += [f"- {r['case']} ({r['dtype']}, {r['way']}, {r['adversary']}): {r['ratio']:.4f}" for r in above]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A dot for each kind of layer and type."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = worst(rows)
    names = sorted(table)
    figure, axes = pyplot.subplots(figsize=(8, 0.26 * len(names) + 1.4), layout="constrained")
    for dtype, colour in COLOURS.items():
        places = [place for place, name in enumerate(names) if dtype in table[name]]
        values = [table[names[place]][dtype]["ratio"] for place in places]
        axes.plot(values, places, "o", color=colour, markersize=4, label=dtype)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="what one example moves the sum by, over the bound; the worst of all adversaries")
    axes.grid(axis="x", linewidth=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 when a float32 row is above 1 + 1e-5."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="0/1", help="the I-th of N parts of the rows (default: 0/1, all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: all three")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ADVERSARIES.update(EXTREME)
    part, parts = map(int, options.part.split("/"))
    measured = [measure(n, d) for d in options.dtypes for n in range(part, len(CASES), parts)]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "sensitivity.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["case"], row["dtype"]): row for row in [*earlier, *measured]}
    machine = describe()
    path.write_text(json.dumps({"machine": machine, "rows": list(rows.values())}, indent=1) + "\n")
    (options.out / "sensitivity.md").write_text(markdown(list(rows.values()), machine))
    plot(list(rows.values()), options.out / "sensitivity.png")
    above = [r for r in measured if r["dtype"] == "float32" and r["ratio"] is not None and r["ratio"] > MOST]
    print(f"{len(measured)} rows; above 1 + 1e-5 in float32: {[(r['case'], r['ratio']) for r in above] or 'none'}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
