"""Opacus's interface over this package: programs written for Opacus run with their import lines changed.

docs/coming_from_opacus.md compares the two, loop by loop.
"""

import sys
from inspect import isfunction
from types import ModuleType
from typing import Any

from .accountants import PRVAccountant, RDPAccountant, create_accountant, import_history
from .checkpoints import from_opacus
from .layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from .loaders import BatchMemoryManager, DPDataLoader
from .optimizer import DPOptimizer
from .privacy_engine import OpacusEngine as PrivacyEngine
from .validators import ModuleValidator

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "BatchMemoryManager",
    "DPDataLoader",
    "DPMultiheadAttention",
    "DPOptimizer",
    "ModuleValidator",
    "PRVAccountant",
    "PrivacyEngine",
    "RDPAccountant",
    "create_accountant",
    "from_opacus",
    "import_history",
]

# The class has the name that programs import in its representation, in errors about its arguments, and when pickled.
PrivacyEngine.__name__ = PrivacyEngine.__qualname__ = "PrivacyEngine"
PrivacyEngine.__module__ = __name__
for _method in filter(isfunction, vars(PrivacyEngine).values()):
    _method.__qualname__ = f"PrivacyEngine.{_method.__name__}"

# Of Opacus, and not here.
SCHEDULES = "StepNoise ExponentialNoise LambdaNoise NoiseScheduler _NoiseScheduler "
SCHEDULES += "StepGradClip ExponentialGradClip LambdaGradClip GradClipScheduler _GradClipScheduler"
PROCESSES = "DifferentiallyPrivateDistributedDataParallel DistributedDPOptimizer "
PROCESSES += "DistributedUniformWithReplacementSampler"
ELSEWHERE = {
    name: instead
    for names, instead in {
        "GradSampleModule AbstractGradSampleModule GradSampleModuleFastGradientClipping wrap_model": "the model stays "
        "as it is; for per-example gradients call ghostclip.GhostClipper(model).per_example_grads(losses)",
        "register_grad_sampler register_norm_sampler": "none is needed, layers of your own train as they are; "
        "faster is a ghostclip.nn.GhostLayer with per_example, see docs/own_layers.md",
        "get_noise_multiplier": "call ghostclip.accounting.noise_multiplier(target_epsilon=..., sample_rate=..., "
        "steps=..., delta=...)",
        SCHEDULES: "give ghostclip.PrivacyEngine(schedule=ghostclip.clipping.Schedule([...])), see "
        "docs/composed_clipping.md",
        "AdaClipDPOptimizer PrivacyEngineAdaptiveClipping": "give ghostclip.PrivacyEngine(clipping="
        "ghostclip.clipping.Adaptive(...))",
        "DPPerLayerOptimizer": 'give make_private(clipping="per_layer", max_grad_norm=[...])',
        "DPOptimizerFastGradientClipping DPLossFastGradientClipping": "optimizer and criterion that "
        'make_private(grad_sample_mode="ghost") returns take its place',
        "UniformWithReplacementSampler": "make_private(...) returns a loader that draws Poisson samples",
        "BatchSplittingSampler wrap_data_loader": "use BatchMemoryManager",
        PROCESSES: "ghostclip.PrivacyEngine trains in several processes, see docs/several_processes.md",
        "GaussianAccountant GDPAccountant": 'its epsilon is a central-limit figure, and no bound; use "prv" or "rdp"',
        "register_module_validator register_module_fixer": "ghostclip.check(model) lists what is wrong, and "
        'ghostclip.wrap(model, replace={"BatchNorm2d": "GroupNorm"}) mends it',
        "UnsupportedModuleError ShouldReplaceModuleError IllegalModuleConfigurationError": "catch "
        "ghostclip.UnsupportedModelError",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """What the module of Opacus with this name has, for modules that aren't there.

    Raises ImportError for a name of Opacus that has another one here, AttributeError for any other.
    """
    if name in ELSEWHERE:
        raise ImportError(f"{name} isn't part of ghostclip.compat.opacus: {ELSEWHERE[name]}")
    if name in __all__:
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Each of Opacus's modules has all of these names, so that of longer import lines the first word alone changes.
MODULES = "accountants accountants.utils data_loader distributed grad_sample layers optimizers optimizers.optimizer "
MODULES += "privacy_engine schedulers utils utils.batch_memory_manager utils.fast_gradient_clipping_utils "
MODULES += "utils.uniform_sampler validators validators.errors validators.module_validator"
for _path in MODULES.split():
    _module = sys.modules.setdefault(f"{__name__}.{_path}", ModuleType(f"{__name__}.{_path}", __doc__))
    _module.__getattr__ = __getattr__  # type: ignore[method-assign]
