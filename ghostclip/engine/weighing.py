"""Whether a clipping function weighs each example by itself.

Where a weight follows from the norms of others too (a median, the largest of a batch), each share is within the bound
and their sum still isn't private: one example's presence changes the weights of all.
"""

from __future__ import annotations

from typing import Any

from ghostclip.clipping import Composed, Custom
from ghostclip.clipping.choice import Clamped
from ghostclip.clipping.groups import CustomGroups
from ghostclip.errors import PrivacyError

__all__ = ["refuse_joint_weights"]

# Relative: what a vectorised function may round differently in a shorter batch.
TOLERANCE = 1e-3


def refuse_joint_weights(policy: Any, norms: Any) -> None:
    """Raises PrivacyError when a policy of the user's weighs half a batch otherwise by itself than in the whole.

    The weights that were used are not compared with: they are of norms with a margin for rounding. Policies of ours
    weigh each example by itself.

    Args:
        policy: of clipping.
        norms: of a physical batch, [B] or {group: [B]}.
    """
    of_user = isinstance(policy, Custom | CustomGroups | Clamped)
    if not of_user and not (isinstance(policy, Composed) and not policy.weighs_each_alone):
        return
    found: Any = policy.weights(norms)
    whole = found if isinstance(found, dict) else {"": found}
    middle = len(next(iter(whole.values()))) // 2
    for part in (slice(0, middle), slice(middle, None)) if middle else ():
        given: Any = {g: n[part] for g, n in norms.items()} if isinstance(norms, dict) else norms[part]
        alone = policy.weights(given)
        for group, weights in (alone if isinstance(alone, dict) else {"": alone}).items():
            together = whole[group][part]
            if ((together - weights).abs() > TOLERANCE * together.abs()).logical_and(together != 0).any():
                raise PrivacyError(
                    "the function of the Custom clipping policy (or a policy of your own) gives examples other weights "
                    "when other examples are beside them, so that one example moves the sum by more than the "
                    "sensitivity; make each weight depend on that example's norm alone, without means, quantiles or "
                    "largest values of the batch"
                )
