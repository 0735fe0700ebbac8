"""Clipping policies: from per-example norms to weights, and the sensitivity those weights guarantee."""

from ghostclip.clipping.adaptive import Adaptive
from ghostclip.clipping.allocation import (
    EqualNoise,
    GivenNoise,
    GlobalNoise,
    NoiseAllocation,
    OptimalNoise,
    ProportionalNoise,
)
from ghostclip.clipping.choice import as_policy
from ghostclip.clipping.composed import Composed
from ghostclip.clipping.groups import Grouped, Groupwise, PerLayer, Thresholds
from ghostclip.clipping.partitions import Blocks, ByLayer, ByName, ByParameter, EqualSizes, Partition, Whole
from ghostclip.clipping.policies import Automatic, Custom, Flat, Policy, flat_weights
from ghostclip.clipping.scaling import AutoS, AutoV, Clip, NormScaling, Psac
from ghostclip.clipping.schedule import Schedule, Stage
from ghostclip.clipping.thresholds import ByDimension, EqualShare, Fixed, JointBound, Quantiles, ThresholdRule

__all__ = [
    "Adaptive",
    "AutoS",
    "AutoV",
    "Automatic",
    "Blocks",
    "ByDimension",
    "ByLayer",
    "ByName",
    "ByParameter",
    "Clip",
    "Composed",
    "Custom",
    "EqualNoise",
    "EqualShare",
    "EqualSizes",
    "Fixed",
    "Flat",
    "GivenNoise",
    "GlobalNoise",
    "Grouped",
    "Groupwise",
    "JointBound",
    "NoiseAllocation",
    "NormScaling",
    "OptimalNoise",
    "Partition",
    "PerLayer",
    "Policy",
    "ProportionalNoise",
    "Psac",
    "Quantiles",
    "Schedule",
    "Stage",
    "ThresholdRule",
    "Thresholds",
    "Whole",
    "as_policy",
    "flat_weights",
]
