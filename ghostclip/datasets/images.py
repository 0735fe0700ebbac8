"""Images: embedded digits, files of MNIST, Fashion-MNIST and CIFAR-10, and folders of images.

The digits, ``digits.npz``, are the test part of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits,
UCI Machine Learning Repository (1998), https://doi.org/10.24432/C50P49, under CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/), in the order of scikit-learn's ``load_digits``. Pixels and labels are
unchanged, as unsigned bytes in a compressed file.
"""

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data, DataError, folder_of, read_bytes
from ghostclip.validate import positive_int

__all__ = ["cifar10", "digits", "images", "mnist"]

TEST_EVERY = 5  # image 0, 5, 10, ... of the digits is a test image: 360 of them, which leaves 1,437 to train on
LARGEST_PIXEL = 16.0  # of the digits
DIGITS = Path(__file__).with_name("digits.npz")  # images [1797, 8, 8] and labels [1797]
UNSIGNED_BYTE = 0x08
CIFAR_SHAPE = (3, 32, 32)
RECORD = 1 + math.prod(CIFAR_SHAPE)
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
LAYOUT = "train/<class>/ and test/<class>/, with one image file per example"


def digits() -> Data:
    """The embedded digits, images ``[1, 8, 8]`` in [0, 1], split by a fixed rule: every fifth image is for testing.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI), CC BY 4.0.
    """
    with np.load(DIGITS) as file:
        images = torch.tensor(file["images"], dtype=torch.float32).unsqueeze(1) / LARGEST_PIXEL
        labels = torch.tensor(file["labels"], dtype=torch.int64)
    testing = torch.arange(len(labels)) % TEST_EVERY == 0
    train = TensorDataset(images[~testing], labels[~testing])
    test = TensorDataset(images[testing], labels[testing])
    return Data("digits", train, test, input_shape=(1, 8, 8), classes=10)


def mnist(folder: str | Path | None, name: str = "mnist") -> Data:
    """MNIST from ``train-images-idx3-ubyte`` and its three siblings, each with or without ``.gz``.

    Images ``[1, 28, 28]`` in [0, 1]. Raises DataError when a file is missing, damaged, or of another format.

    Args:
        folder: that holds the files.
        name: "mnist", or "fashion-mnist", whose files have the same names and format.
    """
    root = folder_of(folder, "train-images-idx3-ubyte, train-labels-idx1-ubyte and the t10k files (or their .gz)")
    train, test = _idx_split(root, "train"), _idx_split(root, "t10k")
    shape, other = (tuple(split.tensors[0].shape[1:]) for split in (train, test))
    if other != shape:
        raise DataError(
            f"{root}: test images have shape {list(other)}, training images {list(shape)}; "
            "the four files must be of one data set"
        )
    return Data(name, train, test, input_shape=shape, classes=10)


def _idx_split(root: Path, split: str) -> TensorDataset:
    """One split: images [N, 1, height, width] in [0, 1] and labels [N]."""
    image_file, label_file = _find(root, f"{split}-images", 3), _find(root, f"{split}-labels", 1)
    (count, height, width), pixels = _read_idx(image_file, dimensions=3)
    (label_count,), raw_labels = _read_idx(label_file, dimensions=1)
    if count != label_count:
        raise DataError(f"{label_file} holds {label_count} labels, {image_file.name} {count} images; expected as many")
    if 0 in (count, height, width):
        raise DataError(f"{image_file} holds no images (shape {[count, height, width]}); download it again")
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(count, 1, height, width)
    return TensorDataset(images.float() / 255, _ten_labels(raw_labels, label_file))


def _find(root: Path, stem: str, dimensions: int) -> Path:
    """The file as published, unpacked or not, or as common mirrors rename it (a dot for the second dash)."""
    published = f"{stem}-idx{dimensions}-ubyte"
    renamed = f"{stem}.idx{dimensions}-ubyte"
    for name in (published, published + ".gz", renamed, renamed + ".gz"):
        if (root / name).is_file():
            return root / name
    raise DataError(f"{root / published} is missing (nor is there {published}.gz); put the publisher's file there")


def _read_idx(path: Path, dimensions: int) -> tuple[tuple[int, ...], bytes]:
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


def cifar10(folder: str | Path | None) -> Data:
    """CIFAR-10 from ``data_batch_1.bin`` .. ``data_batch_5.bin`` and ``test_batch.bin`` (or the folder they unpack to).

    Images ``[3, 32, 32]`` in [0, 1]. Raises DataError when a file is missing, damaged, or of the Python version.
    """
    expected = "data_batch_1.bin .. data_batch_5.bin and test_batch.bin (CIFAR-10 binary version)"
    root = folder_of(folder, expected, "cifar-10-batches-bin")
    *training, test = (_read_batch(root / name) for name in CIFAR_FILES)
    train = TensorDataset(*(torch.cat(parts) for parts in zip(*training, strict=True)))
    return Data("cifar10", train, TensorDataset(*test), input_shape=CIFAR_SHAPE, classes=10)


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """One file's images [N, 3, 32, 32] in [0, 1] and labels [N]."""
    if not path.exists() and path.with_suffix("").is_file():
        raise DataError(
            f"{path} is missing, but {path.stem} is there: that is the Python version; get the binary version"
        )
    raw = read_bytes(path, "a batch of CIFAR-10, binary version")
    if not raw or len(raw) % RECORD:
        raise DataError(f"{path} has {len(raw)} bytes; expected a positive multiple of {RECORD}: download it again")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, RECORD)
    labels = _ten_labels(records[:, 0].numpy().tobytes(), path)
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE).float() / 255, labels


def _ten_labels(labels: bytes, path: Path) -> Tensor:
    """Labels ``[N]`` int64 from one byte each, checked to be in 0 .. 9."""
    tensor = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    if len(tensor) and int(tensor.max()) > 9:
        raise DataError(
            f"{path}: label {int(tensor.max())} of example {int(tensor.argmax())} is not in 0..9; "
            "the file is damaged or of another format"
        )
    return tensor


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
    train, test = (_folder_split(folder_of(root / split, LAYOUT), names, size) for split in ("train", "test"))
    return Data("images", train, test, input_shape=(3, size, size), classes=len(names))


def _folder_split(folder: Path, names: list[str], size: int) -> TensorDataset:
    """One split: images [N, 3, size, size] and labels [N]."""
    strangers = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name not in names)
    if strangers:
        raise DataError(f"{folder / strangers[0]} is a class that train/ does not have; expected {', '.join(names)}")
    pixels, labels = [], []
    for label, name in enumerate(names):
        files = sorted(file for file in (folder / name).glob("*") if file.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(f"{folder / name} holds no image files; expected one per example")
        pixels += [_read_image(file, size) for file in files]
        labels += [label] * len(files)
    return TensorDataset(torch.stack(pixels).float() / 255, torch.tensor(labels, dtype=torch.int64))


def _read_image(path: Path, size: int) -> Tensor:
    """One image as uint8 [3, size, size]."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be read as an image ({why}); replace or remove it") from None
