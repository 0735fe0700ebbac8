"""ghostclip epsilon and calibrate with every sampling scheme; the curve as a plot, and the forecast of a report."""

import pytest
from commands import as_json, ran

from ghostclip import accounting
from ghostclip.cli.methods import Settings
from ghostclip.cli.summary import with_forecast
from ghostclip.report import PrivacyCurve
from ghostclip.report.plots import epsilon_plot

NOISE = ["--noise-multiplier", "4"]
COUNTED = ["--examples", "600", "--batch-size", "60", "--epochs", "2"]
FIXED = ["--sampling", "without_replacement", "--neighboring", "replace_one"]
TRUNCATED = ["--sampling", "truncated", "--max-batch-size", "90"]
PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (FIXED, {"sampling": "without_replacement", "neighboring": "replace_one"}),
        (TRUNCATED, {"sampling": "truncated", "dataset_size": 600, "max_batch_size": 90}),
        (["--neighboring", "replace_one"], {"neighboring": "replace_one"}),
        ([], {}),
    ],
)
def test_every_kind_of_sampling_is_accounting_s(capsys, arguments, options):
    found = as_json(capsys, "epsilon", *NOISE, *COUNTED, *arguments)
    setting = {"noise_multiplier": 4.0, "sample_rate": 0.1, "steps": 20, "delta": 1e-5, **options}
    assert found["epsilon"] == accounting.epsilon(**setting)
    assert {name: found[name] for name in setting} == setting
    both = options.get("neighboring") != "replace_one" or "sampling" in options
    assert set(found["epsilons"]) == ({"pld", "rdp"} if both else {"pld"})
    assert found["epsilons"]["pld"] == found["epsilon"]
    assert not both or float(found["epsilons"]["rdp"]) == accounting.epsilon(**setting, accountant="rdp")


def test_risk_bounds_membership_attacks(capsys):
    setting = {"noise_multiplier": 4.0, "sample_rate": 0.1, "steps": 20}
    bound = accounting.risk(**setting)
    found = as_json(capsys, "epsilon", *NOISE, *COUNTED, "--risk")
    assert found["advantage"] == bound.advantage
    assert found["true_positive_rates"] == {
        name: bound.true_positive_rate(float(name)) for name in ("0.001", "0.01", "0.1")
    }
    assert ran(capsys, "epsilon", *NOISE, *COUNTED, "--risk").splitlines()[-1] == f"membership attacks: {bound}"
    assert "advantage" not in as_json(capsys, "epsilon", *NOISE, *COUNTED)


def settings(**changes) -> Settings:
    """Of a run of 20 steps of rate 0.1."""
    known = {
        "model": "mlp", "method": "cached", "epochs": 2, "batch_size": 60, "max_physical_batch_size": None,
        "learning_rate": 0.1, "optimizer": "sgd", "max_norm": 1.0, "delta": 1e-5, "seed": 0, "target_epsilon": None,
        "noise_multiplier": 4.0,
    }  # fmt: skip
    return Settings(**{**known, **changes})


def test_a_forecast_goes_on_where_the_run_ended():
    once = {"noise_multiplier": 4.0, "sample_rate": 0.1, "delta": 1e-5, "accountant": "rdp"}
    curve = PrivacyCurve([0, 20], {"RDP": [0.0, accounting.epsilon(steps=20, **once)]}, 1e-5)
    found = with_forecast(curve, settings(), 600)
    assert found.forecast_steps[0] == 20
    assert found.forecast_steps[-1] == 40
    assert found.forecasts["RDP"][0] == curve.epsilons["RDP"][-1]
    assert found.forecasts["RDP"][-1] == accounting.epsilon(steps=40, **once)
    forecast = (found.forecast_steps, found.forecasts)
    assert epsilon_plot(found.steps, found.epsilons, 1e-5, 2.0, forecast).startswith(PNG)
