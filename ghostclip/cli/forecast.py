"""What a run would spend if it went on."""

from __future__ import annotations

from dataclasses import replace

from ghostclip import accounting
from ghostclip.cli.methods import Settings
from ghostclip.report import PrivacyCurve

__all__ = ["with_forecast"]

# So much longer than the run, as shares of its steps.
FURTHER = (1.25, 1.5, 1.75, 2.0)


def with_forecast(curve: PrivacyCurve | None, settings: Settings, examples: int) -> PrivacyCurve | None:
    """The curve, continued to twice the steps taken; as it is where other runs of a ledger are counted in it.

    Args:
        curve: of a run; None for one that wasn't private.
        settings: the run's.
        examples: in its training set.
    """
    if curve is None or settings.ledger is not None or not settings.noise_multiplier:
        return curve
    taken = curve.steps[-1]
    marks = [taken, *(round(taken * share) for share in FURTHER)]
    event = accounting.Setting(settings.batch_size / examples).event(settings.noise_multiplier)
    further = {
        name: accounting.epsilons_of([], event, marks, delta=settings.delta, accountant=name.lower())
        for name in curve.epsilons
    }
    return replace(curve, forecast_steps=marks, forecasts=further)
