"""User-level privacy: whose rows are whose, and how they come together in physical batches.

All rows of a user are sampled together, stay in one physical batch, and their losses add up to one loss, whose gradient
is clipped. So that rows can be told apart by their place alone, each user of a physical batch gets the same number of
them: where one has fewer, rows come several times, their losses divided by how often.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import LossShapeError
from ghostclip.sampling.unit_ids import users_of_rows
from ghostclip.validate import positive_int

__all__ = ["UserRows", "Users"]

# A physical batch may have so many rows for each one that is needed; users are sorted by their numbers of rows.
PADDING = 1.5


@dataclass(frozen=True)
class UserRows:
    """The rows of one physical batch: those of the first user, then as many of the second, and so on.

    Attributes:
        users: how many there are.
        shares: one over how often each row comes, [rows]; 1.0 for nearly all.
    """

    users: int
    shares: list[float]

    def part(self, start: int, stop: int) -> UserRows:
        """Users ``start`` to ``stop``, where memory is short."""
        each = len(self.shares) // self.users
        return UserRows(stop - start, self.shares[start * each : stop * each])

    def add_up(self, losses: Tensor) -> Tensor:
        """The users' losses [users] from the rows' [rows]: sums over their rows.

        Raises:
            LossShapeError: there isn't exactly one loss for each row.
        """
        if not isinstance(losses, Tensor) or losses.shape != (len(self.shares),):
            got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise LossShapeError(
                f"losses must have shape exactly [{len(self.shares)}], one for each row of the physical batch (the "
                f"engine adds up those of a user); got {got}"
            )
        shares = torch.tensor(self.shares, dtype=losses.dtype, device=losses.device)
        return (losses * shares).view(self.users, -1).sum(1)


class Users:
    """Which rows of a data set belong to whom.

    Args:
        unit_ids: for each row a number or name of its user, or a mapping {row: user}; see `users_of_rows`.
        dataset_size: how many rows there are.
        max_rows_per_unit: of a user with more rows, the first so many are used, and the others never; None: all.
        limit: the most rows in a physical batch; None: any number.

    Raises:
        ValueError, TypeError: there is no id for each row, one isn't hashable by value or is NaN, or a user has more
            rows than a physical batch may hold.
    """

    def __init__(
        self,
        unit_ids: Iterable[Any] | Mapping[int, Any],
        dataset_size: int,
        max_rows_per_unit: int | None,
        limit: int | None,
    ) -> None:
        cap = None if max_rows_per_unit is None else positive_int(max_rows_per_unit=max_rows_per_unit)
        rows: dict[Hashable, list[int]] = {}
        for row, user in enumerate(users_of_rows(unit_ids, dataset_size)):
            rows.setdefault(user, []).append(row)
        self._rows = [own[:cap] for own in rows.values()]
        most = max(len(own) for own in self._rows)
        if limit is not None and most > limit:
            raise ValueError(
                f"a user has {most} rows, which must be in one physical batch, of at most {limit}; raise "
                "max_physical_batch_size, or use the first few rows of each user: max_rows_per_unit=..."
            )
        self._limit = limit

    def __len__(self) -> int:
        """How many users there are."""
        return len(self._rows)

    @functools.cached_property
    def digest(self) -> str:
        """The same for users with the same rows, in all processes."""
        return hashlib.sha256(repr(self._rows).encode()).hexdigest()

    def divide(self, chosen: Sequence[int]) -> list[tuple[list[int], UserRows]]:
        """The physical batches of a sample of users: (numbers of the rows to load, whose they are)."""
        waiting = sorted((self._rows[user] for user in chosen), key=len)
        parts: list[tuple[list[int], UserRows]] = []
        start = real = 0
        for place, own in enumerate(waiting):
            padded = (place - start + 1) * len(own)
            full = self._limit is not None and padded > self._limit
            if place > start and (full or padded > PADDING * (real + len(own))):
                parts.append(_padded(waiting[start:place]))
                start, real = place, 0
            real += len(own)
        if waiting:
            parts.append(_padded(waiting[start:]))
        return parts


def _padded(users: Sequence[list[int]]) -> tuple[list[int], UserRows]:
    """The users' rows, of each as many as the last one has."""
    size = len(users[-1])
    rows, shares = [], []
    for own in users:
        times, rest = divmod(size, len(own))
        rows += (own * math.ceil(size / len(own)))[:size]
        often = [times + (place < rest) for place in range(len(own))]
        shares += [1.0 / often[place % len(own)] for place in range(size)]
    return rows, UserRows(len(users), shares)
