"""select: draws a number of runs and their settings, charges them once, runs them and returns the best."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsFloat

import torch.distributed as dist

from ghostclip import accounting
from ghostclip.engine.before import Before
from ghostclip.errors import LedgerError, PrivacyError
from ghostclip.events import Event, SampledGaussian, Selection
from ghostclip.ledger import Ledger
from ghostclip.noise.mean import PrivateMean
from ghostclip.selection.draws import draw_runs, draw_settings
from ghostclip.selection.kept import KeptRuns, Runs, folder_of
from ghostclip.selection.scores import NoisyScore, asking, is_asking
from ghostclip.validate import open_fraction, positive, positive_int

__all__ = ["Best", "select"]

# The folders of searches that take place in this process.
_going_on, _lock = set[Path](), threading.Lock()


@dataclass(frozen=True)
class Best:
    """The best run of a search. Its settings and result may be published; nothing of the other runs may be.

    Attributes:
        settings: the candidate it was trained by.
        result: a copy of what ``train`` returned.
        score: of the result, with its noise where the score is a `NoisyScore`.
        delta: of the guarantee.
        events: what was charged, with everything else in the ledger.
    """

    settings: Any
    result: Any
    score: float
    delta: float
    events: tuple[Event, ...]
    _search: Selection
    _before: Before = field(repr=False)

    @property
    def epsilon(self) -> float:
        """Of all that was charged, at ``delta``."""
        return accounting.epsilon_of(self.events, delta=self.delta)

    @property
    def epsilon_added_up(self) -> float:
        """What the expected number of runs, rounded up, would spend if each one were released, at ``delta`` by PLD.

        The number that was drawn is no part of it: it may not be published. What was released before counts once.
        """
        runs = math.ceil(self._search.expected_runs)
        each = [replace(event, count=runs * event.count) for event in self._search.events]
        return accounting.epsilon_of([*each, *self._before.events.values()], delta=self.delta)

    def guarantee(self) -> str:
        """The guarantee in words: epsilon, delta, the distribution of the number of runs, and what one run was."""
        return f"{accounting.guarantee(self.events, delta=self.delta)}{self._before.words()}"


def select(
    train: Callable[[Any], Any],
    candidates: Sequence[Any],
    *,
    expected_runs: float,
    score: Callable[[Any], float],
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    ledger: str | os.PathLike[str] | Ledger | None = None,
    distribution: str | float = "poisson",
    before: Iterable[PrivateMean] = (),
) -> Best | None:
    """The best of a random number of private trainings, charged once for all of them.

    The number of runs is drawn, and for each run a candidate, uniformly; then the search is charged, then the runs take
    place (Papernot and Steinke 2022, "Hyperparameter tuning with Rényi differential privacy", algorithm 1). The
    guarantee is for the best run's settings and result. The number of runs, other results, other scores, logs and the
    time that the search took are confidential.

    Args:
        train: settings -> result: one private training of ``steps`` steps with this noise and rate, and no ledger of
            its own. It releases nothing else, and uses fresh noise each time it is called. The engines that it builds
            are asked what they charged: a run that spent more than is charged for it is refused. A search inside of it
            is refused, too.
        candidates: settings, at least one; chosen without the data.
        expected_runs: mean of the number of runs; finite, >= 1.
        score: result -> float, larger is better: a function of the result and of public data alone, or a `NoisyScore`.
            No engine may take a step in it.
        noise_multiplier, sample_rate, steps: of each run, Poisson sampling, data sets that differ by one example.
        delta: of the guarantee.
        ledger: the file (or `ghostclip.ledger.Ledger`) that the search is charged to. Beside it, in the folder
            ``<ledger>.search``, the runs are kept until the search ends. An interrupted search goes on from there when
            ``select`` is called again, with the same number of runs; a run that was cut short starts again. Results of
            numbers, strings, tensors (brought to the CPU) and lists, tuples and dicts of them are kept, others trained
            again. None: no ledger, and an interrupted search is lost.
        distribution: of the number of runs, as for `accounting.selection_epsilon`.
        before: what `ghostclip.private_mean` released and ``train`` uses, as its engines get it: charged once, beside
            the search, under its own name. A ledger that has it already isn't charged again.

    Returns:
        The best run; the first one of equal scores. None where no run was drawn, which Poisson's distribution does with
        probability exp(-expected_runs). That is charged as well.

    Raises:
        ValueError, TypeError: an argument is out of range, or a result can't be copied.
        LedgerError: the ledger is in use, also for another search in this process, or damaged.
        PrivacyError: the unfinished search beside the ledger is of other arguments, a `NoisyScore` was asked that isn't
            ``score``, a run's engines charged more than is charged for a run, or anything in ``score``, it is called
            inside of another search's ``train`` or ``score``, or several processes train together.
    """
    if is_asking():
        raise PrivacyError(
            "select() was called inside of another search's train or score, which is charged for one training a run, "
            "not for a search; search once over all pairs of settings: candidates=list(itertools.product(outer, inner))"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise PrivacyError(
            "select() draws how many runs there are, and which, for one process, and this one trains together with "
            "others, which would draw others; run it in one process"
        )
    candidates = _checked(train, candidates, score)
    positive(noise_multiplier=noise_multiplier)
    step = SampledGaussian(sample_rate, noise_multiplier, positive_int(steps=steps))
    noisy = [SampledGaussian(1.0, score.noise_multiplier)] if isinstance(score, NoisyScore) else []
    event = Selection((step, *noisy), expected_runs, distribution)
    delta, draw = open_fraction(delta=delta), functools.partial(_drawn, event, len(candidates))
    released = Before(before, private=True)
    run = _Run(train, score, step, released.events, delta)
    charged: list[Event] = [event, *released.events.values()]
    if ledger is None:
        accounting.epsilon_of(charged, delta=delta)  # raises where they don't add up
        runs = _finished(Runs.drawn(draw()), run, candidates, None)
    else:
        book = Ledger(ledger.path if isinstance(ledger, Ledger) else ledger, block=1)
        kept = KeptRuns(folder_of(book), event, candidates)
        # Other processes are kept from the ledger and its search by the account, other threads by the folder.
        with _alone_in(folder_of(book)), closing(book.account()):
            accounting.epsilon_of([*book.events, *charged], delta=delta)
            runs = kept.begin(draw)
            released.charge(book)
            # Unless that was done before an interruption.
            book.take_in({runs.name: {event: 1}}, "standard", "")
            _finished(runs, run, candidates, kept)
            charged = book.events
            kept.end()
    if runs.best is None:
        return None
    return Best(candidates[runs.best], runs.result, runs.score, delta, tuple(charged), event, released)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other thread may begin or go on with the search there: it would take this one's runs and charge."""
    folder = folder.resolve()
    with _lock:
        if folder in _going_on:
            raise LedgerError(
                f"a search that is charged to {str(folder).removesuffix('.search')} is going on in this process "
                "already; wait for its end, or give this one another ledger"
            )
        _going_on.add(folder)
    try:
        yield
    finally:
        with _lock:
            _going_on.discard(folder)


