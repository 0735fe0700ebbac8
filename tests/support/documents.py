"""The documents' Python blocks, run as they stand."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ghostclip.noise.gaussian import Aes, ChaCha

ROOT = Path(__file__).resolve().parents[2]


# A block of Python, and the block of text right after the next few lines that says what it prints.
FENCE = re.compile(r"^```python\n(.*?)^```$(?:\n+(?:It prints:\n+)?^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str) -> Iterator[tuple[Any, str | None]]:
    """The Python blocks of a document, compiled so that errors name its lines, each with what it is said to print."""
    text = text_of(document)
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(1))
        yield compile("\n" * line + found.group(1), document, "exec"), found.group(2)


def run(document: str) -> dict[str, Any]:
    """All Python blocks of a document in one namespace, which is returned; what they print is as the document says."""
    namespace: dict[str, Any] = {"__name__": document}
    for block, expected in blocks(document):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, namespace)
        if expected is not None:
            # As it is where there are C kernels.
            assert printed.getvalue().replace(Aes.generator, ChaCha.generator) == expected, document
    return namespace
