"""Whether a clipping function weighs each example by itself.

Where a weight follows from the norms of others too (a median, the largest of a batch, a running mean), each share is
within the bound and their sum still isn't private: one example's presence changes the weights of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghostclip.clipping import Composed, Custom
from ghostclip.clipping.choice import Clamped, adapts
from ghostclip.clipping.groups import CustomGroups
from ghostclip.errors import PrivacyError

__all__ = ["Weighing", "may_weigh_jointly", "refuse_joint_weights"]

# Relative: what a vectorised function may round differently in a shorter batch.
TOLERANCE = 1e-3
# Not torch's own, which users seed.
_dice = torch.Generator("cpu")
_dice.seed()


def may_weigh_jointly(policy: Any) -> bool:
    """Whether weights of a policy come from a function of the user's; policies of ours weigh each example by itself."""
    return isinstance(policy, Custom | CustomGroups | Clamped) or (
        isinstance(policy, Composed) and not policy.weighs_each_alone
    )


class Weighing:
    """Looks at a policy of the user's in each physical batch; see `refuse_joint_weights`.

    It is also asked again for the weights of the first batch: a function that remembers norms gives others. And the
    sensitivity that a policy states must stay: the noise would follow the norms with it.
    """

    def __init__(self, policy: Any) -> None:
        self._policy, self._changes = policy, adapts(policy)
        self._sensitivity = policy.sensitivity if isinstance(policy, Clamped) else None
        self._first: tuple[Any, dict[str, Tensor]] | None = None

    def check(self, norms: Any) -> None:
        """Raises PrivacyError unless each weight follows from the example's norm alone, and the sensitivity stays."""
        refuse_joint_weights(self._policy, norms)
        if self._sensitivity is not None and self._policy.sensitivity != self._sensitivity:
            raise PrivacyError(
                f"the sensitivity of {type(self._policy.policy).__name__}, a clipping policy of your own, was "
                f"{self._sensitivity!r} when the engine was built and is {self._policy.sensitivity!r} now; it may "
                "follow from no example, so let it stay. Thresholds that change by a plan are a Schedule of the engine"
            )
        if self._changes:
            return
        if self._first is None:
            kept = {g: norm.clone() for g, norm in norms.items()} if isinstance(norms, dict) else norms.clone()
            self._first = kept, _by_group(self._policy.weights(norms))
        given, before = self._first
        for group, weights in _by_group(self._policy.weights(given)).items():
            if _differ(before[group], weights):
                raise PrivacyError(
                    "the function of the Custom clipping policy (or a policy of your own) gives norms other weights "
                    "than in the first batch, so it remembers something; an example's weight may follow from nothing "
                    "but its own norm. Thresholds that change by a plan are a Schedule of the engine"
                )


def refuse_joint_weights(policy: Any, norms: Any) -> None:
    """Raises PrivacyError when a policy of the user's weighs half a batch by itself otherwise than in the whole.

    Tried are the first and the second half, and two halves that are drawn anew.

    The weights that were used are not compared with: they are of norms with a margin for rounding.

    Args:
        policy: of clipping, that `may_weigh_jointly`.
        norms: of a physical batch, [B] or {group: [B]}.
    """
    whole = _by_group(policy.weights(norms))
    some = next(iter(whole.values()))
    orders = torch.arange(len(some), device="cpu"), torch.randperm(len(some), generator=_dice, device="cpu")
    halves = [half.to(some.device) for order in orders for half in order.tensor_split(2) if len(some) > 1]
    for part in halves:
        own = {group: norm[part] for group, norm in norms.items()} if isinstance(norms, dict) else norms[part]
        for group, weights in _by_group(policy.weights(own)).items():
            if _differ(whole[group][part], weights, len(some)):
                raise PrivacyError(
                    "the function of the Custom clipping policy (or a policy of your own) gives examples other weights "
                    "when other examples are beside them, so that one example moves the sum by more than the "
                    "sensitivity; make each weight depend on that example's norm alone, without means, quantiles or "
                    "largest values of the batch, and the same at each call: it is called several times a batch"
                )


def _by_group(weights: Any) -> dict[str, Tensor]:
    return weights if isinstance(weights, dict) else {"": weights}


def _differ(one: Tensor, other: Tensor, examples: int | None = None) -> bool:
    """Whether weights differ by more than rounding, ``examples`` of which together must stay far below the bound."""
    tolerance = min(TOLERANCE, max(0.1 / max(1, examples or len(one)), 16 * torch.finfo(one.dtype).eps))
    return bool(((one - other).abs() > tolerance * torch.maximum(one.abs(), other.abs())).any())
