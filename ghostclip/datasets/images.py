"""Folders of images: ``train/<class>/*`` and ``test/<class>/*``, in any format Pillow reads."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data, DataError, folder_of
from ghostclip.validate import positive_int

__all__ = ["images"]

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
LAYOUT = "train/<class>/ and test/<class>/, with one image file per example"


def images(folder: str | Path | None, size: int = 32) -> Data:
    """Images of a folder, in memory, as RGB ``[3, size, size]`` in [0, 1].

    Classes are the names of the folders in ``train``, sorted; they are taken to be public. Every file is read before
    training starts, so a damaged one raises DataError at once. Needs Pillow.
    """
    positive_int(size=size)
    root = folder_of(folder, LAYOUT)
    names = sorted(entry.name for entry in folder_of(root / "train", LAYOUT).iterdir() if entry.is_dir())
    if len(names) < 2:
        raise DataError(f"{root / 'train'} holds {len(names)} class folder(s); expected two or more, one per class")
    train, test = (_split(folder_of(root / split, LAYOUT), names, size) for split in ("train", "test"))
    return Data("images", train, test, input_shape=(3, size, size), classes=len(names))


def _split(folder: Path, names: list[str], size: int) -> TensorDataset:
    """One split: images [N, 3, size, size] and labels [N]."""
    strangers = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name not in names)
    if strangers:
        raise DataError(f"{folder / strangers[0]} is a class that train/ does not have; expected {', '.join(names)}")
    pixels, labels = [], []
    for label, name in enumerate(names):
        files = sorted(file for file in (folder / name).glob("*") if file.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(f"{folder / name} holds no image files; expected one per example")
        pixels += [_read(file, size) for file in files]
        labels += [label] * len(files)
    return TensorDataset(torch.stack(pixels).float() / 255, torch.tensor(labels, dtype=torch.int64))


def _read(path: Path, size: int) -> torch.Tensor:
    """One image as uint8 [3, size, size]."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be read as an image ({why}); replace or remove it") from None