def _checked(train: Any, candidates: Any, score: Any) -> list[Any]:
    """The candidates, in a list. Raises TypeError or ValueError for arguments of no use."""
    for name, function in (("train", train), ("score", score)):
        if not callable(function):
            raise TypeError(f"{name} must be callable; got {function!r}")
    if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Iterable):
        raise TypeError(
            f"candidates must be a list of settings; got {candidates!r} (of a grid: "
            "[dict(zip(grid, each)) for each in itertools.product(*grid.values())])"
        )
    candidates = list(candidates)
    if not candidates:
        raise ValueError("candidates must be a sequence of at least one setting; got none")
    return candidates


def _drawn(event: Selection, candidates: int) -> list[int]:
    """The number of each run's candidate."""
    return draw_settings(draw_runs(event.expected_runs, event.distribution), candidates)


@dataclass(frozen=True)
class _Run:
    """One run of a search after the other.

    Attributes:
        train, score: as given to `select`.
        charged: what is charged for the training.
        before: {name: what is charged beside the search}.
        delta: of the guarantee.
    """

    train: Callable[[Any], Any]
    score: Callable[[Any], float]
    charged: SampledGaussian
    before: Mapping[str, Event]
    delta: float

    def __call__(self, settings: Any, noted: accounting.Noted) -> tuple[Any, float]:
        """Result and score; raises PrivacyError, before the score is used, where more was spent than is charged.

        ``noted`` has all engines of the search, so that one which goes on in a later run or in the score is seen.
        """
        noted.begin()
        with asking(self.train):
            result = self.train(settings)
        self._check(noted.take(self.before))
        with asking(self.score):
            score = self.score(result)
        if not isinstance(score, SupportsFloat):
            raise TypeError(f"score must return a number; got {type(score).__name__}")
        if spent := noted.take(self.before):
            raise PrivacyError(
                f"engines charged {_words(spent)} in score, which nothing is charged for: a score is a function of the "
                "result and of public data, or a NoisyScore. Train in train, and give select the noise_multiplier, "
                "sample_rate and steps of all that a run trains"
            )
        return result, float(score)

    def _check(self, spent: Sequence[Event]) -> None:
        # Nothing was spent by engines where another library trained, or nothing did.
        if all((each.relation, each.unit) == (self.charged.relation, self.charged.unit) for each in spent):
            if accounting.covers(self.charged, spent):
                return
            found, agreed = (accounting.epsilon_of(each, delta=self.delta) for each in (spent, [self.charged]))
            more = f"spent epsilon {found:.4g} at delta {self.delta:g}, and {agreed:.4g} is charged for a run"
            if found <= agreed:
                more += ", but more in Rényi divergences, from which the search's epsilon is computed"
        else:
            more = "protect something else than what is charged, the presence of one example"
        raise PrivacyError(
            f"the engines that train built {more}: they charged {_words(spent)}, and a run is charged for "
            f"{accounting.steps(self.charged)}. Give select the noise_multiplier, sample_rate and steps that train "
            "uses, and before=[...] too, where its engines have it. A run that goes on with the model, engine or "
            "checkpoint of an earlier one counts with the steps of that one: begin each from new weights"
        )


def _words(events: Sequence[Event]) -> str:
    return "; ".join(map(accounting.steps, events))


def _finished(runs: Runs, run: _Run, candidates: Sequence[Any], kept: KeptRuns | None) -> Runs:
    """The same object, after the runs that were left."""
    with accounting.noting_charges() as noted:
        for number in runs.settings[runs.done :]:
            runs.add(*run(candidates[number], noted))
            if kept is not None:
                kept.keep(runs)
    return runs
