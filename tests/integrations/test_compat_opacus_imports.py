"""Import lines of programs for Opacus: they bring what is here under Opacus's name, or say what to write instead."""

from typing import Any

import pytest

from ghostclip.compat import opacus
from ghostclip.compat.opacus import BatchMemoryManager


def imported(line: str) -> Any:
    """What a line brings in, which Opacus has with its own name in place of the package's."""
    found: dict[str, Any] = {}
    exec(line.replace("opacus", "ghostclip.compat.opacus"), found)
    return found[line.split()[-1]]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from opacus.utils.batch_memory_manager import BatchMemoryManager", "BatchMemoryManager"),
        ("from opacus.optimizers import DPOptimizer", "DPOptimizer"),
        ("from opacus.optimizers.optimizer import DPOptimizer", "DPOptimizer"),
        ("from opacus.data_loader import DPDataLoader", "DPDataLoader"),
        ("from opacus.validators.module_validator import ModuleValidator", "ModuleValidator"),
        ("from opacus.accountants import create_accountant", "create_accountant"),
        ("from opacus.privacy_engine import PrivacyEngine", "PrivacyEngine"),
    ],
)
def test_longer_import_lines_bring_the_same(line: str, name: str) -> None:
    assert imported(line) is getattr(opacus, name)
    assert imported("from opacus.utils import batch_memory_manager").BatchMemoryManager is BatchMemoryManager


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from opacus import GradSampleModule", "per_example_grads"),
        ("from opacus.grad_sample import register_grad_sampler", r"none is needed.*own_layers\.md"),
        ("from opacus.accountants.utils import get_noise_multiplier", r"accounting\.noise_multiplier"),
        ("from opacus.accountants import GaussianAccountant", 'use "prv" or "rdp"'),
        ("from opacus.optimizers import AdaClipDPOptimizer", r"clipping\.Adaptive"),
        ("from opacus.optimizers import DPPerLayerOptimizer", 'clipping="per_layer"'),
        ("from opacus.schedulers import ExponentialNoise", r"clipping\.Schedule"),
        ("from opacus.schedulers import StepGradClip", r"clipping\.Schedule"),
        ("from opacus.utils.uniform_sampler import UniformWithReplacementSampler", r"make_private\(\.\.\.\) returns"),
        ("from opacus.utils.batch_memory_manager import wrap_data_loader", "use BatchMemoryManager"),
        ("from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping", 'mode="ghost"'),
        ("from opacus.distributed import DifferentiallyPrivateDistributedDataParallel", r"several_processes\.md"),
        ("from opacus.validators.errors import UnsupportedModuleError", r"catch ghostclip\.UnsupportedModelError"),
        ("from opacus.validators import register_module_fixer", r"ghostclip\.wrap\(model, replace"),
        ("from opacus.utils import nothing", "cannot import name 'nothing'"),
    ],
)
def test_names_that_are_not_here_are_told_with_ours(line: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        imported(line)
