"""Compiling C on first use: cached, safe to race for, silent about nothing, and never needed."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ghostclip.native import build, library


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    if build.library("normal") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    return tmp_path / "ghostclip"


def test_compiled_once_and_found_again(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ghostclip")
    assert build.library("normal") is not None
    assert build.library("normal") is not None
    assert [record.message.split(" in ")[0] for record in caplog.records] == ["normal: compiled"]
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700


def test_another_source_is_compiled_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "answer.c"
    for number in (41, 42):
        source.write_text(f"int answer(void) {{ return {number}; }}")
        monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
        found = build.library("answer")
        assert found is not None
        assert found.answer() == number


def test_another_header_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "answer.c").write_text('#include "number.h"\nint answer(void) { return NUMBER; }')
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    for number in (41, 42):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}")
        found = build.library("answer")
        assert found is not None
        assert found.answer() == number


def test_a_file_that_does_not_compile_is_said_and_done_without(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.c").write_text("int broken(void) { return unknown; }")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    assert build.library("broken") is None
    assert "broken: can't be compiled" in caplog.text
    assert "unknown" in caplog.text
    assert list(own_cache.iterdir()) == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert build.library("normal") is None
    assert "no C compiler found (tried $CC, cc, gcc, clang)" in caplog.text


def test_forbidden_by_the_environment(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOSTCLIP_COMPILE", "0")
    assert build.library("normal") is None
    assert not own_cache.exists()


def test_a_folder_that_others_may_write_to_is_not_used(own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    assert build.library("normal") is not None
    assert list(own_cache.iterdir()) == []


def test_a_compiler_that_knows_fewer_flags(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "BETTER", ("-fno-such-flag-anywhere=1",))
    assert build.library("normal") is not None


def test_processes_may_race(own_cache: Path) -> None:
    code = "from ghostclip.native import library; assert library('normal') is not None"
    environment = os.environ | {"XDG_CACHE_HOME": str(own_cache.parent)}
    racing = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in racing] == [0, 0, 0]
    assert len(list(own_cache.iterdir())) == 1


def test_nothing_is_compiled_by_an_import(own_cache: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(own_cache.parent)}
    subprocess.run([sys.executable, "-c", "import ghostclip, ghostclip.noise"], env=environment, check=True)
    assert not own_cache.exists()


def test_the_package_loads_it_once() -> None:
    assert library("normal") is library("normal")
