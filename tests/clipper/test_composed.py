"""Policies composed of partition, threshold rule, scaling and noise allocation, beside the slow obvious loop."""

import copy
import itertools
import math

import dp_accounting
import oracle
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import clipping as c
from ghostclip.errors import PrivacyError

PARTITIONS = [
    c.Whole(),
    c.ByLayer(),
    c.ByParameter(),
    c.Blocks(),
    c.EqualSizes(2),
    c.ByName({"weights": ["*weight"], "biases": ["*bias"]}),
]
RULES = [c.EqualShare(0.7), c.Fixed(0.4), c.ByDimension(1.3), c.Quantiles(0.8)]


def half(norms, threshold):
    """A scaling of a user's own, far over what it may return for large norms."""
    return torch.full_like(norms, 0.5)


SCALINGS = [c.Clip(), c.AutoS(), c.AutoV(), c.Psac(), half]
NOISES = [c.GlobalNoise(), c.EqualNoise(), c.OptimalNoise()]
composed = st.builds(
    c.Composed, st.sampled_from(PARTITIONS), st.sampled_from(RULES), st.sampled_from(SCALINGS), st.sampled_from(NOISES)
)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_loop(policy, model, batch):
    """{parameter name: clipped sum} by single examples."""
    policy, grads = copy.deepcopy(policy), oracle.grads_of_single_losses(model, losses_of(model, batch))
    group_of, totals = policy.partition({name: p.numel() for name, p in model.named_parameters()}), {}
    for group, threshold in policy.thresholds.items():
        inside = {name: grad for name, grad in grads.items() if group_of[name] == group}
        norms = oracle.norms(inside)
        weights = policy.scaling(norms, torch.tensor(threshold, dtype=norms.dtype)).minimum(threshold / norms)
        totals |= {name: torch.einsum("b,b...->...", weights, grad) for name, grad in inside.items()}
    return totals


def batch_of(dtype=torch.float64, examples=6):
    torch.manual_seed(1)
    inputs = torch.randn(examples, 5, dtype=dtype) * torch.logspace(-2, 2, examples, dtype=dtype)[:, None]
    return inputs, torch.randint(0, 3, (examples,))


@settings(deadline=None, max_examples=60)
@given(policy=composed, second_pass=st.sampled_from(["cached", "reweight"]))
def test_clipped_sums_equal_the_loop(policy, second_pass) -> None:
    model, batch = network(), batch_of()
    expected = by_loop(policy, network(), batch)
    clipper = ghostclip.GhostClipper(model, policy, second_pass=second_pass)
    result = clipper.backward(losses_of(clipper.model, batch))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
    assert result.sensitivity == pytest.approx(math.hypot(*clipper.clipping.thresholds.values()))


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
def test_each_release_has_the_noise_of_its_group(noise) -> None:
    policy = c.Composed(c.ByLayer(), c.Fixed({"0": 0.5, "1": 2.0}), noise=noise)
    found, engine = noise_of(policy)
    expected = noise.stds(2.0, {"0": 0.5, "1": 2.0}, {"0": 40_000, "1": 20_000})
    for name, std in found.items():
        assert std == pytest.approx(expected[name[0]], rel=0.02)
        assert engine.noise_std(engine.model.get_parameter(name)) * 10 == pytest.approx(expected[name[0]], rel=1e-9)


def test_a_joint_bound_has_its_least_noise_in_every_group() -> None:
    def all_alike(norms):
        whole = torch.stack(list(norms.values())).norm(dim=0)
        return dict.fromkeys(norms, (1.5 / whole).clamp(max=1.0))

    rule = c.JointBound(all_alike, 1.5)
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
def test_counts_are_charged_with_the_gradients(partition) -> None:
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


def test_thresholds_are_those_of_one_model_each() -> None:
    policy = c.Composed(c.ByLayer(), c.Quantiles(1.0))
    first, second = ghostclip.GhostClipper(network(), policy), ghostclip.GhostClipper(nn.Linear(3, 2), policy)
    assert set(first.clipping.thresholds) == {"0", "2", "4"}
    assert set(second.clipping.thresholds) == {""}
    with pytest.raises(PrivacyError, match="once it is given"):
        _ = policy.thresholds


def test_adapted_thresholds_go_through_a_checkpoint(tmp_path) -> None:
    first, second = (engine_of(c.Composed(c.ByLayer(), c.Quantiles(1.0)), noise="test", seed=3) for _ in range(2))
    for batch in first.batches():
        first.step(batch, losses_of)
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    assert second.clipping.thresholds == first.clipping.thresholds != c.EqualShare(1.0).thresholds({"a": 1})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: c.Composed(thresholds=c.JointBound(len, 1.0), scaling=c.Clip()), "leave scaling out"),
        (lambda: c.Composed(partition="layers"), "partition must be a Partition"),
        (lambda: c.Composed(noise=1.0), "noise must be a NoiseAllocation"),
        (lambda: c.Composed(scaling=1.0), "scaling must be a function"),
        (lambda: c.Composed(thresholds=c.Quantiles(1.0), noise=c.GivenNoise({"a": 1.0})), "use ProportionalNoise"),
    ],
)
def test_other_parts_are_refused(make, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


class Counting(c.ThresholdRule):
    """A rule that gives other thresholds each time it is asked, a hundredth of the first ones at the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def thresholds(self, sizes):
        self.asked += 1
        return dict.fromkeys(sizes, 1.0 if self.asked % 2 else 0.01)


def test_thresholds_and_sensitivity_are_of_one_reading_of_the_rule() -> None:
    clipper = ghostclip.GhostClipper(network(), c.Composed(c.ByLayer(), Counting()))
    inputs, labels = batch_of()
    batch = inputs[-1:] * 100, labels[-1:]
    for _ in range(3):
        clipper.model.zero_grad()
        result = clipper.backward(losses_of(clipper.model, batch))
        whole = torch.cat([p.grad.flatten() for p in clipper.model.parameters()]).norm()
        assert whole <= result.sensitivity * (1 + 1e-9)
        assert result.sensitivity == clipper.sensitivity == pytest.approx(math.sqrt(3))


class TooLittle(c.NoiseAllocation):
    """Says of itself what it doesn't keep."""

    def proportions(self, thresholds, sizes):
        return dict.fromkeys(thresholds, 1.0)

    def stds(self, sigma, thresholds, sizes):
        return dict.fromkeys(thresholds, 0.1 * sigma)


class Left(c.NoiseAllocation):
    """Leaves a group out."""

    def proportions(self, thresholds, sizes):
        return {"0": 1.0}


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (TooLittle(), r"noise multiplier of 0\.14\d*; it must be 2"),
        (Left(), r"missing: \['1'\]"),
        (c.GivenNoise({"0": 1.0, "1": 1.0}), "multiply each by"),
    ],
)
def test_an_allocation_of_ones_own_is_held_to_the_noise_multiplier(noise, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        noise_of(c.Composed(c.ByLayer(), c.Fixed(1.0), noise=noise))


@pytest.mark.parametrize("found", [{"": 1.0, "more": 1.0}, {"": 0.0}, {"": math.nan}, {}])
def test_a_rule_of_ones_own_is_held_to_the_groups_and_to_norms(found) -> None:
    own = type("Own", (c.ThresholdRule,), {"thresholds": lambda self, sizes: found})
    with pytest.raises(ValueError, match="thresholds"):
        ghostclip.GhostClipper(nn.Linear(3, 2), c.Composed(c.ByLayer(), own()))
