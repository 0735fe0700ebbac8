"""Whether a clipping function weighs each example by itself.

Where a weight follows from the norms of others too (a median, the largest of a batch), each share is within the bound
and their sum still isn't private: one example's presence changes the weights of all.
"""

from __future__ import annotations

from typing import Any

import torch

from ghostclip.clipping import Composed, Custom
from ghostclip.clipping.choice import Clamped
from ghostclip.clipping.groups import CustomGroups
from ghostclip.errors import PrivacyError

__all__ = ["may_weigh_jointly", "refuse_joint_weights"]

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


def refuse_joint_weights(policy: Any, norms: Any) -> None:
    """Raises PrivacyError when a policy of the user's weighs half a batch by itself otherwise than in the whole.

    Tried are the first and the second half, and two halves that are drawn anew.

    The weights that were used are not compared with: they are of norms with a margin for rounding.

    Args:
        policy: of clipping, that `may_weigh_jointly`.
        norms: of a physical batch, [B] or {group: [B]}.
    """
    found: Any = policy.weights(norms)
    whole = found if isinstance(found, dict) else {"": found}
    some = next(iter(whole.values()))
    orders = torch.arange(len(some), device="cpu"), torch.randperm(len(some), generator=_dice, device="cpu")
    halves = [half.to(some.device) for order in orders for half in order.tensor_split(2) if len(some) > 1]
    # A difference may be the same in all rows: together they must stay far below the sensitivity.
    tolerance = min(TOLERANCE, max(0.1 / max(1, len(some)), 16 * torch.finfo(some.dtype).eps))
    for part in halves:
        given: Any = {g: n[part] for g, n in norms.items()} if isinstance(norms, dict) else norms[part]
        alone = policy.weights(given)
        for group, weights in (alone if isinstance(alone, dict) else {"": alone}).items():
            together = whole[group][part]
            if ((together - weights).abs() > tolerance * torch.maximum(together.abs(), weights.abs())).any():
                raise PrivacyError(
                    "the function of the Custom clipping policy (or a policy of your own) gives examples other weights "
                    "when other examples are beside them, so that one example moves the sum by more than the "
                    "sensitivity; make each weight depend on that example's norm alone, without means, quantiles or "
                    "largest values of the batch, and the same at each call: it is called several times a batch"
                )
