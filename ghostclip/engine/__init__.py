"""Private training: sampling, clipping, charge, noise and update around the user's own model and optimizer."""

import ghostclip.compiled  # noqa: F401  # registers the compiler of clippers

from .privacy_engine import PrivacyEngine
from .snapshots import Restored
from .step import StepRecord

__all__ = ["PrivacyEngine", "Restored", "StepRecord"]
