"""`ghostclip train`: every method and data format end to end, and what is charged."""

import argparse
import json
import math
from dataclasses import replace

import private_runs as runs
import pytest
import torch
from commands import as_json, ran
from data_files import digits, write_adult, write_cifar, write_images, write_imdb, write_mnist
from safetensors.torch import load_file

import ghostclip
from ghostclip import accounting, datasets, models
from ghostclip.cli import main, train
from ghostclip.cli.methods import METHODS, Settings
from ghostclip.cli.plan import runs_of
from ghostclip.cli.summary import with_forecast
from ghostclip.cli.training import Keeping, build
from ghostclip.cli.training import train as train_once
from ghostclip.engine import micro_batching
from ghostclip.events import SampledGaussian

pytestmark = pytest.mark.usefixtures("coarse_losses")

PRIVATE = [method for method in METHODS if method != "nonprivate"]
QUICK = ["--epochs", "1", "--no-compare"]


def settings(method: str, **changes) -> Settings:
    """A run of two steps of nearly the whole data set, without noise or clipping, so that every method must agree."""
    values = {
        "model": "mlp", "method": method, "epochs": 2, "batch_size": 40, "max_physical_batch_size": 16,
        "max_norm": 1e6, "learning_rate": 0.1, "optimizer": "sgd", "seed": 3, "delta": 1e-5, "noise_multiplier": 0.0,
    }  # fmt: skip
    return Settings(**values | changes)


def trained(settings: Settings, data, **options):
    return train_once(settings, data, "a run", lambda *step: None, **options)


def planned(*words: str):
    """The runs that a command with these words takes on the digits."""
    parser = argparse.ArgumentParser()
    train.add_train(parser)
    return list(runs_of(parser.parse_args([*words]), 1437))


@pytest.mark.parametrize("method", PRIVATE)
def test_every_private_method_takes_the_same_steps(method):
    data = digits(40)
    plain = trained(settings("nonprivate", max_norm=1.0, noise_multiplier=None), data)
    private = trained(settings(method), data)
    assert private.run.losses == pytest.approx(plain.run.losses, rel=1e-4)
    assert private.run.steps == plain.run.steps == 2
    torch.testing.assert_close(runs.weights(private.model), runs.weights(plain.model), rtol=1e-3, atol=1e-5)
    assert private.run.epsilons == {"PLD": math.inf, "RDP": math.inf}


@pytest.mark.parametrize("method", PRIVATE)
def test_every_private_method_clips_and_charges(method):
    data = digits(40)
    before = build("mlp", data, seed=3)
    outcome = trained(settings(method, max_norm=1e-3, noise_multiplier=1e-3, epochs=1), data)
    moved = runs.weights(outcome.model) - runs.weights(before)
    assert 0 < float(moved.norm()) <= 0.1 * 1e-3 * 1.01
    where = {"noise_multiplier": 1e-3, "sample_rate": 1.0, "steps": 1, "delta": 1e-5}
    assert outcome.run.epsilons == {
        name.upper(): accounting.epsilon(**where, accountant=name) for name in ("pld", "rdp")
    }


def test_speed_is_by_expected_examples_since_how_many_were_drawn_is_private():
    run = trained(settings("cached", batch_size=8), digits(40)).run
    assert run.examples_per_second * run.seconds == pytest.approx(8 * run.steps, abs=1e-6) == 80


@pytest.mark.parametrize("method", PRIVATE)
@pytest.mark.one_in(6)
def test_noise_is_fresh_in_every_run_and_the_seed_is_of_the_weights(method):
    data = digits(40)
    runs = [trained(settings(method, noise_multiplier=0.5), data) for _ in range(2)]
    assert runs[0].run.losses[0] == pytest.approx(runs[1].run.losses[0])
    assert runs[0].run.losses[1] != runs[1].run.losses[1]


