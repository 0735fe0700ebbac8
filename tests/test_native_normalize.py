"""Gradients of normalizations' scales in C: the same as by tensor operations, whatever the sizes and how they lie."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from ghostclip.native import normalize
from ghostclip.native.normalize import by_channel, by_feature

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def close(found, expected, dtype):
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4) if dtype == torch.float32 else (
        torch.allclose(found, expected, rtol=1e-11, atol=1e-11)
    )  # fmt: skip


@TYPES
@pytest.mark.parametrize(
    "sizes", [(3, 8, 2, 6, 7), (2, 6, 6, 40), (1, 4, 1, 5000), (5, 34, 17, 33), (0, 4, 2, 36)], ids=str
)
def test_channels(sizes, dtype):
    batch, channels, groups, *places = sizes
    images, grads = torch.randn(2, batch, channels, *places, dtype=dtype) + 2
    by_tensors = partial(F.group_norm, num_groups=groups)
    found = by_channel(images, grads, groups, 1e-5, by_tensors)
    assert close(found, (grads * by_tensors(images)).flatten(2).sum(2), dtype)


@TYPES
@pytest.mark.parametrize("sizes", [(3, 5, 8), (2, 40, 33), (1, 1, 5000), (4, 17, 1), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("lies", ["examples first", "positions first", "features apart"])
@pytest.mark.parametrize("centred", [True, False])
def test_features(sizes, lies, centred, dtype):
    inputs, grads = torch.randn(2, *sizes, dtype=dtype) + 2
    if lies != "examples first":
        turn = (0, 1) if lies == "positions first" else (1, 2)
        inputs, grads = (side.transpose(*turn).contiguous().transpose(*turn) for side in (inputs, grads))
    shape = inputs.shape[2:]
    by_tensors = partial(F.layer_norm if centred else F.rms_norm, normalized_shape=shape, eps=1e-5)
    found = by_feature(inputs, grads, 1, centred, 1e-5, by_tensors)
    assert close(found, (grads * by_tensors(inputs)).sum(1), dtype)


def test_far_from_zero_no_digits_are_lost():
    """The variance of numbers around 10,000 is found as torch finds it."""
    images, grads = torch.randn(2, 2, 4, 50, 60)
    images += 1e4
    by_tensors = partial(F.group_norm, num_groups=2)
    exact = (grads.double() * by_tensors(images.double())).flatten(2).sum(2)
    found = by_channel(images, grads, 2, 1e-5, by_tensors)
    assert (found - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_example_stays_by_itself(bad):
    images, grads = torch.randn(2, 3, 4, 40)
    by_tensors = partial(F.group_norm, num_groups=2)
    clean = by_channel(images, grads, 2, 1e-5, by_tensors)
    images[1, 0, 5] = bad
    found = by_channel(images, grads, 2, 1e-5, by_tensors)
    assert not found[1, :2].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(normalize, "library", lambda name: None)
    inputs, grads = torch.randn(2, 3, 5, 40)
    by_tensors = partial(F.layer_norm, normalized_shape=(40,))
    assert torch.equal(by_feature(inputs, grads, 1, True, 1e-5, by_tensors), (grads * by_tensors(inputs)).sum(1))
