"""The first steps' self-check: are gradients what autograd says, do examples stay apart, do the parameters move.

Losses are compared as `LossComparison` says; the rest is looked at once. What the proof by factors shows anyway
(`ghostclip.graph.owners`: rows of each layer follow their own example's loss) is not repeated here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.cutting import leaves_of
from ghostclip.clipper.trial import without_trace
from ghostclip.errors import VerificationError
from ghostclip.self_check.agreement import gradients_agree, listed
from ghostclip.self_check.comparison import LossComparison
from ghostclip.self_check.loading import LoadedRows
from ghostclip.self_check.trial_losses import LossFunction
from ghostclip.sharding.detection import local_part
from ghostclip.sharding.plain import Sharding

__all__ = ["SelfCheck"]

# Examples of a large batch whose gradients are compared, lest the graph of all of it be held; the examples of the
# smallest batch that counts as large, and the bytes of its tensors.
HEAD, LARGE, LARGE_DATA = 16, 64, 1 << 16
# Gradients below this share of the largest may be lost in rounding without anything being wrong.
SLIGHT = 1e-3

log = logging.getLogger("ghostclip")


class SelfCheck:
    """Watches the first steps of an engine; all that they need and leave stays as it would have been.

    Gradients are compared on the first batch whose gradients are all finite (of a large one on its first examples, so
    that its graph needn't be held), losses are compared as `LossComparison` says, and the first update with examples
    in it is looked at.

    Args:
        clipper: of the model in training.
        optimizer: whose first update is watched.
        wanted: False switches all of it off.
    """

    def __init__(self, clipper: GhostClipper, optimizer: Optimizer, wanted: bool = True) -> None:
        self._model, self._passes = clipper.model, clipper.passes
        self._to_compare = wanted
        passes = None if clipper.sharding.sharded else self._passes
        self._comparison = LossComparison(self._model, passes) if wanted else None
        self._movement = _Movement(clipper.sharding, optimizer) if wanted else None
        self._saw_examples = False

    @property
    def over(self) -> bool:
        """Whether nothing is left to be looked at."""
        return not (self._to_compare or self._movement is not None)

    def before(
        self, loss_fn: LossFunction, examples: Any, rows: LoadedRows, units: int, logical: object,
        *, most: int | None = None, ragged: bool = False,
    ) -> None:  # fmt: skip
        """Before a physical batch's forward: `LossComparison.compare`, and gradients of the first of many examples.

        The graph of all of them needn't be held then; ``loss_fn`` is called once more for it. Where that doesn't show
        anything, as where ``loss_fn`` takes no other batch, the gradients are left to `backward`.

        Raises:
            ExamplesMixError: as `LossComparison.compare`.
            VerificationError: as `backward`.
        """
        if self._comparison is not None:
            self._comparison.compare(loss_fn, examples, rows, units, logical, most=most, ragged=ragged)
        if not self._to_compare or ragged or (head := _head_of_large(examples)) is None:
            return
        try:
            with without_trace(self._model):
                losses = loss_fn(self._model, head)
                if losses.shape == (HEAD,):
                    self.backward(losses)
        except VerificationError:
            raise
        except Exception as error:  # what is wrong shows on the whole batch
            log.info("gradients are not compared on %d examples: %s: %s", HEAD, type(error).__name__, error)

    def backward(self, losses: Tensor) -> None:
        """Compares a few of the per-example gradients with autograd's and keeps the graph.

        Args:
            losses: [B].

        Raises:
            VerificationError: they differ; nothing was gathered.
            LossShapeError, StaleInputError, UnsupportedModelError: as `GhostClipper.norms`.
        """
        self._saw_examples = True
        if not self._to_compare or not getattr(losses, "requires_grad", False):
            return
        if (unused := gradients_agree(self._passes, losses)) is not None:
            self._to_compare = False
            if self._movement is not None:
                self._movement.unused = unused

    def cannot_compare(self) -> None:
        """Says once that losses came without a loss function; not where a step with one was taken before."""
        if self._comparison is not None and not self._comparison.begun:
            self._comparison.begun = True
            log.warning(
                "engine.backward() gets no loss function, so the self-check can't test whether a loss depends on other "
                "examples of its batch (by padding to the longest, for instance), nor whether the model keeps "
                "something of them: call ghostclip.check(model, loss_fn, batch) once, with the DataLoader as the "
                "batch, or take the first steps by engine.step(batch, loss_fn)"
            )

    def released(self, held: Collection[nn.Parameter]) -> None:
        """To be called when the noisy gradients of the optimizer's parameters ``held`` are in place."""
        if self._movement is not None and self._saw_examples:
            self._movement.note(held)

    def stepped(self) -> None:
        """To be called after the update; warns once of trained parameters for which training does nothing."""
        if self._movement is not None and self._movement.noted:
            self._movement.warn()
            self._movement = None


class _Entry(NamedTuple):
    """The one number of a parameter whose gradient (``slope``) is largest, so that it moves if any does."""

    name: str
    parameter: Tensor
    place: int
    value: Tensor
    slope: float


class _Movement:
    """Whether one update moves what is to be trained: adapters trained to nothing look like training.

    Args:
        sharding: of the model's parameters.
        optimizer: that takes the step.

    Attributes:
        noted: whether an update was seen coming; one in which every learning rate is zero is none.
        unused: trained parameters on which the losses didn't depend.
    """

    def __init__(self, sharding: Sharding, optimizer: Optimizer) -> None:
        self._sharding, self._optimizer = sharding, optimizer
        self.noted = False
        self.unused: Sequence[str] = ()
        self._entries: list[_Entry] = []
        self._not_held: list[str] = []

    @torch.no_grad()
    def note(self, held: Collection[nn.Parameter]) -> None:
        """Remembers one number of each parameter that is about to be updated.

        Args:
            held: the optimizer's parameters, their gradients in place.
        """
        rates = {p: float(group.get("lr", 1.0)) for group in self._optimizer.param_groups for p in group["params"]}
        if not any(rates.values()):
            return
        self.noted = True
        for name, parameter, _ in self._sharding.pairs:
            if not parameter.requires_grad:
                continue
            if parameter not in held:
                self._not_held.append(name)
            elif rates[parameter] and parameter.grad is not None and local_part(parameter).numel():
                slopes, values = local_part(parameter.grad).reshape(-1).abs(), local_part(parameter)
                place = int(slopes.argmax())
                value = values.reshape(-1)[place].clone()
                self._entries.append(_Entry(name, values, place, value, float(slopes[place])))

    @torch.no_grad()
    def warn(self) -> None:
        """Says which trainable parameters are not trained, if there are any."""
        largest = max((entry.slope for entry in self._entries), default=0.0)
        felt = [entry for entry in self._entries if entry.slope > SLIGHT * largest]
        still = [entry.name for entry in felt if torch.equal(entry.parameter.reshape(-1)[entry.place], entry.value)]
        found = {
            "no loss of the first batch depends on {}: until one does, noise is all they are given": self.unused,
            "the optimizer doesn't hold {}: they stay as they are, and their gradients take up a part of the clipping "
            "norm": self._not_held,
            "the first update left {} as they were: it is skipped, or lost in rounding": still,
        }
        said = [problem.format(listed(names)) for problem, names in found.items() if names]
        if said:
            log.warning(
                "some trainable parameters are not trained: %s. Freeze what is not meant to be trained "
                "(requires_grad_(False)) before the engine is built, and give the optimizer the rest",
                "; ".join(said),
            )


def _head_of_large(batch: Any) -> Any | None:
    """The first examples of a batch so large that its graph may matter in memory; None of another."""
    found = leaves_of(batch)
    if found is None or found[2] < LARGE or sum([leaf.nbytes for leaf in found[0]]) < LARGE_DATA:
        return None
    return tree_unflatten([leaf[:HEAD] for leaf in found[0]], found[1])
