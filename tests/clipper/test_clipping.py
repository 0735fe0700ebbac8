"""Policies: weights from norms, and the sensitivity they promise."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostclip.clipping import Automatic, Custom, Flat, PerLayer, as_policy

NORMS = st.lists(st.floats(0, 2.0**60, width=32), min_size=1, max_size=20)
POLICIES = {
    "flat": Flat(0.7),
    "automatic": Automatic(0.7, gamma=0.01),
    "custom": Custom(lambda norms: 3.0 - norms, sensitivity=0.7),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(values=NORMS)
def test_no_weighted_norm_exceeds_the_sensitivity(policy, values):
    norms = torch.tensor(values, dtype=torch.float32)
    weighted = policy.weights(norms).abs().double() * norms.double()
    assert policy.sensitivity == 0.7
    assert float(weighted.max()) <= 0.7


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


def test_a_custom_function_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"weights of shape \[3\], one per example; got \[1\]"):
        Custom(lambda norms: norms.sum()[None], sensitivity=1.0).weights(torch.ones(3))


def test_what_counts_as_a_policy():
    class Halving:
        sensitivity = 2.0

        def __call__(self, norms):
            return 0.5 / norms

    assert as_policy(1) == Flat(1.0)
    assert isinstance(as_policy(Halving()), Custom)
    assert as_policy(POLICIES["automatic"]) is POLICIES["automatic"]


class Ones:
    """A policy of a user's own that clips nothing, and says that it does."""

    sensitivity = 0.7
    steps = 3

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
    with pytest.raises(TypeError, match=r"must be PerLayer, Grouped, Composed, or Custom\(.*got Mine"):
        as_policy(Mine(1.0))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_max_norm_must_be_positive_and_finite(value):
    for make in (as_policy, Flat, Automatic):
        with pytest.raises(ValueError, match=r"must be a finite number > 0; got"):
            make(value)


@pytest.mark.parametrize("value", [True, "1.0", None, lambda norms: norms])
def test_other_things_are_no_policy(value):
    with pytest.raises(TypeError, match="clipping must be a max norm"):
        as_policy(value)
