"""Users are named by value, in whatever form their names come; what is equal to itself only is refused."""

import dataclasses
import datetime
import decimal
import enum
import fractions
from collections import OrderedDict, UserList, defaultdict
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch

from ghostclip.sampling import Users

NUMBERS = [7, 3, 3, 0, 7, 1, 3, 0]
ROWS = len(NUMBERS)


@dataclasses.dataclass(frozen=True)
class Key:
    """A name by value."""

    part: Any


class Color(enum.Enum):
    """Names by value."""

    RED = 0
    BLUE = 1


class Sly:
    """Hashes by identity in a method of its own."""

    def __hash__(self) -> int:
        return id(self)


class Unequal:
    """Hashes by value, and equals itself only."""

    def __hash__(self) -> int:
        return 3


def of_objects(values: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found


# From numbers to the same users in another form.
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "array [N, 1]": lambda numbers: np.array(numbers)[:, None],
    "array of 0-d arrays": lambda numbers: of_objects([np.array(number) for number in numbers]),
    "one-element arrays": lambda numbers: [np.array([[number]]) for number in numbers],
    "0-d tensors": lambda numbers: [torch.tensor(number) for number in numbers],
    "numbers and tensors": lambda numbers: [n if i % 2 else torch.tensor(n) for i, n in enumerate(numbers)],
    "column of 0-d tensors": lambda numbers: UserList(torch.tensor(numbers)),
    "frame of one column": lambda numbers: pandas.DataFrame({"user": numbers}),
    "arrow chunks": lambda numbers: pyarrow.chunked_array([numbers[:3], numbers[3:]]),
    "arrow dictionary": lambda numbers: pyarrow.array(numbers).dictionary_encode(),
    "mapping in another order": lambda numbers: OrderedDict(reversed(list(enumerate(numbers)))),
    "mapping with numpy's rows": lambda numbers: {np.int64(row): number for row, number in enumerate(numbers)},
    "read-only mapping": lambda numbers: MappingProxyType(defaultdict(int, enumerate(numbers))),
    "tuples": lambda numbers: [("ward", number, f"user {number}") for number in numbers],
    "frozen sets": lambda numbers: [frozenset({"user", number}) for number in numbers],
    "0-d arrays of dates": lambda numbers: [np.array(np.datetime64("2020-01-01", "ns") + number) for number in numbers],
    "dataclasses": lambda numbers: [Key(("ward", number)) for number in numbers],
    "classes by value": lambda numbers: [(Color(number % 2), number) for number in numbers],
    "rows of records": lambda numbers: np.array([(number, 0.5) for number in numbers], "i4, f4"),
}


@pytest.mark.parametrize("form", FORMS)
def test_users_are_named_by_value(form: str) -> None:
    expected = Users(NUMBERS, ROWS, None, None)
    assert len(expected) == 4
    found = Users(FORMS[form](NUMBERS), ROWS, None, None)
    assert (len(found), found.digest) == (4, expected.digest)


DAY, UTC = datetime.datetime(2020, 1, 1), datetime.timezone.utc
# Values of one user a list; those of lists that begin with another one are different users.
EQUAL: list[list[Any]] = [
    [3, 3.0, 3 + 0j, decimal.Decimal(3), fractions.Fraction(3), torch.tensor([3.0]), pyarrow.scalar(3)],
    [3, *(kind(3) for kind in (np.int8, np.uint64, np.float32, np.complex64))],
    ["3", np.str_("3")],
    [b"3", np.bytes_(b"3")],
    [DAY, DAY.date(), pandas.Timestamp(DAY), pyarrow.scalar(DAY.date()), np.datetime64("2020")],
    [DAY, *(np.datetime64("2020-01-01", unit) for unit in ("M", "D", "h", "s", "us", "ns"))],
    [np.datetime64("2020-01-01T00:00:00.000000001"), pandas.Timestamp("2020-01-01T00:00:00.000000001")],
    [np.datetime64("20000-01-01"), np.datetime64("20000-01-01T00", "h")],
    [DAY.replace(tzinfo=UTC), pandas.Timestamp(DAY, tz="UTC"), pandas.Timestamp(DAY, tz=UTC).tz_convert("Asia/Tokyo")],
    [datetime.timedelta(1), pandas.Timedelta(1, "D"), np.timedelta64(1, "D"), np.timedelta64(24 * 3600 * 10**9, "ns")],
    [np.timedelta64(1, "Y"), np.timedelta64(12, "M")],
    [("3", DAY.date()), (np.str_("3"), np.datetime64("2020-01-01", "ns"))],
]


