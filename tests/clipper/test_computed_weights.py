"""Weights computed from other parameters (parametrizations, pruning, hooks, functions): reached through the graph."""

import warnings

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from case_types import project
from comparing import assert_close, assert_dicts_close, assert_exact, batch, gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

import ghostclip

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
positions = pytest.mark.parametrize("shape", [(4, 6, 5), (4, 5)], ids=["positions", "one position"])


class Curved(nn.Module):
    """Entry by entry, with the parameter used twice."""

    def forward(self, weight):
        return 0.3 * torch.exp(weight) - torch.tanh(weight)


class Rounded(nn.Module):
    """A straight-through estimator by detach."""

    def forward(self, weight):
        return weight + (weight.round() - weight).detach()


class RoundedByFunction(nn.Module):
    """One by a Function of its own."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.round()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def forward(self, weight):
        return self.Round.apply(weight)


class Masked(nn.Module):
    """A mask of one entry for each of the weight's, or for each column."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mask", torch.linspace(0, 1, 40).view(8, 5)[: shape[0]])

    def forward(self, weight):
        return weight * self.mask


class Divided(nn.Module):
    """Over its largest row's length, of the weight itself or of a curve of it."""

    def __init__(self, change=lambda weight: weight):
        super().__init__()
        self.change = change

    def forward(self, weight):
        return self.change(weight) / weight.square().sum(1).sqrt().amax()


