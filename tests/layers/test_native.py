"""Compiling C on first use: cached, checked before it is loaded, safe to race for, and never needed."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ghostclip.native import build, targets

HERE = Path(build.__file__).parent
# Quickly compiled ones of the package's files.
FEW = ("normal", "share")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """An empty cache, and the few files alone to compile."""
    try:
        targets.find_compiler()
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    (tmp_path / "few").mkdir()
    for file in (*HERE.glob("*.h"), *(HERE / f"{name}.c" for name in FEW)):
        shutil.copy(file, tmp_path / "few")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "few" / "build.py"))
    return tmp_path / "ghostclip"


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes files, which are all there is to compile from now on."""
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    return lambda name, text: (tmp_path / name).write_text(text)


def compiled(folder):
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def test_all_are_compiled_once_and_found_again(own_cache, caplog, capfd):
    caplog.set_level(logging.INFO, "ghostclip")
    for name in (*FEW, *FEW):
        assert build.library(name) is not None
    said = "compiling 2 kernels for this processor, once; this takes a few seconds"
    assert [record.message for record in caplog.records] == [said]
    assert compiled(own_cache) == sorted(FEW)
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    assert capfd.readouterr() == ("", "")


def change(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link(file):
    file.symlink_to(file.rename(file.with_suffix(".moved")))


def open_to_all(file):
    file.chmod(0o777)


@pytest.mark.parametrize("spoil", [change, link, open_to_all], ids=lambda spoil: spoil.__name__)
def test_a_file_that_was_spoilt_is_not_loaded_but_made_anew(spoil, own_cache, write, monkeypatch):
    write("answer.c", "int answer(void) { return 41; }")
    loaded = []
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: loaded.append(Path(path).read_bytes()))
    build.library("answer")
    (file,) = own_cache.glob("*.so")
    spoil(file)
    build.library("answer")
    assert len(loaded) == 2
    assert loaded[0] == loaded[1]
    (file,) = own_cache.glob("*.so")
    status = file.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.getuid(), 0o700)


@pytest.mark.parametrize(("owner", "mode", "ours"), [
    (0, 0o700, True), (7, 0o755, True), (7, 0o700, True), (8, 0o700, False), (7, 0o720, False), (7, 0o702, False),
    (0, 0o777, False),
])  # fmt: skip
def test_whose_files_are_loaded(owner, mode, ours, monkeypatch):
    monkeypatch.setattr(build.os, "getuid", lambda: 7)
    assert build._is_ours(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))) == ours


@pytest.mark.parametrize("changes", ["answer.c", "number.h"])
def test_another_source_or_header_is_compiled_anew(changes, write):
    write("answer.c", '#include "number.h"\nint answer(void) { return NUMBER; }')
    for number in (41, 42):
        write(changes, f"int answer(void) {{ return {number}; }}" if ".c" in changes else f"#define NUMBER {number}")
        assert build.library("answer").answer() == number


def test_a_file_that_does_not_compile_is_said_and_done_without(own_cache, write, caplog):
    write("broken.c", "int broken(void) { return unknown; }")
    write("fine.c", "int fine(void) { return 1; }")
    assert build.library("broken") is None
    assert "broken: can't be compiled" in caplog.text
    assert "unknown" in caplog.text
    assert compiled(own_cache) == ["fine"]
    assert build.library("fine") is not None


def test_a_folder_that_others_may_write_to_is_not_used(own_cache):
    own_cache.mkdir()
    own_cache.chmod(0o777)
    assert build.library("normal") is not None
    assert list(own_cache.iterdir()) == []


@pytest.mark.slow
def test_processes_may_race_and_nothing_is_compiled_by_an_import(own_cache):
    environment = os.environ | {"XDG_CACHE_HOME": str(own_cache.parent)}
    subprocess.run([sys.executable, "-c", "import ghostclip, ghostclip.noise"], env=environment, check=True)
    assert not own_cache.exists()
    code = (
        f"from ghostclip.native import build; build.__file__ = {build.__file__!r};"
        "assert build.library('normal') is not None"
    )
    racing = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in racing] == [0, 0]
    assert compiled(own_cache) == sorted(FEW)
