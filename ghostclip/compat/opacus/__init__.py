"""Opacus's interface over this package: programs written for Opacus run with their import lines changed.

docs/coming_from_opacus.md compares the two, loop by loop.
"""

from inspect import isfunction

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
