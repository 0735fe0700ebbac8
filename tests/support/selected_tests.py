"""Prints, as JSON, how many tests each selection of tests (arguments of pytest) given as JSON on stdin selects.

All files are collected once; pytest's own hook applies the expressions behind -k and -m. What is wholly slow counts
only where a selection has an -m of its own, as in experiments/mutants.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def parts(selection: list[str]) -> tuple[list[str], dict[str, str]]:
    """(files, {option: expression}) of one selection."""
    first = next((place for place, word in enumerate(selection) if word.startswith("-")), len(selection))
    return selection[:first], dict(zip(selection[first::2], selection[first + 1 :: 2], strict=True))


class Counts:
    def __init__(self, selections: list[list[str]]) -> None:
        self.selections = selections
        self.counts: list[int] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.counts = [self._count(session, *parts(selection)) for selection in self.selections]

    def _count(self, session: Any, files: list[str], options: dict[str, str]) -> int:
        session.config.option.keyword = options.get("-k", "")
        session.config.option.markexpr = options.get("-m", "not slow or one_in")
        found = [item for item in session.items if item.path.relative_to(ROOT).as_posix() in files]
        session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=found)
        return len(found)


def main() -> None:
    """Reads [[argument, ...], ...] and prints [count, ...]; pytest's own words go to stderr."""
    plugin = Counts(json.load(sys.stdin))
    out, sys.stdout = sys.stdout, sys.stderr
    files = sorted({file for selection in plugin.selections for file in parts(selection)[0]})
    status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", *files], [plugin])
    if status:
        sys.exit(int(status))
    json.dump(plugin.counts, out)


if __name__ == "__main__":
    main()
