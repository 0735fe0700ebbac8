"""What users may pass for ``clipping=``, as a policy."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

from ghostclip.clipping.adaptive import Adaptive
from ghostclip.clipping.composed import Composed
from ghostclip.clipping.groups import CustomGroups, Grouped, Groupwise, PerLayer
from ghostclip.clipping.policies import Automatic, Custom, Flat, Policy, clamped
from ghostclip.clipping.thresholds import Fixed
from ghostclip.validate import nonnegative, positive

__all__ = ["Clamped", "adapts", "as_policy"]

# Their weights keep to their sensitivity by themselves.
OWN = (Automatic, Custom, CustomGroups, Flat, Grouped, PerLayer)


class Clamped:
    """A policy of the user's own, whose weights are held to the sensitivity that it states, as `Custom`'s are.

    Args:
        policy: has ``weights`` and ``sensitivity``, and may have more, which is found here too.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        # While a copy is being made there is no policy yet.
        if name == "policy":
            raise AttributeError(name)
        return getattr(self.policy, name)

    @property
    def sensitivity(self) -> float:
        """The policy's own."""
        return nonnegative(sensitivity=self.policy.sensitivity)

    def weights(self, norms: Tensor) -> Tensor:
        """The policy's weights, clamped to ``sensitivity / norms``; raises ValueError on another shape."""
        found = self.policy.weights(norms.clone())
        return clamped(found, norms, self.sensitivity)


def adapts(policy: Any) -> bool:
    """Whether a policy's thresholds change during training: they follow noisy counts, which the engine releases."""
    return isinstance(policy, Adaptive) or (isinstance(policy, Composed) and policy.counted > 0)


def as_policy(clipping: Any) -> Policy | Groupwise:
    """A policy from what users pass: a float is `Flat`, a callable with a ``sensitivity`` is `Custom`.

    One of the user's own, with ``weights`` and ``sensitivity``, is held to what it says.

    Raises:
        TypeError, ValueError: it is none of these, or out of range.
    """
    if isinstance(clipping, Custom) and clipping.groups is not None:
        return CustomGroups(clipping.function, clipping.sensitivity, clipping.groups)
    if type(clipping) in (Adaptive, Composed):
        return clipping.anew()
    if type(clipping) is PerLayer and clipping.thresholds is not None and clipping.has_patterns:
        return Composed(thresholds=Fixed(clipping.thresholds))  # its sensitivity counts the layers of the model
    if type(clipping) in OWN or type(clipping) is Clamped:
        return clipping
    if isinstance(clipping, Adaptive):
        raise TypeError(
            f"{type(clipping).__name__} is a subclass of Adaptive, whose weights and counts nothing bounds; give an "
            "Adaptive of ghostclip.clipping"
        )
    if isinstance(clipping, Groupwise):
        raise TypeError(
            "a group-wise policy must be PerLayer, Grouped, Composed, or Custom(function, sensitivity, groups=...), "
            "whose weights are held to the sensitivity; write a ThresholdRule for Composed for thresholds of your own; "
            f"got {type(clipping).__name__}"
        )
    if isinstance(clipping, Policy):
        return Clamped(clipping)
    if callable(clipping) and hasattr(clipping, "sensitivity"):
        return Custom(clipping, clipping.sensitivity)
    if isinstance(clipping, Real) and not isinstance(clipping, bool):
        return Flat(positive(clipping=clipping))
    raise TypeError(
        f"clipping must be a max norm (a number > 0), a policy of ghostclip.clipping, or a callable with a "
        f"sensitivity attribute; got {clipping!r}"
    )
