"""ghostclip epsilon with every sampling scheme."""

import pytest
from commands import as_json, ran

from ghostclip import accounting

NOISE = ["--noise-multiplier", "4"]
COUNTED = ["--examples", "600", "--batch-size", "60", "--epochs", "2"]
FIXED = ["--sampling", "without_replacement", "--neighboring", "replace_one"]
TRUNCATED = ["--sampling", "truncated", "--max-batch-size", "90"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (FIXED, {"sampling": "without_replacement", "neighboring": "replace_one"}),
        (TRUNCATED, {"sampling": "truncated", "dataset_size": 600, "max_batch_size": 90}),
        (["--neighboring", "replace_one"], {"neighboring": "replace_one"}),
        (["--sampling", "cyclic_poisson", "--bands", "5"], {"sampling": "cyclic_poisson", "bands": 5}),
        (["--sampling", "cyclic"], {"sampling": "cyclic"}),
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
