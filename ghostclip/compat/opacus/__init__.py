"""Opacus's interface over this package: programs written for Opacus run with their import lines changed.

docs/coming_from_opacus.md compares the two, loop by loop.
"""

from inspect import isfunction
from typing import Any

from .accountants import PRVAccountant, RDPAccountant, import_history
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
    "from_opacus",
    "import_history",
]

# The class has the name that programs import in its representation, in errors about its arguments, and when pickled.
PrivacyEngine.__name__ = PrivacyEngine.__qualname__ = "PrivacyEngine"
PrivacyEngine.__module__ = __name__
for _method in filter(isfunction, vars(PrivacyEngine).values()):
    _method.__qualname__ = f"PrivacyEngine.{_method.__name__}"

# Of Opacus, and not here.
ELSEWHERE = {
    "GradSampleModule": "the model stays as it is; for per-example gradients call "
    "ghostclip.GhostClipper(model).per_example_grads(losses)",
    "get_noise_multiplier": "call ghostclip.accounting.noise_multiplier(target_epsilon=..., sample_rate=..., "
    "steps=..., delta=...)",
}


def __getattr__(name: str) -> Any:
    """Raises ImportError for a name of Opacus that has another one here, AttributeError for any other."""
    if name in ELSEWHERE:
        raise ImportError(f"{name} isn't part of ghostclip.compat.opacus: {ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
