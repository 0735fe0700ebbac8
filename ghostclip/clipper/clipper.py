"""GhostClipper: what users call; the passes are in first_pass.py and second_pass.py, compiled ones in compiled/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ghostclip.clipper.collector import Keep
from ghostclip.clipper.explain import StrategyTable, plan_of
from ghostclip.clipper.gradient_guard import GradientGuard
from ghostclip.clipper.layout import layout_of
from ghostclip.clipper.replay import shows_at_another_size
from ghostclip.clipper.second_pass import TwoPasses, add_to_gradient
from ghostclip.clipper.verify import compare_with_loop
from ghostclip.clipping import Adaptive, Composed, Groupwise, Policy, as_policy
from ghostclip.errors import UnsupportedModelError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.planner import Planner
from ghostclip.validate import RefusesNames, one_of, positive, power_of_two
from ghostclip.wrap import check_module, wrap

__all__ = ["ClippingResult", "GhostClipper", "register_compiler"]

BatchIndex = Tensor | Sequence[Tensor] | None
# (model, passes, expected, largest) -> compiled passes.
Compiler = Callable[[nn.Module, TwoPasses, int | None, int | None], Any]
# What `GhostClipper.compile` uses; the package `ghostclip.compiled`, on which nothing here depends, registers it.
_compilers: list[Compiler] = []


def register_compiler(compiler: Compiler) -> None:
    """From now on ``compile=True`` is served by ``compiler``."""
    _compilers[:] = [compiler]


@dataclass(frozen=True)
class ClippingResult:
    """What `GhostClipper.backward` did. Norms and weights are private data: they must not leave the training process.

    Attributes:
        norms: [B], ||g_i|| before clipping; inf or nan for an example that was left out. {group: [B]} under a
            group-wise policy.
        weights: [B], the factor each gradient was multiplied with; {group: [B]} likewise.
        sensitivity: the L2 bound on one example's contribution to the sum.
        losses: [B], from `GhostClipper.clip`; None from `GhostClipper.backward`, whose caller has them.
    """

    norms: Any
    weights: Any
    sensitivity: float
    losses: Tensor | None = None


class GhostClipper(RefusesNames):
    """Per-example gradient norms and exactly clipped sums, without materialised gradients.

    Args:
        model: built of any torch layers; wrapped in place if it isn't yet.
        clipping: a max norm (flat clipping) or a policy of `ghostclip.clipping`.
        second_pass: "cached": the clipped sum is formed from what the first pass kept: of each layer its input and its
            pre-activation gradient, or materialised per-example gradients that take no more bytes than both
            (book-keeping, Bu et al. 2023); "reweight": a second backward in which each layer weights its rows (Lee &
            Kifer 2020), leanest in memory; "auto": "cached" where what it keeps fits in ``memory_budget``, else
            "reweight". Layers under activation checkpointing always get a second backward: nothing is kept of them.
        norm_strategy: "auto" by measured cost, or "gram" or "direct". Neither option changes a result beyond rounding.
            Under ``torch.use_deterministic_algorithms(True)`` no clock is asked: what takes the fewest flops is chosen,
            so that a repeated run gives the same digits.
        memory_budget: bytes that may be kept beside the layers' inputs, estimated from shapes; where "cached" takes
            more, the batch goes by "reweight". None: the bytes of the pre-activations, which it never exceeds.
        compile: let `clip` run as one compiled graph where the model allows it and where that is measured to be
            faster; `backward` is as it was.
        loss_scale: a power of two that losses are multiplied with before the passes, and norms and sums divided by
            after them, so that small float16 gradients don't vanish (1024 is a good start); an example whose gradients
            grow past float16 for it is left out as one that is not finite. It changes no result beyond rounding.

    Raises:
        UnsupportedModelError: the model can't be clipped exactly; every obstacle is listed.
        ValueError, TypeError: an argument is out of range.
    """

    refused_names: ClassVar = {"max_grad_norm": "clipping", "max_norm": "clipping", "module": "model"}

    def __init__(
        self,
        model: nn.Module,
        clipping: float | Policy | Groupwise | Callable[[Tensor], Tensor] = 1.0,
        *,
        second_pass: str = "auto",
        norm_strategy: str = "auto",
        memory_budget: int | None = None,
        compile: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        check_module(model)
        policy = as_policy(clipping)
        self.second_pass = one_of(("auto", "cached", "reweight"), second_pass=second_pass)
        self.memory_budget = None if memory_budget is None else int(positive(memory_budget=memory_budget))
        planner = Planner(one_of(("auto", "gram", "direct"), norm_strategy=norm_strategy))
        self.loss_scale = power_of_two(loss_scale=loss_scale)
        self.layout = layout_of(model)
        with self.layout.whole():
            self.model = wrap(model)
            self.passes = TwoPasses(self.model, policy, self.second_pass, planner, self.memory_budget, self.loss_scale)
        if self.layout.sharded:
            self.passes.reduce_apart()
        self._guard = GradientGuard()
        self.compiled: Any = None
        if compile:
            self.compile()

    def __repr__(self) -> str:
        model, compiled = type(self.model).__name__, "" if self.compiled is None else ", compiled"
        return f"GhostClipper({model}, {self.clipping!r}, second_pass={self.second_pass!r}{compiled})"

    @property
    def clipping(self) -> Policy | Groupwise:
        """The policy, for good: what was learnt of the model, and the sensitivity reported, are by it."""
        return self.passes.clipping

    def compile(self, expected: int | None = None, largest: int | None = None) -> None:
        """From now on `clip` compiles: see the ``compile`` argument.

        Args:
            expected: about how many examples come in a batch, when batches vary in size; they are padded to few sizes
                then, with rows of weight zero.
            largest: the most that ever come.

        Raises:
            ValueError: the clipping policy changes while training goes on, and a graph has its norm built in; or there
                is a ``loss_scale``; or the model is sharded.
        """
        if self.layout.sharded:
            raise ValueError("compile and fully_shard don't go together; leave one of them out")
        if isinstance(self.clipping, Adaptive) or (isinstance(self.clipping, Composed) and self.clipping.counted):
            raise ValueError(
                "compile and adaptive clipping don't go together: a graph is made for one clipping norm; leave one of "
                "them out"
            )
        if self.loss_scale != 1.0:
            raise ValueError(
                f"compile and loss_scale don't go together (got loss_scale={self.loss_scale:g}): compiled passes don't "
                "scale; leave one of them out"
            )
        self.compiled = _compilers[0](self.model, self.passes, expected, largest)

    @property
    def sensitivity(self) -> float:
        """The L2 bound on one example's contribution to the clipped sum in the p.grads, as `backward` reports it.

        The policy's own for parameters of float32 and wider, whatever the batch. Sums of narrower ones are formed in
        float32 and rounded to p.grad with each backward, so that the bound grows with the examples that are summed:
        by k n eps of the policy's after k backwards over n examples (`ghostclip.clipper.gradient_guard.GradientGuard`).
        The engine gathers float32 sums beside the p.grads, and needs the policy's bound only.
        """
        return self.passes.sensitivity * (1.0 + self._guard.excess)

    def check_whole(self) -> None:
        """Raises UnsupportedModelError where the model was sharded among processes since it was wrapped."""
        self.layout.check(self.passes.index.names)

    def indexed(self, batch_index: BatchIndex, losses: Tensor) -> AbstractContextManager[None]:
        """Inside, passes over the graph of ``losses`` [B] take rows by an index, as `backward` says."""
        if batch_index is not None and self.layout.sharded:
            raise ValueError("batch_index and fully_shard don't go together; leave one of them out")
        return self.passes.indexed(batch_index, losses)

    @keeping_grad_mode
    def norms(
        self, losses: Tensor, *, batch_index: BatchIndex = None, per: str | None = None, retain_graph: bool = False
    ) -> Any:
        """Per-example gradient norms by the first pass alone.

        Args:
            losses: shape exactly [B], from a forward of the model.
            batch_index: as `backward` has it.
            per: None for the whole gradient, "layer" or "parameter".
            retain_graph: keep the graph for another call.

        Returns:
            [B], or {module name: [B]}, or {parameter name: [B]}: every trained parameter under its first name, zeros
            where it took no part. float32, or float64 for float64 models. They are as they were measured, without the
            room for rounding that weights are computed with (``backward(losses).norms``).

        Raises:
            LossShapeError, StaleInputError, UnsupportedModelError: for the reasons that `backward` gives.
        """
        if per is not None:
            one_of(("layer", "parameter"), per=per)
        with self.layout.whole(), self.indexed(batch_index, losses):
            self.check_whole()
            run = self.passes.measure(losses, retain_graph=retain_graph)
        if per is None:
            return run.norms()
        names = {id(parameter): name for name, parameter in self.passes.index.trained()}
        if per == "layer":
            names = {owner: name.rpartition(".")[0] for owner, name in names.items()}
        return run.norms_by_group(names)[0]

    @keeping_grad_mode
    def per_example_grads(
        self, losses: Tensor, *, batch_index: BatchIndex = None, retain_graph: bool = False
    ) -> dict[str, Tensor]:
        """Materialised gradients {parameter name: [B, *shape]}, for research: B times the model in memory.

        Raises as `norms` does.
        """
        with self.layout.whole(), self.indexed(batch_index, losses):
            self.check_whole()
            return self.passes.first_pass(losses, Keep.MATERIALISED, retain_graph=retain_graph).per_example_grads()

    @keeping_grad_mode
    def backward(self, losses: Tensor, *, batch_index: BatchIndex = None, retain_graph: bool = False) -> ClippingResult:
        """Both passes: adds ``sum_i v_i g_i`` to each ``p.grad`` (a sum: not averaged, without noise).

        An example whose loss or gradient is not finite contributes exactly zero. Several calls add up. Hooks on tensors
        of the graph run in each pass over it, and may be given None at the end, as it is let go of. What
        ``retain_grad`` leaves there is not to be relied on: not every pass comes to every tensor.

        Args:
            losses: shape exactly [B], from a forward of the model.
            batch_index: for ragged examples, the example of each row [rows], int64 (a graph's of each node, a text's
                of each packed token); a list of such tensors for rows of several kinds. A layer's rows are those of
                the index with as many numbers; with B rows, one of each example. None: every example has as many rows.
            retain_graph: keep the graph for another call.

        Raises:
            LossShapeError: losses of any other shape.
            TypeError, ValueError: ``batch_index`` isn't of that form.
            GradientLeakError: a ``p.grad`` holds something that no clipper put there.
            StaleInputError: a remembered input was modified in place, or the graph is gone.
            UnsupportedModelError: examples mix, a parameter is used outside of its layer, or the model was sharded
                since it was wrapped.
        """
        with self.layout.summed(), self.indexed(batch_index, losses):
            self.check_whole()
            self.passes.index.watch()
            trained = self.passes.index.trained()
            self._guard.check(trained)
            if self.passes.wide_sums is None and isinstance(losses, Tensor) and losses.dim() == 1:
                self._guard.note_rounding(trained, len(losses))
            norms, weights = self.passes.clip(losses, retain_graph=retain_graph)
            self._guard.remember(trained)
        return ClippingResult(norms, weights, self.sensitivity)

    @keeping_grad_mode
    def clip(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> ClippingResult:
        """Forward and `backward` in one: adds the clipped sum of ``loss_fn(model, batch)`` to each ``p.grad``.

        ``loss_fn`` is called once, with the whole batch. A batch whose number of examples is that of positions, too,
        may be refused for it; it is tried once more after a forward of more examples, some of them repeated, which
        leaves no trace.

        With ``compile=True`` all of it becomes one graph, traced at the first batch of a shape, tried beside the eager
        way on the next four, and used from then on if it gives the same sums faster (``compiled.refusals`` says why
        not). What the loss function and the forward do must then depend on the batch, the parameters, the modules'
        modes and torch's random numbers alone.

        Args:
            loss_fn: (model, batch) -> losses [B].
            batch: what ``loss_fn`` takes; to be compiled, tensors with examples in dimension 0, nested as you like.

        Raises:
            GhostClipError: for the reasons that `backward` gives.
        """
        if self.compiled is None:
            with self.layout.summed():
                return self._clip_eagerly(loss_fn, batch)
        self.check_whole()
        self.passes.index.watch()
        trained = self.passes.index.trained()
        self._guard.check(trained)
        found = self.compiled(loss_fn, batch)
        self._guard.check(trained)  # the loss function ran meanwhile
        for (_, parameter), total in zip(trained, found.sums, strict=True):
            if total is not None:
                add_to_gradient(parameter, None, total)
        self._guard.remember(trained)
        return ClippingResult(found.norms, found.weights, self.sensitivity, found.losses)

    def _clip_eagerly(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> ClippingResult:
        """`clip`, by a second forward where a third one of more examples shows what the first didn't."""
        self.check_whole()
        try:
            return self._clip_once(loss_fn, batch)
        except UnsupportedModelError:
            if not shows_at_another_size(self.passes, self.model, loss_fn, batch):
                raise
        return self._clip_once(loss_fn, batch)

    def _clip_once(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> ClippingResult:
        losses = loss_fn(self.model, batch)
        return replace(self.backward(losses), losses=losses.detach())

    def explain(self) -> StrategyTable:
        """The plan as a table: each parameter's layer, rule, strategy, why, measured cost; ``str()`` of it prints well.

        Strategies are chosen on the first batch; before it they read "at the first batch".
        """
        return plan_of(self.model, self.passes.choices)

    @keeping_grad_mode
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
        with self.layout.whole():
            return compare_with_loop(self, loss_fn, batch, tolerance)
