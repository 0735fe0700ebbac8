"""Accuracy at equal epsilon: every row is tuned alike, and what is put on top of a network keeps to its epsilon."""

import importlib
from statistics import mean

import pytest
import torch
from scripts import ran, script
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import accounting, datasets
from ghostclip.events import SampledGaussian

pytestmark = pytest.mark.usefixtures("coarse_losses")


def test_accuracy_at_equal_epsilon_is_tuned_tested_and_taken_up_again(tmp_path, monkeypatch):
    module = script("accuracy")
    monkeypatch.setattr(module, "EPSILONS", (3.0,))
    monkeypatch.setattr(module, "LEAST", 2)
    words = ["--only", module.STATISTICS, module.LINEAR, "--seeds", "2"]
    results, page = ran(module, tmp_path, *words)
    names = {module.STATISTICS, module.LINEAR}
    assert {key.split("|")[1] for key in results["runs"]} == names
    for name in names:
        factor, validated = module.tuned(results["runs"], "images", name, 3.0)
        assert validated == max(
            mean(results["runs"][f"images|{name}|3|{each:g}|{1000 + seed}"] for seed in range(3))
            for each in module.ROWS[name].rates
        )
        found = [results["runs"][f"images|{name}|3|{factor:g}|{seed}"] for seed in (0, 1)]
        assert module.tested(results["runs"], "images", name, 3.0) == found
        assert 0.9 < min(found) < 1
    assert f"| {module.LINEAR} is better than {module.STATISTICS} | measured before | +" in page
    # Nothing is run twice.
    monkeypatch.setattr(module, "accuracy", None)
    assert ran(module, tmp_path, *words)[0]["runs"] == results["runs"]


def test_what_is_put_on_top_is_in_force_and_kept_to_the_same_epsilon(monkeypatch):
    module = script("accuracy")
    data = module._data("images", "digits", None, False)
    few = datasets.Data("few", *(TensorDataset(*part[:90]) for part in (data.train, data.test)), (1, 8, 8), 10)
    built, make = [], ghostclip.PrivacyEngine

    def engine(*given, **options):
        built.append(make(*given, **options))
        return built[-1]

    monkeypatch.setattr(ghostclip, "PrivacyEngine", engine)
    found = {}
    rows = {f"linear, {name}": module.ROWS[f"linear, {name}"] for name in module.ADDED}
    for name, row in {module.LINEAR: module.ROWS[module.LINEAR], **rows}.items():
        found[name] = module.accuracy_of(row, 8.0, row.rates[1], few, 0)
        weight = built[-1].model.output.weight.detach()
        assert all(not torch.equal(weight, each.model.output.weight) for each in built[:-1])
    multipliers = {name: each.noise_multiplier for name, each in zip(found, built, strict=True)}
    assert len({round(multipliers[f"linear, {name}"], 9) for name in ("average", "8 views", "low-pass")}) == 1
    for name in ("bands", "BLT"):  # full batches in effect, whose steps share noise
        assert built[[*found].index(f"linear, {name}")].planned_steps == 3 * 20
    # Each third of the examples takes part in 20 of the 60 steps, as all did in 20: no sampling, so the same noise.
    assert multipliers["linear, bands"] == pytest.approx(multipliers["linear, average"], rel=1e-3)


def test_noisy_statistics_are_a_ridge_regression_and_move_by_at_most_one():
    statistics = importlib.import_module("equal_epsilon.statistics")
    torch.manual_seed(0)
    features, labels = F.normalize(torch.randn(60, 5, dtype=torch.float64)), torch.arange(60) % 3
    exact = torch.linalg.lstsq(features, F.one_hot(labels, 3).double()).solution
    torch.testing.assert_close(statistics.ridge(features, labels, 3, 1e-12, (1.0, 0)), exact, rtol=1e-6, atol=1e-8)
    # Noise of the same size in each coordinate of an isometry of symmetric matrices: x x^T has norm 1 there.
    draws = torch.stack([statistics.symmetric_noise(5, torch.Generator().manual_seed(seed)) for seed in range(4000)])
    assert torch.equal(draws, draws.transpose(1, 2))
    expected = (torch.ones(5, 5) + torch.eye(5)).double() / 2
    torch.testing.assert_close(draws.var(0), expected, rtol=0.12, atol=0)
    noise, mean_noise = statistics.noise_of_each(3.0, 1e-5, 0.1)
    events = [SampledGaussian(1.0, noise, 2), SampledGaussian(1.0, mean_noise)]
    assert 2.99 < accounting.epsilon_of(events, delta=1e-5) <= 3.0
    assert mean_noise**-2 / (mean_noise**-2 + 2 * noise**-2) == pytest.approx(0.1)
