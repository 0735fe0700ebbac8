"""A batch refused because a layer's rows may be examples or positions is met once more with another number of rows.

A table read by position ids [T] gives [T, d], and so does a layer that folds T / B positions of each of B examples into
its batch dimension. Where the graph doesn't tell which it is (`ghostclip.graph.shared.positions`), a forward on some
other number of examples does: T stays what it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from ghostclip.clipper.batches import leaves_of
from ghostclip.clipper.replay import Replay
from ghostclip.clipper.second_pass import TwoPasses

__all__ = ["shows_at_another_size"]


def shows_at_another_size(
    passes: TwoPasses, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any
) -> bool:
    """Whether a forward on more rows of a batch, its examples repeated, shows layers that see no examples.

    Leaves no trace in the model and in random states but for what ``passes`` learnt.
    """
    found = leaves_of(batch)
    if found is None or found[2] < 2:
        return False
    leaves, structure, examples = found
    rows = torch.arange(_prime_above(examples)) % examples
    repeated = tree_unflatten([leaf.detach()[rows.to(leaf.device)] for leaf in leaves], structure)
    known = passes.constants
    try:
        with Replay(model).again(gradients=True):
            passes.rehearse(loss_fn(model, repeated))
    except Exception:  # what refuses this batch, too, or a loss function that takes no other: the first error stands
        return False
    return passes.constants > known


def _prime_above(number: int) -> int:
    """The smallest prime above a number: few tables and images have a multiple of it."""
    return next(n for n in itertools.count(number + 1) if all(n % d for d in range(2, int(n**0.5) + 1)))
