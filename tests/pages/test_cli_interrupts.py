"""Ctrl-C while a command is still being imported ends it in one line with status 130, and no other program."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ghostclip

# Sends Ctrl-C when a module of that name is looked for.
FINDER = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("CTRL_C_AT"):
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
SCRIPT = "import sys\nfrom ghostclip.cli import main\nsys.exit(main())\n"


def interrupted(folder: Path, command: list[str], place: str) -> subprocess.CompletedProcess[str]:
    """What a command does that is interrupted when it imports ``place``."""
    (folder / "sitecustomize.py").write_text(FINDER)
    root = str(Path(ghostclip.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), root]), "CTRL_C_AT": place}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, preexec_fn=listening
    )


def listening() -> None:
    """A shell starts what it runs in the background with Ctrl-C ignored, and so would be what that starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("started", "place"), [("module", "torch"), ("script", "numpy"), ("script", "ghostclip.cli.training")]
)
@pytest.mark.one_in(3)
def test_ctrl_c_in_the_imports(started: str, place: str, tmp_path: Path) -> None:
    script = tmp_path / "ghostclip"
    script.write_text(SCRIPT)
    command = ["-m", "ghostclip"] if started == "module" else [str(script)]
    done = interrupted(tmp_path, [*command, "train", "--model", "mlp"], place)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ghostclip: interrupted\n")


@pytest.mark.parametrize("command", [["-c", "import ghostclip"], ["-m", "other"], ["other.py", "ghostclip"]])
def test_other_programs_see_the_interrupt(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.py").write_text("import ghostclip")
    monkeypatch.chdir(tmp_path)
    done = interrupted(tmp_path, command, "torch")
    assert done.returncode != 130
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
