"""The command line: what each command prints, the one line a mistake ends in, and what is shown meanwhile."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import as_json, mistake, ran

import ghostclip
from ghostclip import accounting, cli
from ghostclip.cli import main, train
from ghostclip.cli.progress import bar, log_on_stderr
from ghostclip.native import kernels

pytestmark = pytest.mark.usefixtures("coarse_losses")

SAMPLING = ["--examples", "6000", "--batch-size", "60", "--epochs", "2"]
AUTO = ["--max-physical-batch-size", "auto"]
SPENT = ["epsilon", "--noise-multiplier", "4", *SAMPLING]
TRAIN = ["train", "--model", "mlp", "--noise-multiplier", "1"]
AUDIT = ["audit", "--model", "mlp", "--epochs", "1", "--noise-multiplier", "1", "--batch-size", "400"]
COUNTED = ["epsilon", "--noise-multiplier", "4", "--examples", "600", "--batch-size", "60", "--epochs", "2"]
log = logging.getLogger("ghostclip")
NETWORKS = """
from torch import nn

def good():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 3))

def bad():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6))

def tuple_output():
    return nn.LSTM(3, 4, batch_first=True)

class broken(nn.Module):
    def forward(self, inputs):
        raise KeyError("no such thing")

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def centred():
    return nn.Sequential(nn.Linear(3, 4), Centred())

