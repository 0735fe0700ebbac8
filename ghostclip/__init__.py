"""Exact per-example gradient clipping for differentially private training."""

from .interruption import ends_a_command

with ends_a_command():
    from . import accounting, clipping, errors, nn, traces
    from .clipper import ClippingResult, GhostClipper, per_example_norms
    from .engine import PrivacyEngine
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
    from .nn.declared import same_as
    from .wrap import Finding, check, unwrap, wrap

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
    "PrivacyEngine",
    "PrivacyError",
    "StaleInputError",
    "UnsupportedModelError",
    "VerificationError",
    "accounting",
    "check",
    "clipping",
    "errors",
    "nn",
    "per_example_norms",
    "same_as",
    "traces",
    "unwrap",
    "wrap",
]
