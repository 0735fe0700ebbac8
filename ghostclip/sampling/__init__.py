"""Sampling: which examples are in a batch, how they are loaded, and what a step over them is charged as."""

from .batches import LogicalBatches
from .logical import BatchState, LogicalBatch
from .schemes import Cyclic, CyclicPoisson, Poisson, Scheme, Truncated, WithoutReplacement, scheme_named
from .unit_ids import users_of_rows
from .users import UserRows, Users

__all__ = [
    "BatchState",
    "Cyclic",
    "CyclicPoisson",
    "LogicalBatch",
    "LogicalBatches",
    "Poisson",
    "Scheme",
    "Truncated",
    "UserRows",
    "Users",
    "WithoutReplacement",
    "scheme_named",
    "users_of_rows",
]
