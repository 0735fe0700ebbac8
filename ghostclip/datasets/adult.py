"""Adult (census income): CSV rows turned into numbers by published facts alone.

Categories are those of the data set's public description, and numbers are scaled by the constants below; neither is
taken from the rows, because a mean or a list of observed values would be a statistic of private data.
"""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data, DataError, folder_of, read_text

__all__ = ["FEATURES", "adult"]

MISSING = "?"
LABELS = {"<=50K": 0, ">50K": 1}


def _log_over(constant: float) -> Callable[[float], float]:
    """Logarithmic scaling, for amounts of money that are mostly 0; ``constant`` maps to 1."""
    return lambda value: math.log1p(max(value, 0.0)) / math.log1p(constant)


COLUMNS: dict[str, Callable[[float], float] | tuple[str, ...]] = {
    "age": lambda value: value / 100,
    "workclass": (
        "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked",
    ),
    "fnlwgt": _log_over(1_500_000),
    "education": (
        "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
        "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
    ),
    "education-num": lambda value: value / 16,
    "marital-status": (
        "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
        "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
        "Priv-house-serv", "Protective-serv", "Armed-Forces",
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": _log_over(100_000),
    "capital-loss": _log_over(5_000),
    "hours-per-week": lambda value: value / 100,
    "native-country": (
        "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
        "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
        "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
        "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
        "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
    ),
}  # fmt: skip
FEATURES = sum(len(column) if isinstance(column, tuple) else 1 for column in COLUMNS.values())


def adult(folder: str | Path | None) -> Data:
    """Adult from ``adult.data`` and ``adult.test``: features ``[105]``, label 1 for an income above 50K.

    A category is one-hot, a missing one ("?") all zeros. Raises DataError naming the line and column.
    """
    root = folder_of(folder, "adult.data and adult.test")
    train, test = _read(root / "adult.data"), _read(root / "adult.test")
    return Data("adult", train, test, input_shape=(FEATURES,), classes=2)


def _read(path: Path) -> TensorDataset:
    """One file: features [N, 105] and labels [N]. Blank lines and the test file's comment line are skipped."""
    rows, labels = [], []
    # Lines end in any of the ways that are usual.
    lines = csv.reader(io.StringIO(read_text(path, "the Adult data set as CSV"), newline=None), skipinitialspace=True)
    try:
        for number, cells in enumerate(lines, start=1):
            if not cells or cells[0].startswith("|"):
                continue
            features, label = _encode([cell.strip() for cell in cells], f"{path}, line {number}")
            rows.append(features)
            labels.append(label)
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: {error}; expected the Adult data set as CSV") from None
    if not rows:
        raise DataError(f"{path} holds no rows; expected the Adult data set as CSV")
    return TensorDataset(torch.tensor(rows, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64))


def _encode(cells: list[str], place: str) -> tuple[list[float], int]:
    """Features and label of one row."""
    if len(cells) != len(COLUMNS) + 1:
        raise DataError(f"{place}: expected {len(COLUMNS) + 1} columns; got {len(cells)}")
    features: list[float] = []
    for cell, (name, column) in zip(cells, COLUMNS.items(), strict=False):
        features += (
            _one_hot(cell, name, column, place) if isinstance(column, tuple) else [_number(cell, name, column, place)]
        )
    income = cells[-1].rstrip(".")
    if income not in LABELS:
        raise DataError(f"{place}: expected an income of <=50K or >50K; got {cells[-1]!r}")
    return features, LABELS[income]


def _one_hot(cell: str, name: str, categories: tuple[str, ...], place: str) -> list[float]:
    """1 at the category's place; all zeros when it is missing."""
    if cell != MISSING and cell not in categories:
        raise DataError(f"{place}: {cell!r} is not a published category of {name}; correct it, or write ? for missing")
    return [float(cell == category) for category in categories]


def _number(cell: str, name: str, scale: Callable[[float], float], place: str) -> float:
    """A number scaled by its column's constant."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{place}: expected a finite number for {name}; got {cell!r}")
    return scale(value)
