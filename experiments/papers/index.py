"""The list of all claims: results/README.md, with each page, its script and what came of it in a line.

python -m experiments.papers.index [--out FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.papers.report import RESULTS, table

SCRIPTS = Path(__file__).parent


def scripts() -> Iterator[tuple[str, str]]:
    """(name, first line of the docstring) of each script that can be run, but for this one."""
    for path in sorted(SCRIPTS.glob("*.py")):
        text = path.read_text()
        if '__name__ == "__main__"' in text and path != Path(__file__):
            yield path.stem, (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def listing(folder: Path) -> str:
    """The page."""
    rows = []
    for name, claim in scripts():
        data = folder / f"{name}.json"
        found = json.loads(data.read_text()) if data.exists() else None
        shown = f"[{name}.md]({name}.md)" if (folder / f"{name}.md").exists() else "not run yet"
        result = found.get("finding", "see the page") if found is not None else ""
        rows.append([claim.rstrip("."), f"[{name}.py](../{name}.py)", shown, result])
    about = (
        "Published claims, each computed anew by one script: `make papers` runs all of them in their small setting, "
        "and `--paper` of a script has the paper's. Each page says what was published, what came of it here, on which "
        "machine, and why the two differ. Beside each page are its figures as JSON."
    )
    foot = "Written by `python -m experiments.papers.index`."
    return "\n\n".join(["# Published claims", about, table(["claim", "script", "page", "ours in a line"], rows), foot])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    (options.out / "README.md").write_text(listing(options.out) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
