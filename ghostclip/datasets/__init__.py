"""Data sets, each with a train and a test part; nothing is ever downloaded."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ghostclip.datasets.adult import adult
from ghostclip.datasets.base import Data, DataError
from ghostclip.datasets.images import cifar10, digits, images, mnist
from ghostclip.datasets.imdb import imdb
from ghostclip.validate import one_of

__all__ = ["NAMES", "Data", "DataError", "digits", "imdb", "load"]

_IN_FOLDERS: dict[str, Callable[[str | Path | None], Data]] = {
    "mnist": mnist,
    "fashion-mnist": partial(mnist, name="fashion-mnist"),
    "cifar10": cifar10,
    "adult": adult,
    "images": images,
}
NAMES = ("digits", *_IN_FOLDERS, "imdb")


def load(name: str, folder: str | Path | None = None, vocabulary: str | Path | None = None) -> Data:
    """The data set called ``name`` (one of ``NAMES``).

    Args:
        name: ``digits`` is embedded; every other is read from ``folder``.
        folder: where the publisher's files lie.
        vocabulary: for ``imdb`` alone: a file of public words, one a line.

    Raises:
        DataError: a file is missing or malformed; one line that names it and the remedy.
        ValueError: the name is unknown.
        ModuleNotFoundError: Pillow (for images) is not installed.
    """
    one_of(NAMES, data=name)
    if name == "digits":
        return digits()
    if name == "imdb":
        return imdb(folder, vocabulary)
    return _IN_FOLDERS[name](folder)
