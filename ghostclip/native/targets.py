"""What the kernels are compiled for: this machine, or a wheel for many.

A wheel has one library for each level of a processor's instructions, with all kernels for both types of numbers. The
level is the one for which torch chooses its own kernels. This module imports nothing but Python's own, since
hatch_build.py runs it where torch is not installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["BETTER", "COMPILERS", "FLAGS", "FOLDER", "KERNELS", "compile_for", "file_of", "find_compiler", "levels"]

# Files with functions for training. allocated.c replaces the allocator of a process that counts memory.
KERNELS = ("gram", "lattice", "normal", "rows", "share", "shifts", "time_loop")
# Where a wheel has them, beside this file.
FOLDER = "made"
COMPILERS = ("cc", "gcc", "clang")
# sqrt without errno and comparisons without traps can be vectorised; NaN and inf go through as they should.
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# What not every compiler knows, tried first.
BETTER = ("-mprefer-vector-width=512",)
# {what torch calls a processor's instructions: the level, as compilers have it}. Any other is the first level.
OF_TORCH = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
X86 = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


def levels() -> tuple[str, ...]:
    """The levels of this kind of processor, the lowest first."""
    return X86 if platform.machine().lower() in ("x86_64", "amd64") else (platform.machine().lower(),)


def file_of(capability: str) -> str:
    """The name of the library for a processor, given what ``torch.backends.cpu.get_cpu_capability()`` says of it."""
    return f"kernels-{OF_TORCH.get(capability, levels()[0])}.so"


def find_compiler() -> str:
    """The path of the C compiler; raises FileNotFoundError where there is none."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError(f"no C compiler found (tried $CC, {', '.join(COMPILERS)})")


def compile_for(level: str, compiler: str, folder: Path) -> Path:
    """Compiles all kernels for a level into one library in a folder; raises CalledProcessError with what was said."""
    made, here = folder / f"kernels-{level}.so", Path(__file__).parent
    flags = [*FLAGS, *([f"-march={level}"] if level in X86 else []), *(BETTER if level == X86[-1] else [])]
    mathematics = [] if sys.platform == "win32" else ["-lm"]
    sources = [str(here / f"{name}.c") for name in KERNELS]
    subprocess.run([compiler, *flags, "-o", str(made), *sources, *mathematics], check=True)
    return made
