"""Private training: the pieces put together around the user's own optimizer."""

from .privacy_engine import PrivacyEngine
from .record import StepRecord
from .snapshots import Restored

__all__ = ["PrivacyEngine", "Restored", "StepRecord"]
