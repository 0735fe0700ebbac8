"""Compiling a C file of this package with the system's compiler, once for each machine, and loading it.

Nothing is compiled at import. The result is kept in ``$XDG_CACHE_HOME/ghostclip`` (``~/.cache/ghostclip``), in a folder
only its owner may write to, under a name made of the source, the compiler and the processor, so that a change of any of
them compiles anew. ``GHOSTCLIP_COMPILE=0`` in the environment forbids it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["library"]

COMPILERS = ("cc", "gcc", "clang")
# sqrt without errno and comparisons without traps can be vectorised; NaN and inf go through as they should.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# What not every compiler knows, tried first.
BETTER = ("-mprefer-vector-width=512",)
SECONDS = 60.0

log = logging.getLogger("ghostclip")


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The compiled ``name``.c of this folder; None where it can't be had, which is logged once with the reason.

    How long the compiler took is logged too (logger "ghostclip", level INFO).
    """
    if os.environ.get("GHOSTCLIP_COMPILE", "1") == "0":
        log.info("%s: not compiled, GHOSTCLIP_COMPILE is 0; tensor operations do its work", name)
        return None
    try:
        return ctypes.CDLL(str(_compiled(Path(__file__).with_name(f"{name}.c"))))
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        log.warning("%s: can't be compiled, slower tensor operations do its work: %s", name, text.strip()[:500])
        return None


def _compiled(source: Path) -> Path:
    """The shared library made of ``source``, from the cache or anew."""
    compiler = _compiler()
    target = _folder() / f"{source.stem}-{_key(source, compiler)}.so"
    if target.exists():
        return target
    started = time.perf_counter()
    handle, made = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        try:
            _run(compiler, (*FLAGS, *BETTER), source, made)
        except subprocess.CalledProcessError:
            _run(compiler, FLAGS, source, made)
        # Two processes may come here at once; each puts a whole file in place.
        os.replace(made, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
    log.info("%s: compiled in %.2f s", source.stem, time.perf_counter() - started)
    return target


def _run(compiler: str, flags: tuple[str, ...], source: Path, target: str) -> None:
    command = [compiler, *flags, "-o", target, str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError(f"no C compiler found (tried $CC, {', '.join(COMPILERS)})")


def _key(source: Path, compiler: str) -> str:
    real = Path(compiler).resolve()
    read = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = [*read, *FLAGS, *BETTER, str(real), str(real.stat().st_mtime_ns), platform.machine(), _cpu()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _cpu() -> str:
    """What tells processors with different instructions apart; a home folder may be shared by many machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _folder() -> Path:
    """A folder that only this user can write to: what lies there is loaded and run."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "ghostclip"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
    except OSError:
        pass
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    """A folder of this process, where the user's cache can't be used."""
    made = tempfile.TemporaryDirectory(prefix="ghostclip-")
    _kept.append(made)
    return Path(made.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []
