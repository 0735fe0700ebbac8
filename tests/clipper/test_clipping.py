"""Policies and their parts, each by its formula: weights from norms, the sensitivity they promise, what is refused."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ghostclip import GhostClipper
from ghostclip import clipping as c
from ghostclip.clipping import Automatic, Custom, Flat, Grouped, PerLayer, as_policy
from ghostclip.errors import PrivacyError

few = settings(deadline=None, max_examples=40)
NORM = st.floats(0, 2.0**60, width=32)
GROUPS = {"a": ["a"], "b": ["b"]}
BOUNDED = {
    "flat": lambda scale: Flat(0.7),
    "automatic": lambda scale: Automatic(0.7, gamma=0.01),
    "custom": lambda scale: Custom(lambda norms: 3.0 - norms, sensitivity=0.7),
    "custom, by group": lambda scale: as_policy(
        Custom(lambda norms: {g: torch.full_like(n, scale) for g, n in norms.items()}, 0.7, GROUPS)
    ),
    "per layer": lambda scale: PerLayer(0.7),
    "grouped": lambda scale: Grouped(GROUPS, max_norm=0.7),
}


@pytest.mark.parametrize("name", BOUNDED)
@few
@given(values=st.lists(st.tuples(NORM, NORM), min_size=1, max_size=20), scale=st.floats(-(2.0**60), 2.0**60, width=32))
def test_no_weighted_norm_exceeds_the_sensitivity(name, values, scale):
    policy, norms = BOUNDED[name](scale), dict(zip("ab", torch.tensor(values).T, strict=True))
    if name in ("flat", "automatic", "custom"):
        norms = {"a": norms["a"]}
        weights = {"a": policy.weights(norms["a"])}
    else:
        weights = policy.weights(norms)
    squares = sum((weights[group].double() * norms[group].double()) ** 2 for group in norms)
    assert float(squares.sqrt().max()) <= policy.sensitivity == 0.7


@pytest.mark.parametrize(
    ("policy", "norms", "expected"),
    [
        (Flat(1.0), [0.0, 0.5, 1.0, 4.0], [1.0, 1.0, 1.0, 0.25]),
        (Automatic(2.0, gamma=0.01), [0.0, 0.99, 9.99], [200.0, 2.0, 0.2]),
        (Custom(lambda norms: torch.tensor([5.0, -5.0, math.nan, 0.1]), 1.0), [2.0] * 4, [0.5, -0.5, 0.0, 0.1]),
    ],
)
def test_weights_by_hand(policy, norms, expected):
    """Flat leaves small gradients alone, Automatic scales all; of a function's weights, NaN counts as zero."""
    assert policy.weights(torch.tensor(norms, dtype=torch.float64)).tolist() == pytest.approx(expected)


ALL = {"all": ["*"]}


@pytest.mark.parametrize(
    ("answer", "groups", "message"),
    [
        (lambda n: n.sum()[None], None, r"weights of shape \[3\], one per example; got \[1\]"),
        (lambda n: n["all"], ALL, r"weights for the groups \['all'\]; got Tensor"),
        (lambda n: {"other": n["all"]}, ALL, r"got \['other'\]"),
        (lambda n: {"all": n["all"].sum()}, ALL, r"shape \[3\] for 'all'; got \[\]"),
    ],
)
def test_a_custom_function_of_another_shape_is_refused(answer, groups, message):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        GhostClipper(model, Custom(answer, 1.0, groups)).backward(model(torch.randn(3, 3)).sum(1))
    assert model.weight.grad is None


class Ones:
    """A policy of a user's own that clips nothing, and says that it does."""

    sensitivity, steps = 0.7, 3

    def weights(self, norms):
        return torch.ones_like(norms)


class Doubled(Flat):
    def weights(self, norms):
        return 2 * super().weights(norms)


class Mine(PerLayer):
    pass


def test_a_policy_of_ones_own_is_held_to_its_sensitivity():
    policy = as_policy(Ones())
    norms = torch.tensor([0.0, 0.5, 1.4, 70.0], dtype=torch.float64)
    torch.testing.assert_close(policy.weights(norms), torch.tensor([1.0, 1.0, 0.5, 0.01], dtype=torch.float64))
    assert (policy.sensitivity, policy.steps) == (0.7, 3)
    assert copy.deepcopy(policy).sensitivity == 0.7
    assert as_policy(policy) is policy
    with pytest.raises(AttributeError, match="state_dict"):
        policy.state_dict()
    assert float(as_policy(Doubled(1.0)).weights(torch.tensor([4.0]))) <= 0.25


