"""Loading the C kernels: those that the wheel has, or else compiled by the system's compiler, once for each machine.

Nothing is compiled at import: the first kernel that is needed has all of them compiled, side by side. They are kept in
``$XDG_CACHE_HOME/ghostclip`` (``~/.cache/ghostclip``) under names made of the source, the compiler and the processor,
so that a change of any of them compiles anew, and of the library's own digest. Only a regular file that has this digest
is loaded, and only where file and folder are this user's or root's and nobody else may write to them.
``GHOSTCLIP_COMPILE=0`` in the environment does without any kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ghostclip.native.notices import slow_work
from ghostclip.native.targets import BETTER, FLAGS, FOLDER, KERNELS, file_of, find_compiler

__all__ = ["kernels", "library", "seconds_compiling"]

# What a compiler may take for one file: seconds of the processor, and of the clock, on a machine that is busy.
PROCESSOR_SECONDS, SECONDS = 60, 600
# Hexadecimal digits of a digest in a name.
DIGITS = 32

log = logging.getLogger("ghostclip")
_durations: list[float] = []


@functools.cache
def library(name: str, real: str = "float") -> ctypes.CDLL | None:
    """The kernels of ``name``.c in this folder; None where they can't be had, which is logged once with the reason.

    That the compiler starts is logged at level INFO, how long it took at level DEBUG (logger "ghostclip").

    Args:
        name: of the file.
        real: "double" for the functions that take float64, of a file that has functions for each type of number.
    """
    if os.environ.get("GHOSTCLIP_COMPILE", "1") == "0":
        log.info("%s: not used, GHOSTCLIP_COMPILE is 0; tensor operations do its work", name)
        return None
    if name in KERNELS and (shipped := _in_wheel(Path(__file__).with_name(FOLDER))) is not None:
        return shipped
    try:
        return ctypes.CDLL(str(_compiled(Path(__file__).with_name(f"{name}.c"), real)))
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        log.warning("%s: can't be compiled, slower tensor operations do its work: %s", name, text.strip()[:500])
        return None


def kernels() -> str:
    """Which kernels this process uses, in words, and what to do where it has none."""
    if os.environ.get("GHOSTCLIP_COMPILE", "1") == "0":
        return "none, since GHOSTCLIP_COMPILE is 0; unset it for faster steps"
    folder = Path(__file__).with_name(FOLDER)
    if _in_wheel(folder) is not None:
        return f"of the wheel ({_file_in(folder).stem.removeprefix('kernels-')})"
    try:
        return f"compiled on this machine at first use, by {Path(find_compiler()).name}"
    except FileNotFoundError as error:
        return (
            f"none: {error}, and this installation brings none. Steps of recurrent networks, word embeddings and "
            "attention take up to twice as long; install gcc or clang, or a wheel for this platform"
        )


def seconds_compiling() -> float:
    """How long this process has waited for the compiler so far."""
    return sum(_durations)


def _file_in(folder: Path) -> Path:
    import torch  # a second, which ``--version`` takes for wheels alone

    return folder / file_of(torch.backends.cpu.get_cpu_capability())


@functools.cache
def _in_wheel(folder: Path) -> ctypes.CDLL | None:
    """All kernels, compiled for processors like this one, where the wheel brought them."""
    if not folder.exists() or not (file := _file_in(folder)).exists():
        return None
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        log.warning("%s of the wheel can't be loaded: %s", file.name, error)
        return None


def _compiled(source: Path, real: str) -> Path:
    """The shared library made of ``source``, from the cache or anew, with all others that are missing there."""
    compiler, folder = find_compiler(), _folder()
    if (found := _cached(folder, _stem(source, real, compiler))) is not None:
        return found
    others = [path for path in source.parent.glob("*.c") if (path.stem in KERNELS) == (source.stem in KERNELS)]
    others = [path for path in others if real == "float" or _is_typed(path)]
    missing = [path for path in others if _cached(folder, _stem(path, real, compiler)) is None]
    errors = _compile(missing, real, compiler, folder)
    if source in errors:
        raise errors[source]
    found = _cached(folder, _stem(source, real, compiler))
    if found is None:
        raise FileNotFoundError(f"what was compiled is gone from {folder}")
    return found


def _is_typed(source: Path) -> bool:
    """Whether it has functions for each type of number; compiled apart, since most programs need one type only."""
    text = source.read_text()
    return '"twice.h"' in text or "ONLY_FLOAT" in text


def _cached(folder: Path, stem: str) -> Path | None:
    """The library of that name: a regular file of ours that holds what its name says."""
    for path in folder.glob(f"{stem}-*.so"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and _is_ours(status) and path.name == _named(stem, path):
                return path
    return None


def _named(stem: str, file: Path) -> str:
    return f"{stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:DIGITS]}.so"


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user, or root, may write there."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(sources: Sequence[Path], real: str, compiler: str, folder: Path) -> dict[Path, Exception]:
    """Compiles all of them into the folder, as many at a time as there are processors; returns what failed."""
    started = time.perf_counter()
    # The longest first, so that none of them is left alone at the end.
    ordered = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
    message = "compiling %d kernels for this processor, once; this takes a few seconds"
    with (
        slow_work("compiling kernels", message, len(sources), parts=len(sources)) as advance,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        found = []
        for error in pool.map(partial(_compile_one, real, compiler, folder), ordered):
            found.append(error)
            advance()
    errors = {source: error for source, error in zip(ordered, found, strict=True) if error is not None}
    _durations.append(time.perf_counter() - started)
    log.debug("%d kernels compiled in %.2f s", len(sources) - len(errors), _durations[-1])
    return errors


def _compile_one(real: str, compiler: str, folder: Path, source: Path) -> Exception | None:
    """Compiles one file and puts the result in its place; returns what went wrong."""
    made = ""
    try:
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _run(compiler, (*_flags(real), *BETTER), source, made)
        except subprocess.CalledProcessError as error:
            if error.returncode < 0:  # by a signal, such as Ctrl-C in the terminal
                raise
            _run(compiler, _flags(real), source, made)
        os.chmod(made, 0o700)
        # Two processes may come here at once; each puts a whole file in place.
        os.replace(made, folder / _named(_stem(source, real, compiler), Path(made)))
    except (OSError, subprocess.SubprocessError) as error:
        return error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
    return None


def _flags(real: str) -> tuple[str, ...]:
    return (*FLAGS, "-march=native", f"-DONLY_{real.upper()}")


def _run(compiler: str, flags: tuple[str, ...], source: Path, target: str) -> None:
    command = [compiler, *flags, "-o", target, str(source), "-lm"]
    limited = ["/bin/sh", "-c", f'ulimit -t {PROCESSOR_SECONDS} && exec "$@"', "sh", *command]
    subprocess.run(limited, check=True, capture_output=True, text=True, timeout=SECONDS)


def _stem(source: Path, real: str, compiler: str) -> str:
    """A name for what this compiler makes of the source for this processor."""
    program = Path(compiler).resolve()
    read = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = [*read, *_flags(real), *BETTER, str(program), str(program.stat().st_mtime_ns), platform.machine(), _cpu()]
    return f"{source.stem}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:20]}"


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
        if _is_ours(folder.stat()) and os.access(folder, os.W_OK):
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
