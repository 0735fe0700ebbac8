"""Structure: imports go one way, stay light, and end at Ctrl-C; no test file is too long to read."""

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ghostclip

ROOT = Path(ghostclip.__file__).parent
MOST_LINES = 500

# From the ground up. Modules on one level in a set do not import each other; those in a tuple may, from left to right.
LEVELS: list[tuple[str, ...] | set[str]] = [
    ("errors", "validate", "native", "started"),
    ("sharding",),
    ("norms",),
    ("nn",),
    ("graph", "planner", "wrap"),
    ("clipping",),
    ("clipper", "compiled"),
    ("events",),
    {"noise", "sampling", "accounting", "ledger", "checkpoint", "traces", "self_check"},
    ("engine",),
    {"datasets", "models", "optim", "selection"},
    {"audit", "report", "bench", "integrations"},
    ("compat",),
    ("public",),
    ("cli",),
    ("__main__",),
]  # fmt: skip


def places() -> dict[str, tuple[int, int]]:
    """(level, place in it) of each top-level module; a set's members are told apart by their names."""
    found = {}
    for level, names in enumerate(LEVELS):
        for place, name in enumerate(sorted(names) if isinstance(names, set) else names):
            found[name] = (level, place)
    return found


def imported(source: str, module: str) -> Iterator[tuple[str, int]]:
    """(top-level module of ghostclip, line) for every import in ``source``, wherever it stands."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ghostclip" and len(parts) > 1:
                yield parts[1], node.lineno


def faults(source: str, module: str) -> list[str]:
    """Imports in ``source`` that go up, or sideways within a set."""
    known, own = places(), module.split(".")[1]
    level = known[own][0]
    return [
        f"{module}:{line} imports {other}, which is {'above' if known[other] > known[own] else 'beside'} it"
        for other, line in imported(source, module)
        if other != own and other in known
        if known[other] > known[own] or (known[other][0] == level and isinstance(LEVELS[level], set))
    ]


def modules() -> dict[str, Path]:
    """Every module of the package but its front door, by dotted name (a package by its ``__init__``)."""
    paths = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    return {".".join(("ghostclip", *path.relative_to(ROOT).with_suffix("").parts)): path for path in paths}


def test_no_import_goes_up():
    assert {module.split(".")[1] for module in modules()} == places().keys()
    assert [fault for module, path in modules().items() for fault in faults(path.read_text(), module)] == []


def test_the_package_shows_its_public_names_only():
    assert dir(ghostclip) == sorted([*ghostclip.__all__, "__version__"])


def test_importing_ghostclip_loads_only_what_every_user_has():
    script = "import sys, torch; before = set(sys.modules); import ghostclip; print(*(set(sys.modules) - before))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    modules = set(output.stdout.split())
    loaded = {name.split(".")[0] for name in modules}
    assert "ghostclip.public" in modules
    assert not loaded & {"dp_accounting", "sklearn", "matplotlib", "jinja2", "pandas", "transformers", "opacus"}
    # Half a second, which accounting takes when it is asked for a number.
    assert not modules & {"scipy.stats", "scipy.optimize", "scipy.fft", "scipy.special", "scipy.linalg"}


def started(folder, command, site="", **changes):
    """What a process of Python does that runs ``site`` first, and that hears Ctrl-C."""
    (folder / "sitecustomize.py").write_text(site)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT.parent)])} | changes
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, preexec_fn=listening
    )


def listening():
    """A shell starts what it runs in the background with Ctrl-C ignored, and so would be what that starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Prints what a command has loaded by the time it ends.
ENDING = """
import atexit, sys

def show():
    print(*sys.modules, file=sys.stderr)

atexit.register(show)
"""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["trian"]], ids=" ".join)
def test_the_front_of_the_command_line_takes_no_torch(arguments, tmp_path):
    done = started(tmp_path, ["-m", "ghostclip", *arguments], ENDING)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert done.stdout or "did you mean 'train'" in done.stderr
    assert "ghostclip.cli" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "ghostclip.public"}


@pytest.mark.parametrize("command", ["epsilon", "calibrate", "ledger"])
def test_accounting_from_the_shell_takes_no_torch(command, tmp_path):
    done = started(tmp_path, ["-m", "ghostclip", command, "--no-such-option"], ENDING)
    *_, message, loaded = done.stderr.splitlines()
    assert message.startswith("ghostclip: ")
    assert "ghostclip.cli.spending" in loaded.split()
    assert not set(loaded.split()) & {"torch", "ghostclip.public"}


@pytest.mark.parametrize("command", [["-c", "import other"], ["-m", "other", "-m", "ghostclip"], ["other.py"]])
@pytest.mark.slow
def test_any_other_program_has_the_public_names(command, tmp_path):
    (tmp_path / "other.py").write_text("import ghostclip.wrap\nprint(*sorted(vars(ghostclip)), ghostclip.wrap)")
    shown = started(tmp_path, command).stdout
    assert set(ghostclip.__all__) <= set(shown.split())
    assert "<function wrap at" in shown


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


@pytest.mark.parametrize(
    ("command", "place"),
    [(["-m", "ghostclip"], "torch"), (["ghostclip"], "numpy"), (["ghostclip"], "ghostclip.cli.training")],
)
@pytest.mark.one_in(3)
def test_ctrl_c_in_the_imports_of_a_command_ends_it_in_one_line(command, place, tmp_path):
    (tmp_path / "ghostclip").write_text(SCRIPT)
    done = started(tmp_path, [*command, "train", "--model", "mlp"], FINDER, CTRL_C_AT=place)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ghostclip: interrupted\n")


@pytest.mark.parametrize("command", [["-c", "import ghostclip"], ["-m", "other"], ["other.py", "ghostclip"]])
def test_other_programs_see_the_interrupt(command, tmp_path):
    (tmp_path / "other.py").write_text("import ghostclip")
    done = started(tmp_path, command, FINDER, CTRL_C_AT="torch")
    assert done.returncode != 130
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("package", "extra"),
    [("transformers", "huggingface"), ("lightning", "lightning"), ("trl", "trl"), ("peft", "trl")],
)
def test_a_missing_framework_names_its_extra(package, extra, monkeypatch):
    module = f"ghostclip.integrations.{extra}"
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf'{package} is not installed; .* pip install "\.\[{extra}\]"'):
        importlib.import_module(module)


def test_no_test_file_is_too_long_or_imported_by_another():
    tests = list(Path(__file__).parents[1].rglob("*.py"))
    assert [path.name for path in tests if len(path.read_text().splitlines()) > MOST_LINES] == []
    assert Path(__file__) in tests
    for path in [*tests, *(ROOT.parent / "experiments").rglob("*.py")]:
        assert not re.search(r"^\s*(from|import) test_", path.read_text(), re.MULTILINE), path
