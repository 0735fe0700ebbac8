"""Several views of each example: the mean of their gradients is clipped, as by the loop over single views."""

import copy

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import ghostclip

MAX_NORM, CLASSES, EXAMPLES, VIEWS = 0.5, 3, 6, 3
IMAGES, LABELS = torch.randn(EXAMPLES, 2, 4, 4, dtype=torch.float64), torch.randint(0, CLASSES, (EXAMPLES,))


def of_views(model, batch):
    """A loss for each view, [B * K]."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs.flatten(0, 1)), labels.repeat_interleave(inputs.shape[1]), reduction="none")


SEEN = []


def examples_first(model, batch):
    """The batch of the last call is in ``SEEN``."""
    SEEN[:] = [batch]
    return of_views(model, batch).view(len(batch[1]), -1).mean(1)


def views_first(model, batch):
    inputs, labels = batch
    rows = model(inputs.transpose(0, 1).flatten(0, 1))
    return F.cross_entropy(rows, labels.repeat(inputs.shape[1]), reduction="none").view(inputs.shape[1], -1).mean(0)


def flipped(images):
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)


def drawn_inside(model, batch):
    """A loss function that draws a flip for each view itself."""
    views = flipped(batch[0].repeat_interleave(VIEWS, 0))
    return examples_first(model, (views.unflatten(0, (-1, VIEWS)), batch[1]))


class Views(Dataset):
    """Each example with several views of it, drawn when it is loaded."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, place):
        return flipped(IMAGES[place].expand(VIEWS, -1, -1, -1)), LABELS[place]


def with_views(count):
    return TensorDataset(torch.randn(EXAMPLES, count, 2, 4, 4, dtype=torch.float64), LABELS)


@pytest.mark.parametrize(
    ("data", "loss_fn", "physical"),
    [
        (with_views(1), examples_first, None),
        (with_views(3), examples_first, 4),
        (with_views(EXAMPLES), examples_first, None),
        (with_views(3), views_first, None),
        (with_views(EXAMPLES), views_first, 4),
        (TensorDataset(IMAGES, LABELS), drawn_inside, None),
        (Views(), examples_first, None),
    ],
)
def test_a_step_is_by_mean_gradients(data, loss_fn, physical, caplog):
    """The clipped sum is read off one step of rate 1 without noise."""
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(16, CLASSES)).double()
    untrained = copy.deepcopy(model)
    engine = ghostclip.PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), data, batch_size=EXAMPLES, noise_multiplier=0.0,
        clipping=MAX_NORM, max_physical_batch_size=physical,
    )  # fmt: skip
    for batch in engine.batches():
        engine.step(batch, loss_fn)
    inputs, labels = SEEN[0] if loss_fn is drawn_inside or isinstance(data, Views) else data.tensors
    grads = oracle.grads_of_single_losses(untrained, of_views(untrained, (inputs, labels)))
    grads = {name: grad.unflatten(0, (EXAMPLES, -1)).mean(1) for name, grad in grads.items()}
    for name, total in oracle.clipped_sum(grads, MAX_NORM).items():
        moved = untrained.get_parameter(name) - model.get_parameter(name)
        torch.testing.assert_close(EXAMPLES * moved, total, rtol=1e-9, atol=1e-10)
    assert not [record for record in caplog.records if "self-check" in record.message]
