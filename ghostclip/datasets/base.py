"""What every loader returns, how it fails, and the reading of files they share."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import TensorDataset

from ghostclip.errors import GhostClipError

__all__ = ["Data", "DataError", "folder_of", "read_bytes", "read_text"]


class DataError(GhostClipError, ValueError):
    """A data file is missing or malformed. One line: the file, what was expected, what came, what to do."""


@dataclass(frozen=True)
class Data:
    """A classification data set, split by its publisher (or by a fixed public rule), never by its contents.

    Attributes:
        name: as the command line spells it.
        train: pairs (input, label); the private part. Labels are int64 in ``0 .. classes - 1``.
        test: the same for the test split.
        input_shape: shape of one input: ``(channels, height, width)``, ``(features,)`` or ``(positions,)``.
        classes: number of labels.
        vocabulary: number of token ids (padding and unknown included) for text, None for anything else.
    """

    name: str
    train: TensorDataset
    test: TensorDataset
    input_shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None


def folder_of(folder: str | Path | None, expected: str, unpacked: str = "") -> Path:
    """``folder`` as an existing directory, or the one called ``unpacked`` in it, where that is there.

    Raises:
        DataError: it is none; the message says which files it should hold.
    """
    if folder is None:
        raise DataError(f"no data folder was given; give the folder that holds {expected}")
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; give the folder that holds {expected}")
    return path / unpacked if (path / unpacked).is_dir() else path


def read_bytes(path: Path, expected: str) -> bytes:
    """The bytes of ``path``, decompressed where the name ends in .gz; every failure is a DataError of one line."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except FileNotFoundError:
        raise DataError(f"{path} is missing; expected {expected} there") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); expected {expected}: download it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); expected {expected}") from None


def read_text(path: Path, expected: str) -> str:
    """The UTF-8 text of ``path``, without a byte order mark, or a DataError of one line."""
    try:
        return read_bytes(path, expected).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); expected {expected}") from None
