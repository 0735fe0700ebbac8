"""The users of a data set's rows, by value, in whatever form they are given.

Two rows belong to one user where their values are equal: 3, 3.0, np.int64(3), torch.tensor(3) and torch.tensor([3])
name the same user. So do a date and its midnight, since np.datetime64("2020-01-01") is equal to both. An object that
is equal to itself only can't name a user, since each row may bring one of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Set
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["users_of_rows"]

# Types that are values and never missing, for speed.
PLAIN = (str, int, bytes, bool)
# Moments and durations, of pandas too, which are equal in several types and have another hash in each.
TIMES = (date, timedelta, np.datetime64, np.timedelta64)


def users_of_rows(unit_ids: Any, rows: int) -> list[Hashable]:
    """The user of each row, equal and of equal hash for rows of the same user.

    Args:
        unit_ids: one for each row, or a mapping from each row's number to its user. Users are hashable values;
            tensors, arrays and arrow scalars of one element stand for their element.
        rows: how many there are.

    Raises:
        TypeError: it is no sequence or mapping, has several values for a row, or a user isn't hashable by value.
        ValueError: it doesn't have one user for each row, or one is missing (None, NaN).
    """
    users = [_value(user) for user in _listed(unit_ids, rows)]
    known: set[Hashable] = set()
    for row, user in enumerate(users):
        if type(user) not in PLAIN:
            _check_hashable(user, row)
            if user not in known:
                _check(user, row)
                known.add(user)
    return users


def _listed(unit_ids: Any, rows: int) -> list[Any]:
    """What is given for each row."""
    if isinstance(unit_ids, Mapping):
        return _by_row(unit_ids, rows)
    if isinstance(unit_ids, str | bytes | Set) or not isinstance(unit_ids, Iterable):
        raise TypeError(
            "unit_ids must be a sequence with one id for each row of the data set, or a mapping from rows to ids; got "
            f"{unit_ids!r}"
        )
    unit_ids = _flat(unit_ids)
    listed: list[Any] = unit_ids.tolist() if hasattr(unit_ids, "tolist") else list(unit_ids)
    if len(listed) != rows:
        raise ValueError(f"unit_ids must have one id for each of the {rows} rows of the data set; got {len(listed)}")
    return listed


def _by_row(unit_ids: Mapping[Any, Any], rows: int) -> list[Any]:
    """The values of a mapping {row: user} that has all rows as its keys, and no other keys."""
    missing = next((row for row in range(rows) if row not in unit_ids), None)
    if missing is not None or len(unit_ids) != rows:
        raise ValueError(
            f"unit_ids is a mapping, whose keys must be the rows of the data set, 0 to {rows - 1}; "
            + (f"it has {len(unit_ids)} keys" if missing is None else f"row {missing} is missing")
        )
    return [unit_ids[row] for row in range(rows)]


def _flat(unit_ids: Any) -> Any:
    """Arrays, tensors and data frames [N, 1] as [N]; anything without a shape as it is."""
    shape = getattr(unit_ids, "shape", None)
    if shape is None or len(shape) == 1:
        return unit_ids
    if len(shape) == 0 or any(size != 1 for size in shape[1:]):
        raise TypeError(f"unit_ids must have one id for each row of the data set; got shape {list(shape)}")
    return (unit_ids.to_numpy() if hasattr(unit_ids, "to_numpy") else unit_ids).reshape(-1)


def _value(user: Any) -> Any:
    """The element of a tensor, an array or an arrow scalar, in Python's own type where it has one for the value."""
    if type(user) in PLAIN:
        return user
    if isinstance(user, Tensor) and user.numel() == 1:
        return user.item()
    if isinstance(user, np.ndarray) and user.size == 1:
        user = user.reshape(-1)[0]
    if hasattr(user, "as_py"):
        user = user.as_py()
    if isinstance(user, TIMES):
        return _time(user)
    if type(user) is tuple:
        return tuple(map(_value, user))
    return user.item() if isinstance(user, np.generic) else user


def _time(user: Any) -> Any:
    """A moment as a datetime, a duration as a timedelta; numpy's own where these have no equal value."""
    if getattr(user, "tzinfo", None) is not None:  # equal to no moment without a time zone
        return user
    if hasattr(user, "to_numpy"):
        user = user.to_numpy()
    if isinstance(user, np.datetime64 | np.timedelta64):
        rounded = user.astype(f"{user.dtype.kind}8[us]")
        own = rounded.item()
        exact = bool(rounded.astype(user.dtype) == user)
        return own if exact and isinstance(own, datetime | timedelta) else user
    return user if isinstance(user, datetime | timedelta) else datetime.combine(user, time())


def _check_hashable(user: Any, row: int) -> None:
    try:
        hash(user)
    except TypeError:
        raise TypeError(f"unit_ids must be hashable; got {user!r} for row {row}") from None


def _check(user: Any, row: int) -> None:
    """Raises where the user is missing, or differs from an equal one: every row would be a user of its own."""
    if user is None or _is_missing(user):
        raise ValueError(f"unit_ids must name the user of every row; got {user!r} for row {row}")
    if not _is_by_value(user):
        raise TypeError(
            f"unit_ids must name users by value; row {row} has an object of type {type(user).__name__} that is (or "
            "holds one that is) equal to itself only, so that each row would be a user of its own. Give a number or "
            "a name: tensor.item(), object.name"
        )


def _is_missing(user: Any) -> bool:
    """Whether it, or a part of it, isn't equal to itself, as NaN isn't."""
    parts: Iterable[Any] = ()
    if isinstance(user, Tensor):  # which `_is_by_value` refuses
        return False
    if isinstance(user, tuple | frozenset):
        parts = user
    elif dataclasses.is_dataclass(user):
        parts = [getattr(user, field.name) for field in dataclasses.fields(user)]
    try:
        return bool(user != user) or any(_is_missing(part) for part in parts)
    except TypeError:  # as pandas.NA raises
        return True


def _is_by_value(user: Any) -> bool:
    """Whether a copy of it is equal to it, with the same hash."""
    if isinstance(user, np.generic):
        return True
    if type(user).__hash__ is object.__hash__:
        return False
    try:
        other = copy.deepcopy(user)
        return hash(other) == hash(user) and bool(other == user)
    except Exception:  # an object that can't be copied is no value
        return False