def test_what_counts_as_a_policy():
    halving = type("Halving", (), {"sensitivity": 2.0, "__call__": lambda self, norms: 0.5 / norms})()
    assert as_policy(1) == Flat(1.0)
    assert isinstance(as_policy(halving), Custom)
    assert as_policy(automatic := Automatic(0.7)) is automatic
    assert PerLayer({"0": 3.0, "2": 4.0}) == PerLayer(thresholds={"0": 3.0, "2": 4.0})


def rule_of_ones_own(thresholds):
    return type("Own", (c.ThresholdRule,), {"thresholds": lambda self, sizes: thresholds})()


NO_NUMBER, NO_POLICY = "must be a finite number > 0; got", "clipping must be a max norm"
SHARED = {"a": ["*"], "b": ["2.*"]}
REFUSED = [
    *((lambda value=value: as_policy(value), NO_NUMBER) for value in (0, -1.0, math.nan, math.inf)),
    *((lambda value=value: as_policy(value), NO_POLICY) for value in (True, "1.0", None, lambda norms: norms)),
    (lambda: Flat(0.0), NO_NUMBER),
    (lambda: Automatic(math.nan), NO_NUMBER),
    (lambda: Mine(1.0), r"must be PerLayer, Grouped, Composed, or Custom\(.*got Mine"),
    (lambda: PerLayer(0.0), "max_norm must be a finite number > 0"),
    (lambda: PerLayer(1.0, {"0": 1.0}), "exclude each other"),
    (lambda: PerLayer({"0": 1.0}, thresholds={"0": 1.0}), "exclude each other"),
    (lambda: PerLayer(thresholds={"0": -1.0}), r"thresholds\['0'\] must be"),
    (lambda: PerLayer(thresholds={}), "thresholds must be"),
    (lambda: PerLayer({}), "thresholds must be"),
    (lambda: PerLayer(thresholds={"0": 1.0}), r"missing: \['2', '3'\], unknown: none"),
    (lambda: PerLayer({"*": 1.0, "7*": 1.0}), r"missing: none, unknown: \['7\*'\]"),
    (lambda: PerLayer({"*": 1.0, "[0-2]": 1.0}), r"'0' fits '\*', '\[0-2\]'"),
    (lambda: PerLayer({"*": 1.0}).sensitivity, "once PerLayer is given to a model"),
    (lambda: Grouped({}), "at least one group"),
    (lambda: Grouped({"a": []}), "at least one pattern"),
    (lambda: Grouped({"a": "0.*"}), "lists of name patterns"),
    (lambda: Grouped(["0"]), r"groups must be .*such as \{"),
    (lambda: Grouped({"0.*": 0.5}), r'such as \{"encoder": .*; got 0.5 for .*into thresholds='),
    (lambda: Grouped({"a": ["*"]}, thresholds={"b": 1.0}), r"missing: \['a'\], unknown: \['b'\]"),
    (lambda: Grouped({"a": ["0", "2"]}), "'3.weight' is in none of a"),
    (lambda: Grouped(SHARED), "'2.weight' is in several: a, b"),
    (lambda: Grouped({"a": ["*", "7.*"]}), "fit none: '7.\\*' of 'a'"),
    (lambda: Custom(lambda n: n, 1.0, {"a": ["0"]}), "'2.weight' is in none"),
    (lambda: Custom(lambda n: n, -1.0, {"a": ["*"]}), "sensitivity must be"),
    (lambda: c.EqualShare(0.0), "must"),
    (lambda: c.Fixed({"a": -1.0}), "must"),
    (lambda: c.Fixed({}), "must"),
    (lambda: c.Fixed({"a": 1.0, "c": 1.0}).thresholds({"a": 3, "b": 4}), r"missing: \['b'\], unknown: \['c'\]"),
    (lambda: c.AutoS(0.0), "must"),
    (lambda: c.Psac(math.inf), "must"),
    (lambda: c.Quantiles(target_quantile=1.0), "must"),
    (lambda: c.Quantiles(floor=0.1, max_norm=1.0), "exclude"),
    (lambda: c.ProportionalNoise({"a": 0.0}), "must"),
    (lambda: c.EqualSizes(0), "must"),
    (lambda: c.ByName({"a": []}), "must|at least one pattern"),
    (lambda: c.Composed(thresholds=c.JointBound(len, 1.0), scaling=c.Clip()), "leave scaling out"),
    (lambda: c.Composed(partition="layers"), "partition must be a Partition"),
    (lambda: c.Composed(noise=1.0), "noise must be a NoiseAllocation"),
    (lambda: c.Composed(scaling=1.0), "scaling must be a function"),
    (lambda: c.Composed(thresholds=c.Quantiles(1.0), noise=c.GivenNoise({"a": 1.0})), "use ProportionalNoise"),
    *(
        (lambda found=found: c.Composed(thresholds=rule_of_ones_own(found)), "thresholds")
        for found in ({"all": 1.0, "more": 1.0}, {"all": 0.0}, {"all": math.nan}, {})
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_wrong_arguments_and_groups_are_named_at_once(make, message):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises((TypeError, ValueError, PrivacyError), match=message):
        GhostClipper(model, make())


# Partitions, threshold rules, scalings and noise allocations ---


SIZES = {
    "embed.weight": 50, "h.0.a.weight": 8, "h.0.a.bias": 2, "h.0.b.weight": 8, "h.1.a.weight": 9, "head.weight": 30,
}  # fmt: skip
SIZES_OF_GROUPS = st.dictionaries(st.text("abc", min_size=1), st.integers(1, 10**6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (c.Whole(), ["all"] * 6),
        (c.ByLayer(), ["embed", "h.0.a", "h.0.a", "h.0.b", "h.1.a", "head"]),
        (c.ByParameter(), list(SIZES)),
        (c.Blocks(), ["rest", "h.0", "h.0", "h.0", "h.1", "rest"]),
        (c.ByName({"ends": ["embed", "head.weight"], "middle": ["h.*"]}), ["ends", *["middle"] * 4, "ends"]),
        (c.EqualSizes(2), ["1", *["2"] * 5]),
        (c.EqualSizes(6), ["1", "2", "3", "4", "5", "6"]),
    ],
)
def test_partitions(partition, expected):
    assert partition.groups(SIZES) == dict(zip(SIZES, expected, strict=True))


@few
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), count=st.integers(1, 12))
def test_equal_sizes_are_consecutive_and_none_is_empty(sizes, count):
    named = {f"p{place}": size for place, size in enumerate(sizes)}
    if count > len(sizes):
        with pytest.raises(ValueError, match="at least as many trained parameters"):
            c.EqualSizes(count).groups(named)
        return
    found = list(c.EqualSizes(count).groups(named).values())
    assert list(dict.fromkeys(found)) == [str(group) for group in range(1, count + 1)]
    assert found == sorted(found, key=int)


