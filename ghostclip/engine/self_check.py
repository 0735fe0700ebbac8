"""The first steps' self-check: are gradients what autograd says, do examples stay apart, do the parameters move.

Losses are compared in the first six steps, for 1.2 to 2.6 steps' time each (measured), and at random later, for under
1% of the time; the rest is looked at once. What the proof by factors shows anyway (`ghostclip.graph.mixing_test`: rows
of each layer follow their own example's loss) is not repeated here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.replay import Replay
from ghostclip.engine.agreement import gradients_agree
from ghostclip.engine.comparison import LossComparison
from ghostclip.engine.head import head_of_large
from ghostclip.engine.movement import Movement
from ghostclip.errors import VerificationError

__all__ = ["SelfCheck"]

# Examples of a large batch whose gradients are compared, lest the graph of all of it be held.
HEAD = 16
LossFunction = Callable[[nn.Module, Any], Tensor]

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
        self._comparison = LossComparison(self._model) if wanted else None
        self._movement = Movement(self._passes.index, optimizer) if wanted else None
        self._unused: list[str] = []

    @property
    def over(self) -> bool:
        """Whether nothing is left to be looked at."""
        return not (self._to_compare or self._movement is not None)

    def compare(self, loss_fn: LossFunction, examples: Any, rows: int, units: int, logical: object) -> None:
        """`LossComparison.compare` of a physical batch before its forward."""
        if self._comparison is not None:
            self._comparison.compare(loss_fn, examples, rows, units, logical)

    def before(self, loss_fn: LossFunction, examples: Any) -> None:
        """To be called before a physical batch's forward: a large one is compared by its first examples.

        Its own graph needn't be held then. ``loss_fn`` is called once more for it. Where that doesn't show anything,
        as where ``loss_fn`` takes no other batch, the comparison is left to `backward`.

        Raises:
            VerificationError: as `backward`.
        """
        if not self._to_compare or (head := head_of_large(examples, HEAD)) is None:
            return
        try:
            with Replay(self._model).again(gradients=True):
                losses = loss_fn(self._model, head)
                if losses.shape == (HEAD,):
                    self.backward(losses)
        except VerificationError:
            raise
        except Exception as error:  # what is wrong shows on the whole batch
            log.info("gradients are not compared on %d examples: %s: %s", HEAD, type(error).__name__, error)

    def rehearse(self, loss_fn: LossFunction, examples: Any, check_count: Callable[[Tensor], None]) -> None:
        """The same for a batch whose own forward can't be looked at, as part of a compiled step.

        Args:
            loss_fn: (model, examples) -> losses [B].
            examples: a physical batch.
            check_count: refuses losses that aren't one for each example.
        """
        self.before(loss_fn, examples)
        if self._to_compare:
            with Replay(self._model).again(gradients=True):
                losses = loss_fn(self._model, examples)
                check_count(losses)
                self.backward(losses)

    def backward(self, losses: Tensor) -> None:
        """Compares a few of the per-example gradients with autograd's and keeps the graph.

        Args:
            losses: [B].

        Raises:
            VerificationError: they differ; nothing was gathered.
            LossShapeError, StaleInputError, UnsupportedModelError: as `GhostClipper.norms`.
        """
        if self._movement is not None:
            self._movement.saw_examples = True
        if self._to_compare and losses.requires_grad and (unused := gradients_agree(self._passes, losses)) is not None:
            self._to_compare, self._unused = False, unused

    def released(self, held: Collection[nn.Parameter]) -> None:
        """To be called when the noisy gradients of the optimizer's parameters ``held`` are in place."""
        if self._movement is not None:
            self._movement.note(held)

    def stepped(self) -> None:
        """To be called after the update; warns once of trained parameters for which training does nothing."""
        if self._movement is not None and self._movement.noted:
            movement, self._movement = self._movement, None
            movement.warn(self._unused)
