"""GhostClipper, the public class. Its passes are in first_pass.py and second_pass.py, compiled passes in compiled/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ghostclip.clipper.collector import Keep
from ghostclip.clipper.explain import StrategyTable, plan_of
from ghostclip.clipper.forwards import ModelCalls, check_loss_function, forward_of, without_ranks
from ghostclip.clipper.gradient_guard import GradientGuard
from ghostclip.clipper.gradients import add_to_gradients
from ghostclip.clipper.second_pass import Add, TwoPasses
from ghostclip.clipper.verify import compare_with_loop
from ghostclip.clipping import Groupwise, Policy, as_policy
from ghostclip.clipping.choice import adapts
from ghostclip.errors import RowsMovedError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.planner import Planner
from ghostclip.sharding import sharding_of
from ghostclip.validate import RefusesNames, flag, one_of, positive, power_of_two
from ghostclip.wrap import check_module, wrap

__all__ = ["ClippingResult", "GhostClipper", "register_compiler"]

BatchIndex = Tensor | Sequence[Tensor] | None
# (model, passes, expected, largest) -> compiled passes.
Compiler = Callable[[nn.Module, TwoPasses, int | None, int | None], Any]
# What `GhostClipper.compile` uses; the package `ghostclip.compiled`, on which nothing here depends, registers it.
_compilers: list[Compiler] = []


def register_compiler(compiler: Compiler) -> None:
    """Makes ``compiler`` the one that ``compile=True`` uses."""
    _compilers[:] = [compiler]


@dataclass(frozen=True)
class ClippingResult:
    """The result of `GhostClipper.backward` and `clip`. Norms, weights and losses are private data: don't publish them.

    Attributes:
        norms: [B], ||g_i|| before clipping; inf or nan for an example that was left out. A group-wise policy gives
            {group: [B]}.
        weights: [B], the factor v_i of each gradient, or {group: [B]}.
        sensitivity: the L2 bound on one example's contribution to the sum.
        losses: [B], from `GhostClipper.clip`; None from `GhostClipper.backward`.
    """

    norms: Any
    weights: Any
    sensitivity: float
    losses: Tensor | None = None

    def __repr__(self) -> str:
        """No private number."""
        names = "norms, weights" if self.losses is None else "norms, weights, losses"
        return f"ClippingResult(sensitivity={self.sensitivity:g}; {names}: private data of single examples)"


class GhostClipper(RefusesNames):
    """Computes per-example gradient norms and clipped sums exactly, without materialising per-example gradients.

    Args:
        model: any torch model. Its layers are wrapped in place if they aren't wrapped yet.
        clipping: a max norm (flat clipping) or a policy of `ghostclip.clipping`.
        second_pass: how the clipped sum is formed; it changes no result beyond rounding.
            "cached": from tensors that the first pass kept: each layer's input and pre-activation gradient, or its
            per-example gradients where these take no more bytes (book-keeping, Bu et al. 2023).
            "reweight": by a second backward in which each layer weights its rows (Lee & Kifer 2020). It keeps fewest.
            "auto": "cached" if the kept tensors fit into ``memory_budget``, else "reweight".
            Layers under activation checkpointing use a second backward, unless their per-example gradients are small.
        norm_strategy: "gram", "direct", or "auto", which takes the one measured to be faster for each layer. It changes
            no result beyond rounding. Under ``torch.use_deterministic_algorithms(True)`` "auto" counts flops in place
            of measuring time, so that a repeated run gives the same digits.
        memory_budget: the most bytes that "cached" may keep beside the layers' inputs, estimated from shapes. A batch
            that would keep more uses "reweight". None: the bytes of the pre-activations.
        compile: run `clip` as one compiled graph where the model allows it and the graph is measured to be faster.
            It does not affect `backward`.
        loss_scale: a power of two. Losses are multiplied by it before the passes, norms and sums divided by it after
            them, so that small float16 gradients don't become zero (1024 is a good start). An example whose scaled
            gradients exceed float16's range is left out, as one that is not finite. Otherwise no result changes
            beyond rounding.

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
        self.sharding = sharding_of(model, GradientGuard())
        with self.sharding.unsharded_parameters():
            self.model = wrap(model)
            self.passes = TwoPasses(
                self.model, self.sharding, policy, self.second_pass, planner, self.memory_budget, self.loss_scale
            )
        self.calls = ModelCalls(without_ranks(self.model))
        self.passes.calls = self.calls
        self._guard = GradientGuard()
        self.compiled: Any = None
        if flag(compile=compile):
            self.compile()

    def __repr__(self) -> str:
        model, compiled = type(self.model).__name__, "" if self.compiled is None else ", compiled"
        return f"GhostClipper({model}, {self.clipping!r}, second_pass={self.second_pass!r}{compiled})"

    @property
    def clipping(self) -> Policy | Groupwise:
        """The clipping policy. It is fixed: build a new `GhostClipper` for another one."""
        return self.passes.clipping

    def compile(self, expected: int | None = None, largest: int | None = None) -> None:
        """Lets later calls of `clip` compile, as the constructor's ``compile=True`` does.

        Args:
            expected: for batches of varying size: the expected number of examples. Batches are padded to a few sizes,
                with rows of weight zero.
            largest: the largest number of examples in a batch.

        Raises:
            ValueError: the clipping norm changes during training, while a graph's norm is constant; or ``loss_scale``
                is not 1; or the model is sharded.
        """
        if self.sharding.sharded:
            raise ValueError("compile and fully_shard don't go together; leave one of them out")
        if adapts(self.clipping):
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

        For float32 and float64 parameters it is the policy's bound, but for the rounding of sums (SECURITY.md): p.grads
        of k backwards add up one by one. For narrower types each backward rounds a float32 sum to p.grad. So the bound
        grows by a relative k n eps after k backwards over n examples in all
        (`ghostclip.clipper.gradient_guard.GradientGuard`). The engine avoids both by sums of its own.
        """
        return self.passes.sensitivity * (1.0 + self._guard.excess)

    def check_whole(self) -> None:
        """Raises UnsupportedModelError where the model was sharded among processes since it was wrapped."""
        self.sharding.check(self.passes.index.names)

    def with_index(self, batch_index: BatchIndex, losses: Tensor) -> AbstractContextManager[None]:
        """Inside, passes over the graph of ``losses`` [B] take rows by an index, as `backward` says."""
        if batch_index is None:
            return self.sharding.unsharded_parameters()
        if self.sharding.sharded:
            raise ValueError("batch_index and fully_shard don't go together; leave one of them out")
        return self.passes.with_index(batch_index, losses)

    @keeping_grad_mode
    def norms(
        self, losses: Tensor, *, batch_index: BatchIndex = None, per: str | None = None, retain_graph: bool = False
    ) -> Any:
        """Per-example gradient norms by the first pass alone.

        Args:
            losses: shape exactly [B], from a forward of the model.
            batch_index: see `backward`.
            per: None for the whole gradient, "layer" or "parameter".
            retain_graph: keep the graph for another call.

        Returns:
            [B]; or {module name: [B]}; or {parameter name: [B]} with every trained parameter under its first name,
            zeros if the batch did not use it. float32, or float64 for float64 models. These are the measured norms,
            as in ``backward(losses).norms``; the rounding margin affects weights only.

        Raises:
            LossShapeError, StaleInputError, UnsupportedModelError: as `backward`.
        """
        if per is not None:
            one_of(("layer", "parameter"), per=per)
        with self.sharding.unsharded_values(), self.with_index(batch_index, losses):
            self.check_whole()
            run = self.passes.norms_pass(losses, retain_graph=retain_graph)
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
        """Per-example gradients {parameter name: [B, *shape]}, for research. They take B times the model's memory.

        Raises as `norms` does.
        """
        with self.sharding.unsharded_values(), self.with_index(batch_index, losses):
            self.check_whole()
            return self.passes.first_pass(losses, Keep.MATERIALISED, retain_graph=retain_graph).per_example_grads()

    @keeping_grad_mode
    def backward(self, losses: Tensor, *, batch_index: BatchIndex = None, retain_graph: bool = False) -> ClippingResult:
        """Runs both passes: adds ``sum_i v_i g_i`` to each ``p.grad`` (a sum: not averaged, without noise).

        An example whose loss or gradient is not finite contributes exactly zero. Several calls add up. Hooks on tensors
        of the graph run in each pass, and may get None when the graph is freed. Don't use gradients that
        ``retain_grad`` stores there: not every pass reaches every tensor.

        Args:
            losses: shape exactly [B], from a forward of the model.
            batch_index: for ragged examples: [rows], int64, the example that each row belongs to (rows are a graph's
                nodes or the tokens of packed texts). Give a list of such tensors if rows are of several kinds: a layer
                uses the tensor whose length is its number of rows, and a layer of B rows has one per example. None:
                all examples have equally many rows.
            retain_graph: keep the graph for another call.

        Raises:
            LossShapeError: ``losses`` has another shape.
            TypeError, ValueError: ``batch_index`` has another form.
            GradientLeakError: a ``p.grad`` holds a gradient that no clipper added.
            StaleInputError: a saved input was modified in place, or the graph was freed.
            UnsupportedModelError: examples mix, a parameter is used outside of its layer, or the model was sharded
                after it was wrapped.
        """
        with self.sharding.summed(), self.with_index(batch_index, losses):
            self.check_whole()
            self.passes.index.watch()
            trained = self.passes.index.trained()
            self._guard.check(trained)
            if isinstance(losses, Tensor) and losses.dim() == 1:
                self._guard.note_rounding(trained, len(losses))
            norms, weights = add_to_gradients(
                self.passes,
                lambda add: self.passes.clip(losses, add, retain_graph=retain_graph),
                sharded=self.sharding.sharded,
            )
            self._guard.remember(trained)
        return ClippingResult(norms, weights, self.sensitivity)

    @keeping_grad_mode
    def clip(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> ClippingResult:
        """Forward and `backward` in one call: adds the clipped sum of ``loss_fn(model, batch)`` to each ``p.grad``.

        ``loss_fn`` is called once, with the whole batch. Where parameters are used outside of layers, or layers read no
        examples, batches in which ownership is measured take two to six calls more, with some examples in the places
        of others.

        With ``compile=True`` forward and passes become one graph. It is traced on the third batch of a shape, compared
        with the eager passes on the next four, and used from then on if it gives the same sums faster;
        ``compiled.refusals`` says why not. The loss may depend on nothing but the batch, the parameters, the modules'
        modes and torch's random numbers.

        Args:
            loss_fn: (model, batch) -> losses [B].
            batch: any argument for ``loss_fn``. To be compiled it must consist of tensors with examples in dimension
                0, in nested tuples, lists or dicts.

        Raises:
            GhostClipError: as `backward`.
            TypeError: ``loss_fn`` can't be called with (model, batch).
        """
        check_loss_function(loss_fn, batch)
        if self.compiled is None:
            with self.sharding.summed():
                return self._clip_eagerly(loss_fn, batch)
        self.check_whole()
        self.passes.index.watch()
        trained = self.passes.index.trained()
        self._guard.check(trained)

        def clip(add: Add) -> ClippingResult:
            found, sums = self.clip_compiled(loss_fn, batch)
            self._guard.check(trained)  # the loss function ran meanwhile
            self._guard.note_rounding(trained, 0 if found.losses is None else len(found.losses))
            found = replace(found, sensitivity=self.sensitivity)
            for owner, total in sums:
                add((owner, None), total)
            return found

        found = add_to_gradients(self.passes, clip)
        self._guard.remember(trained)
        return found

    def clip_compiled(
        self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any
    ) -> tuple[ClippingResult, list[tuple[int, Tensor]]]:
        """`clip` by the compiled passes; its sums come as (id of the parameter, sum), and change no p.grad."""
        found = self.compiled(loss_fn, batch)
        owners = [id(parameter) for _, parameter in self.passes.trained()]
        sums = [(owner, total) for owner, total in zip(owners, found.sums, strict=True) if total is not None]
        return ClippingResult(found.norms, found.weights, self.sensitivity, found.losses), sums

    def _clip_eagerly(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> ClippingResult:
        """`clip`; by a second forward where the first showed that its rows don't lie as those of earlier batches."""
        self.check_whole()
        with self.passes.running(forward_of(self.model, loss_fn, batch)):
            try:
                return self._clip_once(loss_fn, batch)
            except RowsMovedError:
                return self._clip_once(loss_fn, batch)

    def _clip_once(self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> ClippingResult:
        losses = loss_fn(self.model, batch)
        return replace(self.backward(losses), losses=losses.detach())

    def explain(self) -> StrategyTable:
        """A table with each parameter's layer, rule, strategy, the reason for it and its measured cost; print it.

        Strategies are chosen on the first batch. Until then the table says "at the first batch".
        """
        return plan_of(self.model, self.passes.choices)

    @keeping_grad_mode
    def verify(
        self, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, *, tolerance: float | None = None
    ) -> float:
        """Compares norms and clipped sums with a loop over single examples; returns the largest relative error.

        The loop runs torch's own layers in place of the wrappers, but for a model under ``fully_shard``.

        Args:
            loss_fn: (model, batch) -> losses [B].
            batch: tensors (or nested tuples, lists, dicts of them) with examples in dimension 0.
            tolerance: relative; None: 1e-9 in float64, 1e-3 in narrower types.

        Raises:
            VerificationError: a norm or sum differs by more than ``tolerance``; the message names the layers.
        """
        check_loss_function(loss_fn, batch)
        with self.sharding.unsharded_values():
            return compare_with_loop(self, loss_fn, batch, tolerance)
