"""Accuracies at equal epsilon: every training's noise is the engine's own calibration; outcomes follow from data."""

import pytest
from torch.utils.data import Subset

from experiments.papers.paired import Hypothesis, Interval, interval
from experiments.papers.training import Setting, engine_for, losses_of
from ghostclip import datasets
from ghostclip.clipping import ByLayer, Composed, Flat, Quantiles
from ghostclip.models import CNN

POLICIES = [
    lambda: Flat(1.0),
    lambda: Composed(ByLayer(), Quantiles(1.0, max_norm=1.0)),
    lambda: Composed(ByLayer(), Quantiles(1.0, count_noise=3.0)),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_reused_noise_spends_the_target(policy):
    examples = Subset(datasets.digits().train, range(64))
    setting = Setting(policy, 0.1, epochs=2, batch_size=16)
    engines = [engine_for(setting, CNN((1, 8, 8), 10), examples, seed=None) for _ in range(2)]
    assert engines[0].noise_multiplier == engines[1].noise_multiplier
    assert engines[1].target_epsilon is None
    for _ in range(setting.epochs):
        for batch in engines[1].batches():
            engines[1].step(batch, losses_of)
    assert 0.99 * setting.target_epsilon < engines[1].epsilon() <= setting.target_epsilon


@pytest.mark.parametrize(
    ("claim", "low", "high", "expected"),
    [
        ("better", 0.001, 0.02, "supported"),
        ("better", -0.01, 0.02, "not supported"),
        ("better", -0.02, -0.001, "opposite"),
        ("worse", -0.02, -0.001, "supported"),
        ("worse", -0.02, 0.001, "not supported"),
        ("worse", 0.001, 0.02, "opposite"),
        ("as good", -0.009, 0.02, "supported"),
        ("as good", -0.011, 0.02, "not supported"),
        ("as good", -0.009, -0.001, "opposite"),
    ],
)
def test_outcomes_follow_from_the_interval(claim, low, high, expected):
    assert Hypothesis("a", "b", claim, "").outcome(Interval((low + high) / 2, low, high)) == expected


def test_the_interval_is_student_s():
    assert interval([0.0, 1.0, 2.0]) == pytest.approx((1.0, 1 - 4.30265 / 3**0.5, 1 + 4.30265 / 3**0.5), rel=1e-5)
    assert interval([0.5, 0.5]) == (0.5, 0.5, 0.5)
