"""Work that takes seconds is announced before it begins."""

import logging

import pytest
import torch

from ghostclip import GhostClipper, accounting
from ghostclip.compiled import clip
from ghostclip.native.notices import notice

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
    class Compiled:
        """A region that takes no time."""

        seconds = 2.5

        def __init__(self, graph, inputs, lasting):
            self.announced = capsys.readouterr().err

    monkeypatch.setattr(clip, "Region", Compiled)
    compiled = GhostClipper(torch.nn.Linear(2, 2), clipping=1.0, compile=True).compiled
    region = compiled.compile(None, [], 0, "a step for 8 rows")
    assert region.announced == (
        "ghostclip: compiling a step for 8 rows; this takes seconds, or minutes for large models\n"
    )
    assert (compiled.graphs, compiled.seconds) == (1, 2.5)


@pytest.mark.parametrize("steps", [0, 10])
def test_calibration_is_logged_where_there_is_any(caplog, steps):
    caplog.set_level(logging.INFO, "ghostclip")
    accounting.noise_multiplier(target_epsilon=2.0, sample_rate=0.1, steps=steps, delta=1e-6, accountant="rdp")
    expected = "looking for the least noise within epsilon 2 at delta 1e-06; this takes seconds"
    assert [record.message for record in caplog.records] == ([expected] if steps else [])


def test_calibration_prints_nothing_by_default(capsys):
    accounting.noise_multiplier(target_epsilon=2.0, sample_rate=0.1, steps=10, delta=1e-6, accountant="rdp")
    assert capsys.readouterr() == ("", "")