@pytest.mark.slow
def test_target_is_met_and_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "MARKS", 2)
    words = ["--epsilon", "2", "--batch-size", "300", "--report", tmp_path / "r"]
    found = as_json(capsys, "train", "--model", "mlp", *words, *QUICK)
    report = {"report": str(tmp_path / "r" / "index.html")}
    assert found == json.loads((tmp_path / "r" / "report.json").read_text()) | report
    assert load_file(tmp_path / "r" / "model.safetensors").keys() == models.MLP((1, 8, 8), 10).state_dict().keys()
    (run,) = found["runs"]
    assert 1.99 < run["epsilons"]["PLD"] <= 2 < run["epsilons"]["RDP"]
    assert run["noise_multiplier"] == found["settings"]["noise_multiplier"]
    assert (found["privacy"]["steps"][0], found["privacy"]["steps"][-1]) == (0, run["steps"])
    assert found["privacy"]["epsilons"]["PLD"][-1] == run["epsilons"]["PLD"]
    assert len(found["not_private"]["norms"]["norms"]) == found["settings"]["training examples"] == 1437


@pytest.mark.parametrize(
    ("text", "limit"), [("8GiB", 8 << 30), ("8.5 GB", 8_500_000_000), (str(8 << 30), 8 << 30), (None, None)]
)
@pytest.mark.slow
def test_the_size_of_physical_batches_is_found_within_the_limit(capsys, monkeypatch, tmp_path, text, limit):
    """The report's norms, too, take no more memory than the passes did."""
    sizes, norms = [], ghostclip.GhostClipper.norms
    monkeypatch.setattr(micro_batching, "_largest_that_fits", lambda *_: 30)
    monkeypatch.setattr(
        ghostclip.GhostClipper, "norms", lambda self, losses: sizes.append(len(losses)) or norms(self, losses)
    )
    found = as_json(
        capsys, "train", "--model", "mlp", "--noise-multiplier", "1", "--max-physical-batch-size", "auto",
        "--report", tmp_path, *([] if text is None else ["--memory-limit", text]), *QUICK,
    )  # fmt: skip
    assert (found["settings"]["max_physical_batch_size"], found["settings"]["memory_limit"]) == ("auto", limit)
    assert max(sizes) == 30


def test_a_network_of_good_features_has_their_mean_first(tmp_path):
    plan = planned("--model", "oriented", "--epsilon", "1")[0]
    kept = Keeping(tmp_path / "kept", None, resume=False)
    few = replace(plan.settings, epochs=1, ledger=str(tmp_path / "run.ledger"))
    noises = [(plan.settings.noise_multiplier, plan.steps), (plan.settings.mean_noise, 1)]
    spent = accounting.epsilon_of([SampledGaussian(1.0, *each) for each in noises], delta=1e-5)
    assert 0.99 < spent <= 1
    assert plan.settings.mean_noise == pytest.approx(plan.settings.noise_multiplier * math.sqrt(0.88 / 0.12 / 8))
    data = datasets.load("digits", None, None)
    once = trained(few, data, marks=(1,), keeping=kept)
    # The report's curve begins with the mean, and what would follow goes on from what was spent.
    alone = accounting.epsilon_of([SampledGaussian(1.0, few.mean_noise)], delta=1e-5)
    assert once.curve.epsilons["PLD"] == [alone, once.run.epsilons["PLD"]]
    further = with_forecast(once.curve, replace(few, ledger=None), 1437)
    assert further.forecasts["PLD"][0] == pytest.approx(once.run.epsilons["PLD"])
    assert once.model.centre.mean.norm() > 0.1
    # One step and the mean; a run that goes on releases no other.
    on = trained(replace(few, epochs=2), data, keeping=replace(kept, resume=True))
    assert torch.equal(on.model.centre.mean, once.model.centre.mean)
    for outcome, steps in ((once, 1), (on, 2)):
        events = [SampledGaussian(1.0, few.noise_multiplier, steps), SampledGaussian(1.0, few.mean_noise)]
        assert outcome.run.epsilons["PLD"] == pytest.approx(accounting.epsilon_of(events, delta=1e-5))


