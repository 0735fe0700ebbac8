"""When a compiled graph is used: made once ownership was measured for a shape, tried beside eager, kept if faster."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ghostclip.clipper.cutting import leaves_of
from ghostclip.clipper.forwards import forward_of
from ghostclip.clipper.gradient_guard import with_hook
from ghostclip.clipper.random_states import drawing_from, random_states
from ghostclip.clipper.second_pass import TwoPasses
from ghostclip.clipper.trial import without_trace
from ghostclip.compiled.plan import GraphPlan
from ghostclip.compiled.region import Region, blindfolded, trace
from ghostclip.compiled.signature import (
    CompileRequest,
    ModelState,
    capacity_for,
    function_key,
    pad,
    settings_of,
    states_of,
)
from ghostclip.compiled.trace_friendly import Clipped, learn, steps_through_time, trace_friendly
from ghostclip.compiled.trial import (
    TOLERANCE,
    TRIALS,
    Trial,
    by_rounding,
    difference,
    in_a_line,
    timed,
    with_other_masks,
)
from ghostclip.errors import RowsMovedError
from ghostclip.native.custom_ops import as_compiled
from ghostclip.native.notices import slow_work
from ghostclip.norms.precision import is_narrow

__all__ = ["TRIALS", "CompiledClip", "LossFunction"]

LossFunction = Callable[[nn.Module, Any], Tensor]
# Graphs are made for so many keys.
MOST_GRAPHS = 16
# Once there is a graph, further ones are made for keys of which so many batches came.
ENOUGH = 3
# So many keys are counted. Who has more passes a function that is another one every time, or texts of any length.
MOST_KEYS = 256
# After so many batches in a row to which a graph gave no result, it is made anew.
MOST_WITHOUT_RESULT = 4
# Of so many batches one runs eagerly, too.
MEASURED = 64
# After so many batches in a row of which no graph could be made, none is tried of other batches either.
MOST_FAILURES = 2
# After so many batches that no graph could be made of yet, since each was measured, a line says so.
MOST_OPEN = 16

log = logging.getLogger("ghostclip")


@dataclass
class CompiledClip:
    """Forward and both passes of a physical batch, compiled where the model allows it and that is faster.

    Args:
        model: wrapped.
        passes: over its graphs.
        expected: about how many examples come in a batch; None when all batches have one size.
        largest: the most that come.

    Attributes:
        graphs: how many were compiled.
        seconds: what compiling took in all.
        refusals: why a graph is not used, for each shape that has none.
        state: of the model, as graphs have it built in.
    """

    model: nn.Module
    passes: TwoPasses
    expected: int | None = None
    largest: int | None = None
    graphs: int = 0
    seconds: float = 0.0
    refusals: list[str] = field(default_factory=list)
    _plans: dict[tuple, GraphPlan] = field(default_factory=dict)
    _kept_rows: dict[tuple, Tensor] = field(default_factory=dict)
    _came: dict[tuple, int] = field(default_factory=dict)
    _failures: int = 0
    _open: int = 0
    _replaced: set[tuple] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = ModelState(self.model)

    def __call__(self, loss_fn: LossFunction, batch: Any) -> Clipped:
        """The clipped sums of ``loss_fn(model, batch)``, losses [B].

        What ``loss_fn`` and the model's forward do must depend on the batch, the parameters and torch's random numbers
        alone: a graph has every other value built in, until another batch shape, mode or function comes.
        """
        asked = self.ask(loss_fn, batch)
        plan = None if asked is None else self._plans.get(asked.key)
        if asked is None or self.passes.must_measure:
            return self.eager(loss_fn, batch)
        if plan is not None and self._is_due(plan):
            return self._try(plan, loss_fn, batch, asked, Trial())
        if plan is None:
            result = self.eager(loss_fn, batch)
            self._open = self._open + 1 if self.passes.is_open else 0
            if self._open == MOST_OPEN:
                self._say_once(
                    "whose rows are whose is measured in every batch of this model (docs/ownership.md, When), and no "
                    "graph measures it"
                )
            # The forward may have made something that the model keeps.
            asked = replace(asked, key=(*asked.key[:-1], self.state.key()))
            known = asked.key in self._plans or self.passes.is_open or self.gave_up or self._comes_seldom(asked.key)
            if not known and self._may_have_another() and (made := self._attempt(loss_fn, asked)) is not None:
                self._plans[asked.key] = made
            return result
        if plan.region is None:
            return self.eager(loss_fn, batch)
        if plan.trial.left:
            return self._try(plan, loss_fn, batch, asked, plan.trial)
        try:
            found = plan.run(asked, self.keep_rows(asked))
        except Exception as error:  # a tensor that it reads isn't of the shape or type that it had
            self._end([plan], in_a_line(error))
            return self.eager(loss_fn, batch)
        plan.runs_without_result = 0 if found is not None else plan.runs_without_result + 1
        if plan.runs_without_result == MOST_WITHOUT_RESULT:
            self._replace_graph(asked.key, plan)
        return self.eager(loss_fn, batch) if found is None else found

    def _replace_graph(self, key: tuple, plan: GraphPlan) -> None:
        """Makes a graph that gives no results any more once again; the second one isn't replaced."""
        if key not in self._replaced:
            self._replaced.add(key)
            del self._plans[key]
            return
        self._end(
            [plan],
            f"in each of {MOST_WITHOUT_RESULT} batches in a row some loss or norm wasn't finite, or a gradient came "
            "where there was none when the graph was made",
        )

    def _end(self, plans: Iterable[GraphPlan], reason: str) -> None:
        """From now on batches of these plans run eagerly, for a reason."""
        for plan in plans:
            plan.region = None
        self.refuse(reason)

    def _is_due(self, plan: GraphPlan) -> bool:
        """Whether a batch runs eagerly, too, for ownership to be measured, which no graph does, and sums compared."""
        plan.batches += 1
        self.passes.must_measure = plan.batches % MEASURED == 0
        return self.passes.must_measure

    def eager(self, loss_fn: LossFunction, batch: Any) -> Clipped:
        """The same without compiling: what a graph is held against."""
        with self.passes.running(forward_of(self.model, loss_fn, batch)):
            try:
                return self._eager(loss_fn, batch)
            except RowsMovedError:
                return self._eager(loss_fn, batch)

    def _eager(self, loss_fn: LossFunction, batch: Any) -> Clipped:
        losses, sums = loss_fn(self.model, batch), self.passes.new_sums()
        norms, weights = self.passes.clip(losses, sums.add, retain_graph=False)
        totals = [sums.totals.get(id(parameter)) for _, parameter in self.passes.index.trained()]
        return Clipped(losses.detach(), norms, weights, totals)

    def ask(self, loss_fn: LossFunction, batch: Any) -> CompileRequest | None:
        """The batch, padded, and the key of its graph; None for a batch that no graph takes."""
        found = leaves_of(batch)
        if found is None:
            self._say_once(
                "a batch has something besides dense tensors whose first dimension is the examples, such as texts or "
                "numbers, which no graph takes"
            )
        if found is None or found[2] == 0:
            return None
        leaves, structure, examples = found
        size = capacity_for(examples, self.expected, self.largest)
        try:
            function, kept = function_key(loss_fn, self.model)
        except Exception as error:  # of a property, or another attribute that runs code
            self._say_once(f"the loss function can't be told from others: {in_a_line(error)}")
            return None
        shapes = tuple((type(leaf), leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves)
        settings, objects = settings_of(self.passes.clipping)
        kept += objects
        # Of torch 2.6, structures have no hash.
        key = (size, shapes, str(structure), function, self.passes.clipping.sensitivity, settings, self.state.key())
        return CompileRequest(key, [pad(leaf.detach(), size) for leaf in leaves], structure, examples, kept)

    @property
    def gave_up(self) -> bool:
        """Whether no other batch is tried, after several of which no graph could be made."""
        return self._failures >= MOST_FAILURES

    def _comes_seldom(self, key: tuple) -> bool:
        """Counts a batch without a graph, and says whether it is left without one, since too few like it came."""
        if len(self._came) == MOST_KEYS and key not in self._came:
            self.refuse(
                f"batches of {MOST_KEYS} kinds came, most of them less than {ENOUGH} times: the loss function closes "
                "over a value, or the model is in a state, that is another one at every step, or texts have many "
                "lengths (pad them to few)"
            )
            self._came.clear()
        self._came[key] = self._came.get(key, 0) + 1
        return self.graphs > 0 and self._came[key] < ENOUGH

    def _may_have_another(self) -> bool:
        """Whether there may be one more graph; says so when that is the last."""
        if len(self._plans) == MOST_GRAPHS - 1:
            self.refuse(f"graphs for {MOST_GRAPHS} sizes or shapes of batches were made, so no more will be")
        return len(self._plans) < MOST_GRAPHS

    def keep_rows(self, asked: CompileRequest) -> Tensor:
        """1 for rows that are examples, 0 for padding."""
        first = asked.leaves[0]
        known = (first.shape[0], asked.examples, first.device)
        if known not in self._kept_rows:
            keep = torch.ones(first.shape[0], device=first.device)
            keep[asked.examples :] = 0.0
            self._kept_rows[known] = keep
        return self._kept_rows[known]

    def obstacle(self, loss_fn: LossFunction, asked: CompileRequest) -> str | None:
        """Why there can be no graph of this batch; where there can, its strategies are measured after this."""
        if (reason := steps_through_time(self.model)) is not None:
            return reason
        if (name := self.state.hooked()) is not None:
            return f"hooks of {name} want to be called at each step"
        if with_hook(self.passes.index.trained()) is not None:
            return "hooks of parameters want to be called at each step"
        if is_narrow(asked.leaves[0].device):
            return (
                "float32 products are allowed to round (torch.set_float32_matmul_precision, or torch.backends), and a "
                'graph has norms among its products; set them to "highest" to compile'
            )
        before, versions = self._now(loss_fn), [leaf._version for leaf in asked.leaves]
        _, *generators = random_states()
        losses = loss_fn(self.model, tree_unflatten(asked.leaves, asked.structure))
        if [leaf._version for leaf in asked.leaves] != versions:
            return "the forward or the loss changes the batch in place, which a second run would do again"
        if [*random_states()[1:]] != generators:
            return "the forward or the loss draws from NumPy's or Python's generator, which a graph would not"
        if self._now(loss_fn) != before:
            return (
                "the forward changes the model's buffers, attributes or parameters, or the loss what it is "
                "bound to: it depends on something besides the batch, the parameters and torch's random numbers"
            )
        return learn(self.passes, losses, self.expected is not None)

    def _now(self, loss_fn: LossFunction) -> Any:
        """Another one as soon as a forward has changed something that the model or the loss function has."""
        key, kept = function_key(loss_fn, self.model)
        return self.state.now(), key, states_of([*self.state.objects, *kept])

    def _say_once(self, reason: str) -> None:
        if reason not in self.refusals:
            self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """Notes, and says, why something isn't compiled."""
        self.refusals.append(reason)
        log.warning("steps of this shape run without compiling: %s", reason)

    def _attempt(self, loss_fn: LossFunction, asked: CompileRequest) -> GraphPlan | None:
        """The plan of a batch, without a graph where that isn't possible; the model is as before.

        None where it is too early: whose rows are whose isn't known yet.
        """
        plan = GraphPlan()
        try:
            padded = tree_unflatten(asked.leaves, asked.structure)
            forward = forward_of(self.model, loss_fn, padded)
            with without_trace(self.model), as_compiled(), self.passes.running(forward):
                if (reason := self.obstacle(loss_fn, asked)) is None:
                    plan = self._graph(loss_fn, asked)
        except Exception as error:  # whatever the compiler stumbles over, the eager step is there
            reason = in_a_line(error)
        if self.passes.is_open:
            return None
        self._failures = 0 if reason is None else self._failures + 1
        if reason is not None:
            self.refuse(reason + ("; no other is tried" if self.gave_up else ""))
        return plan

    def _graph(self, loss_fn: LossFunction, asked: CompileRequest) -> GraphPlan:
        held, keep = self.state.held, self.keep_rows(asked)
        plan = GraphPlan([*asked.kept, *self.state.objects, *self.state.kept], held)

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            with blindfolded():
                losses = loss_fn(self.model, tree_unflatten(list(inputs[len(held) : -1]), asked.structure))
            fine, result = trace_friendly(self.passes, losses, inputs[-1])
            vectors, plan.structure = tree_flatten((result.losses, result.norms, result.weights))
            plan.present = [total is not None for total in result.sums]
            return tuple(output.detach() for output in (fine, *vectors, *result.sums) if output is not None)

        others = [*held, *(leaf[-1:].expand_as(leaf).contiguous() for leaf in asked.leaves), keep]
        inputs = [*held, *asked.leaves, keep]
        # Of a Poisson sample the number is private, and that of the rows which it is padded to tells about how large.
        what = "a step" if self.expected is not None else f"a step for {len(keep)} rows"
        with slow_work(f"compiling {what}", "compiling %s; this takes seconds, or minutes for large models", what):
            plan.region = Region(trace(step, inputs, others), inputs, len(held))
        self.graphs, self.seconds = self.graphs + 1, self.seconds + plan.region.seconds
        log.info("compiled %s in %.1f s", what, plan.region.seconds)
        return plan

    def _try(self, plan: GraphPlan, loss_fn: LossFunction, batch: Any, asked: CompileRequest, trial: Trial) -> Clipped:
        """Both ways on one batch from the same random numbers: compares their results, and their times."""
        if plan.region is None:
            return self.eager(loss_fn, batch)
        begins, states = plan.trial.left == TRIALS, random_states()
        expected, reason = self._compare(plan, loss_fn, batch, asked, trial)
        incomparable = asked.examples < asked.key[0] and random_states() != states
        if reason is None and (begins or incomparable):
            reason = self._try_others(plan, loss_fn, asked, masks=begins)
        if reason is not None:
            # What changed after the trials of one graph changed for all.
            self._end([plan] if trial is plan.trial else [*self._plans.values()], reason)
        return expected

    def _try_others(self, plan: GraphPlan, loss_fn: LossFunction, asked: CompileRequest, masks: bool) -> str | None:
        """Both ways on whole batches that nobody made: padding as examples; if ``masks``, with other masks, too.

        Says why the graph is refused. Where the model can't take such a mask, nothing is said: the batch's own mask is
        compared in any case. A padded batch of a model that draws random numbers is compared in this way alone.
        """
        for leaves in (asked.leaves, *(with_other_masks(asked.leaves) if masks else ())):
            other = replace(asked, leaves=leaves, examples=len(leaves[0]))
            made = tree_unflatten(leaves, asked.structure)
            with without_trace(self.model), suppress(Exception):
                if (reason := self._compare(plan, loss_fn, made, other, Trial())[1]) is not None:
                    return reason
        return None

    def _compare(
        self, plan: GraphPlan, loss_fn: LossFunction, batch: Any, asked: CompileRequest, trial: Trial
    ) -> tuple[Clipped, str | None]:
        """What the eager passes give, and why the graph is refused; ``trial`` takes the times of both."""
        states, reason = random_states(), None

        def again() -> Sequence[Tensor | None]:
            with drawing_from(states):
                return self.eager(loss_fn, batch).sums

        try:
            with torch.no_grad(), drawing_from(states):
                found, compiled = timed(lambda: plan.run(asked, self.keep_rows(asked)))
        except Exception as failure:
            found, compiled, reason = None, float("inf"), in_a_line(failure)
        expected, taken = timed(lambda: self.eager(loss_fn, batch))
        # Padding shifts which random number is whose, so that only whole batches of a random model can be compared.
        comparable = found is not None and (asked.examples == asked.key[0] or random_states() == states)
        error = difference(found.sums, expected.sums) if found is not None and comparable else 0.0
        most = TOLERANCE.get(expected.losses.dtype, TOLERANCE[torch.float32])
        if most < error < math.inf:
            with without_trace(self.model):
                most = max(most, by_rounding(self.model.parameters(), again, expected.sums))
        return expected, reason or trial.note(compiled, taken, error, most)
