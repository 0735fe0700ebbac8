"""Compiles cuda.cpp against the headers that come with torch: ``python build.py OUT``."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

__all__ = ["build", "compiler"]


def compiler() -> str | None:
    """A C++ compiler that is installed."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(out: Path) -> None:
    """Writes the library; raises subprocess.CalledProcessError where it can't be compiled."""
    found = compiler()
    assert found is not None, "no C++ compiler here"
    torchs = Path(torch.__file__).parent / "lib"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    subprocess.run(
        [found, "-O0", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        + [f"-I{path}" for path in include_paths()]
        + [str(Path(__file__).with_name("cuda.cpp")), "-o", str(out), f"-L{torchs}", "-lc10", "-ltorch_cpu"],
        check=True,
        capture_output=True,
        text=True,
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
