"""Exact per-example gradient clipping for differentially private training."""

from . import clipping, errors, nn
from .clipper import ClippingResult, GhostClipper
from .convert import Finding, check, unwrap, wrap
from .errors import (
    BudgetExceededError,
    GhostClipError,
    GradientLeakError,
    LedgerError,
    LossShapeError,
    PrivacyError,
    StaleInputError,
    UnsupportedModelError,
    VerificationError,
)

__version__ = "0.1.0"

__all__ = [
    "BudgetExceededError",
    "ClippingResult",
    "Finding",
    "GhostClipError",
    "GhostClipper",
    "GradientLeakError",
    "LedgerError",
    "LossShapeError",
    "PrivacyError",
    "StaleInputError",
    "UnsupportedModelError",
    "VerificationError",
    "check",
    "clipping",
    "errors",
    "nn",
    "unwrap",
    "wrap",
]
