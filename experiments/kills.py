"""Kill -9 at named points and at random moments: what was released never exceeds what the ledger counts.

A run trains a small network with a ledger and a checkpoint every few steps, and is killed again and again; each
attempt goes on from the last checkpoint. A counter outside of the process, in memory that survives it, notes each
release at the earliest moment there is: after the charge, before the noise is drawn. After every kill the ledger is
read as anybody would read it, and

- counts at least the releases seen so far, all attempts together,
- and counts too many by at most a block more than before the attempt; an attempt that ends by itself adds nothing.

The attempt after it must find ledger and checkpoint usable, and know at least those steps as spent; each run ends with
an attempt that nobody kills, which must reach the last step.

    python experiments/kills.py [--kills N] [--out FOLDER]

writes kills.json and kills.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine, checkpoint, select
from ghostclip.bench.machine import describe, in_words
from ghostclip.checkpoint import folder
from ghostclip.ledger import Ledger, files
from ghostclip.noise import BandedToeplitz
from ghostclip.selection.kept import folder_of

BLOCK, STEPS, SAVE_EVERY = 5, 60, 4
BANDS = 4  # of the runs with correlated noise
# An attempt stops by itself after so many steps, so that a point it never comes to doesn't end the run.
MOST_STEPS = 12
ATTEMPTS = 14
# Seconds within which a random kill comes, about what an attempt takes.
LONGEST_WAIT = 0.08

# Where a process is killed; ledger, then engine, then checkpoint.
POINTS = (
    "before the intent is written",
    "in the middle of the intent",
    "intent written, not flushed",
    "intent flushed, nothing released",
    "a new ledger written, not in its place",
    "a new ledger in its place",
    "before a torn line is taken away",
    "after a torn line is taken away",
    "charged, before the noise",
    "released, before the update",
    "after the update",
    "between two steps",
    "before the rest of a block is returned",
    "in the middle of a checkpoint's file",
    "a checkpoint's file written",
    "before a folder is flushed",
    "after a folder is flushed",
    "before a folder is renamed",
    "after a folder is renamed",
)
RANDOM = "at a random moment"
# Of a search for the best of several runs, which has no steps of its own.
SEARCH_POINTS = (
    *(point for point in POINTS if "torn" not in point and "step" not in point and "returned" not in point
      and "noise" not in point and "update" not in point),
    "in a run of a search",
    "at the score of a run",
)  # fmt: skip

SEARCHED: dict[str, Any] = {
    "expected_runs": 4, "noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 5, "delta": 1e-5,
}  # fmt: skip


class Shared:
    """Numbers that outlive the process that wrote them."""

    NAMES = ("released", "progress", "known", "resumed_at")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name: str) -> int:
        return struct.unpack_from("q", self._memory, 8 * self.NAMES.index(name))[0]

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * self.NAMES.index(name), value)


class Trap:
    """Kills its own process when ``point`` is reached for the ``turn``-th time."""

    def __init__(self, point: str, turn: int) -> None:
        self.point, self.turn = point, turn

    def reached(self, point: str) -> None:
        """To be called at every point."""
        if self.due(point):
            self.spring()

    def due(self, point: str) -> bool:
        """Whether the process is to be killed at the point now."""
        if point != self.point:
            return False
        self.turn -= 1
        return self.turn == 0

    def spring(self) -> None:
        """Kills."""
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def around(self, call: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
        """``call`` between two points."""

        def watched(*arguments: Any) -> Any:
            self.reached(before)
            result = call(*arguments)
            self.reached(after)
            return result

        return watched


def set_traps(trap: Trap) -> None:
    """Puts the points of ledger and checkpoint into this process."""

    def write(descriptor: int, data: bytes) -> int:
        if b'"kind":"returned"' in data:
            trap.reached("before the rest of a block is returned")
        trap.reached("before the intent is written")
        if trap.due("in the middle of the intent"):
            os.write(descriptor, data[: len(data) // 2])
            trap.spring()
        written = os.write(descriptor, data)
        trap.reached("intent written, not flushed")
        return written

    def write_file(file: Path, content: bytes, mode: int) -> None:
        if trap.due("in the middle of a checkpoint's file"):
            real_write(file, content[: len(content) // 2], mode)
            trap.spring()
        real_write(file, content, mode)
        trap.reached("a checkpoint's file written")

    watched = {
        "write": write,
        "fsync": trap.around(os.fsync, after="intent flushed, nothing released"),
        "link": trap.around(os.link, "a new ledger written, not in its place", "a new ledger in its place"),
        "ftruncate": trap.around(os.ftruncate, "before a torn line is taken away", "after a torn line is taken away"),
    }
    files.os = SimpleNamespace(**{**vars(os), **watched})  # type: ignore[attr-defined]
    real_write, folder._write = folder._write, write_file  # type: ignore[assignment]
    folder._flush = trap.around(folder._flush, "before a folder is flushed", "after a folder is flushed")  # type: ignore[assignment]
    rename = trap.around(os.rename, "before a folder is renamed", "after a folder is renamed")
    folder.os = SimpleNamespace(**{**vars(os), "rename": rename})  # type: ignore[attr-defined]


def losses_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """One loss for each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def engine_for(ledger: Ledger | None, bands: int = 1) -> PrivacyEngine:
    """A small network about to be trained, with noise that so many steps share."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.arange(64) % 3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shared: dict[str, Any] = {"sampling": "cyclic_poisson", "correlation": BandedToeplitz(bands=bands), "steps": STEPS}
    options = {"batch_size": 8, "noise_multiplier": 1.0, "self_check": False} | (shared if bands > 1 else {})
    return PrivacyEngine(model, optimizer, data, ledger=ledger, **options)


def warm_up(bands: int) -> None:
    """A few steps, a save and a restore, after which a fork finds everything loaded."""
    engine = engine_for(None, bands)
    for batch in engine.batches():
        engine.step(batch, losses_of)
    with tempfile.TemporaryDirectory() as place:
        engine.save(Path(place) / "checkpoint")
        engine.restore(Path(place) / "checkpoint")


def attempt(place: Path, shared: Shared, trap: Trap, most: int, bands: int = 1) -> None:
    """Trains from the last checkpoint on, ``most`` steps or to the last one."""
    set_traps(trap)
    engine = engine_for(Ledger(place / "run.ledger", block=BLOCK), bands)
    shared["known"] = sum(event.count for event in engine.events)
    shared["progress"] = shared["resumed_at"] = 0
    saved = place / "checkpoint"
    if saved.exists() or saved.with_name("checkpoint.previous").exists():
        shared["progress"] = shared["resumed_at"] = engine.restore(saved).steps
    watch(engine, shared, trap)
    last = min(STEPS, shared["progress"] + most)
    while shared["progress"] < last:
        for batch in engine.batches():
            engine.step(batch, losses_of)
            shared["progress"] += 1
            trap.reached("between two steps")
            if shared["progress"] % SAVE_EVERY == 0:
                engine.save(saved)
            if shared["progress"] == last:
                break
    engine.detach()


def watch(engine: PrivacyEngine, shared: Shared, trap: Trap) -> None:
    """Notes every release of the engine, and puts points around it."""
    release = engine._steps.release._noise.release

    def noted(*arguments: Any) -> Any:
        trap.reached("charged, before the noise")
        shared["released"] += 1
        return release(*arguments)

    engine._steps.release._noise.release = noted  # type: ignore[method-assign]
    engine.optimizer.register_step_pre_hook(lambda *_: trap.reached("released, before the update"))
    engine.optimizer.register_step_post_hook(lambda *_: trap.reached("after the update"))


def forked(
    place: Path, shared: Shared, trap: Trap, most: int, wait: float | None = None, work: Callable[..., None] = attempt
) -> int:
    """An attempt in a process of its own, killed after ``wait`` seconds if it lives that long; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work(place, shared, trap, most)
            os._exit(0)
        except BaseException:
            (place / "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(1)
    if wait is not None:
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Broken(Exception):
    """A promise was not kept; the message says which."""


def spent_in(place: Path) -> int:
    """Steps that the ledger counts; 0 where a run was killed before it had one."""
    path = place / "run.ledger"
    return sum(event.count for event in Ledger(path).events) if path.exists() else 0


def too_many(place: Path, shared: Shared, before: int, killed: str | None, block: int = BLOCK) -> int:
    """Charged steps less releases, of the run so far.

    Args:
        before: what this was before the last attempt.
        killed: where that was killed; None: it ended.
        block: of the ledger.

    Raises:
        Broken: there are too few, or too many.
    """
    charged, released = spent_in(place), shared["released"]
    most = before if killed is None else before + block
    if not before <= charged - released <= most:
        raise Broken(
            f"after an attempt that {f'was killed {killed}' if killed else 'ended'}: {released} releases, {charged} "
            f"charged; before it, {before} more were charged than released"
        )
    return charged - released


def check_ended(place: Path, shared: Shared, status: int, before: int) -> None:
    """Raises Broken when an attempt failed, or forgot what was spent."""
    if (place / "error.txt").exists():
        raise Broken((place / "error.txt").read_text())
    if status not in (0, -signal.SIGKILL):
        raise Broken(f"an attempt ended with status {status}")
    if shared["known"] < before:
        raise Broken(f"an attempt knew of {shared['known']} steps where {before} were released before")


def one_run(place: Path, plan: Sequence[str], added: dict[str, list[int]], draw: random.Random, bands: int = 1) -> int:
    """Attempts killed as planned, then one that isn't, to the end; returns how many went on from a checkpoint.

    Args:
        place: an empty folder.
        plan: where to kill, one attempt after the other.
        added: gets, for each kill, by how many steps more the ledger counts too many than before.
    """
    shared, extra, resumed = Shared(), 0, 0
    for what in [*plan, None]:
        before = shared["known"] = shared["released"]  # what is known holds until the attempt has read its ledger
        wait = draw.uniform(0, LONGEST_WAIT) if what == RANDOM else None
        trap, most = (Trap(what, _turn(what, draw)), MOST_STEPS) if what else (Trap("", 0), STEPS)
        status = forked(place, shared, trap, most, wait, partial(attempt, bands=bands))
        check_ended(place, shared, status, before)
        resumed += shared["resumed_at"] > 0
        killed = what if status == -signal.SIGKILL else None
        now = too_many(place, shared, extra, killed)
        if killed:
            added[killed].append(now - extra)
        extra = now
    if shared["progress"] != STEPS:
        raise Broken(f"the last attempt ended after {shared['progress']} of {STEPS} steps")
    return resumed


def _turn(what: str, draw: random.Random) -> int:
    """At which time of being there: an early one for points that are rarely come to."""
    rare = "new ledger" in what or "torn" in what or "returned" in what or what == "in the middle of the intent"
    return 1 if rare else draw.choice((1, 1, 2, 3))


def plan_of(points: list[str], draw: random.Random) -> list[str]:
    """The kills of one run, in an order in which its points can be come to.

    Only the first attempt makes a ledger, and a line is taken away only after it was torn.
    """
    first = [what for what in points if "new ledger" in what]
    torn = [what for what in points if "torn line" in what]
    rest = [[what] for what in points if what not in first + torn]
    groups = [["in the middle of the intent", what] for what in torn] + rest + [[RANDOM]] * (ATTEMPTS // 3)
    draw.shuffle(groups)
    return first + [what for group in groups for what in group]


def measure(kills: int, seed: int, say: Callable[[str], None], bands: int = 1) -> dict[str, Any]:
    """Runs until there were so many kills, each point about as often as any other; noise has so many ``bands``."""
    draw = random.Random(seed)
    added: dict[str, list[int]] = {what: [] for what in (*POINTS, RANDOM)}
    warm_up(bands)
    runs = resumed = done = 0
    while done < kills:
        rarest = sorted(POINTS, key=lambda what: (len(added[what]), draw.random()))
        plan = plan_of(rarest[: ATTEMPTS - ATTEMPTS // 3], draw)
        with tempfile.TemporaryDirectory() as place:
            resumed += one_run(Path(place), plan, added, draw, bands)
        runs, done = runs + 1, sum(map(len, added.values()))
        say(f"{done} kills in {runs} runs")
    rows = {
        what: {"kills": len(found), "least_added": min(found), "most_added": max(found)}
        for what, found in added.items()
        if found
    }
    settings = {"block": BLOCK, "steps": STEPS, "bands": bands}
    return {"kills": done, "runs": runs, "resumed_from_a_checkpoint": resumed, **settings, "points": rows}


def search(place: Path, shared: Shared, trap: Trap, most: int) -> None:
    """A search for the best of a few runs, or what is left of it; each run notes whose it is before it begins."""
    set_traps(trap)
    kept = folder_of(Ledger(place / "run.ledger"))

    def train(setting: int) -> int:
        runs = checkpoint.load(kept).private["runs"]
        with (place / "begun.txt").open("a") as file:
            file.write(f"{runs['name']} {','.join(map(str, runs['settings']))}\n")
        trap.reached("in a run of a search")
        return setting

    def score(result: int) -> float:
        trap.reached("at the score of a run")
        return float(result)

    select(train, range(3), **SEARCHED, score=score, ledger=place / "run.ledger")
    shared["progress"] += 1


def one_search(place: Path, plan: Sequence[str], added: dict[str, list[int]], draw: random.Random) -> None:
    """Attempts at searches, killed as planned, then one that isn't.

    Raises:
        Broken: runs of a search began that isn't charged, or of one whose number of runs was drawn again; or more were
            charged than began, but for one that was killed before its first run, or drew none.
    """
    shared, most = Shared(), 0
    for what in [*plan, None]:
        wait = draw.uniform(0, LONGEST_WAIT) if what == RANDOM else None
        trap = Trap(what, draw.choice((1, 1, 2, 3))) if what else Trap("", 0)
        ended = shared["progress"]
        status = forked(place, shared, trap, 0, wait, search)
        check_ended(place, shared, status, 0)
        begun = (place / "begun.txt").read_text().split("\n")[:-1] if (place / "begun.txt").exists() else []
        names, draws = {line.split(" ")[0] for line in begun}, set(begun)
        charged = spent_in(place)
        most += shared["progress"] == ended  # a search that was killed may have ended all but for its return
        if len(draws) != len(names) or not len(names) <= charged <= shared["progress"] + most + 1:
            raise Broken(f"after an attempt that was killed {what}: {charged} searches charged, begun: {begun}")
        if what and status == -signal.SIGKILL:
            added[what].append(charged - len(names))
    if not shared["progress"]:
        raise Broken("no search ended")


def measure_searches(kills: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Searches until there were so many kills."""
    draw, runs, done = random.Random(seed), 0, 0
    added: dict[str, list[int]] = {what: [] for what in (*SEARCH_POINTS, RANDOM)}
    with tempfile.TemporaryDirectory() as place:  # after which a fork finds everything loaded
        select(int, [1], **SEARCHED, score=float, ledger=Path(place) / "run.ledger")
    while done < kills:
        plan = [*draw.choices(SEARCH_POINTS, k=ATTEMPTS // 2), *[RANDOM] * (ATTEMPTS // 4)]
        draw.shuffle(plan)
        with tempfile.TemporaryDirectory() as place:
            one_search(Path(place), plan, added, draw)
        runs, done = runs + 1, sum(map(len, added.values()))
    say(f"{done} kills of searches in {runs} runs")
    rows = {what: {"kills": len(found), "most_added": max(found)} for what, found in added.items() if found}
    return {"kills": done, "runs": runs, "points": rows}


def markdown(results: dict[str, Any]) -> str:
    """The results as tables."""
    found = results["searches"]
    searches = [
        f"Searches (`ghostclip.select`): {found['kills']} kills in {found['runs']} ledgers. After every one the ledger "
        "counted each search of which a run had begun, and the number of its runs was not drawn again.",
        "",
        "| killed | times | searches charged beyond those of which a run had begun, most |",
        "| --- | --- | --- |",
        *(f"| {what} | {row['kills']} | {row['most_added']} |" for what, row in found["points"].items()),
        "",
    ]
    parts = [*_table(results), *(_table(results["correlated"])), *searches]
    return "\n".join([*parts, f"Machine: {in_words(results['machine'])}.", ""])


def _table(results: dict[str, Any]) -> list[str]:
    noise = f"With noise that {results['bands']} steps share: " if results["bands"] > 1 else ""
    lines = [
        f"{noise}"
        f"{results['kills']} kills in {results['runs']} runs of {results['steps']} steps, in blocks of "
        f"{results['block']}. After every one the ledger counted at least what had been released, and the run went on "
        f"to its last step. {results['resumed_from_a_checkpoint']} attempts started from a checkpoint.",
        "",
        "| killed | times | steps counted too many for it, least | most |",
        "| --- | --- | --- | --- |",
    ]
    for what, row in results["points"].items():
        lines.append(f"| {what} | {row['kills']} | {row['least_added']} | {row['most_added']} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; returns the exit status: 1 when a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=600, help="how many (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of points (default: 0)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        say = partial(print, file=sys.stderr)
        results = measure(options.kills, options.seed, say)
        results["correlated"] = measure(options.kills // 2, options.seed, say, BANDS)
        results["searches"] = measure_searches(options.kills // 2, options.seed, say)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    results["machine"] = describe()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kills.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "kills.md").write_text(markdown(results))
    print(f"wrote kills.json and kills.md to {options.out}; {in_words(results['machine'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
