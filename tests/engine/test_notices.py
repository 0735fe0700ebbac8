"""Work that takes seconds is announced before it begins."""

import importlib.util
import io
import logging
import threading
import time
from contextlib import redirect_stderr

import pytest
import torch

from ghostclip import GhostClipper, accounting
from ghostclip.compiled import clip
from ghostclip.native import notices
from ghostclip.native.notices import notice, slow_work

log = logging.getLogger("ghostclip")


def test_a_notice_is_printed_where_nobody_set_up_logging(capsys):
    notice("%d things", 3)
    assert capsys.readouterr() == ("", "ghostclip: 3 things\n")


def test_a_notice_is_logged_where_the_level_is_on(capsys, caplog):
    caplog.set_level(logging.INFO, "ghostclip")
    notice("%d things", 3)
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.INFO, "3 things")]
    assert capsys.readouterr() == ("", "")


def test_a_notice_is_silent_where_a_higher_level_was_chosen(capsys, caplog):
    caplog.set_level(logging.WARNING, "ghostclip")
    notice("%d things", 3)
    assert caplog.records == []
    assert capsys.readouterr() == ("", "")


def test_compiling_a_graph_is_announced_before_it_begins(capsys, monkeypatch):
    announced = []

    def region(graph, inputs, lasting):
        announced.append(capsys.readouterr().err)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(clip, "Region", region)
    clipper = GhostClipper(torch.nn.Linear(2, 2), clipping=1.0, compile=True)
    for _ in range(3):
        clipper.clip(lambda model, x: model(x).sum(1), torch.randn(8, 2))
    assert announced == ["ghostclip: compiling a step for 8 rows; this takes seconds, or minutes for large models\n"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 10])
def test_calibration_is_announced_where_there_is_any(capsys, steps):
    accounting.noise_multiplier(target_epsilon=2.0, sample_rate=0.1, steps=steps, delta=1e-6)
    expected = "ghostclip: looking for the least noise within epsilon 2 at delta 1e-06; this takes seconds\n"
    assert capsys.readouterr() == ("", expected if steps else "")


@pytest.mark.slow
def test_calibration_by_rdp_takes_no_time_and_is_not_announced(capsys, caplog):
    caplog.set_level(logging.INFO, "ghostclip")
    accounting.noise_multiplier(target_epsilon=2.0, sample_rate=0.1, steps=10, delta=1e-6, accountant="rdp")
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


class Terminal(io.StringIO):
    """A stderr that someone watches."""

    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(notices, "PATIENCE", 0.0)
    monkeypatch.setattr(notices, "TICK", 0.001)


def shows(terminal, text):
    """Whether the bar gets that far within a minute."""
    until = time.monotonic() + 60
    while text not in terminal.getvalue() and time.monotonic() < until:
        time.sleep(0.001)
    return text in terminal.getvalue()


def test_work_of_known_length_has_a_bar_on_a_terminal(impatient):
    with redirect_stderr(Terminal()) as terminal, slow_work("counting", "counting to %d", 4, parts=4) as advance:
        assert shows(terminal, "ghostclip: counting:   0%|")
        advance()
        assert shows(terminal, "25%|")
        assert shows(terminal, "| 1/4 [00:0")
    lines = terminal.getvalue().split("\n")
    assert lines[0] == "ghostclip: counting to 4"
    assert lines[1].split("\r")[-2].strip() == ""  # the bar is gone when the work is done


def test_work_of_unknown_length_has_a_clock_on_a_terminal(impatient):
    with redirect_stderr(Terminal()) as terminal, slow_work("thinking", "thinking"):
        assert shows(terminal, "ghostclip: thinking: 00:0")


def test_the_clock_stops_when_the_work_fails(impatient):
    before = threading.active_count()
    with redirect_stderr(Terminal()), pytest.raises(KeyError), slow_work("thinking", "thinking"):
        raise KeyError
    assert threading.active_count() == before


def test_short_work_has_no_bar():
    with redirect_stderr(Terminal()) as terminal, slow_work("thinking", "thinking"):
        pass
    assert terminal.getvalue() == "ghostclip: thinking\n"


def test_the_line_is_all_without_a_terminal(impatient, capsys):
    with slow_work("thinking", "thinking") as advance:
        time.sleep(0.02)
        advance()
    assert capsys.readouterr() == ("", "ghostclip: thinking\n")


def test_the_line_is_all_without_tqdm(impatient, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with redirect_stderr(Terminal()) as terminal, slow_work("thinking", "thinking"):
        time.sleep(0.02)
    assert terminal.getvalue() == "ghostclip: thinking\n"


def test_there_is_no_bar_where_a_higher_level_was_chosen(impatient, caplog):
    caplog.set_level(logging.WARNING, "ghostclip")
    with redirect_stderr(Terminal()) as terminal, slow_work("thinking", "thinking"):
        time.sleep(0.02)
    assert terminal.getvalue() == ""
