"""What a command shows on stderr while it works."""

import json
import logging
import re
import subprocess
import sys

import pytest

from ghostclip.cli import main, train
from ghostclip.cli.progress import bar, log_on_stderr

log = logging.getLogger("ghostclip")


def test_the_log_is_shown_from_info_on_each_line_once(capsys):
    with log_on_stderr():
        for level in (logging.DEBUG, logging.INFO, logging.INFO, logging.WARNING):
            log.log(level, "level %d,\nin one line", level)
    assert capsys.readouterr().err == "ghostclip: level 20, in one line\nghostclip: level 30, in one line\n"


def test_a_line_does_not_continue_a_bar(capsys):
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
    where = ["--epsilon", "1", "--sample-rate", "0.1", "--steps", "20", "--json"]
    command = [sys.executable, "-m", "ghostclip", "calibrate", *where]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["noise_multiplier"] > 0
    assert done.stderr == "ghostclip: looking for the least noise within epsilon 1 at delta 1e-05; this takes seconds\n"
