"""MNIST and Fashion-MNIST: the IDX files of their publishers, gzipped or not."""

import math
import struct
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data, DataError, folder_of, label_tensor, read_bytes

__all__ = ["fashion_mnist", "mnist", "read_idx"]

CLASSES = 10
UNSIGNED_BYTE = 0x08


def mnist(folder: str | Path | None) -> Data:
    """MNIST from ``train-images-idx3-ubyte`` and its three siblings, each with or without ``.gz``.

    Images ``[1, 28, 28]`` in [0, 1]. Raises DataError when a file is missing, damaged, or of another format.
    """
    return _four_files("mnist", folder)


def fashion_mnist(folder: str | Path | None) -> Data:
    """Fashion-MNIST, whose files have the names and the format of MNIST's. Shapes and errors as for ``mnist``."""
    return _four_files("fashion-mnist", folder)


def _four_files(name: str, folder: str | Path | None) -> Data:
    """Both splits of an MNIST-like folder."""
    root = folder_of(folder, "train-images-idx3-ubyte, train-labels-idx1-ubyte and the t10k files (or their .gz)")
    train, test = _split(root, "train"), _split(root, "t10k")
    shape = tuple(train.tensors[0].shape[1:])
    if tuple(test.tensors[0].shape[1:]) != shape:
        raise DataError(
            f"{root}: test images have shape {list(test.tensors[0].shape[1:])}, training images {list(shape)}; "
            "the four files must be of one data set"
        )
    return Data(name, train, test, input_shape=shape, classes=CLASSES)


def _split(root: Path, split: str) -> TensorDataset:
    """One split: images [N, 1, height, width] in [0, 1] and labels [N]."""
    image_file, label_file = _find(root, f"{split}-images", 3), _find(root, f"{split}-labels", 1)
    (count, height, width), pixels = read_idx(image_file, dimensions=3)
    (label_count,), raw_labels = read_idx(label_file, dimensions=1)
    if count != label_count:
        raise DataError(f"{label_file} holds {label_count} labels, {image_file.name} {count} images; expected as many")
    if 0 in (count, height, width):
        raise DataError(f"{image_file} holds no images (shape {[count, height, width]}); download it again")
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(count, 1, height, width)
    return TensorDataset(images.float() / 255, label_tensor(raw_labels, CLASSES, label_file))


def _find(root: Path, stem: str, dimensions: int) -> Path:
    """The file as published, unpacked or not, or as common mirrors rename it (a dot for the second dash)."""
    published = f"{stem}-idx{dimensions}-ubyte"
    renamed = f"{stem}.idx{dimensions}-ubyte"
    for name in (published, published + ".gz", renamed, renamed + ".gz"):
        if (root / name).is_file():
            return root / name
    raise DataError(f"{root / published} is missing (nor is there {published}.gz); put the publisher's file there")


def read_idx(path: Path, dimensions: int) -> tuple[tuple[int, ...], bytes]:
    """The shape and the bytes of an IDX file of unsigned bytes.

    Layout: two zero bytes, a type byte (0x08), the number of dimensions, each size as a big-endian uint32, the data.
    Raises DataError when the header or the length says otherwise.
    """
    raw = read_bytes(path, f"an IDX file of {dimensions} dimension(s)")
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if raw[:4] != magic:
        raise DataError(
            f"{path} starts with {raw[:4].hex() or 'nothing'}; expected {magic.hex()}, an IDX file of unsigned "
            f"bytes with {dimensions} dimension(s): is it the publisher's file?"
        )
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise DataError(f"{path} ends inside its header ({len(raw)} bytes); download it again")
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise DataError(
            f"{path} holds {len(raw) - start} bytes of data; its header {list(shape)} promises {math.prod(shape)}: "
            "download it again"
        )
    return shape, raw[start:]
