"""Kernels that a wheel brings: for which processors, which of them is loaded, and what is said of them."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ghostclip.native import build, kernels, targets

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(build.__file__).parent


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A copy of the folder of C files, as of an installation; what is there is loaded."""
    folder = tmp_path / "native"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__", targets.FOLDER))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    monkeypatch.setattr(build, "__file__", str(folder / "build.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GHOSTCLIP_COMPILE", raising=False)
    return folder


@pytest.fixture
def compiler():
    try:
        return targets.find_compiler()
    except FileNotFoundError:
        pytest.skip("no C compiler here")


def test_the_wheels_kernels_are_loaded_and_nothing_is_compiled(installed, compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "FLAGS", ("-O0", *targets.FLAGS[1:]))  # in a tenth of the time
    level = targets.file_of(torch.backends.cpu.get_cpu_capability()).removeprefix("kernels-").removesuffix(".so")
    (installed / targets.FOLDER).mkdir()
    targets.compile_for(level, compiler, installed / targets.FOLDER)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in targets.KERNELS:
        for real in ("float", "double"):
            assert build.library(name, real) is not None
    assert hasattr(build.library("rows"), "rows_added_double")
    assert hasattr(build.library("normal"), "ghostclip_normal")
    assert not (tmp_path / "cache").exists()
    assert build.kernels() == f"of the wheel ({level})"


def test_a_processor_gets_the_kernels_that_torch_has_for_it():
    if targets.levels() != targets.X86:
        assert {targets.file_of(found) for found in ("DEFAULT", "SVE256")} == {f"kernels-{targets.levels()[0]}.so"}
        return
    found = [targets.file_of(capability) for capability in ("DEFAULT", "AVX2", "AVX512")]
    assert found == [f"kernels-{level}.so" for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4")]


def test_every_c_file_is_in_the_wheel_or_is_the_allocator():
    assert {path.stem for path in HERE.glob("*.c")} == {*targets.KERNELS, "allocated"}


def test_what_is_said_without_kernels(installed, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert build.kernels().startswith("none: no C compiler found")
    assert "install gcc or clang, or a wheel for this platform" in build.kernels()
    monkeypatch.setenv("GHOSTCLIP_COMPILE", "0")
    assert kernels() == "none, since GHOSTCLIP_COMPILE is 0; unset it for faster steps"
    assert build.library("normal") is None


@pytest.mark.slow
def test_the_wheel_has_them_and_names_its_platform(tmp_path, compiler):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 2_000_000
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any"
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"ghostclip/native/{targets.FOLDER}/kernels-{level}.so" for level in targets.levels()} <= {*names}
    assert "ghostclip/datasets/digits.npz" in names
