"""Which way to the squared norms, for which layer and shape: one comparison of measured costs, remembered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ghostclip.norms.dense import Dense
from ghostclip.norms.term import Answer, Candidate, Term

__all__ = ["SOLE", "Choice", "Planner", "milliseconds"]

# Candidates whose arithmetic is this many times the least one's are not worth a measurement.
HOPELESS = 12.0
# Per-example gradients are kept for the clipped sum up to this many bytes, or while less than what they replace.
KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Choice:
    """What was chosen for a term and why.

    Attributes:
        name: the candidate's.
        keep: whether its per-example gradients are kept for the clipped sum.
        reason: in words.
        milliseconds: measured cost of every candidate that was tried, by name.
    """

    name: str
    keep: bool
    reason: str
    milliseconds: dict[str, float] = field(default_factory=dict)


SOLE = Choice("exact", False, "the only way")
EMPTY = Choice("any", False, "an empty batch")


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Least of a few runs of ``run``, in milliseconds, after one to warm up."""
    best = math.inf
    for attempt in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = 1e3 * (time.perf_counter() - start)
        best = elapsed if attempt == 1 else min(best, elapsed)
        if attempt and elapsed > 20.0:
            break
    return best


class Planner:
    """Chooses among a term's candidates: by measured cost, by flops where a clock must not decide, or as told.

    Args:
        norm_strategy: "auto", or "gram" or "direct" to allow only that family where a term has both.
        measure: seconds of a callable; replaceable, so that a test can see a plan follow its measurements.
    """

    def __init__(
        self,
        norm_strategy: str = "auto",
        measure: Callable[[Callable[[], object], torch.device], float] = milliseconds,
    ) -> None:
        self.norm_strategy = norm_strategy
        self.choices: dict[tuple, Choice] = {}
        self._measure = measure

    def answer(self, term: Term, keep: bool) -> tuple[Answer, Choice]:
        """Squared norms of ``term`` the chosen way; ``keep``: a clipped sum of the same term is to follow."""
        answer = term.sole_answer(keep)
        if answer is not None:
            return answer, SOLE
        candidates = term.candidates()
        if term.examples == 0:
            return next(iter(candidates.values())).run(False), EMPTY
        key = (term.key, keep)
        choice = self.choices.get(key)
        if choice is None:
            choice = self.choices[key] = self._choose(term, candidates, keep)
        return candidates[choice.name].run(choice.keep), choice

    def _choose(self, term: Term, candidates: dict[str, Candidate], keep: bool) -> Choice:
        keep = keep and kept_bytes(term) <= max(KEPT_BYTES, term.nbytes)
        allowed = {n: c for n, c in candidates.items() if self.norm_strategy in ("auto", c.family)} or candidates
        if torch.are_deterministic_algorithms_enabled():
            name = min(allowed, key=lambda n: allowed[n].flops)
            return Choice(name, keep and allowed[name].keeps, "fewest flops (deterministic algorithms asked for)")
        least = min(c.flops for c in allowed.values())
        costs: dict[str, float] = {}
        for name, candidate in allowed.items():
            if candidate.flops <= HOPELESS * least:
                costs[name] = self._cost(term, candidate, keep)
        name = min(costs, key=costs.__getitem__)
        reason = "fastest measured"
        if len(costs) == 1:
            reason = "far fewest flops" if self.norm_strategy == "auto" else "asked for"
        return Choice(name, keep and candidates[name].keeps, reason, costs)

    def _cost(self, term: Term, candidate: Candidate, keep: bool) -> float:
        """Milliseconds for the norms, and where a clipped sum follows (``keep`` is possible at all) for that too."""

        def run() -> Tensor:
            answer = candidate.run(keep and candidate.keeps)
            if not keep:
                return answer.squared_norms
            source = term if answer.kept is None else Dense(answer.kept)
            return source.weighted_sum(answer.squared_norms)

        return self._measure(run, term.device)


def kept_bytes(term: Term) -> int:
    """Bytes of the term's per-example gradients, were they kept."""
    return 4 * term.examples * math.prod(term.shape)
