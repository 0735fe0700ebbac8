"""Builds the wheel for this platform: with the compiled C kernels, where there is a compiler; else one for all.

A wheel may not be made for one machine: each kernel is compiled for several levels of a processor's instructions, and
`ghostclip.native.build` loads the one that torch itself would choose. Editable installations get none, and compile what
they need at first use. ``GHOSTCLIP_COMPILE=0`` in the environment makes a wheel without kernels.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The newest glibc that a wheel may ask for: that of manylinux_2_28, on which torch's own wheels stand.
GLIBC = 28


class KernelsHook(BuildHookInterface):
    """Puts the kernels into wheels."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles them; called before a wheel is put together."""
        if version == "editable" or os.environ.get("GHOSTCLIP_COMPILE") == "0":
            return
        targets = _targets(Path(self.root))
        try:
            compiler = targets.find_compiler()
        except FileNotFoundError as error:
            self.app.display_warning(f"{error}: this wheel is for all platforms, and has no kernels")
            return
        self._made = tempfile.TemporaryDirectory(prefix="ghostclip-")
        folder = Path(self._made.name)
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                files = list(pool.map(lambda level: targets.compile_for(level, compiler, folder), targets.levels()))
        except subprocess.CalledProcessError as error:
            self.app.display_warning(f"{error}; this wheel is for all platforms, and has no kernels")
            return
        build_data["force_include"] |= {str(file): f"ghostclip/native/{targets.FOLDER}/{file.name}" for file in files}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(files)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the compiled files, which the wheel has by now."""
        if hasattr(self, "_made"):
            self._made.cleanup()


def platform_tag(files: list[Path]) -> str:
    """The platform of a wheel with these files, as in its name: manylinux_2_28 where they ask for no newer glibc."""
    name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    asked = {int(found) for file in files for found in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())}
    known = name.startswith("linux_") and asked and max(asked) <= GLIBC
    return name.replace("linux", f"manylinux_2_{GLIBC}", 1) if known else name


def _targets(root: Path) -> ModuleType:
    """The package's module that knows levels and flags, alone: the package needs torch, which isn't there."""
    path = root / "ghostclip" / "native" / "targets.py"
    spec = importlib.util.spec_from_file_location("targets", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
