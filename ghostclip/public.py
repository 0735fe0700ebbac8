"""The names that `import ghostclip` gives. They take torch; ``ghostclip --help`` does without them."""

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
from .noise.mean import PrivateMean, private_mean
from .selection import Best, NoisyScore, select
from .self_check import check
from .wrap import Finding, unwrap, wrap

__all__ = [
    "Best",
    "BudgetExceededError",
    "ClippingResult",
    "Finding",
    "GhostClipError",
    "GhostClipper",
    "GradientLeakError",
    "LedgerError",
    "LossShapeError",
    "NoisyScore",
    "PrivacyEngine",
    "PrivacyError",
    "PrivateMean",
    "StaleInputError",
    "UnsupportedModelError",
    "VerificationError",
    "accounting",
    "check",
    "clipping",
    "errors",
    "nn",
    "per_example_norms",
    "private_mean",
    "same_as",
    "select",
    "traces",
    "unwrap",
    "wrap",
]
