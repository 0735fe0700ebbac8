"""What a loop gets for an empty sample: a batch as ``collate_fn`` makes it, without rows or with one row of ones.

Where a batch has its examples is measured: ``collate_fn`` is given one example, and the same example twice. A tensor
[1, 7] that becomes [2, 7] has the examples in dimension 0, and is made [0, 7]; one that stays [7] belongs to no example
and is kept; offsets [2] that become [3] are made [1]. A list of strings that grows is made empty.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["empty_batch"]

REMEDY = (
    "have collate_fn return an empty batch for an empty list, or give make_private(rand_on_empty=True): a batch of one "
    "row of ones then takes the place of an empty one, and none of its gradients is used"
)
# Numbers and strings of a batch of one row of ones.
ONES: dict[type, Any] = {bool: True, int: 1, float: 1.0, str: "", bytes: b""}


def empty_batch(dataset: Any, collate_fn: Callable[[list[Any]], Any], one_row: bool = False) -> Any:
    """The batch of an empty sample, with no number or text of an example in it.

    Args:
        dataset: whose first example shows how ``collate_fn`` makes batches.
        collate_fn: list of examples -> batch.
        one_row: whether the batch has one row of ones in place of none.

    Raises:
        TypeError: the batch holds something that can't be made empty, and ``collate_fn`` refuses an empty list.
    """
    example = dataset[0]
    # Copies, since collate functions may take what they use out of the examples.
    one, two = (collate_fn([copy.deepcopy(example) for _ in range(count)]) for count in (1, 2))
    maker = _Maker(one_row)
    try:
        batch = maker.make(one, two)
        if not maker.grew:
            raise TypeError("nothing in a batch grows with its number of examples")
        return batch
    except (TypeError, ValueError, RuntimeError, AttributeError) as reason:
        try:
            return collate_fn([])
        except Exception:
            raise TypeError(f"an empty batch can't be made: {reason}; {REMEDY}") from reason


class _Maker:
    """Makes a batch from batches of one example and of the same one twice.

    Attributes:
        grew: whether something in them had examples.
    """

    def __init__(self, one_row: bool) -> None:
        self._one_row, self.grew = one_row, False

    def make(self, one: Any, two: Any) -> Any:
        """What an empty batch has in the place of these two."""
        if one is two or type(one) is not type(two):
            return self._same(one, two)
        if isinstance(one, Tensor):
            return self._tensor(one, two)
        if isinstance(one, np.ndarray):
            return self._array(one, two)
        if isinstance(one, Mapping):
            return self._mapping(one, two)
        if isinstance(one, tuple) and hasattr(one, "_fields"):
            return type(one)(*map(self.make, one, two))
        if isinstance(one, (list, tuple)):
            return self._sequence(one, two)
        if type(one) in ONES:
            return one if one == two else ONES[type(one)] if self._one_row else type(one)()
        return self._object(one, two)

    def _same(self, one: Any, two: Any) -> Any:
        if one is not two:
            raise TypeError(f"a batch of one example has a {type(one).__name__} where one of two has another type")
        return one

    def _sizes(self, one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes for no examples, in a straight line from those of two and one."""
        if len(one) != len(two):
            raise TypeError(f"a tensor of a batch has {len(one)} dimensions for one example, and {len(two)} for two")
        self.grew = self.grew or one != two
        return tuple(max(0, 2 * first - second) for first, second in zip(one, two, strict=True))

    def _tensor(self, one: Tensor, two: Tensor) -> Tensor:
        if one.is_nested:
            return self._nested(one)
        sizes = self._sizes(tuple(one.shape), tuple(two.shape))
        if one.shape == two.shape:
            return one if torch.equal(one, two) or self._one_row else torch.zeros_like(one)
        if self._one_row:
            return torch.ones_like(one)
        for dim, size in enumerate(sizes):
            one = one.narrow(dim, 0, size)
        return one

    def _nested(self, one: Any) -> Tensor:
        self.grew = True
        if self._one_row:
            return torch.ones_like(one)
        if one.layout != torch.jagged:
            raise TypeError("torch has no operations on a nested tensor of strided layout without rows")
        none = one.offsets().new_zeros(1)
        return torch.nested.nested_tensor_from_jagged(one.values()[:0], none, jagged_dim=one._ragged_idx)

    def _array(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        sizes = self._sizes(one.shape, two.shape)
        if one.shape == two.shape:
            return one if np.array_equal(one, two) or self._one_row else np.zeros_like(one)
        return np.ones_like(one) if self._one_row else one[tuple(map(slice, sizes))]

    def _mapping(self, one: Mapping[Any, Any], two: Mapping[Any, Any]) -> Any:
        if set(one.keys()) != set(two.keys()):
            raise TypeError(f"the keys of a {type(one).__name__} depend on the number of examples")
        made = {key: self.make(one[key], two[key]) for key in one.keys()}  # noqa: SIM118
        if type(one) is dict:
            return made
        if isinstance(one, UserDict) or not isinstance(one, MutableMapping):
            return type(one)(made)  # type: ignore[call-arg]  # a copy would keep what else a BatchEncoding knows
        whole = copy.copy(one)
        for key, value in made.items():
            whole[key] = value
        return whole

    def _sequence(self, one: Any, two: Any) -> Any:
        """A list of fields, or one with an entry for each example."""
        if len(one) == len(two):
            return type(one)(self.make(first, second) for first, second in zip(one, two, strict=True))
        (size,) = self._sizes((len(one),), (len(two),))
        if not self._one_row:
            return one[:size]
        return type(one)(_Maker(True)._ones(each) for each in one)

    def _ones(self, value: Any) -> Any:
        """The entry of one example in a batch of one row of ones."""
        if isinstance(value, (Tensor, np.ndarray)):
            return torch.ones_like(value) if isinstance(value, Tensor) else np.ones_like(value)
        if isinstance(value, Mapping):
            return {key: self._ones(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            entries = [self._ones(each) for each in value]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if type(value) in ONES or value is None:
            return None if value is None else ONES[type(value)]
        raise TypeError(f"a batch holds a {type(value).__name__}, of which no row of ones can be made")

    def _object(self, one: Any, two: Any) -> Any:
        """A copy of an object with other attributes."""
        names = list(_attributes(one))
        if not names or set(names) != set(_attributes(two)):
            if not names and bool(one == two):
                return one
            raise TypeError(f"a batch holds a {type(one).__name__}, which can't be made empty")
        made = copy.copy(one)
        for name in names:
            object.__setattr__(made, name, self.make(getattr(one, name), getattr(two, name)))
        return made


def _attributes(value: Any) -> Iterator[str]:
    """The names of what an object holds."""
    yield from getattr(value, "__dict__", {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                yield name
