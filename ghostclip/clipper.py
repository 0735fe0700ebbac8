"""GhostClipper: the two passes of Lee & Kifer (2020, algorithm 1). The only place that runs autograd for clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipping import Flat, Groupwise, Policy, Thresholds, as_policy
from ghostclip.convert import wrap
from ghostclip.errors import LossShapeError, StaleInputError
from ghostclip.explain import Plan, plan_of
from ghostclip.gradients import GradientGuard
from ghostclip.graph import captured_calls, first_pass, let_go
from ghostclip.groupwise import GroupSums, Part
from ghostclip.index import ModelIndex
from ghostclip.passes import Collector, FirstPass, add_to_gradient, norm_dtype
from ghostclip.planner import Choice, Planner
from ghostclip.regroup import Grouping
from ghostclip.validate import one_of, positive
from ghostclip.verify import compare_with_loop

__all__ = ["ClippingResult", "GhostClipper"]


WIDE_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class ClippingResult:
    """What `GhostClipper.backward` did. Norms and weights are private data: they must not leave the training process.

    Attributes:
        norms: [B], ||g_i|| before clipping; inf or nan for an example that was left out. {group: [B]} under a
            group-wise policy.
        weights: [B], the factor each gradient was multiplied with; {group: [B]} likewise.
        sensitivity: the L2 bound on one example's contribution to the sum.
    """

    norms: Any
    weights: Any
    sensitivity: float


class GhostClipper:
    """Per-example gradient norms and exactly clipped sums, without materialised gradients.

    Args:
        model: built of any torch layers; wrapped in place if it isn't yet.
        clipping: a max norm (flat clipping) or a policy of `ghostclip.clipping`. Group-wise policies with thresholds
            need no second pass: each group is clipped while the first one goes by.
        second_pass: "reweight": a second ordinary backward of the reweighted losses (Lee & Kifer 2020), leanest in
            memory; "cached": the clipped sum is built from what the first pass kept (book-keeping, Bu et al. 2023).
        norm_strategy: "auto" by measured cost, or "gram" or "direct". Neither option changes a result beyond rounding.
        memory_budget: bytes "cached" may keep; where that is not enough, the batch falls back to "reweight".

    Raises:
        UnsupportedModelError: the model can't be clipped exactly; every obstacle is listed.
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        clipping: float | Policy | Groupwise | Callable[[Tensor], Tensor] = 1.0,
        *,
        second_pass: str = "reweight",
        norm_strategy: str = "auto",
        memory_budget: int | None = None,
    ) -> None:
        self.clipping = as_policy(clipping)
        self.second_pass = one_of(("reweight", "cached"), second_pass=second_pass)
        self.memory_budget = None if memory_budget is None else int(positive(memory_budget=memory_budget))
        self._planner = Planner(one_of(("auto", "gram", "direct"), norm_strategy=norm_strategy))
        self.model = wrap(model)
        self._index = ModelIndex(self.model)
        self._partition()
        self._grouping = Grouping()
        self._guard = GradientGuard()
        self._choices: Mapping[int, Choice] | None = None

    @property
    def sensitivity(self) -> float:
        """The L2 bound on one example's contribution to a clipped sum, as `backward` reports it, known without a batch.

        The policy's own, and a little more for parameters narrower than float32, whose gradients are rounded after
        their weights were computed: by four units in the last place of the narrowest.
        """
        narrowest = max(torch.finfo(p.dtype).eps for _, p in self._index.trained()) if self._index.trained() else 0.0
        return self.clipping.sensitivity * (1.0 + 4.0 * narrowest if narrowest > WIDE_EPS else 1.0)

    def norms(self, losses: Tensor, *, per: str | None = None, retain_graph: bool = False) -> Any:
        """Per-example gradient norms by the first pass alone.

        Args:
            losses: shape exactly [B], from a forward of the model.
            per: None for the whole gradient, "layer" or "parameter".
            retain_graph: keep the graph for another call.

        Returns:
            [B], or {module name: [B]}, or {parameter name: [B]}: every trained parameter under its first name, zeros
            where it took no part. float32, or float64 for float64 models.

        Raises:
            LossShapeError, StaleInputError, UnsupportedModelError.
        """
        if per is not None:
            one_of(("layer", "parameter"), per=per)
        run = self._first_pass(losses, keep=False, retain_graph=retain_graph)
        if per is None:
            return run.norms()
        return run.norms_by_layer() if per == "layer" else run.norms_by_parameter()

    def per_example_grads(self, losses: Tensor, *, retain_graph: bool = False) -> dict[str, Tensor]:
        """Materialised gradients {parameter name: [B, *shape]}, for research: B times the model in memory.

        Raises as `norms` does.
        """
        run = self._first_pass(losses, keep=True, retain_graph=retain_graph, materialise=True)
        return run.per_example_grads()

    def backward(self, losses: Tensor, *, retain_graph: bool = False) -> ClippingResult:
        """Both passes: adds ``sum_i v_i g_i`` to each ``p.grad`` (a sum: not averaged, without noise).

        An example whose loss or gradient is not finite contributes exactly zero. Several calls add up.

        Args:
            losses: shape exactly [B], from a forward of the model.
            retain_graph: keep the graph for another call.

        Raises:
            LossShapeError: losses of any other shape.
            GradientLeakError: a ``p.grad`` holds something that no clipper put there.
            StaleInputError: a remembered input was modified in place, or the graph is gone.
            UnsupportedModelError: examples mix, or a parameter is used outside of its layer.
        """
        trained = self._index.trained()
        self._guard.check(trained)
        clip: Any = self._clip_groups if isinstance(self.clipping, Groupwise) else self._clip_whole
        norms, weights = clip(losses, self.clipping, retain_graph)
        self._guard.remember(trained)
        return ClippingResult(norms, weights, self.sensitivity)

    def _clip_whole(self, losses: Tensor, policy: Policy, retain_graph: bool) -> tuple[Tensor, Tensor]:
        """Adds the clipped sum to each p.grad; returns norms and weights [B]."""
        cached = self.second_pass == "cached"
        run = self._first_pass(
            losses, keep=cached, retain_graph=retain_graph or not cached or self.memory_budget is not None
        )
        norms = run.norms()
        # Sums are finite only where all that goes into them is: one look at one number for the whole batch.
        both = norms + losses.detach()
        finite = None
        all_finite = math.isfinite(both.sum().item())
        weights = policy.weights(norms)
        if not all_finite:
            finite = torch.isfinite(both)
            weights = torch.where(finite, weights, torch.zeros_like(weights))
        if not all_finite and not run.holds_terms:
            run = self._first_pass(losses, keep=True, retain_graph=retain_graph, ignore_budget=True)
        if run.holds_terms:
            self._add(run.weighted_sums(weights, finite))
        else:
            with _in_our_words():
                seed = weights.to(losses.dtype)
                inputs = [parameter for _, parameter in self._index.trained()]
                torch.autograd.backward(losses, seed, retain_graph=retain_graph, inputs=inputs)
        return norms, weights

    def _clip_groups(
        self, losses: Tensor, policy: Groupwise, retain_graph: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same group by group; returns {group: norms [B]} and {group: weights [B]} of all groups.

        What a group adds is not taken back, so the graph is kept until all norms are known: an example that turns out
        not to be finite in the last group is left out of all of them by going once more.
        """
        partition = self._partition()
        given: dict[str, Tensor] | None = None
        if isinstance(policy, Thresholds):
            sums = self._group_pass(losses, policy, None, None)
            norms = sums.norms
        else:
            norms = self._first_pass(losses, keep=False, retain_graph=True).norms_by_group(partition)
            given = policy.weights(norms)
        both = torch.stack([losses.detach().to(norm_dtype(self._index.trained())), *norms.values()])
        finite = None if math.isfinite(both.sum().item()) else torch.isfinite(both).all(0)
        if finite is not None or given is not None:
            sums = self._group_pass(losses, policy, given, finite)
        if not retain_graph:
            self._let_go(losses)
        self._add(sums.taken())
        norms = {group: norms.get(group, torch.zeros_like(both[0])) for group in partition.values()}
        weights = policy.weights(norms) if given is None else given
        if finite is not None:
            weights = {name: torch.where(finite, weight, torch.zeros_like(weight)) for name, weight in weights.items()}
        return norms, weights

    def explain(self) -> Plan:
        """The plan as a table: each parameter's layer, rule, strategy, why, measured cost; ``str()`` of it prints well.

        Strategies are chosen on the first batch; before it they read "at the first batch".
        """
        return plan_of(self.model, self._choices)

    def verify(
        self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, *, tolerance: float | None = None
    ) -> float:
        """Compares norms and clipped sums with the slow obvious loop on this model; returns the worst relative error.

        Args:
            loss_fn: (model, batch) -> losses [B].
            batch: tensors (or nested tuples, lists, dicts of them) with examples in dimension 0.
            tolerance: relative; None for 1e-9 in float64 and 1e-3 in narrower types.

        Raises:
            VerificationError: something differs by more than ``tolerance``; the layers are named.
        """
        return compare_with_loop(self, loss_fn, batch, tolerance)

    def _add(self, sums: Iterator[tuple[Part, Tensor]]) -> None:
        """Adds the clipped sums of parts to the p.grads."""
        parameters = {id(parameter): parameter for _, parameter in self._index.trained()}
        for (owner, rows), amount in sums:
            add_to_gradient(parameters[owner], rows, amount)

    def _partition(self) -> dict[str, str]:
        """{name of a trained parameter: group} under a group-wise policy; {} under another."""
        if not isinstance(self.clipping, Groupwise):
            return {}
        return self.clipping.partition([name for name, _ in self._index.trained()])

    def _group_pass(
        self, losses: Tensor, policy: Groupwise, given: dict[str, Tensor] | None, finite: Tensor | None
    ) -> GroupSums:
        """A first pass that clips on the way: by ``given`` weights, or by the policy's as norms come."""
        trained, partition = self._index.trained(), self._partition()
        thresholds = policy.thresholds_of(dict.fromkeys(partition.values())) if isinstance(policy, Thresholds) else {}

        def weigh(group: str, norms: Tensor) -> Tensor:
            return given[group] if given is not None else Flat(thresholds[group]).weights(norms)

        sums = GroupSums({id(p): partition[name] for name, p in trained}, weigh, finite, norm_dtype(trained))
        self._first_pass(losses, keep=True, retain_graph=True, ignore_budget=True, groups=sums)
        return sums

    def _let_go(self, losses: Tensor) -> None:
        with _in_our_words():
            let_go(losses, captured_calls(losses, self._index).calls)

    def _first_pass(
        self,
        losses: Tensor,
        *,
        keep: bool,
        retain_graph: bool,
        materialise: bool = False,
        ignore_budget: bool = False,
        groups: GroupSums | None = None,
    ) -> FirstPass:
        _check_losses(losses)
        with _in_our_words():
            uses = captured_calls(losses, self._index)
            calls = uses.calls
            majors = self._grouping.prove(losses, calls, self._index, again=uses.reorders)
            budget = None if ignore_budget or materialise else self.memory_budget
            collector = Collector(
                losses, calls, majors, self._planner, self._index,
                keep=keep, materialise=materialise, budget=budget, groups=groups,
            )  # fmt: skip
            first_pass(losses, calls, collector.receive, retain_graph=retain_graph)
        run = FirstPass(collector, self._index.trained())
        self._choices = run.choices
        return run


def _check_losses(losses: Tensor) -> None:
    """Raises LossShapeError unless ``losses`` are one number per example, attached to a graph."""
    if not isinstance(losses, Tensor):
        raise LossShapeError(f"losses must be a tensor of shape [B], one per example; got {type(losses).__name__}")
    if losses.dim() != 1:
        raise LossShapeError(
            f'losses must have shape exactly [B], one per example; got {list(losses.shape)}. Use reduction="none", and '
            "average what belongs to one example yourself: token losses [B, T] by .mean(1), a head of [B, 1] by [:, 0]"
        )
    if not losses.dtype.is_floating_point:
        raise LossShapeError(f"losses must be floating point numbers; got {losses.dtype}")
    if not losses.requires_grad:
        raise StaleInputError(
            "the losses are not attached to a graph: they were detached or computed under no_grad, or nothing in the "
            "model is trained; compute them from the model's output with gradients on"
        )


@contextmanager
def _in_our_words() -> Iterator[None]:
    """torch's errors about changed or freed tensors, said in ours."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "modified by an inplace operation" in text:
            raise StaleInputError(
                "a tensor that the per-example gradients need was modified in place after a layer had used it; "
                f"clone it before the change. torch says: {text.splitlines()[0]}"
            ) from error
        if "backward through the graph a second time" in text or "freed" in text:
            raise StaleInputError(
                "the graph of these losses was freed by an earlier norms(), backward() or .backward(); run the forward "
                "again, or pass retain_graph=True to the earlier call"
            ) from error
        raise
