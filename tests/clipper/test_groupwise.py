"""Group-wise clipping and what it is composed of, beside the slow obvious loop; test_clipping.py has the parts."""

import copy
import itertools
import math

import dp_accounting
import oracle
import pytest
import torch
from cases import CASES_AND_DTYPES
from comparing import TOLERANCE, assert_close, assert_dicts_close, every_pass, gradients, ready, truth, typical_norm
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from private_runs import losses_of
from torch import nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import clipping as c
from ghostclip.clipping import Custom, Grouped, PerLayer
from ghostclip.errors import PrivacyError


def clip(norms, threshold):
    return torch.where(norms > 0, threshold / norms, 1.0).clamp(max=1.0)


def by_group(grads, group_of, thresholds, scaling=clip):
    """{group: norms}, {group: weights} and the clipped sum by the loop's gradients."""
    norms = {group: oracle.norms({n: g for n, g in grads.items() if group_of(n) == group}) for group in thresholds}
    bounds = {group: torch.tensor(each, dtype=torch.float64) for group, each in thresholds.items()}
    weights = {group: scaling(n, bounds[group]).minimum(bounds[group] / n) for group, n in norms.items()}
    sums = {n: torch.einsum("b,b...->...", weights[group_of(n)], g) for n, g in grads.items()}
    return norms, weights, sums


@every_pass
@pytest.mark.parametrize(("row", "dtype"), CASES_AND_DTYPES)
@pytest.mark.one_in(48)
def test_per_layer_equals_the_loop(row, dtype, second_pass):
    grads = truth(row)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in grads))
    max_norm = typical_norm(grads)
    model, clipper, losses = ready(row, dtype, clipping=PerLayer(max_norm), second_pass=second_pass)
    result = clipper.backward(losses)
    thresholds = dict.fromkeys(layers, max_norm / math.sqrt(len(layers)))
    norms, weights, sums = by_group(grads, lambda name: name.rpartition(".")[0], thresholds)
    assert_dicts_close(gradients(model), sums, TOLERANCE[dtype])
    whole = oracle.norms(grads)
    assert list(result.norms) == layers
    for layer in layers:
        assert_close(result.norms[layer], norms[layer], TOLERANCE[dtype], 1e-3 * whole)
        assert_close(result.weights[layer] * norms[layer].to(dtype), weights[layer] * norms[layer],
                     10 * TOLERANCE[dtype], 1e-3 * whole)  # fmt: skip
    assert result.sensitivity == clipper.sensitivity == max_norm


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batch_of(dtype=torch.float64, examples=6):
    """Gradients of very different sizes."""
    torch.manual_seed(1)
    inputs = torch.randn(examples, 3, dtype=dtype) * torch.logspace(-2, 2, examples, dtype=dtype)[:, None]
    return inputs, torch.randint(0, 2, (examples,))


def loop_over(batch):
    model = network()
    return oracle.grads_of_single_losses(model, losses_of(model, batch))


GROUPS = {"ends": ["0", "4"], "weight": ["2.weight"], "bias": ["2.b*"]}
THRESHOLDS = {"ends": 0.3, "weight": 0.2, "bias": 0.1}


def group_of(name):
    return "ends" if name[0] in "04" else name[2:]


@every_pass
def test_groups_that_divide_a_layer(second_pass):
    model, batch = network(), batch_of()
    norms, weights, sums = by_group(loop_over(batch), group_of, THRESHOLDS)
    clipper = ghostclip.GhostClipper(model, Grouped(GROUPS, thresholds=THRESHOLDS), second_pass=second_pass)
    for _ in range(2):
        result = clipper.backward(losses_of(model, batch))
    assert_dicts_close(gradients(model), {name: 2 * value for name, value in sums.items()}, 1e-10)
    for group in THRESHOLDS:
        assert_close(result.norms[group], norms[group], 1e-10)
        assert_close(result.weights[group], weights[group], 1e-10)
    assert result.sensitivity == pytest.approx(math.sqrt(0.3**2 + 0.2**2 + 0.1**2))
    assert clipper.verify(losses_of, batch) < 1e-9


def test_a_custom_function_sees_all_groups_and_is_held_to_its_sensitivity():
    model, batch = network(), batch_of()
    grads = loop_over(batch)
    norms, _, _ = by_group(grads, group_of, THRESHOLDS)

    def function(found):
        for group, norm in norms.items():
            assert_close(found[group], norm, 1e-10)
        return {"ends": 9.0 / found["weight"], "weight": found["bias"] * 0 - 1, "bias": found["bias"] * 0}

    policy = Custom(function, sensitivity=2.0**-10, groups=GROUPS)
    result = ghostclip.GhostClipper(model, policy).backward(losses_of(model, batch))
    assert_close(sum((result.weights[g] * norms[g]) ** 2 for g in norms).sqrt(), torch.full((6,), 2.0**-10), 1e-9)
    assert (result.weights["weight"] < 0).all()
    sums = {n: torch.einsum("b,b...->...", result.weights[group_of(n)], g) for n, g in grads.items()}
    assert_dicts_close(gradients(model), sums, 1e-10)


