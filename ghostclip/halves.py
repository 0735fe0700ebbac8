"""Large batches of images in two halves, and a rehearsal of the first batch on a few of its examples.

"reweight" goes over its graph twice, so that all of it stands in memory while the gradients at the widest layer come,
where an ordinary backward has let go of the rest. Half of the graph at a time takes less than that backward does.
Convolutions cost about as much for an image in a half as in the whole (measured: the CNN of Lee & Kifer at 128 images
1.5 to 8% more, the CIFAR network at 64 as much). Products of rows need many of them: the Transformer takes 0.97 and
0.87 of the time at 64 and 128 texts, and more than before at 32. Recurrent layers pay for each step in time: they come
whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from ghostclip.clipping import Adaptive, Automatic, Flat, Groupwise, Policy
from ghostclip.compiled.signature import function_kind, leaves_of
from ghostclip.gradients import have_hooks, is_distributed
from ghostclip.nn.base import Call
from ghostclip.replay import Replay
from ghostclip.two_passes import TwoPasses

__all__ = ["Halves", "head_of_large"]

# Examples of the rehearsal: few, and no size that tables or images have, so that their dimension is told from others.
FEW = 7
# Examples of the smallest batch that counts as large, and bytes of what it holds.
LEAST, LEAST_DATA = 64, 1 << 16
# Bytes of pre-activations from which on a batch is divided: most of them of convolutions, or of products of rows; and
# how many times the parameters' bytes they must take, that half of them counts.
IMAGE_BYTES, ROW_BYTES, OVER_PARAMETERS = 4 << 20, 64 << 20, 2
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Policies that weigh an example by its own norm alone.
EACH_BY_ITSELF = (Flat, Automatic, Adaptive)
# Relative difference of a loss from which on it is another one.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

log = logging.getLogger("ghostclip")

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass
class Halves:
    """Says which batches come in halves, by what a rehearsal of the first large one showed.

    That also proves on a few examples what is proved of a model's graph on first meeting it
    (`ghostclip.regroup.Grouping`), and so needs not be proved on a whole batch, of which all the graph would be held.

    Args:
        model: wrapped.
        passes: over its graphs.
        clipping: the policy.
        reweighted: whether a second pass follows the first.

    Attributes:
        function: the kind of loss function whose batches are divided; None: nothing is.
    """

    model: nn.Module
    passes: TwoPasses
    clipping: Policy | Groupwise
    reweighted: bool
    function: Any = None
    _each: float = 0.0
    _least: float = math.inf
    _open: bool = True
    _batches: int = 0

    def divides(self, loss_fn: LossFunction, batch: Any) -> bool:
        """Whether a batch comes in halves, by what is known so far."""
        if self.function is None or self.function != function_kind(loss_fn) or is_distributed():
            return False
        found = leaves_of(batch)
        if found is None or found[2] < LEAST or found[2] * self._each < self._least:
            return False
        return not have_hooks(parameter for _, parameter in self.passes.index.trained())

    def divide(self, loss_fn: LossFunction, batch: Any) -> Sequence[Any]:
        """The batch, met before it goes through the passes, or its halves: [batch] or [first half, second half]."""
        if self._open:
            self._meet(loss_fn, batch)
        found = leaves_of(batch) if self.divides(loss_fn, batch) else None
        if found is None:
            return [batch]
        leaves, structure, examples = found
        parts = [slice(0, examples // 2), slice(examples // 2, examples)]
        return [tree_unflatten([leaf[part] for leaf in leaves], structure) for part in parts]

    def describe(self) -> str:
        """Whether batches are divided, in a line; "" where they aren't."""
        if self.function is None:
            return ""
        least = max(LEAST, math.ceil(self._least / self._each))
        return f"batches of {least} and more in two halves, which take less memory"

    def _meet(self, loss_fn: LossFunction, batch: Any) -> None:
        """Rehearses the 1st, 2nd, 4th ... large batch while something is open; leaves no trace but what was learnt."""
        few = head_of_large(batch, FEW)
        if few is None:
            return
        self._batches += 1
        if self._batches & (self._batches - 1):
            return
        self._open = False
        replay = Replay(self.model)
        try:
            with replay.again(gradients=True):
                calls, self._open = self.passes.rehearse(loss_fn(self.model, few))
            least = self._least_bytes(calls) if self._batches == 1 else math.inf
            if not math.isinf(least):
                self._each, self._least = sum([call.nbytes for call in calls]) / FEW, least
                with replay.again(training=False):
                    if _stand_alone(loss_fn(self.model, few), loss_fn(self.model, _last_of(few))):
                        self.function = function_kind(loss_fn)
        except Exception as error:  # what is wrong shows on the whole batch; and nobody promised to take a part of one
            log.info("no rehearsal on %d examples: %s: %s", FEW, type(error).__name__, error)

    def _least_bytes(self, calls: Sequence[Call]) -> float:
        """Bytes of pre-activations from which on a batch takes less memory in halves, and no more time."""
        trained = [parameter for _, parameter in self.passes.index.trained()]
        if not self.reweighted or not isinstance(self.clipping, EACH_BY_ITSELF):
            return math.inf
        if any(p.device.type != "cpu" or p.dtype not in TOLERANCE for p in trained):
            return math.inf
        if any(isinstance(call.layer, nn.RNNBase) for call in calls):
            return math.inf
        total = sum([call.nbytes for call in calls])
        of_images = sum([call.nbytes for call in calls if isinstance(call.layer, CONVOLUTIONS)])
        least = IMAGE_BYTES if 2 * of_images >= total else ROW_BYTES
        return max(least, OVER_PARAMETERS * sum([p.nbytes for p in trained]))


def _stand_alone(among_few: Tensor, among_fewer: Tensor) -> bool:
    """Whether losses of the last ones are the same among fewer, elsewhere in the batch.

    They aren't where they are divided by how many there are, or a loss function takes what is its own from the front.
    """
    if among_few.shape != (FEW,) or among_fewer.shape != (FEW // 2,) or among_few.dtype not in TOLERANCE:
        return False
    off = TOLERANCE[among_few.dtype]
    return bool(torch.isclose(among_few[-(FEW // 2) :], among_fewer, rtol=off, atol=0.0, equal_nan=True).all())


def head_of_large(batch: Any, count: int) -> Any | None:
    """The first ``count`` examples of a batch so large that its graph may matter in memory; None of another."""
    found = leaves_of(batch)
    if found is None or found[2] < LEAST or sum([leaf.nbytes for leaf in found[0]]) < LEAST_DATA:
        return None
    leaves, structure, _ = found
    return tree_unflatten([leaf[:count] for leaf in leaves], structure)


def _last_of(few: Any) -> Any:
    """The last of a few examples."""
    found = leaves_of(few)
    assert found is not None
    return tree_unflatten([leaf[-(FEW // 2) :] for leaf in found[0]], found[1])
