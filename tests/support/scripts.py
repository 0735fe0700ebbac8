"""Scripts of the experiments folder, as modules."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(module: ModuleType, folder: Path, *words: str) -> tuple[Any, str]:
    """(results, page) that a script writes into a folder, given these words."""
    assert module.main([*words, "--out", str(folder)]) == 0
    path = folder / module.__name__
    return json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".md").read_text()
