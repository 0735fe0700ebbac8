"""Clipping policies: from per-example norms to weights, and the sensitivity those weights guarantee."""

from ghostclip.clipping.adaptive import Adaptive
from ghostclip.clipping.choice import as_policy
from ghostclip.clipping.groups import Grouped, Groupwise, PerLayer, Thresholds
from ghostclip.clipping.policies import Automatic, Custom, Flat, Policy

__all__ = [
    "Adaptive",
    "Automatic",
    "Custom",
    "Flat",
    "Grouped",
    "Groupwise",
    "PerLayer",
    "Policy",
    "Thresholds",
    "as_policy",
]
