"""Several views of each example: the mean of their gradients is clipped, as by the loop over single views."""

import copy
import logging

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ghostclip
from ghostclip.clipping import ByLayer, Composed

MAX_NORM, CLASSES, POSITIONS, WORDS = 0.5, 3, 5, 11


class Recurrent(nn.Module):
    """Word vectors, an LSTM, the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = (
            nn.Embedding(WORDS, 4),
            nn.LSTM(4, 6, batch_first=True),
            nn.Linear(6, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(POSITIONS, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


SHAPES = {linear: (POSITIONS,), convolutional: (2, 4, 4), Recurrent: (POSITIONS,)}
# Examples and views; as many views as examples, as positions, and one.
SIZES = [(6, 3), (4, 4), (4, POSITIONS), (POSITIONS, POSITIONS), (5, 1)]


def prepared(make, examples: int, views: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model in float64, and views [B, K, ...] with labels [B]."""
    torch.manual_seed(0)
    model, shape = make().double(), (examples, views, *SHAPES[make])
    inputs = torch.randint(0, WORDS, shape) if make is Recurrent else torch.randn(shape, dtype=torch.float64)
    return model, (inputs, torch.randint(0, CLASSES, (examples,)))


def examples_first(model: nn.Module, batch) -> Tensor:
    inputs, labels = batch
    views = inputs.shape[1]
    rows = F.cross_entropy(model(inputs.flatten(0, 1)), labels.repeat_interleave(views), reduction="none")
    return rows.view(-1, views).mean(1)


def views_first(model: nn.Module, batch) -> Tensor:
    inputs, labels = batch
    views = inputs.shape[1]
    rows = F.cross_entropy(model(inputs.transpose(0, 1).flatten(0, 1)), labels.repeat(views), reduction="none")
    return rows.view(views, -1).mean(0)


ORDERS = [examples_first, views_first]


def by_loop(model: nn.Module, batch) -> oracle.Grads:
    """Gradients of each example by one backward a view, averaged: {name: [B, ...]}."""
    found: dict[str, list[Tensor]] = {}
    for inputs, label in zip(*batch, strict=True):
        single = oracle.per_example_grads(model, lambda outputs, label=label: F.cross_entropy(
            outputs, label[None], reduction="none"), [inputs])  # fmt: skip
        for name, grads in single.items():
            found.setdefault(name, []).append(grads.mean(0))
    return {name: torch.stack(grads) for name, grads in found.items()}


@pytest.mark.parametrize("policy", [MAX_NORM, Composed(ByLayer())], ids=["flat", "by layer"])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("loss_fn", ORDERS)
def test_mean_gradients_are_clipped(loss_fn, second_pass, policy):
    model, batch = prepared(convolutional, 4, 4)
    assert ghostclip.GhostClipper(model, policy, second_pass=second_pass).verify(loss_fn, batch) < 1e-9


def trained(
    model: nn.Module, data: Dataset | DataLoader, size: int, loss_fn, physical: int | None
) -> dict[str, Tensor]:
    """{name: clipped sum over all examples}, read off one step of rate 1 without noise."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = ghostclip.PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), data, batch_size=size, noise_multiplier=0.0,
        clipping=MAX_NORM, max_physical_batch_size=physical,
    )  # fmt: skip
    for batch in engine.batches():
        engine.step(batch, loss_fn)
    return {name: size * (before[name] - p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("loss_fn", ORDERS)
@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize(("examples", "views"), SIZES)
@pytest.mark.one_in(12)
def test_a_step_is_by_mean_gradients(make, examples, views, loss_fn, physical, caplog):
    model, batch = prepared(make, examples, views)
    expected = oracle.clipped_sum(by_loop(model, batch), MAX_NORM)
    with caplog.at_level(logging.WARNING):
        sums = trained(model, TensorDataset(*batch), examples, loss_fn, physical)
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-9, atol=1e-10)
    assert not [record for record in caplog.records if "self-check" in record.message]


class Views(Dataset):
    """Each example with three views of it, drawn when it is loaded."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image = self.inputs[place]
        views = [image.flip(2) if torch.rand(()) < 0.5 else image for _ in range(3)]
        return torch.stack(views), self.labels[place]


def recorded(loss_fn, seen: list):
    """``loss_fn``, and the batch of its last call in ``seen``."""

    def losses(model: nn.Module, batch) -> Tensor:
        seen[:] = [batch]
        return loss_fn(model, batch)

    return losses


def drawn_inside(seen: list):
    """A loss function that draws a flip for each view itself."""

    def losses(model: nn.Module, batch) -> Tensor:
        inputs = batch[0].repeat_interleave(3, 0)
        flipped = torch.rand(len(inputs)) < 0.5
        inputs = torch.where(flipped[:, None, None, None], inputs.flip(3), inputs)
        seen[:] = [(inputs.unflatten(0, (-1, 3)), batch[1])]
        return examples_first(model, seen[0])

    return losses


@pytest.mark.parametrize("inside", [False, True])
def test_views_drawn_at_random_pass_the_self_check(inside, caplog):
    model, (inputs, labels) = prepared(convolutional, 6, 1)
    untrained, seen = copy.deepcopy(model), []
    images = inputs.squeeze(1)
    data = TensorDataset(images, labels) if inside else Views(images, labels)
    loss_fn = drawn_inside(seen) if inside else recorded(examples_first, seen)
    with caplog.at_level(logging.WARNING):
        sums = trained(model, data, 6, loss_fn, None)
    assert not [record for record in caplog.records if "self-check" in record.message]
    (views,) = seen
    for name, total in oracle.clipped_sum(by_loop(untrained, views), MAX_NORM).items():
        torch.testing.assert_close(sums[name], total, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("views", [1, 7])
def test_the_charge_is_that_of_the_sample(views):
    model, batch = prepared(linear, 40, views)
    engine = ghostclip.PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(*batch), batch_size=10, noise_multiplier=1.5
    )
    for logical in engine.batches():
        engine.step(logical, examples_first)
    assert engine.epsilon() == ghostclip.accounting.epsilon(
        noise_multiplier=1.5, sample_rate=10 / 40, steps=engine.steps_taken, delta=1e-5
    )


def test_a_loss_for_each_view_is_refused():
    model, batch = prepared(linear, 6, 3)

    def of_views(model: nn.Module, batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs.flatten(0, 1)), labels.repeat_interleave(3), reduction="none")

    with pytest.raises(ghostclip.errors.LossShapeError, match="one entry for each of the 6 examples"):
        trained(model, TensorDataset(*batch), 6, of_views, None)
