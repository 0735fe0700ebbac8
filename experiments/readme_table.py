"""Writes the table of the committed benchmark into README.md, so that its figures are those of results/bench.json.

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
START = "<!-- table: written by experiments/readme_table.py from experiments/results/bench.json, do not edit -->"
END = "<!-- end of table -->"


def with_table(text: str, results: Path = RESULTS) -> str:
    """``text`` with what is between the markers replaced by the table; ValueError when a marker isn't there once."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one line {START!r} and one line {END!r}")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{markdown(json.loads(results.read_text()))}\n\n{END}{after}"


def main() -> int:
    """Rewrites README.md; returns the exit status."""
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
