"""Writes the tables of the committed benchmark into README.md, so that its figures are those of the results' files.

    python experiments/readme_table.py

Run it after `make bench`. The block between the two markers is replaced; a test compares them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ghostclip.bench import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results" / "bench.json"
FURTHER = {
    "bench-peers.json": "Beside other libraries (Opacus, fastDP, JAX), one core:",
    "bench-sizes.json": "Larger and smaller images, longer texts, one core:",
    "bench-backward.json": "By `backward(losses)`, which has to do with the graph it is given, one core:",
    "bench-two-threads.json": "On two threads:",
    "bench-compiled.json": "Compiled steps, one core:",
}
START = "<!-- table: written by experiments/readme_table.py from experiments/results/bench.json, do not edit -->"
END = "<!-- end of table -->"


def with_table(text: str, results: Path = RESULTS) -> str:
    """``text`` with what is between the markers replaced by the tables; ValueError when a marker isn't there once.

    Args:
        text: a page.
        results: the benchmark's file; the tables of the FURTHER files beside it follow its own.
    """
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one line {START!r} and one line {END!r}")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    tables = [markdown(json.loads(results.read_text()))]
    for name, title in FURTHER.items():
        if (path := results.parent / name).exists():
            tables.append(f"{title}\n\n{markdown(json.loads(path.read_text()))}")
    return "\n\n".join([f"{before}{START}", *tables, f"{END}{after}"])


def main() -> int:
    """Rewrites README.md; returns the exit status."""
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
