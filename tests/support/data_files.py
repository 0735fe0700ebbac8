"""Small files in the format of each data set, and what was written into them."""

import gzip
import struct
from pathlib import Path

import numpy as np
from torch.utils.data import TensorDataset

from ghostclip import datasets
from ghostclip.datasets.images import RECORD

ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, {income}"
)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, compressed: bool = False) -> np.ndarray:
    """Four files of three training and two test images of 2x4 pixels; returns the training images."""
    images = np.arange(24, dtype=np.uint8).reshape(3, 2, 4) * 10
    for name, array in {
        "train-images-idx3": images,
        "train-labels-idx1": np.array([7, 0, 9], np.uint8),
        "t10k-images-idx3": images[:2],
        "t10k-labels-idx1": np.array([1, 2], np.uint8),
    }.items():
        raw = idx_bytes(array)
        path = folder / (f"{name}-ubyte" + (".gz" if compressed else ""))
        path.write_bytes(gzip.compress(raw) if compressed else raw)
    return images


def write_cifar(folder: Path) -> np.ndarray:
    """Six files of two records each; returns one file's records."""
    records = np.random.default_rng(0).integers(0, 256, (2, RECORD), dtype=np.uint8)
    records[:, 0] = (3, 8)
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        (folder / name).write_bytes(records.tobytes())
    return records


def write_imdb(folder: Path) -> Path:
    """One review per class and split; returns the vocabulary file."""
    for split in ("train", "test"):
        for label, text in {"neg": "Bad,<br />BAD film!", "pos": "a don't-miss"}.items():
            (folder / split / label).mkdir(parents=True)
            (folder / split / label / "0_1.txt").write_text(text)
    (folder / "words.txt").write_text("film\nbad\ndon't\n")
    return folder / "words.txt"


def write_adult(folder: Path) -> None:
    """Two training rows and one test row, with the test file's comment line and closing dots."""
    unknown = ADULT_ROW.replace("State-gov", "?").format(income=">50K")
    (folder / "adult.data").write_text(ADULT_ROW.format(income="<=50K") + "\n" + unknown + "\n\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + ADULT_ROW.format(income=">50K.") + "\n")


def write_images(folder: Path) -> None:
    """One red and one blue image per split."""
    from PIL import Image

    for split in ("train", "test"):
        for name, colour in {"blue": (0, 0, 255), "red": (255, 0, 0)}.items():
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (9, 5), colour).save(folder / split / name / "1.png")


def digits(count: int) -> datasets.Data:
    """The first digits of the embedded data set, for training and for tests."""
    data = datasets.digits()
    part = TensorDataset(*(tensor[:count] for tensor in data.train.tensors))
    return datasets.Data("digits", part, part, data.input_shape, data.classes)