number = 3
"""


@pytest.fixture
def networks(tmp_path, monkeypatch) -> Path:
    """A folder with a module of networks, as the working folder."""
    (tmp_path / "networks.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_an_example(capsys, command):
    shown = ran(capsys, command, "--help")
    assert f"ghostclip {command}" in shown.partition("example")[2]
    assert "--json" in shown
    if command == "audit":
        assert "exit status: 0 consistent with the claim, 1 more is spent than claimed" in shown


def test_module_and_version():
    command = [sys.executable, "-m", "ghostclip", "--version"]
    first, second = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == f"ghostclip {ghostclip.__version__}"
    assert second == f"C kernels: {kernels()}"


def test_calibrated_noise_keeps_the_target_as_printed(capsys):
    words = ["calibrate", "--epsilon", "1", "--sample-rate", "0.1", "--steps", "20", "--accountant", "rdp"]
    printed = ran(capsys, *words).splitlines()[0].removeprefix("noise multiplier ")
    assert len(printed.partition(".")[2]) <= 4
    assert float(printed) == as_json(capsys, *words)["noise_multiplier"]
    setting = {"sample_rate": 0.1, "steps": 20, "delta": 1e-5, "accountant": "rdp"}
    assert 0.99 < accounting.epsilon(noise_multiplier=float(printed), **setting) <= 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "invalid choice: 'trian'; did you mean 'train'? (see ghostclip --help)"),
        (["xyz"], "invalid choice: 'xyz'; choose from train, epsilon, calibrate, check, explain, bench, audit, tune"),
        (["train", "--modle", "mlp"], "unrecognized argument --modle; did you mean --model?"),
        (["epsilon", "--noise-multiplyer", "1", *SAMPLING], "--noise-multiplyer; did you mean --noise-multiplier?"),
        (["train", "--report", ""], "argument --report: expected a path; got an empty text"),
        (["train", "--model", "cnm"], "--model: invalid choice: 'cnm'; did you mean 'cnn'?"),
        (["epsilon"], "required: --noise-multiplier (see ghostclip epsilon --help)"),
        (["epsilon", "--noise-multiplier", "x"], "invalid float value: 'x'"),
        (["epsilon", "--noise-multiplier", "1"], "give --sample-rate and --steps, or --examples"),
        (["epsilon", "--noise-multiplier", "nan", *SAMPLING], "noise_multiplier must be a finite number > 0; got nan"),
        (["calibrate", "--epsilon", "1", *SAMPLING, "--batch-size", "6001"], "at most the number of examples, 6000"),
        (["check", "resnet"], "lstm, transformer, oriented, oriented-linear, or module:factory; got 'resnet'"),
        (["check", "nowhere:make"], "ModuleNotFoundError: No module named 'nowhere'"),
        (["check", "./networks.py:make"], "./networks.py is a file; name its module, as import does: networks:make"),
        (["check", "networks:number"], "TypeError: 'int' object is not callable"),
        (["explain", "networks:bad"], "the model can't be clipped exactly as it is"),
        (["explain", "networks:good", "--input-shape", "7"], "does not take random inputs of shape [32, 7]"),
        (["check", "networks:good", "--input-shape", "7,x"], "expected sizes such as 1 8 8 or 1,8,8; got '7,x'"),
        (["explain", "networks:broken", "--input-shape", "7"], "KeyError: 'no such thing'"),
        (["train", "--data", "mnist"], "--data mnist needs --data-dir"),
        (["train", "--data", "mnist", "--data-dir", "nowhere"], "nowhere is not a folder; give the folder that holds"),
        (["train", "--data-dir", "."], "digits are embedded and take no --data-dir"),
        (["train", "--vocabulary", "words.txt"], "--vocabulary is for imdb; digits has none"),
        (["train", "--model", "transformer"], "transformer takes token ids of texts"),
        (["train", "--method", "nonprivate", "--epsilon", "3"], "--method nonprivate takes no --epsilon"),
        (["train", "--method", "nonprivate", "--noise", "hardened"], "--method nonprivate takes no --noise"),
        (["train", "--epsilon", "3", "--noise-multiplier", "1"], "give --epsilon or --noise-multiplier, not both"),
        (["train", "--batch-size", "1438"], "batch_size must be at most the 1437 training examples; got 1438"),
        (["train", "--max-physical-batch-size", "some"], "expected a whole number or auto; got 'some'"),
        (["train", "--memory-limit", "4GiB"], "--memory-limit is for --max-physical-batch-size auto; give both"),
        (["train", *AUTO, "--memory-limit", "4 gigs"], "number with a unit, such as 4GiB or 500MB; got '4 gigs'"),
        (["train", *AUTO, "--method", "nxbp"], "--method nxbp takes a number as --max-physical-batch-size"),
        (["train", *AUTO, "--method", "nonprivate"], "--method nonprivate takes no --max-physical-batch-size"),
        (["audit", *AUTO], "the audit takes a number as --max-physical-batch-size"),
        (["train", "--seeds", "2", "--ledger", "led"], "--seeds 2 and --ledger don't go together; leave one out"),
        (["train", "--report", "networks.py/report"], "networks.py/report: Not a directory; choose another place"),
        (["train", "--report", "networks.py"], "networks.py: File exists; choose another place"),
        ([*AUDIT, "--method", "nxbp"], "whose methods are auto, cached, reweight; got --method nxbp"),
        ([*AUDIT, "--draws", "0", "--canaries", "0"], "leave nothing to audit"),
        ([*AUDIT, "--plot", "/nowhere/at/all.png"], "there is no folder /nowhere/at"),
        ([*AUDIT, "--noise-multiplier", "0"], "noise multiplier 0 claims nothing"),
        ([*AUDIT, "--draws", "5"], "draws must be at least 100"),
        ([*SPENT, "--plot", "curve.pdf"], "--plot must name a .png file; got curve.pdf"),
        ([*SPENT, "--max-batch-size", "9"], "--max-batch-size is for --sampling truncated"),
        ([*SPENT, "--sampling", "truncated"], "needs --examples, --batch-size, --epochs and --max-batch-size"),
        ([*SPENT, "--neighboring", "replace_one", "--accountant", "rdp"], "accountant='rdp' has no bound"),
        (["train", "--method", "nonprivate", "--ledger", "led"], "--method nonprivate takes no --ledger"),
        (["train", "--compare", "--ledger", "led"], "give it or --compare, not both"),
        ([*TRAIN, "--resume"], "--resume needs --checkpoint DIR"),
        ([*TRAIN, "--every", "2"], "--every needs --checkpoint DIR"),
        ([*TRAIN, "--checkpoint", "run", "--resume"], "no checkpoint at run to go on from; leave out --resume"),
        ([*TRAIN, "--checkpoint", "there"], "there is a checkpoint at there; add --resume to go on from it"),
        ([*TRAIN, "--checkpoint", "run", "--compare"], "give --checkpoint or --compare, not both"),
    ],
)
def test_a_mistake_is_one_line(capsys, networks, arguments, expected):
    (networks / "there").mkdir()
    (networks / "there" / "manifest.json").touch()
    assert expected in mistake(capsys, *arguments)
    assert {path.name for path in networks.iterdir()} <= {"networks.py", "__pycache__", "there"}


def test_check_tells_findings_by_its_status(capsys, networks):
    assert "none of 5 random inputs changed another's output; your loss function" in ran(capsys, "check", "lstm")
    assert "networks:bad: 2 thing(s) to change\n  1. module 1: " in ran(capsys, "check", "networks:bad", status=1)
    found = as_json(capsys, "check", "networks:bad", status=1)
    assert [finding["path"] for finding in found["findings"]] == ["1", "2"]
    assert found["trainable"] is False


def test_check_tries_random_inputs_and_names_the_line(capsys, networks):
    assert "no batch was run, so what its forward does" in ran(capsys, "check", "networks:centred")
    assert as_json(capsys, "check", "networks:centred")["tested"] == ["layers"]
    shown = ran(capsys, "check", "networks:centred", "--input-shape", "3", status=1)
    number = NETWORKS.splitlines().index("        return x - x.mean(0)") + 1
    assert "1: Centred: what it gives for example 1 depends" in shown
    assert f"[networks.py:{number}: return x - x.mean(0)]" in shown
    assert "none of 5 random inputs" in ran(capsys, "check", "networks:good", "--input-shape", "2,3")


def test_explain_shows_the_plan(capsys, networks):
    shown = ran(capsys, "explain", "networks:good")
    assert "at the first batch" in shown
    assert "Give --input-shape" in shown
    shown = ran(capsys, "explain", "networks:good", "--input-shape", "2", "3")
    assert "at the first batch" not in shown
    plan = as_json(capsys, "explain", "networks:tuple_output", "--input-shape", "5", "3")["plan"]
    assert {row["rule"] for row in plan} == {"LSTM"}


@pytest.mark.parametrize("extra", ["tqdm", "matplotlib", "jinja2"])
def test_a_missing_extra_is_one_line(capsys, monkeypatch, tmp_path, extra):
    for module in [name for name in sys.modules if name.partition(".")[0] == extra]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, extra, None)
    message = mistake(capsys, "train", "--noise-multiplier", "1", "--report", tmp_path)
    assert message == f'ghostclip: {extra} is not installed; run in a checkout: pip install ".[cli]"\n'


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space on that disk, or choose another place"),
        (errno.ENOENT, "check the path"),
        (errno.EACCES, "choose a place that you may write to"),
    ],
)
def test_a_place_that_cannot_be_used_is_reported_with_a_remedy(capsys, monkeypatch, number, remedy):
    def foreign(arguments):
        raise OSError(number, os.strerror(number), "reports")

    monkeypatch.setattr(train, "load_data", foreign)
    assert mistake(capsys, "train") == f"ghostclip: reports: {os.strerror(number)}; {remedy}\n"


@pytest.mark.slow
def test_a_reader_that_went_away_is_no_traceback():
    command = f"{sys.executable} -m ghostclip explain cnn | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.stderr == ""
    assert ended.returncode in (0, cli.READER_GONE)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("--sampling without_replacement --neighboring replace_one",
         {"sampling": "without_replacement", "neighboring": "replace_one"}),
        ("--sampling truncated --max-batch-size 90",
         {"sampling": "truncated", "dataset_size": 600, "max_batch_size": 90}),
        ("--neighboring replace_one", {"neighboring": "replace_one"}),
        ("--sampling cyclic_poisson --bands 5", {"sampling": "cyclic_poisson", "bands": 5}),
        ("--sampling cyclic", {"sampling": "cyclic"}),
        ("", {}),
    ],
)  # fmt: skip
@pytest.mark.one_in(2)
def test_every_kind_of_sampling_is_accounting_s(capsys, arguments, options):
    found = as_json(capsys, *COUNTED, *arguments.split())
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
    found = as_json(capsys, *COUNTED, "--risk")
    assert found["advantage"] == bound.advantage
    assert found["true_positive_rates"] == {
        name: bound.true_positive_rate(float(name)) for name in ("0.001", "0.01", "0.1")
    }
    assert ran(capsys, *COUNTED, "--risk").splitlines()[-1] == f"membership attacks: {bound}"
    assert "advantage" not in as_json(capsys, *COUNTED)


def test_the_log_is_shown_from_info_on_each_line_once_and_does_not_continue_a_bar(capsys):
    with log_on_stderr():
        for level in (logging.DEBUG, logging.INFO, logging.INFO, logging.WARNING):
            log.log(level, "level %d,\nin one line", level)
    assert capsys.readouterr().err == "ghostclip: level 20, in one line\nghostclip: level 30, in one line\n"
    with log_on_stderr(), bar("training", 10) as advance:
        advance()
        log.info("compiling")
        advance()
    assert re.search(r"[\r\n]ghostclip: compiling\n", capsys.readouterr().err)


def test_commands_show_what_is_logged(capsys, monkeypatch):
    def slow(arguments):
        log.info("something slow begins")
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_data", slow)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "ghostclip: something slow begins\nghostclip: interrupted\n"


@pytest.mark.slow
def test_calibration_is_announced_and_output_is_only_the_result():
    words = ["calibrate", "--epsilon", "1", "--sample-rate", "0.1", "--steps", "20", "--json"]
    done = subprocess.run([sys.executable, "-m", "ghostclip", *words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["noise_multiplier"] > 0
    assert done.stderr == "ghostclip: looking for the least noise within epsilon 1 at delta 1e-05; this takes seconds\n"
