"""Empirical privacy: attacks on a training configuration, and what they prove that it spends at least."""

from ghostclip.audit.auditing import audit
from ghostclip.audit.one_run import OneRun
from ghostclip.audit.result import Audit, Bound, CurvePoint, WhiteBox

__all__ = ["Audit", "Bound", "CurvePoint", "OneRun", "WhiteBox", "audit"]
