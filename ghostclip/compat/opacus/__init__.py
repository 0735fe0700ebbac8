"""Opacus's interface over this package: programs written for Opacus run with their import lines changed.

docs/coming_from_opacus.md compares the two, loop by loop.
"""

from .accountants import PRVAccountant, RDPAccountant, import_history
from .checkpoints import from_opacus
from .layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from .loaders import BatchMemoryManager, DPDataLoader
from .optimizer import DPOptimizer
from .privacy_engine import PrivacyEngine
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