@few
@given(sizes=SIZES_OF_GROUPS, norm=st.floats(1e-3, 1e3))
def test_threshold_rules_keep_to_their_sensitivity(sizes, norm):
    for rule in (c.EqualShare(norm), c.ByDimension(norm), c.Quantiles(norm, max_norm=norm)):
        assert math.hypot(*rule.thresholds(sizes).values()) == pytest.approx(norm, rel=1e-12)
    assert c.Fixed(norm).thresholds(sizes) == dict.fromkeys(sizes, norm)
    by_size = c.ByDimension(norm).thresholds(sizes)
    first = next(iter(sizes))
    for group, size in sizes.items():
        assert by_size[group] / by_size[first] == pytest.approx(math.sqrt(size / sizes[first]), rel=1e-12)


@pytest.mark.parametrize("scaling", [c.Clip(), c.AutoS(10.0), c.AutoV(), c.Psac(5.0)])
@few
@given(norm=st.floats(0, 1e8), threshold=st.floats(1e-4, 1e4))
def test_scaled_norms_stay_within_the_threshold(scaling, norm, threshold):
    norms, bound = torch.tensor([norm], dtype=torch.float64), torch.tensor(threshold, dtype=torch.float64)
    assert float((scaling(norms, bound) * norms)[0]) <= threshold * (1 + 1e-12)


