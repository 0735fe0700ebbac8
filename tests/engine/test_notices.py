"""Work that takes seconds is announced before it begins."""

import importlib.util
import io
import logging
import threading
import time
from contextlib import redirect_stderr

import pytest
import torch

from ghostclip import GhostClipper
from ghostclip.compiled import clip
from ghostclip.native import notices
from ghostclip.native.notices import notice, slow_work


@pytest.mark.parametrize("level", [None, logging.INFO, logging.WARNING])
def test_a_notice_is_printed_where_nobody_set_up_logging_and_else_logged_at_info(capsys, caplog, level):
    if level is not None:
        caplog.set_level(level, "ghostclip")
    notice("%d things", 3)
    assert capsys.readouterr() == ("", "ghostclip: 3 things\n" if level is None else "")
    logged = [(record.levelno, record.message) for record in caplog.records]
    assert logged == [(logging.INFO, "3 things")] * (level == logging.INFO)


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


class Terminal(io.StringIO):
    """A stderr that someone watches."""

    def isatty(self):
        return True

    def shows(self, text):
        """Whether the bar gets that far within a minute."""
        until = time.monotonic() + 60
        while text not in self.getvalue() and time.monotonic() < until:
            time.sleep(0.001)
        return text in self.getvalue()

    def is_cleared_after(self, line):
        """Whether nothing is left to see below a first line."""
        first, second = self.getvalue().split("\n")
        return first == line and not second.split("\r")[-2].strip()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(notices, "PATIENCE", 0.0)
    monkeypatch.setattr(notices, "TICK", 0.001)


def test_work_of_known_length_has_a_bar_on_a_terminal():
    with redirect_stderr(Terminal()) as terminal, slow_work("counting", "counting to %d", 4, parts=4) as advance:
        assert terminal.shows("ghostclip: counting:   0%|")
        advance()
        assert terminal.shows("| 1/4 [00:0")
    assert terminal.is_cleared_after("ghostclip: counting to 4")


def test_work_of_unknown_length_has_a_clock_that_stops_when_the_work_fails():
    before = threading.active_count()
    terminal = Terminal()
    with redirect_stderr(terminal), pytest.raises(KeyError), slow_work("thinking", "thinking"):
        raise KeyError(terminal.shows("ghostclip: thinking: 00:0"))
    assert "thinking: 00:0" in terminal.getvalue()
    assert threading.active_count() == before


def test_without_tqdm_the_clock_counts_seconds_and_is_cleared(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with redirect_stderr(Terminal()) as terminal, slow_work("thinking", "thinking", parts=3):
        assert terminal.shows("\rghostclip: thinking: 0 s")
    assert terminal.is_cleared_after("ghostclip: thinking")


@pytest.mark.parametrize("reason", ["short work", "no terminal"])
def test_there_is_no_bar(monkeypatch, reason):
    if reason == "short work":
        monkeypatch.setattr(notices, "PATIENCE", 60.0)
    stream = io.StringIO() if reason == "no terminal" else Terminal()
    with redirect_stderr(stream) as shown, slow_work("thinking", "thinking") as advance:
        time.sleep(0.02)
        advance()
    assert shown.getvalue() == "ghostclip: thinking\n"
