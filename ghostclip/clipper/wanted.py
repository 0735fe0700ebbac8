"""What a first pass is to find besides squared norms, and which per-example gradients it keeps for the clipped sum."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ghostclip.nn.base import LayerCall

__all__ = ["Keep", "Wanted", "bytes_to_keep", "room_for_small"]

# "reweight" may keep materialised gradients up to this share of all pre-activations, and the size of the parameters.
SMALL_SHARE = 0.15


class Keep(enum.Enum):
    """Which per-example gradients are kept.

    NOTHING: none outlives its layer.
    SMALL: materialised ones that are smaller than their pre-activation gradient ("reweight").
    ALL: each parameter's: the pre-activation gradient with the layer's input, or materialised gradients that take no
        more bytes than both ("cached").
    CHOSEN: SMALL or ALL, by the clipper's ``second_pass`` and ``memory_budget``.
    """

    NOTHING = enum.auto()
    SMALL = enum.auto()
    ALL = enum.auto()
    CHOSEN = enum.auto()


@dataclass(frozen=True)
class Wanted:
    """What a first pass is for.

    Attributes:
        keep: which per-example gradients are kept.
        materialise: materialise and keep every per-example gradient, and find no norms.
        margin: also gather what the rounding margin of weights follows from (`ghostclip.norms.rounding`).
        exact: use no form of a norm that may cancel, and wait for a GPU where that takes it.
    """

    keep: Keep = Keep.NOTHING
    materialise: bool = False
    margin: bool = True
    exact: bool = False


def bytes_to_keep(calls: Sequence[LayerCall]) -> int:
    """Estimate of what `Keep.ALL` takes beside inputs: of each call the smaller of both kinds of gradients."""
    return sum([min(call.nbytes, _materialised_bytes(call)) for call in calls])


def _materialised_bytes(call: LayerCall) -> int:
    own = call.layer._parameters
    size = sum([parameter.nbytes for name in call.parameters if (parameter := own[name]) is not None])
    return call.shape[call.batch_dim] * size


def room_for_small(calls: Sequence[LayerCall], parameter_bytes: int, budget: int | None) -> int:
    """Bytes that `Keep.SMALL` may take."""
    room = int(SMALL_SHARE * sum([call.nbytes for call in calls])) + parameter_bytes
    return room if budget is None else min(room, budget)
