"""Executes every notebook of this folder in place, so that what is shown is what the code gives.

python notebooks/execute.py [NOTEBOOK ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 300  # seconds a cell


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs, run in its own folder; raises CellExecutionError when a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    # Version and build of the interpreter change from machine to machine and say nothing to a reader.
    notebook.metadata.pop("language_info", None)
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes the notebooks named, or all; returns the exit status."""
    named = [Path(name) for name in (sys.argv[1:] if arguments is None else arguments)]
    for path in named or sorted(FOLDER.glob("*.ipynb")):
        notebook = executed(path)
        nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
