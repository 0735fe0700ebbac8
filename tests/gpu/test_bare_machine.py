"""What the GPU check imports works where nothing but torch, numpy, scipy, einops and pytest is installed."""

import subprocess
import sys

import pytest

ABSENT = ("dp_accounting", "tqdm", "sklearn", "matplotlib", "jinja2", "hypothesis", "nbclient", "nbformat")
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"


def run(code: str) -> subprocess.CompletedProcess:
    """Runs ``code`` in a fresh process that can't import the absent packages."""
    return subprocess.run([sys.executable, "-c", f"{BLOCK}\n{code}"], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_clipping_needs_no_accountant_and_no_plots():
    done = run(
        "import ghostclip, ghostclip.cli.bench, experiments.peers.__main__, torch\n"
        "model = ghostclip.nn.Linear(3, 2)\n"
        "clipper = ghostclip.GhostClipper(model, 0.5)\n"
        "result = clipper.backward(model(torch.ones(4, 3)).sum(1))\n"
        "print(float(model.weight.grad.norm()) > 0, len(result.norms))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "4"]
