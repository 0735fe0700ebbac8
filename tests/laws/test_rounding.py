"""One example moves a clipped sum by at most the bound, also where float32 leaves nothing but rounding of its gradient.

Each model here has gradients in which almost all digits cancel: between positions, between the uses of a parameter, or
between two branches of the graph. Every number is chosen by an adversary who knows the code.
"""

import math

import cancelling_models as cancelling
import pytest
import torch
from cancelling_models import MAX_NORM, SHARE, FanOut, TiedHead, Twice, tied_batches, tied_losses
from paired import SECOND_PASSES, STRATEGIES
from torch import Tensor, nn
from torch.nn import functional as F

import ghostclip
from ghostclip.clipping import Automatic, AutoV, Composed, Custom, PerLayer, Whole


def moved(model: nn.Module, losses, batch: tuple[Tensor, ...], clipper: ghostclip.GhostClipper) -> float:
    """How far the last example of ``batch`` moves the clipped sum, over the bound.

    The other examples have no loss, so that their share in the sums, and its rounding, are zero. A power of two that
    the losses are multiplied with makes the last one's norm about ten times the bound.
    """
    found = losses(model, *batch)
    last = torch.zeros_like(found)
    last[-1] = 1.0
    norm = float(clipper.norms(found * last, retain_graph=True)[-1])
    factor = 2.0 ** math.ceil(math.log2(10 * MAX_NORM / norm)) if 0 < norm < math.inf else 1.0
    model.zero_grad()
    clipper.backward(found * (factor * last))
    total = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return total**0.5 / MAX_NORM


def clippers(model: nn.Module):
    """A clipper for every second pass and strategy, then by layer and with weights of another policy."""
    for second_pass in SECOND_PASSES:
        for strategy in STRATEGIES:
            yield ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass, norm_strategy=strategy)
        # Nothing kept, so that every sum is formed in the second backward.
        yield ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass, memory_budget=1)
        yield ghostclip.GhostClipper(model, Automatic(MAX_NORM), second_pass=second_pass)
        yield ghostclip.GhostClipper(model, PerLayer(MAX_NORM), second_pass=second_pass)


def worst(model: nn.Module, losses, batches) -> float:
    batches = list(batches)
    return max(moved(model, losses, batch, clipper) for clipper in clippers(model) for batch in batches)


@pytest.mark.parametrize("positions", [1, 2, *(pytest.param(each, marks=pytest.mark.slow) for each in (9, 70))])
def test_tied_embedding_and_head_that_cancel(positions):
    assert worst(ghostclip.wrap(TiedHead()), tied_losses, tied_batches(positions)) <= SHARE


@pytest.mark.parametrize("positions", [2, 8, 70])
@pytest.mark.parametrize("width", [4, 32])
@pytest.mark.one_in(6)
def test_tied_embedding_and_head_in_each_of_which_positions_cancel(positions, width):
    """Then the cross term cancels by itself, too, where neither use is small beside the sum of both."""

    def batches():
        for left_over in (1e-6, 1e-5, 1e-4, 1e-3):
            torch.manual_seed(0)
            words = torch.randint(50, (3, 1)).expand(-1, positions).contiguous()
            signs = torch.tensor([1.0, -1.0]).repeat(positions // 2)[:, None]
            targets = signs * (F.one_hot(words, 50) + 0.3 * torch.randn(3, 1, 50))
            yield words, 1e6 * (targets + left_over * torch.randn(3, positions, 50))

    assert worst(ghostclip.wrap(TiedHead(width=width)), tied_losses, batches()) <= SHARE


def test_norms_of_tied_uses_that_cancel_are_the_loops():
    model = ghostclip.wrap(TiedHead())
    words, targets = next(tied_batches(9))
    double = ghostclip.GhostClipper(TiedHead().double())
    double.model.load_state_dict(model.state_dict())
    expected = double.per_example_grads(tied_losses(double.model, words, targets.double()))["words.weight"]
    found = ghostclip.GhostClipper(model).norms(tied_losses(model, words, targets))
    torch.testing.assert_close(found.double(), expected.flatten(1).norm(dim=1), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("make", "width", "positions"),
    [
        (lambda: nn.Linear(512, 512), 512, 8),
        (lambda: nn.Linear(64, 64), 64, 70),
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), 64, 8),
        (lambda: Twice(64), 64, 1),
        (lambda: Twice(64), 64, 8),
    ],
)
@pytest.mark.slow
def test_positions_that_cancel(make, width, positions):
    model = ghostclip.wrap(make())
    assert worst(model, cancelling.squared_error, cancelling.positions_batches(model, width, positions)) <= SHARE


