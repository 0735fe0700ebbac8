"""What users may pass for ``clipping=``, as a policy."""

from __future__ import annotations

from typing import Any

from ghostclip.clipping.groups import CustomGroups, Groupwise
from ghostclip.clipping.policies import Custom, Flat, Policy
from ghostclip.validate import positive

__all__ = ["as_policy"]


def as_policy(clipping: Any) -> Policy | Groupwise:
    """A policy from what users pass: a float is `Flat`, a callable with a ``sensitivity`` is `Custom`.

    Raises:
        TypeError, ValueError: it is none of these, or out of range.
    """
    if isinstance(clipping, Custom) and clipping.groups is not None:
        return CustomGroups(clipping.function, clipping.sensitivity, clipping.groups)
    if isinstance(clipping, (Policy, Groupwise)):
        return clipping
    if callable(clipping) and hasattr(clipping, "sensitivity"):
        return Custom(clipping, clipping.sensitivity)
    if isinstance(clipping, (int, float)) and not isinstance(clipping, bool):
        return Flat(positive(clipping=clipping))
    raise TypeError(
        f"clipping must be a max norm (a number > 0), a policy of ghostclip.clipping, or a callable with a "
        f"sensitivity attribute; got {clipping!r}"
    )
