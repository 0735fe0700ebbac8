"""The benchmark: its gate finds wrong gradients, its ratios are of the same round, slow contenders run less often."""

import json
import math

import pytest
import torch

from ghostclip.bench import CONTENDERS, WORKLOADS, Contender, Workload, compare, line_up, markdown
from ghostclip.bench.__main__ import main
from ghostclip.bench.contenders import by_filling_gradients
from ghostclip.bench.machine import describe, in_words
from ghostclip.bench.measure import Spread, Timings, loop_norms, loop_sum, relative_error, take_turns

TINY = Workload(
    "tiny",
    "one hidden layer",
    6,
    lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)),
    lambda size: (3 * torch.randn(size, 5), torch.randint(0, 3, (size,))),
)


def unclipped(model, max_norm):
    """A contender that forgets to clip."""

    def add(inputs, targets):
        torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()

    return add


def broken(model, max_norm):
    """A contender that can't be prepared."""
    raise RuntimeError("out of paper\nsecond line")


class Clock:
    """Time that passes only when a turn says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def turn(self, seconds):
        def take():
            self.now += seconds

        return take


def test_every_contender_passes_the_gate():
    field = line_up(TINY, CONTENDERS)
    assert field.absent == {}
    assert field.errors.pop("nonprivate") is None
    assert set(field.errors) == {"reweight", "cached", "nxbp", "multiloss"}
    assert all(error < 1e-5 for error in field.errors.values())


def test_the_gate_sees_clipped_and_unclipped_examples():
    field = line_up(TINY, {"nonprivate": CONTENDERS["nonprivate"]})
    torch.manual_seed(0)
    norms = loop_norms(TINY.model(), *TINY.batch(6))
    assert norms.min() < field.max_norm < norms.max()


def test_wrong_broken_and_missing_contenders_are_told_apart():
    chosen = {
        "nonprivate": CONTENDERS["nonprivate"],
        "unclipped": Contender("unclipped", "", by_filling_gradients(unclipped)),
        "broken": Contender("broken", "", by_filling_gradients(broken)),
        "absent": Contender("absent", "", by_filling_gradients(broken), lambda: "not installed"),
    }
    found = compare(TINY, chosen, seconds=0.01)
    rows = found["contenders"]
    assert rows["unclipped"]["gradient_error"] > 0.1
    assert rows["unclipped"]["correct"] is False
    assert rows["broken"] == {"failed": "RuntimeError: out of paper\nsecond line"}
    assert rows["absent"] == {"missing": "not installed"}
    table = markdown({"machine": describe(), "contenders": dict.fromkeys(chosen), "workloads": {"tiny": found}})
    assert "WRONG" in table
    assert "| FAILED | - |" in table
    assert "- tiny, broken failed: RuntimeError: out of paper" in table.splitlines()


def test_the_loop_is_the_definition():
    torch.manual_seed(0)
    model, (inputs, targets) = TINY.model(), TINY.batch(6)
    norms = loop_norms(model, inputs, targets)
    unbounded = loop_sum(model, inputs, targets, float(norms.max()) * 2)
    torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(plain, unbounded) < 1e-5
    alone = loop_sum(model, inputs[:1], targets[:1], float(norms[0]) / 10)
    assert math.isclose(math.sqrt(sum(float(v.square().sum()) for v in alone.values())), float(norms[0]) / 10)


def test_relative_error_counts_nan_and_missing_parameters_as_infinite():
    expected = {"w": torch.ones(2, dtype=torch.float64)}
    assert relative_error({"w": torch.tensor([1.0, 2.0])}, expected) == pytest.approx(1 / math.sqrt(2))
    assert relative_error({"w": torch.tensor([1.0, math.nan])}, expected) == math.inf
    assert relative_error({}, expected) == math.inf
    assert relative_error({"w": torch.ones(3)}, expected) == math.inf


def test_turns_of_slow_contenders_are_fewer_but_never_none():
    clock = Clock()
    turns = {"plain": clock.turn(1.0), "fast": clock.turn(2.0), "slow": clock.turn(30.0), "snail": clock.turn(100.0)}
    timings = take_turns(turns, 300.0, baseline="plain", clock=clock)
    counts = {name: len(times) for name, times in timings.seconds.items()}
    assert counts["plain"] == counts["fast"]
    assert counts["plain"] == pytest.approx(8 * counts["slow"], abs=8)
    assert timings.seconds["slow"].keys() > timings.seconds["snail"].keys()
    assert timings.ratio("slow", "plain").median == 30.0
    assert timings.ratio("slow", "fast").median == 15.0
    least = take_turns(turns, 0.1, baseline="plain", clock=clock)
    assert len(least.seconds["snail"]) == 3


def test_ratios_pair_times_of_the_same_round():
    timings = Timings({"plain": {0: 1.0, 1: 10.0, 2: 100.0}, "slow": {0: 3.0, 2: 500.0}})
    assert timings.ratio("slow", "plain") == Spread(4.0, 3.5, 4.5, 2)
    assert timings.milliseconds("plain").median == 10_000.0


def test_the_command_prints_a_table_and_writes_every_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0))
    status = main(["--workloads", "tiny", "--seconds", "0.05", "--out", str(tmp_path / "new" / "bench.json")])
    printed = capsys.readouterr()
    results = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert status == 0
    assert "load average is 3.25" in printed.err
    assert printed.out.strip() == markdown(results)
    assert results["machine"]["threads"] == 1
    assert results["workloads"]["tiny"]["contenders"]["cached"]["nxbp_over"]["rounds"] >= 3
    assert in_words(results["machine"]) in printed.out


@pytest.mark.parametrize(
    "words", [["--workloads", "mpl"], ["--contenders", ""], ["--seconds", "0"], ["--device", "cuda"]]
)
def test_mistakes_on_the_command_line_end_with_status_2(words, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "error: argument" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "tiny"])
def test_workloads_are_plain_torch_and_learn_from_every_example(name):
    workload = WORKLOADS[name]
    model, (inputs, targets) = workload.model(), workload.batch(2)
    assert all(type(module).__module__.startswith(("torch.", "ghostclip.models")) for module in model.modules())
    assert model(inputs).shape[0] == len(targets) == 2
    assert all(norm > 0 for norm in loop_norms(model, inputs, targets))
