"""CIFAR-10, binary version: records of one label byte and 3,072 pixel bytes."""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data, DataError, folder_of, label_tensor, read_bytes

__all__ = ["cifar10"]

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
UNPACKED = "cifar-10-batches-bin"


def cifar10(folder: str | Path | None) -> Data:
    """CIFAR-10 from ``data_batch_1.bin`` .. ``data_batch_5.bin`` and ``test_batch.bin`` (or the folder they unpack to).

    Images ``[3, 32, 32]`` in [0, 1]. Raises DataError when a file is missing, damaged, or of the Python version.
    """
    expected = "data_batch_1.bin .. data_batch_5.bin and test_batch.bin (CIFAR-10 binary version)"
    root = folder_of(folder, expected, UNPACKED)
    parts = [_read_batch(root / name) for name in TRAINING_FILES]
    train = TensorDataset(torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
    test = TensorDataset(*_read_batch(root / "test_batch.bin"))
    return Data("cifar10", train, test, input_shape=SHAPE, classes=CLASSES)


def _read_batch(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """One file's images [N, 3, 32, 32] in [0, 1] and labels [N]."""
    if not path.exists() and path.with_suffix("").is_file():
        raise DataError(
            f"{path} is missing, but {path.stem} is there: that is the Python version; get the binary version"
        )
    raw = read_bytes(path, "a batch of CIFAR-10, binary version")
    if not raw or len(raw) % RECORD:
        raise DataError(f"{path} has {len(raw)} bytes; expected a positive multiple of {RECORD}: download it again")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, RECORD)
    labels = label_tensor(records[:, 0].numpy().tobytes(), CLASSES, path)
    return records[:, 1:].reshape(-1, *SHAPE).float() / 255, labels
