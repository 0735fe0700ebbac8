"""Several views of each example: the mean of their gradients is clipped, as by the loop over single views."""

import copy

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import ghostclip

MAX_NORM, CLASSES, EXAMPLES, VIEWS = 0.5, 3, 6, 3


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, CLASSES)).double()


IMAGES, LABELS = torch.randn(EXAMPLES, 2, 4, 4, dtype=torch.float64), torch.randint(0, CLASSES, (EXAMPLES,))


def of_views(model: nn.Module, batch) -> Tensor:
    """A loss for each view, [B * K]."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs.flatten(0, 1)), labels.repeat_interleave(inputs.shape[1]), reduction="none")


def examples_first(model: nn.Module, batch) -> Tensor:
    return of_views(model, batch).view(len(batch[1]), -1).mean(1)


def views_first(model: nn.Module, batch) -> Tensor:
    inputs, labels = batch
    rows = model(inputs.transpose(0, 1).flatten(0, 1))
    return F.cross_entropy(rows, labels.repeat(inputs.shape[1]), reduction="none").view(inputs.shape[1], -1).mean(0)


def drawn_inside(model: nn.Module, batch) -> Tensor:
    """A loss function that draws a flip for each view itself."""
    inputs = batch[0].repeat_interleave(VIEWS, 0)
    flipped = torch.rand(len(inputs)) < 0.5
    inputs = torch.where(flipped[:, None, None, None], inputs.flip(3), inputs)
    return recorded(model, (inputs.unflatten(0, (-1, VIEWS)), batch[1]))


SEEN: list = []


def recorded(model: nn.Module, batch) -> Tensor:
    """The batch of the last call is in ``SEEN``."""
    SEEN[:] = [batch]
    return examples_first(model, batch)


class Views(Dataset):
    """Each example with several views of it, drawn when it is loaded."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        views = [IMAGES[place].flip(2) if torch.rand(()) < 0.5 else IMAGES[place] for _ in range(VIEWS)]
        return torch.stack(views), LABELS[place]


def by_loop(model: nn.Module, batch) -> oracle.Grads:
    """Clipped sums of each example's gradients by one backward a view, averaged."""
    each = oracle.grads_of_single_losses(model, of_views(model, batch))
    return oracle.clipped_sum({name: g.unflatten(0, (EXAMPLES, -1)).mean(1) for name, g in each.items()}, MAX_NORM)


def trained(model: nn.Module, data: Dataset, loss_fn, physical: int | None = None) -> dict[str, Tensor]:
    """{name: clipped sum over all examples}, read off one step of rate 1 without noise."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = ghostclip.PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), data, batch_size=EXAMPLES, noise_multiplier=0.0,
        clipping=MAX_NORM, max_physical_batch_size=physical,
    )  # fmt: skip
    for batch in engine.batches():
        engine.step(batch, loss_fn)
    return {name: EXAMPLES * (before[name] - p.detach()) for name, p in model.named_parameters()}


def assert_mean_gradients(sums, model, batch, caplog) -> None:
    for name, total in by_loop(model, batch).items():
        torch.testing.assert_close(sums[name], total, rtol=1e-9, atol=1e-10)
    assert not [record for record in caplog.records if "self-check" in record.message]


@pytest.mark.parametrize("physical", [None, 4])
@pytest.mark.parametrize("loss_fn", [examples_first, views_first])
@pytest.mark.parametrize("views", [1, 3, 6])
def test_a_step_is_by_mean_gradients(views, loss_fn, physical, caplog):
    model, inputs = convolutional(), torch.randn(EXAMPLES, views, 2, 4, 4, dtype=torch.float64)
    untrained = copy.deepcopy(model)
    sums = trained(model, TensorDataset(inputs, LABELS), loss_fn, physical)
    assert_mean_gradients(sums, untrained, (inputs, LABELS), caplog)


@pytest.mark.parametrize(("data", "loss_fn"), [(TensorDataset(IMAGES, LABELS), drawn_inside), (Views(), recorded)])
def test_views_drawn_at_random_pass_the_self_check(data, loss_fn, caplog):
    model = convolutional()
    untrained = copy.deepcopy(model)
    sums = trained(model, data, loss_fn)
    assert_mean_gradients(sums, untrained, SEEN[0], caplog)
