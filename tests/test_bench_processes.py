"""Contenders in processes of their own: figures as in one, failures that stay theirs, no process left behind."""

import math
import multiprocessing
import os
from dataclasses import replace
from itertools import count

import pytest
import torch
from planted_contenders import CONTENDERS as PLANTED
from test_bench import NONPRIVATE, TINY

from ghostclip.bench import CONTENDERS, WORKLOADS, compare, methods, processes
from ghostclip.bench.measure import take_turns
from ghostclip.bench.processes import ContenderProcess, ProcessFailed, Task, in_processes


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    """Processes that know the planted contenders, which are harmless in this process."""
    monkeypatch.setattr(methods, "MODULES", ["planted_contenders"])
    for planted in PLANTED:
        monkeypatch.setitem(CONTENDERS, planted.name, replace(CONTENDERS["cached"], name=planted.name))


def task(contender, **others):
    return Task("mlp", contender, 4, **others)


def gone(pid):
    """Whether no process has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_contenders_are_compared_apart_and_failures_are_their_own(capfd):
    names = ("nonprivate", "cached", "nxbp", "chatty", "mortal", "fragile")
    found = compare(WORKLOADS["mlp"], {name: CONTENDERS[name] for name in names}, 0.2, batch_size=4, apart=True)
    rows = found["contenders"]
    assert list(rows) == list(names)
    for name in ("cached", "nxbp", "chatty"):
        assert rows[name]["over_nonprivate"]["rounds"] >= 3
        assert rows[name]["ready_seconds"] > 0
        assert rows[name]["correct"]
    assert rows["nxbp"]["ready_seconds"] > 0
    assert rows["cached"]["nxbp_over"]["median"] > 0
    assert rows["mortal"] == {"failed": "its process ended with signal SIGKILL"}
    assert rows["fragile"] == {"failed": "RuntimeError: out of paper"}
    assert "word" not in capfd.readouterr().out


def test_no_process_is_left_after_an_interruption(monkeypatch):
    pids, before = [], set(multiprocessing.active_children())

    def interrupted(turns, seconds, baseline):
        pids.extend(process.pid for process in set(multiprocessing.active_children()) - before)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "take_turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_processes({name: task(name) for name in ("nonprivate", "chatty")}, 1.0, baseline="nonprivate")
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_step_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.2)
    process = ContenderProcess(task("endless"))
    process.answer()
    process._line.send("turn")
    (pid,) = (child.pid for child in multiprocessing.active_children())
    process.close()
    assert gone(pid)


def test_without_the_baseline_there_is_nothing_to_compare():
    with pytest.raises(ProcessFailed, match=r"^fragile failed: RuntimeError: out of paper$"):
        in_processes({"fragile": task("fragile")}, 0.1, baseline="fragile")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system can't keep a process to cores")
def test_a_process_has_the_threads_and_cores_of_its_task():
    core = max(os.sched_getaffinity(0))
    with pytest.raises(ProcessFailed) as said:
        in_processes({"telling": task("telling", threads=3, cores=(core,))}, 0.1, baseline="telling")
    assert said.value.why == f"RuntimeError: 3 threads, 3 for others, cores [{core}]"
    assert task("cached").cores == tuple(sorted(os.sched_getaffinity(0)))
    assert task("cached").threads == 1


def test_threads_that_slept_have_work_before_a_step_is_timed(monkeypatch):
    ticks = count()
    monkeypatch.setattr(processes.time, "perf_counter", lambda: next(ticks) * processes.AWAKE / 4)
    with torch.profiler.profile() as profile:
        processes._wake_threads()
    work = [event.count for event in profile.key_averages() if event.key == "aten::sin_"]
    assert work == [3]


@pytest.mark.parametrize(("threads", "waits"), [(1, []), (2, [processes.SPINNING])])
def test_where_threads_spin_the_next_turn_waits(threads, waits, monkeypatch):
    process, slept = ContenderProcess(task("chatty", threads=threads)), []
    process.answer()
    monkeypatch.setattr("time.sleep", slept.append)
    assert 0 < process.turn() < 60
    assert slept == waits
    monkeypatch.undo()
    process.close()


def test_turns_are_believed_about_their_own_time():
    ticks = count()
    timings = take_turns({"plain": lambda: 0.1, "slow": lambda: 0.3}, 50, baseline="plain", clock=lambda: next(ticks))
    assert timings.ratio("slow", "plain").median == pytest.approx(3.0)
    assert math.isclose(timings.milliseconds("plain").median, 100)


def test_what_another_process_could_not_find_is_refused():
    with pytest.raises(ValueError, match=r"finds workloads and contenders by name.*got others: tiny;"):
        compare(TINY, NONPRIVATE, 0.1, apart=True)
