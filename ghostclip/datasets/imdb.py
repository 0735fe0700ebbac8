"""IMDB reviews: folders of texts, read with a vocabulary that the user supplies.

The vocabulary is never built from the reviews. Which words occur in private texts is a fact about those texts, so a
list made from them would have to be released through a mechanism of its own and charged to the privacy budget. (The
``imdb.vocab`` that comes with the reviews is such a list.) Take a public one, such as the words of published
embeddings.
"""

import re
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data, DataError, folder_of, read_text
from ghostclip.validate import positive_int

__all__ = ["imdb", "read_vocabulary"]

PADDING, UNKNOWN = 0, 1  # ids below the first word's
LABELS = {"neg": 0, "pos": 1}
UNPACKED = "aclImdb"
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LINE_BREAK = re.compile(r"<br\s*/?>")


def imdb(folder: str | Path | None, vocabulary: str | Path | None, positions: int = 256) -> Data:
    """IMDB from ``train/pos/*.txt``, ``train/neg/*.txt``, ``test/pos/*.txt`` and ``test/neg/*.txt``.

    Args:
        folder: what holds ``train`` and ``test`` (or the folder ``aclImdb`` that does).
        vocabulary: a file of public words, one a line; line i (from 0) gets id i + 2; id 0 pads, id 1 is
            any other word.
        positions: token ids kept of each review; shorter ones are padded.

    Returns:
        Inputs ``[positions]`` int64; label 1 is a positive review.

    Raises:
        DataError: no vocabulary was given, or a file or folder is missing or malformed.
    """
    positive_int(positions=positions)
    root = folder_of(folder, "train/pos, train/neg, test/pos and test/neg", UNPACKED)
    if vocabulary is None:
        raise DataError(
            "imdb needs a vocabulary file of public words, one a line; it is not built from the reviews, because a "
            "word list made from private texts would have to be charged to the privacy budget"
        )
    ids = read_vocabulary(Path(vocabulary))
    train, test = (_split(root / split, ids, positions) for split in ("train", "test"))
    return Data("imdb", train, test, input_shape=(positions,), classes=2, vocabulary=len(ids) + 2)


def read_vocabulary(path: Path) -> dict[str, int]:
    """The id of each word of a file with one word a line: line number (from 0) + 2. DataError when it is not that."""
    ids: dict[str, int] = {}
    text = read_text(path, "a vocabulary, one word a line")
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        word = line.strip()
        if not word or len(word.split()) > 1:
            raise DataError(f"{path}, line {number}: expected one word; got {line[:40]!r}")
        if word in ids:
            raise DataError(f"{path}, line {number}: {word!r} was already on line {ids[word] - 1}; keep one of the two")
        ids[word] = len(ids) + 2
    if not ids:
        raise DataError(f"{path} is empty; expected a vocabulary, one word a line")
    return ids


def _split(folder: Path, ids: dict[str, int], positions: int) -> TensorDataset:
    """One split: token ids [N, positions] and labels [N]."""
    rows, labels = [], []
    for name, label in LABELS.items():
        files = sorted(folder_of(folder / name, "one .txt file per review").glob("*.txt"))
        if not files:
            raise DataError(f"{folder / name} holds no .txt files; expected one per review")
        rows += [_encode(read_text(file, "a review"), ids, positions) for file in files]
        labels += [label] * len(files)
    return TensorDataset(torch.tensor(rows, dtype=torch.int64), torch.tensor(labels, dtype=torch.int64))


def _encode(text: str, ids: dict[str, int], positions: int) -> list[int]:
    """Token ids of a review, padded; without any word it counts as one unknown word, so no row is all padding."""
    words = _WORD.findall(_LINE_BREAK.sub(" ", text.lower()))[:positions]
    tokens = [ids.get(word, UNKNOWN) for word in words] or [UNKNOWN]
    return tokens + [PADDING] * (positions - len(tokens))
