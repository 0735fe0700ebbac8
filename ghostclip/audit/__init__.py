"""Empirical privacy: attacks on a training configuration, and what they prove that it spends at least."""

from ghostclip.audit.auditing import audit, audit_training
from ghostclip.audit.bounds import epsilon_from_rates, error_bound, gaussian_mu, noise_from_rates
from ghostclip.audit.claim import Claim
from ghostclip.audit.one_run import OneRun
from ghostclip.audit.one_run_bound import one_run_epsilon, one_run_p_value
from ghostclip.audit.result import Audit, Bound, CurvePoint, WhiteBox
from ghostclip.audit.training import Training
from ghostclip.audit.trials import ErrorRates, Trials

__all__ = [
    "Audit",
    "Bound",
    "Claim",
    "CurvePoint",
    "ErrorRates",
    "OneRun",
    "Training",
    "Trials",
    "WhiteBox",
    "audit",
    "audit_training",
    "epsilon_from_rates",
    "error_bound",
    "gaussian_mu",
    "noise_from_rates",
    "one_run_epsilon",
    "one_run_p_value",
]
