"""Compiling C on first use: cached, checked before it is loaded, safe to race for, and never needed."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ghostclip.native import build, targets

HERE = Path(build.__file__).parent
# Quickly compiled ones of the package's files.
FEW = ("normal", "share")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and the few files alone to compile."""
    try:
        targets.find_compiler()
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    sources = tmp_path / "few"
    sources.mkdir()
    for file in (*HERE.glob("*.h"), *(HERE / f"{name}.c" for name in FEW)):
        shutil.copy(file, sources)
    monkeypatch.setattr(build, "__file__", str(sources / "build.py"))
    return tmp_path / "ghostclip"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 41; }")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    return source


def test_all_are_compiled_once_and_found_again(
    own_cache: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "ghostclip")
    for name in (*FEW, *FEW):
        assert build.library(name) is not None
    said = "compiling 2 kernels for this processor, once; this takes a few seconds"
    assert [record.message for record in caplog.records] == [said]
    assert [path.name.partition("-")[0] for path in sorted(own_cache.iterdir())] == sorted(FEW)
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    assert capfd.readouterr() == ("", "")


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link(file: Path) -> None:
    moved = file.rename(file.with_suffix(".moved"))
    file.symlink_to(moved)


def open_to_all(file: Path) -> None:
    file.chmod(0o777)


SPOILT = [change, link, open_to_all]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_file_that_was_spoilt_is_not_loaded_but_made_anew(
    spoil: Callable[[Path], None], own_cache: Path, answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []
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
def test_whose_files_are_loaded(owner: int, mode: int, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "getuid", lambda: 7)
    assert build._is_ours(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))) == ours


@pytest.mark.parametrize("changes", ["answer.c", "number.h"])
def test_another_source_or_header_is_compiled_anew(
    changes: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "answer.c").write_text('#include "number.h"\nint answer(void) { return NUMBER; }')
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    for number in (41, 42):
        text = f"int answer(void) {{ return {number}; }}" if changes == "answer.c" else f"#define NUMBER {number}"
        (tmp_path / changes).write_text(text)
        found = build.library("answer")
        assert found is not None
        assert found.answer() == number


def test_a_file_that_does_not_compile_is_said_and_done_without(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.c").write_text("int broken(void) { return unknown; }")
    (tmp_path / "fine.c").write_text("int fine(void) { return 1; }")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    assert build.library("broken") is None
    assert "broken: can't be compiled" in caplog.text
    assert "unknown" in caplog.text
    assert [path.name.partition("-")[0] for path in own_cache.iterdir()] == ["fine"]
    assert build.library("fine") is not None


def test_a_folder_that_others_may_write_to_is_not_used(own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    assert build.library("normal") is not None
    assert list(own_cache.iterdir()) == []


@pytest.mark.slow
def test_processes_may_race(own_cache: Path) -> None:
    code = (
        f"from ghostclip.native import build; build.__file__ = {build.__file__!r};"
        "assert build.library('normal') is not None"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(own_cache.parent)}
    racing = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in racing] == [0, 0]
    assert len(list(own_cache.iterdir())) == len(FEW)


@pytest.mark.slow
def test_nothing_is_compiled_by_an_import(own_cache: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(own_cache.parent)}
    subprocess.run([sys.executable, "-c", "import ghostclip, ghostclip.noise"], env=environment, check=True)
    assert not own_cache.exists()
