"""Which way to the squared norms, for which layer and shape: one comparison of measured costs, remembered."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.term import SAMPLE, Dense, NormResult, PerExampleGrads, Strategy, StrategyRun

__all__ = ["SOLE", "Planner", "StrategyChoice", "kept_bytes", "milliseconds"]

# Candidates whose arithmetic is this many times the least one's are not worth a measurement. The second best is
# measured nevertheless, to have something to compare with, unless that takes more flops than this.
HOPELESS, LONG = 12.0, 4e9
# A first run, which pays for first touches, and any later one that take this many times the best are the last.
BEATEN_COLD, BEATEN = 4.0, 1.3
# No candidate is run for longer than this, after its second run, in milliseconds.
ENOUGH = 10.0
# What keeps gradients is chosen where it takes up to 1 / this of the fastest: in a step, where other layers come
# between norms and sum, it was the faster one then (0.98 of a whole step of the GPT-like model, cached).
KEPT = 0.85

Measure = Callable[[Callable[[], object], torch.device, float], float]

log = logging.getLogger("ghostclip")


@dataclass(frozen=True)
class StrategyChoice:
    """What was chosen for a term and why.

    Attributes:
        name: the candidate's.
        keep: whether its per-example gradients are kept for the clipped sum.
        reason: in words.
        milliseconds: measured cost of every candidate that was tried, by name, for the batch it was first measured on.
        raised: what the candidates raised that could not be run, by name; they are not applicable.
        run: the way itself, where there was something to choose.
    """

    name: str
    keep: bool
    reason: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)
    run: StrategyRun | None = field(default=None, repr=False, compare=False)


SOLE = StrategyChoice("one formula", False, "nothing to choose")
EMPTY = StrategyChoice("any", False, "an empty batch")
EXACT = StrategyChoice("no subtraction", False, "faster forms may have lost their digits")


def milliseconds(run: Callable[[], object], device: torch.device, best: float = math.inf) -> float:
    """Least of a few runs of ``run``, in milliseconds, after one to warm up.

    Args:
        run: what is measured.
        device: that it runs on.
        best: what another way takes; one that is clearly slower is not run again.
    """
    least, spent = math.inf, 0.0
    for attempt in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = 1e3 * (time.perf_counter() - start)
        spent += elapsed
        least = elapsed if attempt <= 1 else min(least, elapsed)
        if least > (BEATEN if attempt else BEATEN_COLD) * best or (attempt and spent > ENOUGH):
            break
    return least


class Planner:
    """Chooses among a term's candidates: by measured cost, by flops where a clock must not decide, or as told.

    Of two that take about as long (KEPT), the one whose per-example gradients are kept for the clipped sum is taken.
    A candidate that raises while it is measured, out of memory too, is not applicable to terms of that key; where all
    of them raise, the first error goes on.

    Measurements are made on a sample of at most SAMPLE examples and scaled to the batch; they are remembered by what
    they depend on, so that batches of every larger size share them.

    Args:
        norm_strategy: "auto", or "gram" or "direct" to allow only that family where a term has both.
        measure: milliseconds of a callable on a device, given the best so far; replaceable, so that a test can see a
            plan follow its measurements.
    """

    def __init__(self, norm_strategy: str = "auto", measure: Measure = milliseconds) -> None:
        self.norm_strategy = norm_strategy
        self.choices: dict[tuple, StrategyChoice] = {}
        self._measure = measure
        self._direct = self if norm_strategy == "direct" else Planner("direct", measure)

    def answer(
        self, term: PerExampleGrads, keep: bool, room: int | None = None, exact: bool = False
    ) -> tuple[NormResult, StrategyChoice]:
        """Squared norms of ``term`` the chosen way, and `PerExampleGrads.absolute` where the sum is formed of the term.

        Args:
            term: of any kind.
            keep: a clipped sum of the same term is to follow, so that per-example gradients may be worth keeping.
            room: bytes that kept gradients may take; None for no more than what they replace.
            exact: in no form that may cancel, which on a GPU would become NaN.
        """
        answer, choice = (None, SOLE) if exact else (term.closed_form(keep), SOLE)
        if answer is None:
            answer, choice = self._exact_answer(term) if exact else self._chosen_answer(term, keep, room)
        # Materialised gradients are summed as they were measured.
        if answer.kept is None and answer.absolute is None:
            answer.absolute = term.absolute()
        return answer, choice

    def _exact_answer(self, term: PerExampleGrads) -> tuple[NormResult, StrategyChoice]:
        squared = term.exact_squared_norms()
        return (NormResult(squared), EXACT) if squared is not None else self._direct.answer(term, False)

    def _chosen_answer(self, term: PerExampleGrads, keep: bool, room: int | None) -> tuple[NormResult, StrategyChoice]:
        """That of the candidate chosen for terms of this key."""
        if term.examples == 0:
            return next(iter(term.candidates().values())).run(term), EMPTY
        may_keep = keep and kept_bytes(term) <= (term.nbytes if room is None else room)
        key = (term.key, keep, may_keep, is_traced(), torch.are_deterministic_algorithms_enabled())
        choice = self.choices.get(key)
        if choice is None:
            choice = self.choices[key] = self._choose(term, keep, may_keep)
        assert choice.run is not None
        return choice.run(term, choice.keep), choice

    def _choose(self, term: PerExampleGrads, keep: bool, may_keep: bool) -> StrategyChoice:
        """The choice for terms of that key."""
        candidates, traced = term.candidates(), is_traced()
        allowed = {n: c for n, c in candidates.items() if self.norm_strategy in ("auto", c.family)} or candidates
        ordered = sorted(allowed, key=lambda name: allowed[name].flops)
        costs: dict[str, float] = {}
        raised: dict[str, Exception] = {}
        if torch.are_deterministic_algorithms_enabled():
            reason = "fewest flops (deterministic algorithms asked for)"
            name = ordered[0] if traced else _first_to_run(term, [*ordered, *_others(candidates, ordered)], raised)
        elif traced:
            # Inside a graph nothing can be timed.
            outside = self.choices.get((term.key, keep, may_keep, False, False))
            costs = {name: cost for name, cost in outside.milliseconds.items() if name in allowed} if outside else {}
            name, reason = ordered[0], "fewest flops (nothing measured outside of the graph)"
        else:
            costs = self._costs(term, ordered, keep, may_keep, raised)
        if costs:
            name, reason = self._fastest(costs, {way for way in costs if may_keep and candidates[way].keeps}, raised)
        kept = may_keep and candidates[name].keeps
        texts = {way: _text(error) for way, error in raised.items()}
        return StrategyChoice(name, kept, reason, costs, texts, candidates[name].run)

    def _fastest(self, costs: dict[str, float], kept: set[str], raised: dict[str, Exception]) -> tuple[str, str]:
        """The name of what is chosen by its cost, and the reason; ``kept``: whose gradients would be kept."""
        name = min(costs, key=lambda way: costs[way] * (KEPT if way in kept else 1.0))
        if len(costs) > 1:
            fastest = name == min(costs, key=costs.__getitem__)
            return name, "fastest measured" if fastest else "about the fastest, and its gradients are kept"
        if raised:
            return name, "all others raised"
        return name, "far fewest flops" if self.norm_strategy == "auto" else "asked for"

    def _costs(
        self, term: PerExampleGrads, ordered: list[str], keep: bool, may_keep: bool, raised: dict[str, Exception]
    ) -> dict[str, float]:
        """Milliseconds for the norms and, where one follows (``keep``), the clipped sum.

        Of those candidates, given in the order of their flops, that are worth a measurement; where all of these raise,
        of the others. What raises is put into ``raised``.
        """
        sample = term.pick(slice(0, SAMPLE))
        candidates, share = sample.candidates(), sample.examples / term.examples
        weights = torch.ones(term.examples, device=term.device)

        def kept_and_summed(way: Strategy) -> Tensor:
            kept = way.run(sample, True).kept
            assert kept is not None
            return Dense(kept).weighted_sum(weights[: sample.examples])

        costs: dict[str, float] = {}
        summed: float | None = None
        worth = worth_measuring(ordered, candidates)
        for name in [*worth, *_others(candidates, worth)]:
            if name not in worth and not costs.keys().isdisjoint(worth):
                break
            way, best = candidates[name], min(costs.values(), default=math.inf)
            run: Callable[[], object]
            if may_keep and way.keeps:
                run, besides = partial(kept_and_summed, way), 0.0
            else:
                if keep and summed is None:
                    # Part of its cost is that of a parameter-sized result, which does not grow with the batch.
                    summed = self._measure(partial(term.weighted_sum, weights), term.device, math.inf)
                run, besides = partial(way.run, sample, False), summed or 0.0
            with _inapplicable(name, term, raised):
                costs[name] = self._measure(run, term.device, max(0.0, best - besides) * share) / share + besides
        if not costs:
            raise next(iter(raised.values()))
        return costs


def _others(candidates: dict[str, Strategy], names: list[str]) -> list[str]:
    """The names of the other candidates, of any family, in the order of their flops."""
    return sorted(candidates.keys() - set(names), key=lambda name: candidates[name].flops)


def _first_to_run(term: PerExampleGrads, names: list[str], raised: dict[str, Exception]) -> str:
    """The first of the candidates that does not raise."""
    sample = term.pick(slice(0, SAMPLE))
    candidates = sample.candidates()
    for name in names:
        with _inapplicable(name, term, raised):
            candidates[name].run(sample)
            return name
    raise next(iter(raised.values()))


@contextmanager
def _inapplicable(name: str, term: PerExampleGrads, raised: dict[str, Exception]) -> Iterator[None]:
    """Puts what a candidate raises into ``raised`` and goes on; Ctrl-C is no Exception and is left alone."""
    try:
        yield
    except Exception as error:
        raised[name] = error
        log.warning("%s is not applicable to a gradient of shape %s: %s", name, list(term.shape), _text(error))


def _text(error: Exception) -> str:
    """An error in one short line. The error itself would hold the frames it went through, and their tensors."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:80]}"


def worth_measuring(ordered: list[str], candidates: dict[str, Strategy]) -> list[str]:
    """Those of the names, given in the order of their flops, that may be the fastest."""
    least = candidates[ordered[0]].flops
    return [
        name
        for place, name in enumerate(ordered)
        if candidates[name].flops <= HOPELESS * least or (place == 1 and candidates[name].flops <= LONG)
    ]


def kept_bytes(term: PerExampleGrads) -> int:
    """Bytes of the term's per-example gradients, were they kept."""
    return 4 * term.examples * math.prod(term.shape)