@pytest.mark.parametrize(
    "shape", [(8, 8), *(pytest.param(each, marks=pytest.mark.slow) for each in ((20,), (3, 4, 4)))]
)
def test_pixels_that_cancel(shape):
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)]
    model = ghostclip.wrap(kind(4, 6, 3))

    def losses(model, images, targets):
        return F.mse_loss(model(images), targets, reduction="none").flatten(1).mean(1)

    def batches():
        for left_over in (0.0, 1e-7, 1e-5, 1e-3):
            for size in (1.0, 1e4):
                images = size * torch.randn(3, 4, *[1] * len(shape)).expand(-1, -1, *shape).contiguous()
                with torch.no_grad():
                    outputs = model(images)
                errors = torch.randn_like(outputs)
                errors -= errors.flatten(2).mean(2).view(*errors.shape[:2], *[1] * len(shape))
                yield images, outputs - 1e3 * (errors + left_over * torch.randn_like(outputs))

    assert worst(model, losses, batches()) <= SHARE


@pytest.mark.parametrize("factor", [1 - 2**-23, 1 - 1e-6, 1 + 1e-5, 1 - 1e-3])
@pytest.mark.parametrize("kind", ["linear", "lstm"])
@pytest.mark.one_in(8)
def test_branches_that_cancel(factor, kind):
    model = ghostclip.wrap(FanOut(factor, kind))
    assert worst(model, lambda model, inputs: model(inputs), cancelling.fan_out_batches(4)) <= SHARE


UNDERFLOWING = {
    "linear": (lambda: nn.Linear(1000, 1, bias=False), (1000,)),
    "positions": (lambda: nn.Linear(64, 48, bias=False), (8, 64)),
    "pixels": (lambda: nn.Conv2d(16, 24, 3, bias=False), (16, 5, 5)),
    "groups": (lambda: nn.Conv2d(16, 24, 3, groups=2, bias=False), (16, 5, 5)),
    "bag": (lambda: Bag(), (6,)),
    "tied": (lambda: Twice(64), (3, 64)),
    "recurrent": (lambda: Last(), (5, 32)),
}


class Bag(nn.EmbeddingBag):
    """Row r with weight x[r]."""

    def __init__(self) -> None:
        super().__init__(6, 1000, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.arange(6).expand(len(x), 6), per_sample_weights=x)


class Last(nn.GRU):
    def __init__(self) -> None:
        super().__init__(32, 16, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", UNDERFLOWING)
def test_inputs_whose_squares_are_zero_beside_huge_gradients(name: str, strategy: str) -> None:
    """Squares of 3e-23 are zero in float32, and their products with a slope of 1e+18 are not."""
    make, shape = UNDERFLOWING[name]
    for second_pass in SECOND_PASSES:
        for policy in (1e-4, Automatic(1e-4), PerLayer(1e-4)):
            model = ghostclip.wrap(make())
            clipper = ghostclip.GhostClipper(model, policy, norm_strategy=strategy, second_pass=second_pass)
            inputs = torch.full((1, *shape), 2.6e-23)
            clipper.backward(model(inputs).flatten(1).sum(1) * 1.5e18)
            total = sum(float(p.grad.double().square().sum()) for p in model.parameters())
            assert total**0.5 <= 1e-4


POLICIES = {
    "function": lambda: Custom(lambda norms: 1 / norms, 1.0),
    "by norm": lambda: Composed(Whole(), 1.0, AutoV()),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trained", ["all", "biases"])
@pytest.mark.parametrize("margin", [45.0, 50.0, 52.0, 56.0, 70.0, 90.0])
def test_weights_of_gradients_whose_squares_are_zero(policy: str, trained: str, margin: float) -> None:
    """An example that the model is sure of, and right about, has a gradient of e^-margin."""
    model = nn.Sequential(nn.Linear(1000, 1), nn.Unflatten(1, (1, 1)), nn.Linear(1, 1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or "bias" in name)
    nn.init.constant_(model[0].weight, 1e-3)
    nn.init.ones_(model[2].weight)
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), POLICIES[policy]())
    logits = model(torch.full((1, 1000), margin)).flatten()
    clipper.backward(F.softplus(-logits))
    total = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.requires_grad)
    assert 0 < total**0.5 <= clipper.clipping.sensitivity
