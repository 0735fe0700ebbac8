"""What runs on a GPU, on a device that says it is CUDA and is the processor: values, and where they are.

Branches for devices other than the processor are taken, tensors of two devices that meet are an error, and the host's
waits are counted (tests/support/pretended). Kernels, streams, graphs and speed only `make gpu-check` on a GPU can tell.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretended.build import build, compiler

TESTS = Path(__file__).parents[1]
PRETENDED = TESTS / "support" / "pretended"
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler here"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA itself"),
]

# The LSTM cell's last bit, which CUDA's own operation has, and sparse tensors, for which the device has no kernels.
NOT_THERE = "not sparse and not (bit_for_bit and cell_lstm)"
# Networks whose loop in float64 takes seconds.
LARGE = ("gpt", "resnet", "vgg", "cifar", "imdb", "lora")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device, compiled."""
    out = tmp_path_factory.mktemp("pretended") / "cuda.so"
    build(out)
    return out


def process(library: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python in a process in which the device is there."""
    paths = os.pathsep.join(
        [str(PRETENDED), str(PRETENDED.parent), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    )
    own = {"PRETENDED_CUDA": str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
    command, environment = [sys.executable, *arguments], {**os.environ, **own}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def run(library: Path, *arguments: str, **variables: str) -> str:
    """The same, where all must go well; returns what it wrote."""
    done = process(library, *arguments, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def run_tests(library: Path, *arguments: str, **variables: str) -> int:
    """Runs pytest there, where all must go well; returns how many tests passed."""
    plugins = ["-p", "pretended_cuda", "-p", "no:cacheprovider"]
    out = run(library, "-m", "pytest", *plugins, "-rs", "-o", "addopts=", *arguments, **variables)
    return int(out.splitlines()[-1].split(" passed")[0].split()[-1])


# name: (what runs there, how many tests pass at least). What names no device is made there where it is the default.
SUITES = {
    "clipping": (["gpu", "-k", " and ".join(f"not {name}" for name in LARGE)], 150),
    "clipping of large networks": (["gpu", "-k", " or ".join(LARGE)], 30),
    "the host waits once for each physical batch": (["support/pretended/waiting.py"], 25),
    **{f"default: {file}": ([file, "-m", "not slow", "-k", NOT_THERE], 3) for file in (
        "layers/test_layers.py", "layers/test_layers_outside.py", "privacy/test_pitfalls.py",
        "clipper/test_computed_weights.py")},
    "default: laws/test_random_models.py": (["laws/test_random_models.py", "-k", "1"], 10),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_what_is_tested_holds_there(name, library):
    (path, *options), least = SUITES[name]
    default = {"PRETENDED_DEFAULT": "1"} if name.startswith("default") else {}
    assert run_tests(library, str(TESTS / path), *options, **default) > least


@pytest.mark.parametrize(("operation", "refusal"), [
    ("+", "found at least two devices, cuda:0 and cpu"), ("@", "got tensors of CUDA and one of the processor"),
])  # fmt: skip
@pytest.mark.slow
def test_tensors_of_two_devices_do_not_meet(operation, refusal, library):
    code = f"import pretended_cuda, torch; torch.ones(2, 2, device='cuda') {operation} torch.ones(2, 2)"
    done = process(library, "-c", code)
    assert done.returncode != 0
    assert refusal in done.stderr


@pytest.mark.slow
def test_the_benchmark_runs_there(library, tmp_path):
    arguments = ["--device", "cuda", "--seconds", "0.2", "--batch-size", "8", "--workloads", "mlp"]
    contenders = "nonprivate,reweight,cached,per-layer,nxbp,multiloss"
    code = "import sys, pretended_cuda; from ghostclip.cli import main; sys.exit(main(['bench', *sys.argv[1:]]))"
    out = run(library, "-c", code, *arguments, "--contenders", contenders, "--out", str(tmp_path / "x.json"))
    assert "pretended" in out
    assert "WRONG" not in out