@pytest.mark.parametrize("words", [("--max-norm", "0"), ("--learning-rate", "-1")])
def test_a_value_out_of_range_is_told_before_noise_is_calibrated(words, monkeypatch):
    monkeypatch.setattr(accounting, "noise_for", lambda *_, **__: pytest.fail("calibrated"))
    with pytest.raises(ValueError, match="must be a finite number > 0"):
        planned("--model", "mlp", *words)


def test_a_linear_model_is_planned_beside_the_network_with_settings_of_its_own():
    words = ["--model", "oriented", "--epsilon", "3", "--max-norm", "0.5", "--epochs", "2"]
    plans = planned(*words)[:-1]
    assert [(plan.name, plan.settings.model, plan.steps, plan.settings.max_norm) for plan in plans] == [
        ("private, epsilon 3", "oriented", 2, 0.5), ("private, epsilon 1", "oriented", 2, 0.5),
        ("linear model, epsilon 3", "oriented-linear", 12, 0.1), ("linear model, epsilon 1", "oriented-linear", 8, 0.2),
    ]  # fmt: skip
    for plan in plans:
        noises = [(plan.settings.noise_multiplier, plan.steps), (plan.settings.mean_noise, 1)]
        spent = accounting.epsilon_of([SampledGaussian(1.0, *each) for each in noises], delta=1e-5)
        assert 0.99 * plan.settings.target_epsilon < spent <= plan.settings.target_epsilon
    assert [plan.name for plan in planned(*words, "--no-compare")] == ["private, epsilon 3"]


def test_memory_that_holds_no_example_is_told_in_one_line(capsys):
    limit = ["--max-physical-batch-size", "auto", "--memory-limit", "1kB"]
    assert main(["train", "--model", "mlp", "--noise-multiplier", "1", *QUICK, *limit]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    assert last.startswith("ghostclip: the passes over one example don't fit")
    assert "memory_limit" in last


def test_training_without_noise_is_not_called_private(capsys):
    shown = ran(capsys, "train", "--model", "mlp", "--noise-multiplier", "0", *QUICK).splitlines()
    (line,) = (line for line in shown if line.startswith(("private", "not private")))
    assert line.split("  ")[0] == "not private, no noise"
    assert " inf " in line


def test_nonprivate_training_spends_no_epsilon(capsys):
    found = as_json(capsys, "train", "--model", "mlp", "--method", "nonprivate", *QUICK)
    assert found["runs"][0]["epsilons"] == {}
    assert found["privacy"] is None
    assert found["settings"]["noise_multiplier"] is None


@pytest.mark.parametrize(
    ("data", "write", "model"),
    [
        ("mnist", write_mnist, "rnn"), ("fashion-mnist", write_mnist, "lstm"), ("cifar10", write_cifar, "cnn"),
        ("adult", write_adult, "mlp"), ("images", write_images, "cnn"), ("imdb", write_imdb, "transformer"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_every_format_trains(capsys, tmp_path, data, write, model):
    write(tmp_path)
    words = ["--vocabulary", tmp_path / "words.txt"] if data == "imdb" else []
    where = ["--data", data, "--data-dir", tmp_path, *words]
    found = as_json(capsys, "train", *where, "--model", model, "--noise-multiplier", "1", "--batch-size", "2", *QUICK)
    assert 0 <= found["runs"][0]["accuracy"] <= 1
    assert 0 < found["runs"][0]["epsilons"]["PLD"] < math.inf


def test_a_delta_that_promises_nothing_is_warned_about(capsys):
    assert main(["train", "--model", "mlp", "--noise-multiplier", "1", "--delta", "1e-3", *QUICK]) == 0
    assert "delta 0.001 is not below 1 / 1437 examples" in capsys.readouterr().err
