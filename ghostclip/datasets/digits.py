"""The handwritten digits that scikit-learn ships: 1,797 real images of 8x8 pixels, nothing to download."""

import torch
from torch.utils.data import TensorDataset

from ghostclip.datasets.base import Data

__all__ = ["digits"]

TEST_EVERY = 5  # image 0, 5, 10, ... is a test image: 360 of them, which leaves 1,437 to train on
LARGEST_PIXEL = 16.0


def digits() -> Data:
    """The embedded digits, images ``[1, 8, 8]`` in [0, 1], split by a fixed rule: every fifth image is for testing.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI); needs scikit-learn.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / LARGEST_PIXEL
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    testing = torch.arange(len(labels)) % TEST_EVERY == 0
    train = TensorDataset(images[~testing], labels[~testing])
    test = TensorDataset(images[testing], labels[testing])
    return Data("digits", train, test, input_shape=(1, 8, 8), classes=10)