def test_a_pattern_gives_each_layer_that_it_fits_its_threshold():
    model, batch, found = network(), batch_of(), []
    for thresholds in ({"*": 1e-3, "4": 3e-3}, {"0": 1e-3, "2": 1e-3, "4": 3e-3}):
        model.zero_grad()
        result = ghostclip.GhostClipper(model, PerLayer(thresholds)).backward(losses_of(model, batch))
        assert result.sensitivity == pytest.approx(11**0.5 * 1e-3)
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert_close(*found, 1e-9)


def test_freezing_a_layer_moves_the_thresholds_of_the_others():
    model, batch = network(), batch_of()
    clipper = ghostclip.GhostClipper(model, PerLayer(3.0**0.5 * 1e-6))
    first = clipper.backward(losses_of(model, batch))
    model[2].requires_grad_(False)
    model.zero_grad()
    second = clipper.backward(losses_of(model, batch))
    assert list(second.norms) == ["0", "4"]
    assert_close(second.weights["0"], first.weights["0"] * (3 / 2) ** 0.5, 1e-9)
    assert first.sensitivity == second.sensitivity


# Partition, threshold rule, scaling and noise allocation together ---


def half(norms, threshold):
    """A scaling of a user's own, far over what it may return for large norms."""
    return torch.full_like(norms, 0.5)


BY_NAME = c.ByName({"weights": ["*weight"], "biases": ["*bias"]})
NOISES = [c.GlobalNoise(), c.EqualNoise(), c.OptimalNoise()]
composed = st.builds(
    c.Composed,
    st.sampled_from([c.Whole(), c.ByLayer(), c.ByParameter(), c.Blocks(), c.EqualSizes(2), BY_NAME]),
    st.sampled_from([c.EqualShare(0.7), c.Fixed(0.4), c.ByDimension(1.3), c.Quantiles(0.8)]),
    st.sampled_from([c.Clip(), c.AutoS(), c.AutoV(), c.Psac(), half]),
    st.sampled_from(NOISES),
)


@settings(deadline=None, max_examples=30)
@given(policy=composed, second_pass=st.sampled_from(["cached", "reweight"]))
def test_clipped_sums_equal_the_loop(policy, second_pass):
    model, batch = network(), batch_of()
    clipper = ghostclip.GhostClipper(model, policy, second_pass=second_pass)
    result = clipper.backward(losses_of(model, batch))
    thresholds = clipper.clipping.thresholds
    own = copy.deepcopy(policy).partition({name: p.numel() for name, p in model.named_parameters()})
    _, _, sums = by_group(loop_over(batch), own.__getitem__, thresholds, policy.scaling)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, sums[name], rtol=1e-10, atol=1e-10)
    assert result.sensitivity == pytest.approx(math.hypot(*thresholds.values()))


