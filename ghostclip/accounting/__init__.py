"""How much privacy a run spends, by dp-accounting's accountants behind argument checks.

"pld" composes privacy loss distributions numerically (Koskela et al. 2020; Doroshenko et al. 2022), "rdp" adds up
Rényi divergences (Mironov 2017; Mironov et al. 2019). Both give upper bounds; PLD's is tighter. A central-limit figure
is no bound, so there is none.
"""

from ghostclip.accounting.attacks import FALSE_POSITIVE_RATES, Risk, risk, risk_of
from ghostclip.accounting.calibration import affordable, max_steps, noise_for, noise_multiplier
from ghostclip.accounting.noted import Noted, note_charges, noting_charges
from ghostclip.accounting.running import RunningEpsilon
from ghostclip.accounting.selection import covers, selection_epsilon, success_probability
from ghostclip.accounting.spent import (
    ACCOUNTANTS,
    Setting,
    accountants_for,
    epsilon,
    epsilon_of,
    epsilon_over_time,
    epsilons_of,
    used_for,
)
from ghostclip.accounting.words import guarantee, neighbours, samples, steps, warn_of_delta

__all__ = [
    "ACCOUNTANTS",
    "FALSE_POSITIVE_RATES",
    "Noted",
    "Risk",
    "RunningEpsilon",
    "Setting",
    "accountants_for",
    "affordable",
    "covers",
    "epsilon",
    "epsilon_of",
    "epsilon_over_time",
    "epsilons_of",
    "guarantee",
    "max_steps",
    "neighbours",
    "noise_for",
    "noise_multiplier",
    "note_charges",
    "noting_charges",
    "risk",
    "risk_of",
    "samples",
    "selection_epsilon",
    "steps",
    "success_probability",
    "used_for",
    "warn_of_delta",
]
