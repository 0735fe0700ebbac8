"""Partitions, threshold rules, scalings and noise allocations, each by its formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostclip.clipping.allocation import EqualNoise, GivenNoise, GlobalNoise, OptimalNoise, ProportionalNoise
from ghostclip.clipping.partitions import Blocks, ByLayer, ByName, ByParameter, EqualSizes, Whole
from ghostclip.clipping.scaling import AutoS, AutoV, Clip, NormScaling, Psac
from ghostclip.clipping.thresholds import ByDimension, EqualShare, Fixed, Quantiles

SIZES = {
    "embed.weight": 50,
    "h.0.a.weight": 8,
    "h.0.a.bias": 2,
    "h.0.b.weight": 8,
    "h.1.a.weight": 9,
    "head.weight": 30,
}
GROUPS = st.dictionaries(st.text("abc", min_size=1), st.integers(1, 10**6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (Whole(), ["all"] * 6),
        (ByLayer(), ["embed", "h.0.a", "h.0.a", "h.0.b", "h.1.a", "head"]),
        (ByParameter(), list(SIZES)),
        (Blocks(), ["rest", "h.0", "h.0", "h.0", "h.1", "rest"]),
        (ByName({"ends": ["embed", "head.weight"], "middle": ["h.*"]}), ["ends", *["middle"] * 4, "ends"]),
        (EqualSizes(2), ["1", *["2"] * 5]),
        (EqualSizes(6), ["1", "2", "3", "4", "5", "6"]),
    ],
)
def test_partitions(partition, expected: list[str]) -> None:
    assert partition.groups(SIZES) == dict(zip(SIZES, expected, strict=True))


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), count=st.integers(1, 12))
def test_equal_sizes_are_consecutive_and_none_is_empty(sizes: list[int], count: int) -> None:
    named = {f"p{place}": size for place, size in enumerate(sizes)}
    if count > len(sizes):
        with pytest.raises(ValueError, match="at least as many trained parameters"):
            EqualSizes(count).groups(named)
        return
    found = list(EqualSizes(count).groups(named).values())
    assert list(dict.fromkeys(found)) == [str(group) for group in range(1, count + 1)]
    assert found == sorted(found, key=int)


@given(sizes=GROUPS, norm=st.floats(1e-3, 1e3))
def test_threshold_rules_keep_to_their_sensitivity(sizes: dict[str, int], norm: float) -> None:
    for rule in (EqualShare(norm), ByDimension(norm), Quantiles(norm, max_norm=norm)):
        assert math.hypot(*rule.thresholds(sizes).values()) == pytest.approx(norm, rel=1e-12)
    assert Fixed(norm).thresholds(sizes) == dict.fromkeys(sizes, norm)
    by_size = ByDimension(norm).thresholds(sizes)
    first = next(iter(sizes))
    for group, size in sizes.items():
        assert by_size[group] / by_size[first] == pytest.approx(math.sqrt(size / sizes[first]), rel=1e-12)


def test_thresholds_for_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"missing: \['b'\], unknown: \['c'\]"):
        Fixed({"a": 1.0, "c": 1.0}).thresholds({"a": 3, "b": 4})


@pytest.mark.parametrize("scaling", [Clip(), AutoS(), AutoS(10.0), AutoV(), Psac(), Psac(5.0)])
@given(norm=st.floats(0, 1e8), threshold=st.floats(1e-4, 1e4))
def test_scaled_norms_stay_within_the_threshold(scaling: NormScaling, norm: float, threshold: float) -> None:
    norms, bound = torch.tensor([norm], dtype=torch.float64), torch.tensor(threshold, dtype=torch.float64)
    assert float((scaling(norms, bound) * norms)[0]) <= threshold * (1 + 1e-12)


@pytest.mark.parametrize(
    ("scaling", "at_zero", "at_two"),
    [(Clip(), 1.0, 1.0), (AutoS(0.5), 6.0, 3 / 2.5), (AutoV(), 0.0, 1.5), (Psac(0.5), 3.0, 3 / (2 + 0.5 / 2.5))],
)
def test_scalings_by_hand(scaling: NormScaling, at_zero: float, at_two: float) -> None:
    found = scaling(torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64))
    assert found.tolist() == pytest.approx([at_zero, at_two], rel=1e-12)


@given(sizes=GROUPS, sigma=st.floats(0.1, 10), data=st.data())
def test_allocations_follow_their_formulas_and_make_exactly_the_noise_multiplier(
    sizes: dict[str, int], sigma: float, data
) -> None:
    bounds = {group: data.draw(st.floats(1e-3, 1e3)) for group in sizes}
    whole = math.sqrt(math.fsum(bound**2 for bound in bounds.values()))
    weighted = math.fsum(bounds[group] * math.sqrt(size) for group, size in sizes.items())
    best = {group: math.sqrt(bounds[group] / math.sqrt(size) * weighted) for group, size in sizes.items()}
    proportional = ProportionalNoise({group: 1.0 + number for number, group in enumerate(sizes)})
    for allocation, by_hand in [
        (GlobalNoise(), dict.fromkeys(sizes, sigma * whole)),
        (EqualNoise(), {group: sigma * math.sqrt(len(sizes)) * bound for group, bound in bounds.items()}),
        (OptimalNoise(), {group: sigma * each for group, each in best.items()}),
        (proportional, None),
    ]:
        stds = allocation.stds(sigma, bounds, sizes)
        assert by_hand is None or stds == pytest.approx(by_hand, rel=1e-12)
        assert math.fsum((bounds[g] / stds[g]) ** 2 for g in sizes) == pytest.approx(1 / sigma**2, rel=1e-12)
        assert GivenNoise(stds).stds(sigma, bounds, sizes) == stds
        with pytest.raises(ValueError, match="make a noise multiplier of"):
            GivenNoise(stds).stds(sigma * 1.001, bounds, sizes)


def test_quantiles_move_by_their_formula_and_stop_at_the_floor() -> None:
    rule = Quantiles(Fixed({"a": 1.0, "b": 2.0}), target_quantile=0.6, learning_rate=0.5, floor=0.9)
    sizes = {"a": 1, "b": 1}
    assert rule.thresholds(sizes) == {"a": 1.0, "b": 2.0}
    counts = rule.counts({"a": torch.tensor([0.5, 1.0, 3.0, math.nan]), "b": torch.tensor([1.0, 1.0, 1.0, 1.0])})
    assert counts.tolist() == [0.0, 2.0]
    rule.update([1.0, 0.1])
    assert rule.thresholds(sizes) == pytest.approx({"a": 0.9, "b": 2.0 * math.exp(-0.5 * (0.1 - 0.6))})
    other = Quantiles(Fixed({"a": 1.0, "b": 2.0}), floor=0.9)
    other.load_state_dict(rule.state_dict())
    assert other.thresholds(sizes) == rule.thresholds(sizes)


def test_a_constant_sensitivity_divides_by_the_quantiles_that_were_asked_for() -> None:
    norms = {"a": torch.linspace(0.0, 1.0, 1001), "b": torch.linspace(0.0, 10.0, 1001).square()}
    for quantile in (0.2, 0.7):
        rule = Quantiles(3.0, target_quantile=quantile, learning_rate=0.1, max_norm=2.0)
        rule.thresholds({"a": 1, "b": 1})
        for _ in range(500):
            rule.update([float(count) / 1001 + 0.5 for count in rule.counts(norms)])
        found = rule.thresholds({"a": 1, "b": 1})
        assert math.hypot(*found.values()) == pytest.approx(2.0)
        assert found["b"] / found["a"] == pytest.approx((10 * quantile) ** 2 / quantile, rel=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EqualShare(0.0),
        lambda: Fixed({"a": -1.0}),
        lambda: Fixed({}),
        lambda: AutoS(0.0),
        lambda: Psac(math.inf),
        lambda: Quantiles(target_quantile=1.0),
        lambda: Quantiles(floor=0.1, max_norm=1.0),
        lambda: ProportionalNoise({"a": 0.0}),
        lambda: EqualSizes(0),
        lambda: ByName({"a": []}),
    ],
)
def test_arguments_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"must|exclude"):
        make()