def noise_of(policy, sigma=2.0, steps=3):
    """{parameter name: standard deviation of what one step adds to its sum}, and the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 100, bias=False)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = TensorDataset(torch.randn(40, 200, dtype=torch.float64), torch.zeros(40, dtype=torch.long))
    engine = ghostclip.PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), data, batch_size=10, noise_multiplier=sigma,
        clipping=policy, self_check=False,
    )  # fmt: skip
    batches = itertools.chain.from_iterable(engine.batches() for _ in range(steps))
    for batch in itertools.islice(batches, steps):
        engine.step(batch, lambda model, batch: model(batch[0]).sum(1) * 0.0)
    moved = {name: (p.detach() - before[name]) for name, p in model.named_parameters()}
    return {name: float(each.std()) * 10 / math.sqrt(steps) for name, each in moved.items()}, engine


@pytest.mark.parametrize("noise", [*NOISES, c.ProportionalNoise({"0": 1.0, "1": 5.0})])
def test_each_release_has_the_noise_of_its_group(noise):
    policy = c.Composed(c.ByLayer(), c.Fixed({"0": 0.5, "1": 2.0}), noise=noise)
    found, engine = noise_of(policy)
    expected = noise.stds(2.0, {"0": 0.5, "1": 2.0}, {"0": 40_000, "1": 20_000})
    for name, std in found.items():
        assert std == pytest.approx(expected[name[0]], rel=0.02)
        assert engine.noise_std(engine.model.get_parameter(name)) * 10 == pytest.approx(expected[name[0]], rel=1e-9)


def test_a_joint_bound_has_its_least_noise_in_every_group():
    rule = c.JointBound(lambda norms: dict.fromkeys(norms, next(iter(norms.values())) * 0), 1.5)
    policy = c.Composed(c.ByLayer(), rule, noise=c.ProportionalNoise({"0": 1.0, "1": 4.0}))
    found, engine = noise_of(policy, sigma=1.0)
    assert found["0.weight"] == pytest.approx(1.5, rel=0.02)
    assert found["1.weight"] == pytest.approx(6.0, rel=0.02)
    assert engine.clipping.sensitivity == 1.5


@pytest.mark.parametrize("size", [1.0, 100.0, 3e6])
def test_endless_weights_are_scaled_to_the_joint_bound(size):
    norms = {group: size * torch.rand(8) for group in "ab"}
    policy = c.Composed(thresholds=c.JointBound(lambda norms: {g: n / 0.0 for g, n in norms.items()}, 0.5))
    weights = policy.weights(norms)
    whole = torch.stack([weights[group].double() * norms[group].double() for group in norms]).norm(dim=0)
    assert (whole <= 0.5).all()
    assert (whole >= 0.5 * (1 - 1e-5)).all()


def engine_of(policy, **options):
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(*batch_of(torch.float32, 40))
    options = {"batch_size": 10, "noise_multiplier": 1.2, "clipping": policy, **options}
    return ghostclip.PrivacyEngine(model, optimizer, data, **options)


@pytest.mark.parametrize("partition", [c.Whole(), c.ByLayer(), c.ByParameter()])
@pytest.mark.one_in(math.inf)
def test_counts_are_charged_with_the_gradients(partition):
    engine = engine_of(c.Composed(partition, c.Quantiles(1.0, count_noise=3.0), noise=c.EqualNoise()))
    start = dict(engine.clipping.thresholds)
    for batch in engine.batches():
        engine.step(batch, losses_of)
    assert all(engine.clipping.thresholds[group] != start[group] for group in start)
    multiplier = 1 / math.sqrt(1 / 1.2**2 + len(start) / (4 * 3.0**2))
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(10 / 40, dp_accounting.GaussianDpEvent(multiplier))
    accountant.compose(event, engine.steps_taken)
    assert engine.epsilon() == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_thresholds_are_those_of_one_model_each():
    policy = c.Composed(c.ByLayer(), c.Quantiles(1.0))
    first, second = ghostclip.GhostClipper(network(), policy), ghostclip.GhostClipper(nn.Linear(3, 2), policy)
    assert set(first.clipping.thresholds) == {"0", "2", "4"}
    assert set(second.clipping.thresholds) == {""}
    with pytest.raises(PrivacyError, match="once it is given"):
        _ = policy.thresholds


def test_adapted_thresholds_go_through_a_checkpoint(tmp_path):
    first, second = (engine_of(c.Composed(c.ByLayer(), c.Quantiles(1.0)), noise="test", seed=3) for _ in range(2))
    for batch in first.batches():
        first.step(batch, losses_of)
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    assert second.clipping.thresholds == first.clipping.thresholds != c.EqualShare(1.0).thresholds({"a": 1})


class Counting(c.ThresholdRule):
    """A rule that gives other thresholds each time it is asked, a hundredth of the first ones at the second time."""

    def __init__(self):
        self.asked = 0

    def thresholds(self, sizes):
        self.asked += 1
        return dict.fromkeys(sizes, 1.0 if self.asked % 2 else 0.01)


def test_thresholds_and_sensitivity_are_of_one_reading_of_the_rule():
    clipper = ghostclip.GhostClipper(network(), c.Composed(c.ByLayer(), Counting()))
    inputs, labels = batch_of()
    batch = inputs[-1:] * 100, labels[-1:]
    for _ in range(3):
        clipper.model.zero_grad()
        result = clipper.backward(losses_of(clipper.model, batch))
        whole = torch.cat([p.grad.flatten() for p in clipper.model.parameters()]).norm()
        assert whole <= result.sensitivity * (1 + 1e-9)
        assert result.sensitivity == clipper.sensitivity == pytest.approx(math.sqrt(3))


def allocation(**methods):
    return type("Own", (c.NoiseAllocation,), methods)()


# It says of itself what it doesn't keep.
TOO_LITTLE = allocation(
    proportions=lambda self, thresholds, sizes: dict.fromkeys(thresholds, 1.0),
    stds=lambda self, sigma, thresholds, sizes: dict.fromkeys(thresholds, 0.1 * sigma),
)


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (TOO_LITTLE, r"noise multiplier of 0\.14\d*; it must be 2"),
        (allocation(proportions=lambda self, thresholds, sizes: {"0": 1.0}), r"missing: \['1'\]"),
        (c.GivenNoise({"0": 1.0, "1": 1.0}), "multiply each by"),
    ],
)
def test_an_allocation_of_ones_own_is_held_to_the_noise_multiplier(noise, words):
    with pytest.raises(ValueError, match=words):
        noise_of(c.Composed(c.ByLayer(), c.Fixed(1.0), noise=noise))