class LowRank(nn.Module):
    """LoRA."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(8, 2))

    def forward(self, weight):
        return weight + self.up @ self.down


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def parametrized(layer, parametrization, name="weight"):
    register_parametrization(layer, name, parametrization)
    return layer


def pruned(layer, *names):
    for name in names or ("weight",):
        prune.random_unstructured(layer, name, 0.5)
    return layer


def low_rank():
    layer = nn.Linear(5, 8)
    layer.weight.requires_grad_(False)
    return parametrized(layer, LowRank())


def convolution(change, **options):
    return nn.Sequential(change(nn.Conv1d(6, 4, 2, **options)), nn.Flatten(), nn.Linear(16, 8))


LINEAR = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 8)),
    "weight_norm by hooks": lambda: nn.utils.weight_norm(nn.Linear(5, 8)),
    "weight_norm of columns": lambda: parametrizations.weight_norm(nn.Linear(5, 8), dim=1),
    "weight_norm of the whole": lambda: parametrizations.weight_norm(nn.Linear(5, 8), dim=None),
    "weight_norm of a bias": lambda: parametrizations.weight_norm(nn.Linear(5, 8), "bias"),
    "weight_norm of both": lambda: parametrizations.weight_norm(parametrizations.weight_norm(nn.Linear(5, 8)), "bias"),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 8)),
    "spectral_norm of columns": lambda: parametrizations.spectral_norm(nn.Linear(5, 8), dim=1, n_power_iterations=3),
    "spectral_norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(5, 8)),
    "spectral_norm of both": lambda: parametrizations.spectral_norm(parametrizations.spectral_norm(nn.Linear(5, 8))),
    "spectral_norm, called twice": lambda: nn.Sequential(
        Twice(parametrizations.spectral_norm(nn.Linear(5, 5))), nn.Linear(5, 8)
    ),
    "quotient": lambda: parametrized(nn.Linear(5, 8), Divided()),
    "quotient of a curve": lambda: parametrized(nn.Linear(5, 8), Divided(torch.exp)),
    "masked columns": lambda: parametrized(nn.Linear(5, 8), Masked(1)),
    "masked after a curve": lambda: parametrized(parametrized(nn.Linear(5, 8), Curved()), Masked(8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 8)),
    "orthogonal by cayley": lambda: parametrizations.orthogonal(nn.Linear(5, 8), orthogonal_map="cayley"),
    "pruned": lambda: pruned(nn.Linear(5, 8)),
    "pruned, both": lambda: pruned(nn.Linear(5, 8), "weight", "bias"),
    "straight-through": lambda: parametrized(nn.Linear(5, 8), Rounded()),
    "straight-through by a Function": lambda: parametrized(nn.Linear(5, 8), RoundedByFunction()),
    "entry by entry": lambda: parametrized(nn.Linear(5, 8), Curved()),
    "low rank": low_rank,
    "two, one after the other": lambda: parametrized(parametrizations.weight_norm(nn.Linear(5, 8)), Curved()),
    "called twice": lambda: nn.Sequential(Twice(parametrizations.weight_norm(nn.Linear(5, 5))), nn.Linear(5, 8)),
    "pruned, called twice": lambda: nn.Sequential(Twice(pruned(nn.Linear(5, 5))), nn.Linear(5, 8)),
    "a normalization": lambda: nn.Sequential(parametrized(nn.LayerNorm(5), Curved()), nn.Linear(5, 8)),
}
# A constant inside, and rows of the weight that the batch goes into: the search takes these for the examples'.
LINEAR_CASES = list(LINEAR)
POSITIONS = {
    "weight_norm of a convolution": lambda: convolution(parametrizations.weight_norm),
    "weight_norm in groups": lambda: convolution(parametrizations.weight_norm, groups=2),
    "spectral_norm of a convolution": lambda: convolution(parametrizations.spectral_norm),
    "spectral_norm in groups": lambda: convolution(parametrizations.spectral_norm, groups=2),
    "pruned convolution": lambda: convolution(pruned),
    "pruned in groups": lambda: convolution(pruned, groups=2),
    "straight-through convolution": lambda: convolution(lambda layer: parametrized(layer, Rounded())),
}


def built(layer, dtype=torch.float64):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(layer(), nn.Tanh(), nn.Linear(8, 2)).to(dtype).eval()
    for part in model.modules():  # what hooks left there can't be copied, and is of the old type
        for name in ("weight", "bias"):
            if isinstance(value := vars(part).get(name), torch.Tensor):
                part.__dict__[name] = value.detach().to(dtype)
    return model


@every_pass
@positions
@pytest.mark.parametrize("name", LINEAR_CASES)
@pytest.mark.one_in(3)
def test_linear_layers(name, shape, second_pass):
    clipper = assert_exact(built(LINEAR[name]), batch(*shape), second_pass=second_pass)
    assert any(row.rule.endswith("(computed weight)") for row in clipper.explain())


@every_pass
@pytest.mark.parametrize("name", POSITIONS)
def test_convolutions(name, second_pass):
    clipper = assert_exact(built(POSITIONS[name]), batch(4, 6, 5), second_pass=second_pass)
    assert any(row.rule.endswith("(computed weight)") for row in clipper.explain())


@every_pass
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "pruned", "low rank"])
def test_rows_that_the_model_folded_into_the_batch(name, second_pass):
    layers = built(LINEAR[name])
    model = Wired(lambda m, x: m.layers(x.flatten(0, 1)).unflatten(0, (len(x), -1)), layers=layers)
    assert_exact(model, batch(4, 6, 5), second_pass=second_pass)


@positions
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "pruned", "low rank"])
def test_groups_and_batches_of_every_size(name, shape):
    model = built(LINEAR[name])
    expected = {}
    for size in (4, 1, 0, 3):
        expected[size] = oracle.per_example_grads(model, project, (batch(4, *shape[1:])[:size],)) if size else None
    clipper = ghostclip.GhostClipper(model, clipping=ghostclip.clipping.PerLayer(1.0))
    for size, truth in expected.items():
        model.zero_grad()
        found = clipper.norms(project(model(batch(4, *shape[1:])[:size])), per="parameter")
        assert all(each.shape == (size,) for each in found.values())
        if truth is not None:
            assert_dicts_close(found, {name: each.flatten(1).norm(dim=1) for name, each in truth.items()}, 1e-10)


@every_pass
@pytest.mark.parametrize("name", ["weight_norm", "pruned", "straight-through", "low rank", "spectral_norm"])
def test_an_example_more_moves_the_sum_by_no_more_than_the_bound(name, second_pass):
    model = built(LINEAR[name], torch.float32)
    clipper = ghostclip.GhostClipper(model, clipping=0.1, second_pass=second_pass)
    x = batch(4, 5).float()
    x[3] = 1e4 * model[0](x[3:]).new_ones(5)
    sums = []
    for size in (3, 4):
        model.zero_grad()
        clipper.backward(project(model(x[:size])))
        sums.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))
    assert (sums[1] - sums[0]).norm() <= 0.1 * (1 + 1e-5)


@every_pass
def test_an_input_along_the_direction_of_a_normalised_weight(second_pass):
    """What is left of dL/dv is what rounding leaves: its norm is measured from the gradient itself."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 1)), nn.Linear(1, 1)).double()
    x = model[0].parametrizations.weight.original1.detach() * torch.tensor([[1.0], [1.0 + 1e-7]], dtype=torch.float64)
    x[1, 0] += 1e-7
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, clipping=1.0, second_pass=second_pass)
    norms = clipper.norms(project(model(x)), per="parameter")["0.parametrizations.weight.original1"]
    assert_close(norms[1:], expected["0.parametrizations.weight.original1"].flatten(1).norm(dim=1)[1:], 1e-6)
    clipper.backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 1.0), 1e-10)


