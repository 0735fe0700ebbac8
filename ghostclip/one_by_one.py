"""The loop over single examples, where it is the fastest way: a few examples, each of them a lot of work.

Its products are as large as a batch's then, no norm needs a product of its own, and one example's graph stands in
memory at a time: "nxBP" of Lee & Kifer (2020, section 3). It is tried beside the two passes on batches of at most
`MOST_EXAMPLES`; what it is not faster for stays with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from ghostclip.clipping import Automatic, Flat, Groupwise, Policy, Thresholds
from ghostclip.compiled.signature import function_kind, leaves_of
from ghostclip.gradients import gradients_aside, have_hooks, is_distributed
from ghostclip.index import ModelIndex
from ghostclip.norms.dense import squared_norms
from ghostclip.outcome import add_sums, norm_dtype
from ghostclip.verify import without_randomness

__all__ = ["Alone", "OneByOne", "Trial"]

MOST_EXAMPLES = 16
# Kinds of batches and loss functions that are remembered.
MOST_KINDS = 1000
# Seconds the two passes must take before the loop is tried: below, what is called costs more than what is computed.
LEAST_SECONDS = 0.05
TRIALS = 3
# How much faster it must be, since what is measured varies; how much slower it may be to be tried again; and how many
# times that when it runs for the first time, with kernels to load and pages to find.
GAIN, HOPELESS, UNUSED = 0.95, 1.25, 1.6
# Relative difference of the clipped sums from which on a single example is not treated as it is in its batch.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
# Policies that weigh an example by its own norms alone.
EACH_BY_ITSELF = (Flat, Automatic, Thresholds)

log = logging.getLogger("ghostclip")

LossFunction = Callable[[nn.Module, Any], Tensor]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Alone:
    """What the loop found: losses [B], and norms and weights, [B] or {group: [B]}."""

    losses: Tensor
    norms: Any
    weights: Any


@dataclass
class Trial:
    """Both ways on batches of one shape.

    Attributes:
        passes, loop: seconds of each, best so far.
        left: batches until the faster one is taken.
        reason: why the loop is not used for them; None where it is, or while that isn't known.
    """

    passes: float = float("inf")
    loop: float = float("inf")
    left: int = TRIALS
    reason: str | None = None


@dataclass
class OneByOne:
    """Chooses, for each shape of batch, between the two passes and the loop, and runs the loop.

    Args:
        model: wrapped.
        index: its trained parameters.
        clipping: the policy.
        partition: gives {parameter name: group} under a group-wise policy.

    Attributes:
        last: the trial of batches like the last one; None for its first, and where the loop is no choice.
    """

    model: nn.Module
    index: ModelIndex
    clipping: Policy | Groupwise
    partition: Callable[[], dict[str, str]]
    last: Trial | None = None
    _trials: dict[tuple, Trial] = field(default_factory=dict)

    def clip(self, loss_fn: LossFunction, batch: Any, passes: Callable[[], Alone]) -> Alone:
        """Adds the clipped sum to each p.grad, by ``passes``, which does so, or by the loop."""
        key = self._key(loss_fn, batch)
        self.last = trial = None if key is None else self._trials.get(key)
        if trial is None:
            # The first batch of a shape also measures what the passes are made of.
            if key is not None and len(self._trials) < MOST_KINDS:
                self._trials[key] = Trial()
            return passes()
        if trial.reason is not None:
            return passes()
        if trial.left:
            return self._try(trial, loss_fn, batch, passes)
        result, sums = self.loop(loss_fn, batch)
        add_sums(self.index.trained(), sums)
        return result

    def describe(self) -> str:
        """What was found for batches like the last one, in a line; "" where there was no trial."""
        trial = self.last
        if trial is None or math.isinf(trial.loop):
            return ""
        costs = f"one by one {1e3 * trial.loop:.3g} ms, the two passes {1e3 * trial.passes:.3g} ms"
        if trial.reason is not None:
            return f"not by the loop over single examples: {trial.reason} ({costs})"
        return f"by the loop over single examples ({costs})" if trial.left == 0 else f"both ways are tried ({costs})"

    def _key(self, loss_fn: LossFunction, batch: Any) -> tuple | None:
        """What a choice holds for; None where the loop is no choice."""
        first = batch[0] if type(batch) in (tuple, list) and batch else batch
        if isinstance(first, Tensor) and first.dim() and len(first) > MOST_EXAMPLES:
            return None
        found = leaves_of(batch)
        if found is None or not 1 <= found[2] <= MOST_EXAMPLES or not isinstance(self.clipping, EACH_BY_ITSELF):
            return None
        trained = self._parameters()
        if any(p.device.type != "cpu" or p.dtype not in TOLERANCE for p in trained):
            return None
        if is_distributed() or have_hooks(trained) or torch.are_deterministic_algorithms_enabled():
            return None
        leaves, structure, examples = found
        # Texts of about one length are of one kind.
        kinds = [(leaf.dtype, leaf.dim(), round(2 * math.log2(1 + leaf[0].numel()))) for leaf in leaves]
        return (function_kind(loss_fn), examples, self.model.training, len(trained), structure, *kinds)

    def _try(self, trial: Trial, loss_fn: LossFunction, batch: Any, passes: Callable[[], Alone]) -> Alone:
        """Both ways on one batch, from the same random numbers; the passes' result is what counts."""
        random, started = torch.random.get_rng_state(), clock()
        with gradients_aside(self._parameters()) as expected:
            result = passes()
        trial.passes = min(trial.passes, clock() - started)
        trial.left -= 1
        if trial.passes < LEAST_SECONDS:
            trial.reason = "the two passes are fast"
        else:
            steady = torch.equal(random, torch.random.get_rng_state())
            trial.reason = self._compare(trial, loss_fn, batch, expected if steady else None, passes)
        if trial.reason is not None:
            log.info("no loop over single examples: %s", trial.reason)
        add_sums(self.index.trained(), expected)
        return result

    def _compare(
        self, trial: Trial, loss_fn: LossFunction, batch: Any, expected: Gradients | None, passes: Callable[[], Alone]
    ) -> str | None:
        """Why the loop is no choice for batches like this one; None where it is, or may be.

        Without ``expected`` sums, which a model that draws random numbers has none of, both ways run in eval mode once
        more to be compared.
        """
        last, first = trial.left == 0, trial.left == TRIALS - 1
        try:
            with torch.random.fork_rng(devices=[]):
                started = clock()
                # Gradients twice beside the passes' sums are more than a step needs, and only held where it may pay.
                _, sums = self.loop(loss_fn, batch, keep=last)
                trial.loop = min(trial.loop, clock() - started)
                if trial.loop > (GAIN if last else HOPELESS * (UNUSED if first else 1.0)) * trial.passes:
                    return "the two passes are faster"
                if not last:
                    return None
                if expected is None:
                    with without_randomness(self.model), gradients_aside(self._parameters()) as expected:
                        passes()
                        _, sums = self.loop(loss_fn, batch)
        except Exception as error:  # a loss function need not take single examples
            return f"{type(error).__name__}: {error}"
        off = _difference(sums, expected)
        if not off <= TOLERANCE[norm_dtype(self.index.trained())]:
            return f"a batch of one differs from the same example in its batch, by {off:.2g} (relative)"
        return None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.index.trained()]

    def loop(self, loss_fn: LossFunction, batch: Any, keep: bool = True) -> tuple[Alone, Gradients]:
        """Losses, norms and weights of the batch, and its clipped sums, one backward an example.

        Without ``keep`` no sums are held: each gradient is scaled and dropped, which costs as much time.
        """
        found = leaves_of(batch)
        assert found is not None
        leaves, structure, examples = found
        names = [name for name, _ in self.index.trained()]
        parameters = self._parameters()
        partition = self.partition()
        sums: Gradients = [None] * len(parameters)
        losses, norms, weights = [], [], []
        for i in range(examples):
            loss = loss_fn(self.model, tree_unflatten([leaf[i : i + 1] for leaf in leaves], structure))
            if loss.shape != (1,):
                raise ValueError(f"a batch of one has losses of shape {list(loss.shape)}")
            losses.append(loss.detach())
            with torch.enable_grad():
                grads = torch.autograd.grad(loss, parameters, torch.ones_like(loss), allow_unused=True)
            norm, weight = self._weigh(names, partition, loss.detach(), grads)
            norms.append(norm)
            weights.append(weight)
            _add_weighted(sums, grads, _each(names, partition, weight), keep)
            # Nothing of one example's work stands beside the next one's.
            del loss, grads
        whole = not isinstance(self.clipping, Groupwise)
        return Alone(torch.cat(losses), _joined(norms, whole), _joined(weights, whole)), sums

    @torch.no_grad()
    def _weigh(
        self, names: list[str], partition: dict[str, str], loss: Tensor, grads: tuple[Tensor | None, ...]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """{group: norm [1]} and {group: weight [1]} of one example; the group "" where there are none."""
        dtype = norm_dtype(self.index.trained())
        parts: dict[str, list[Tensor]] = {group: [] for group in partition.values()} or {"": []}
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                parts[partition.get(name, "")].append(squared_norms(grad.reshape(1, -1)).to(dtype))
        zero = loss.new_zeros(1, dtype=dtype)
        norms = {group: torch.stack([zero, *own]).sum(0).sqrt_() for group, own in parts.items()}
        if isinstance(self.clipping, Groupwise):
            weights = self.clipping.weights(norms)
        else:
            weights = {"": self.clipping.weights(norms[""])}
        if not all(bool(torch.isfinite(value).all()) for value in (loss, *norms.values())):
            weights = {group: torch.zeros_like(weight) for group, weight in weights.items()}
        return norms, weights


def _each(names: list[str], partition: dict[str, str], weights: dict[str, Tensor]) -> list[float]:
    """Each parameter's weight."""
    found = {group: float(weight) for group, weight in weights.items()}
    return [found[partition.get(name, "")] for name in names]


@torch.no_grad()
def _add_weighted(sums: Gradients, grads: tuple[Tensor | None, ...], weights: list[float], keep: bool) -> None:
    """``sums += weights * grads`` in place; gradients that are not finite come with a weight of 0, and are left out."""
    if not any(weights):
        return
    for place, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        if grad is None:
            continue
        total = sums[place]
        if total is not None:
            total.add_(grad, alpha=weight)
            continue
        scaled = grad * weight
        if keep:
            sums[place] = scaled


def _joined(parts: list[dict[str, Tensor]], whole: bool) -> Any:
    """[B] where the ``whole`` gradient is clipped, else {group: [B]}; a model of one layer has a group called ""."""
    joined = {group: torch.cat([part[group] for part in parts]) for group in parts[0]}
    return joined[""] if whole else joined


def _difference(found: Gradients, expected: Gradients) -> float:
    """The norm of the difference of all sums as a share of the norm of the expected ones."""
    off, size = 0.0, 0.0
    for one, other in zip(found, expected, strict=True):
        if one is None and other is None:
            continue
        here = torch.zeros_like(other) if one is None else one  # type: ignore[arg-type]
        there = torch.zeros_like(here) if other is None else other
        off += float((here - there).double().square().sum())
        size += float(there.double().square().sum())
    return math.sqrt(off / size) if size else math.sqrt(off)