def test_what_is_equal_is_one_user_in_every_type() -> None:
    values = [(repr(several[0]), value) for several in EQUAL for value in several]
    for user, value in values:
        for other_user, other in values:
            same = user == other_user
            assert len(Users([value, other], 2, None, None)) == (1 if same else 2), (value, other)


SAME = "equal to itself only"
# Identities, missing values and other mistakes: what is given for 8 rows, error, a part of its text.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "objects of a class": (lambda: [object() for _ in NUMBERS], TypeError, f"row 0.*object.*{SAME}"),
    "an own hash by identity": (lambda: [Sly() for _ in NUMBERS], TypeError, SAME),
    "equal to itself only": (lambda: [Unequal() for _ in NUMBERS], TypeError, SAME),
    "functions": (lambda: [lambda: None for _ in NUMBERS], TypeError, SAME),
    "dataclasses of tensors": (lambda: [Key(torch.tensor(number)) for number in NUMBERS], TypeError, SAME),
    "tensors of two elements": (lambda: [torch.tensor([number, 1]) for number in NUMBERS], TypeError, "row 0.*Tensor"),
    "a tensor [N, 2]": (lambda: torch.zeros(ROWS, 2), TypeError, r"shape \[8, 2\]"),
    "an array of lists": (lambda: of_objects([[number, 1] for number in NUMBERS]), TypeError, "must be hashable"),
    "a number": (lambda: 3, TypeError, "must be a sequence"),
    "a set": (lambda: set(range(ROWS)), TypeError, "must be a sequence"),
    "None": (lambda: [None, *NUMBERS[1:]], ValueError, "must name the user of every row; got None for row 0"),
    "NaN": (lambda: [*NUMBERS[1:], float("nan")], ValueError, "got nan for row 7"),
    "NaN in tuples": (lambda: [("a", float("nan")) for _ in NUMBERS], ValueError, "row 0"),
    "NaN in dataclasses": (lambda: [Key((float("nan"), 1)) for _ in NUMBERS], ValueError, "row 0"),
    "NaN in records": (lambda: np.array([(0, np.nan)] * ROWS, "i4, f4"), ValueError, "row 0"),
    "nothing in arrow": (lambda: pyarrow.array([*NUMBERS[1:], None]), ValueError, "None for row 7"),
    "no time": (lambda: [*NUMBERS[1:], np.datetime64("NaT")], ValueError, "NaT.* for row 7"),
    "pandas' no time": (lambda: [*NUMBERS[1:], pandas.NaT], ValueError, "NaT.* for row 7"),
    "a data frame's missing value": (lambda: [*NUMBERS[1:], pandas.NA], ValueError, "for row 7"),
    "masked": (lambda: np.ma.array(NUMBERS, mask=[0] * 7 + [1]), ValueError, "None for row 7"),
    "a mapping from 1": (lambda: dict(enumerate(NUMBERS, 1)), ValueError, "row 0 is missing"),
    "a mapping with a default": (lambda: defaultdict(int, {0: 1}), ValueError, "row 1 is missing"),
    "a mapping with too many rows": (lambda: dict(enumerate([*NUMBERS, 3])), ValueError, "9 keys"),
    "columns": (lambda: {"user": NUMBERS}, ValueError, "row 0 is missing"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_other_names_are_refused(mistake: str) -> None:
    make, error, text = REFUSED[mistake]
    with pytest.raises(error, match=text):
        Users(make(), ROWS, None, None)