@every_pass
def test_a_gradient_along_a_normalised_weight_of_rank_one(second_pass):
    """Of dL/dv only rounding is left, where the weight's gradient is its multiple; digits are measured again."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 1)), nn.Linear(1, 1)).double().eval()
    weight = model[0].parametrizations.weight
    weight[0]._u.fill_(1.0)
    weight[0]._v.copy_(weight.original[0].detach() / weight.original.detach().norm())
    x = weight.original.detach() * torch.tensor([[1.0], [1.0 + 1e-7]], dtype=torch.float64)
    x[1, 0] += 1e-7
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, clipping=1.0, second_pass=second_pass)
    norms = clipper.norms(project(model(x)), per="parameter")["0.parametrizations.weight.original"]
    assert_close(norms[1:], expected["0.parametrizations.weight.original"].flatten(1).norm(dim=1)[1:], 1e-6)


def normalised(m):
    return torch._weight_norm(m.v, m.g, 0)


def divided(m):
    return m.v / m.v.square().sum().sqrt()


# name: a function of x and the parameters v [8, 5], g [8, 1], without any layer
FUNCTIONS = {
    "weight_norm": lambda m, x: F.linear(x, normalised(m)),
    "weight_norm from the right": lambda m, x: x @ normalised(m).T,
    "weight_norm's transpose": lambda m, x: F.linear(x, normalised(m)) @ normalised(m),
    "one weight, twice": lambda m, x: (lambda weight: F.linear(torch.tanh(F.linear(x, weight)), weight.T))(
        normalised(m)
    ),
    "weight_norm scaled": lambda m, x: torch.addmm(m.q, x.flatten(0, -2), normalised(m).T, beta=0.5, alpha=2.0),
    "weight_norm, bias scaled": lambda m, x: torch.addmm(m.q, x.flatten(0, -2), normalised(m).T, beta=0.5),
    "direction used again": lambda m, x: F.linear(x, normalised(m)) + F.linear(x, m.v),
    "direction used twice": lambda m, x: F.linear(x, normalised(m)) + F.linear(x, divided(m)) * m.g.T,
    "quotient": lambda m, x: F.linear(x, divided(m)),
    "quotient's transpose": lambda m, x: F.linear(F.linear(x, m.v), divided(m).T),
    "quotient by another": lambda m, x: F.linear(x, m.v / m.g.square().sum()),
    "quotient of a computed one": lambda m, x: F.linear(x, normalised(m) / m.v.square().sum().sqrt()),
    "quotient, number on top": lambda m, x: F.linear(x, m.v.square().sum().sqrt() / m.v),
    "masked rows": lambda m, x: F.linear(x, m.v * torch.arange(8.0, dtype=x.dtype).view(8, 1)),
    "masked by a parameter": lambda m, x: F.linear(x, m.v * m.g),
    "one entry by entry": lambda m, x: F.linear(x, m.v * m.v.detach().sign() + m.v.sin()),
    "added twice": lambda m, x: F.linear(x, m.v + m.v),
    "cast": lambda m, x: F.linear(x.float(), torch.tanh(m.v).float()).double(),
    "low rank": lambda m, x: F.linear(x, m.v + m.g @ m.q[None, :5]),
    "from the left": lambda m, x: (normalised(m) @ x.flatten(0, -2).T).T,
}


@every_pass
@positions
@pytest.mark.parametrize("frozen", [None, "v", "g"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(4)
def test_weights_computed_in_a_function(name, frozen, shape, second_pass):
    def wiring(m, x):
        out = FUNCTIONS[name](m, x)
        return (out if out.shape[0] == len(x) else out.unflatten(0, (len(x), -1))) + m.q[: out.shape[-1]] * 0.1

    model = with_parameters(wiring, {"v": (8, 5), "g": (8, 1), "q": (8,)}).double()
    if frozen:
        getattr(model, frozen).requires_grad_(False)
    truth = 1e-5 if name == "cast" else 1e-10
    expected = oracle.per_example_grads(model, project, (batch(*shape),))
    clipper = ghostclip.GhostClipper(model, clipping=1.0, second_pass=second_pass)
    losses = project(model(batch(*shape)))
    assert_dicts_close(clipper.norms(losses, per="parameter", retain_graph=True),
                       {name: each.flatten(1).norm(dim=1) for name, each in expected.items()}, truth)  # fmt: skip
    assert_dicts_close(clipper.per_example_grads(losses, retain_graph=True), expected, truth)
    clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 1.0), truth)


# name: a function of x [B, 6, 5] and filters p [6, 4, 3] or p [4, 6, 3]
FILTERS = {
    "plain": (lambda x, p: F.conv1d(x, p), (4, 6, 3)),
    "strided, padded, dilated": (lambda x, p: F.conv1d(x, p, stride=2, padding=3, dilation=2), (4, 6, 3)),
    "in groups": (lambda x, p: F.conv1d(x, p, groups=2, padding=1), (4, 3, 3)),
    "transposed": (lambda x, p: F.conv_transpose1d(x, p, stride=2), (6, 4, 3)),
    "transposed, padded": (lambda x, p: F.conv_transpose1d(x, p, stride=3, padding=1, output_padding=2), (6, 4, 3)),
    "transposed, with positions of its own": (
        lambda x, p: F.conv_transpose1d(x, p, stride=1, dilation=3, output_padding=2), (6, 4, 3)),
    "transposed in groups": (lambda x, p: F.conv_transpose1d(x, p, groups=3), (6, 2, 3)),
    "two dimensions": (lambda x, p: F.conv2d(x.unsqueeze(1), p, padding=(0, 1)), (2, 1, 2, 3)),
    "twice": (lambda x, p: F.conv1d(torch.tanh(F.conv1d(x, p, padding=1)), p), (6, 6, 3)),
}  # fmt: skip


@every_pass
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("change", [lambda p: p, torch.tanh], ids=["bare", "computed"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.one_in(3)
def test_filters_outside_of_layers(name, change, folded, second_pass):
    convolve, shape = FILTERS[name]

    def wiring(m, x):
        out = convolve(x.flatten(0, 1) if folded else x, change(m.p))
        return out.unflatten(0, (len(x), -1)) if folded else out

    x = batch(4, 3, 6, 5) if folded else batch(4, 6, 5)
    assert_exact(with_parameters(wiring, {"p": shape}).double(), x, second_pass=second_pass)


def test_a_weight_computed_by_a_layer_is_followed_through_the_graph():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, weight):
            return self.layer(weight)

    assert_exact(built(lambda: parametrized(nn.Linear(5, 8), Made())), batch(4, 5))


def test_spectral_norm_steps_its_vectors_once_a_forward():
    torch.manual_seed(0)
    plain = parametrizations.spectral_norm(nn.Linear(5, 8))
    torch.manual_seed(0)
    model = ghostclip.wrap(parametrizations.spectral_norm(nn.Linear(5, 8)))
    x = batch(4, 5).float()
    for _ in range(3):
        assert torch.equal(model(x), plain(x))


def test_checkpointed_layers_are_exact():
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = parametrizations.weight_norm(nn.Linear(5, 8))

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    assert_exact(built(Again), batch(4, 5))


def test_unwrap_gives_the_class_back():
    model = parametrizations.weight_norm(nn.Linear(5, 8))
    kind = type(model)
    assert type(ghostclip.unwrap(ghostclip.wrap(model))) is kind