@pytest.mark.parametrize(
    ("scaling", "at_zero", "at_two"),
    [
        (c.Clip(), 1.0, 1.0),
        (c.AutoS(0.5), 6.0, 3 / 2.5),
        (c.AutoV(), 0.0, 1.5),
        (c.Psac(0.5), 3.0, 3 / (2 + 0.5 / 2.5)),
    ],
)
def test_scalings_by_hand(scaling, at_zero, at_two):
    found = scaling(torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64))
    assert found.tolist() == pytest.approx([at_zero, at_two], rel=1e-12)


@few
@given(sizes=SIZES_OF_GROUPS, sigma=st.floats(0.1, 10), data=st.data())
def test_allocations_follow_their_formulas_and_make_exactly_the_noise_multiplier(sizes, sigma, data):
    bounds = {group: data.draw(st.floats(1e-3, 1e3)) for group in sizes}
    whole = math.sqrt(math.fsum(bound**2 for bound in bounds.values()))
    weighted = math.fsum(bounds[group] * math.sqrt(size) for group, size in sizes.items())
    best = {group: math.sqrt(bounds[group] / math.sqrt(size) * weighted) for group, size in sizes.items()}
    proportional = c.ProportionalNoise({group: 1.0 + number for number, group in enumerate(sizes)})
    for allocation, by_hand in [
        (c.GlobalNoise(), dict.fromkeys(sizes, sigma * whole)),
        (c.EqualNoise(), {group: sigma * math.sqrt(len(sizes)) * bound for group, bound in bounds.items()}),
        (c.OptimalNoise(), {group: sigma * each for group, each in best.items()}),
        (proportional, None),
    ]:
        stds = allocation.stds(sigma, bounds, sizes)
        assert by_hand is None or stds == pytest.approx(by_hand, rel=1e-12)
        assert math.fsum((bounds[g] / stds[g]) ** 2 for g in sizes) == pytest.approx(1 / sigma**2, rel=1e-12)
        assert c.GivenNoise(stds).stds(sigma, bounds, sizes) == stds
        with pytest.raises(ValueError, match="make a noise multiplier of"):
            c.GivenNoise(stds).stds(sigma * 1.001, bounds, sizes)


def test_quantiles_move_by_their_formula_and_stop_at_the_floor():
    rule = c.Quantiles(c.Fixed({"a": 1.0, "b": 2.0}), target_quantile=0.6, learning_rate=0.5, floor=0.9)
    sizes = {"a": 1, "b": 1}
    assert rule.thresholds(sizes) == {"a": 1.0, "b": 2.0}
    counts = rule.counts({"a": torch.tensor([0.5, 1.0, 3.0, math.nan]), "b": torch.tensor([1.0, 1.0, 1.0, 1.0])})
    assert counts.tolist() == [0.0, 2.0]
    rule.update([1.0, 0.1])
    assert rule.thresholds(sizes) == pytest.approx({"a": 0.9, "b": 2.0 * math.exp(-0.5 * (0.1 - 0.6))})
    other = c.Quantiles(c.Fixed({"a": 1.0, "b": 2.0}), floor=0.9)
    other.load_state_dict(rule.state_dict())
    assert other.thresholds(sizes) == rule.thresholds(sizes)


def test_a_constant_sensitivity_divides_by_the_quantiles_that_were_asked_for():
    norms = {"a": torch.linspace(0.0, 1.0, 1001), "b": torch.linspace(0.0, 10.0, 1001).square()}
    for quantile in (0.2, 0.7):
        rule = c.Quantiles(3.0, target_quantile=quantile, learning_rate=0.1, max_norm=2.0)
        rule.thresholds({"a": 1, "b": 1})
        for _ in range(500):
            rule.update([float(count) / 1001 + 0.5 for count in rule.counts(norms)])
        found = rule.thresholds({"a": 1, "b": 1})
        assert math.hypot(*found.values()) == pytest.approx(2.0)
        assert found["b"] / found["a"] == pytest.approx((10 * quantile) ** 2 / quantile, rel=0.05)
