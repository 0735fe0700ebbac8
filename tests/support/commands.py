"""`ghostclip` commands run in this process: what they print, and the one line that a mistake ends in."""

import json
from typing import Any

import pytest

from ghostclip.cli import main


def ran(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> str:
    """What a command prints; its exit status must be ``status``."""
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> Any:
    return json.loads(ran(capsys, *arguments, "--json", status=status))


def mistake(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line on stderr that a mistake ends in, with exit status 2 and nothing on stdout."""
    assert main([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("ghostclip: ")
    assert shown.err.count("\n") == 1
    return shown.err
