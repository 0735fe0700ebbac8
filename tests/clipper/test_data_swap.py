"""check with an example batch: examples that meet are found, and where they meet; nothing is left behind."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ghostclip

CLASSES = 3


def class_losses(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def batch(examples=5):
    torch.manual_seed(0)
    return torch.randn(examples, 2, 6, 6), torch.randint(CLASSES, (examples,))


def network(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, CLASSES))


class Centred(nn.Module):
    """Takes the mean of the batch away, which no class of layer gives away."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.Identity()], ids=["GroupNorm", "Identity"])
def test_examples_that_stay_apart_are_no_finding(norm):
    assert ghostclip.check(network(norm), class_losses, batch()) == []


def test_the_first_module_in_which_examples_meet_is_named():
    (finding,) = ghostclip.check(network(Centred()), class_losses, batch())
    assert finding.path == "1"
    assert finding.problem == "Centred: what it gives for example 1 depends on the data of example 0"
    assert "GroupNorm" in finding.remedy


def test_a_layer_that_is_known_to_mix_is_named_once():
    (finding,) = ghostclip.check(network(nn.BatchNorm2d(4)), class_losses, batch())
    assert finding.path == "1"
    assert "BatchNorm2d" in finding.problem


def test_losses_that_meet_after_the_model_are_found():
    (finding,) = ghostclip.check(
        network(nn.Identity()), lambda m, b: class_losses(m, b) - class_losses(m, b).mean(), batch()
    )
    assert (finding.path, finding.problem) == ("", "the loss of example 1 depends on the data of example 0")
    assert 'reduction="none"' in finding.remedy


def test_losses_of_another_shape_are_a_finding():
    (finding,) = ghostclip.check(network(nn.Identity()), lambda m, b: class_losses(m, b).mean(), batch())
    assert finding.problem == "the losses have shape [], not [B]"


def test_only_the_last_example_may_reach_the_others():
    class FromLast(nn.Module):
        def forward(self, x):
            return x + x[-1:].detach()

    (finding,) = ghostclip.check(network(FromLast()), class_losses, batch())
    assert finding.problem.endswith("depends on the data of example 4")


def test_nothing_is_left_behind():
    model, state = network(nn.BatchNorm2d(4)), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, labels = batch()
    kept = inputs.clone()
    torch.set_rng_state(state)
    ghostclip.check(model, class_losses, (inputs, labels))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inputs, kept)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training


class Remembers(nn.Module):
    """Keeps a mean of what it has seen, in place or in a new tensor, and how often it was called."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(2, 6, 6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.training and self.in_place:
            self.mean.copy_(x.mean(0))
        elif self.training:
            self.mean = x.mean(0)
        return x


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_keeps_something_of_the_data_is_found(in_place):
    model = nn.Sequential(Remembers(in_place), *network(nn.Identity()))
    mean, calls = model[0].mean, model[0].calls
    (finding,) = ghostclip.check(model, class_losses, batch())
    assert finding.path == "0"
    assert "buffer 'mean'" in finding.problem
    assert model[0].mean is mean
    assert mean.abs().sum() == calls == 0
    assert ghostclip.check(model.eval(), class_losses, batch()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_without_a_finite_example_are_a_finding(value):
    inputs, labels = batch()
    (finding,) = ghostclip.check(network(nn.Identity()), class_losses, (torch.full_like(inputs, value), labels))
    assert "no example's loss and gradient are finite" in finding.problem
    inputs[1:] = value  # one that is finite is clipped and trained on
    assert ghostclip.check(network(nn.Identity()), class_losses, (inputs, labels)) == []


def test_losses_with_a_gradient_of_their_own_are_checked():
    def penalized(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return class_losses(model, batch) + slope.flatten(1).square().sum(1)

    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    assert ghostclip.check(model, penalized, batch()) == []
    mixing = nn.Sequential(Centred(), *model)
    assert [finding.path for finding in ghostclip.check(mixing, penalized, batch())] == ["0"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_fn": class_losses}, "loss_fn and batch together"),
        ({"batch": batch()}, "loss_fn and batch together"),
        ({"loss_fn": class_losses, "batch": batch(1)}, "at least two examples"),
    ],
)
def test_wrong_arguments_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ghostclip.check(network(nn.Identity()), **given)
