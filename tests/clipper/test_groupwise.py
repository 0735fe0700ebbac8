"""Group-wise clipping: every case against the loop, by both second passes, and every wrong grouping refused."""

import math

import oracle
import pytest
import torch
from cases import CASES_AND_DTYPES
from comparing import TOLERANCE, assert_close, assert_dicts_close, every_pass, gradients, ready, truth, typical_norm
from hypothesis import given
from hypothesis import strategies as st

import ghostclip
from ghostclip.clipping import Custom, Grouped, PerLayer, as_policy
from ghostclip.errors import PrivacyError


def by_group(grads, group_of, thresholds):
    """{group: norms}, {group: weights} and the clipped sum by the loop's gradients."""
    norms = {group: oracle.norms({n: g for n, g in grads.items() if group_of(n) == group}) for group in thresholds}
    weights = {group: torch.where(n > 0, thresholds[group] / n, 1.0).clamp(max=1.0) for group, n in norms.items()}
    sums = {n: torch.einsum("b,b...->...", weights[group_of(n)], g) for n, g in grads.items()}
    return norms, weights, sums


@every_pass
@pytest.mark.parametrize(("row", "dtype"), CASES_AND_DTYPES)
@pytest.mark.one_in(24)
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


def model_and_batch(dtype=torch.float64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    return model.to(dtype), torch.randn(6, 3, dtype=dtype), torch.randint(0, 2, (6,))


def losses_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


GROUPS = {"ends": ["0", "3"], "weight": ["2.weight"], "bias": ["2.b*"]}
THRESHOLDS = {"ends": 0.3, "weight": 0.2, "bias": 0.1}


def group_of(name):
    return "ends" if name[0] in "03" else name[2:]


def expected_grads(model, x, y):
    return oracle.grads_of_single_losses(model, losses_of(model, x, y))


@every_pass
def test_groups_that_divide_a_layer(second_pass):
    model, x, y = model_and_batch()
    norms, weights, sums = by_group(expected_grads(model, x, y), group_of, THRESHOLDS)
    clipper = ghostclip.GhostClipper(model, Grouped(GROUPS, thresholds=THRESHOLDS), second_pass=second_pass)
    for _ in range(2):
        result = clipper.backward(losses_of(model, x, y))
    assert_dicts_close(gradients(model), {name: 2 * value for name, value in sums.items()}, 1e-10)
    for group in THRESHOLDS:
        assert_close(result.norms[group], norms[group], 1e-10)
        assert_close(result.weights[group], weights[group], 1e-10)
    assert result.sensitivity == pytest.approx(math.sqrt(0.3**2 + 0.2**2 + 0.1**2))
    assert clipper.verify(lambda m, batch: losses_of(m, *batch), (x, y)) < 1e-9


def test_a_custom_function_sees_all_groups_and_is_held_to_its_sensitivity():
    model, x, y = model_and_batch()
    grads = expected_grads(model, x, y)
    norms, _, _ = by_group(grads, group_of, THRESHOLDS)

    def function(found):
        for group, norm in norms.items():
            assert_close(found[group], norm, 1e-10)
        return {"ends": 9.0 / found["weight"], "weight": found["bias"] * 0 - 1, "bias": found["bias"] * 0}

    policy = Custom(function, sensitivity=0.5, groups=GROUPS)
    result = ghostclip.GhostClipper(model, policy).backward(losses_of(model, x, y))
    assert_close(sum((result.weights[g] * norms[g]) ** 2 for g in norms).sqrt(), torch.full((6,), 0.5), 1e-9)
    assert (result.weights["weight"] < 0).all()
    sums = {n: torch.einsum("b,b...->...", result.weights[group_of(n)], g) for n, g in grads.items()}
    assert_dicts_close(gradients(model), sums, 1e-10)


@given(values=st.lists(st.tuples(*[st.floats(0, 2.0**60, width=32)] * 2), min_size=1, max_size=10),
       scale=st.floats(-(2.0**60), 2.0**60, width=32))  # fmt: skip
def test_no_sum_over_groups_exceeds_the_sensitivity(values, scale):
    norms = {group: torch.tensor([v[k] for v in values]) for k, group in enumerate("ab")}
    custom = as_policy(
        Custom(lambda n: {g: torch.full_like(v, scale) for g, v in n.items()}, 0.7, {"a": ["a"], "b": ["b"]})
    )
    for policy in (custom, PerLayer(0.7), Grouped({"a": ["a"], "b": ["b"]}, max_norm=0.7)):
        weights = policy.weights(norms)
        squares = sum((weights[g].double() * norms[g].double()) ** 2 for g in norms)
        assert float(squares.sqrt().max()) <= policy.sensitivity == 0.7


def test_thresholds_may_come_first():
    assert PerLayer({"0": 3.0, "2": 4.0}) == PerLayer(thresholds={"0": 3.0, "2": 4.0})


def test_a_pattern_gives_each_layer_that_it_fits_its_threshold():
    model, x, y = model_and_batch()
    found = {}
    names = {"pattern": {"*": 1e-3, "3": 3e-3}, "layers": {"0": 1e-3, "2": 1e-3, "3": 3e-3}}
    for kind, thresholds in names.items():
        model.zero_grad()
        found[kind] = ghostclip.GhostClipper(model, PerLayer(thresholds)).backward(losses_of(model, x, y))
        found[kind, "sum"] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert found["pattern"].sensitivity == found["layers"].sensitivity == pytest.approx(11**0.5 * 1e-3)
    assert_close(found["pattern", "sum"], found["layers", "sum"], 1e-9)
    with pytest.raises(PrivacyError, match="once PerLayer is given to a model"):
        _ = PerLayer({"*": 1.0}).sensitivity


def test_freezing_a_layer_moves_the_thresholds_of_the_others():
    model, x, y = model_and_batch()
    clipper = ghostclip.GhostClipper(model, PerLayer(3.0**0.5 * 1e-3))
    first = clipper.backward(losses_of(model, x, y))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    model.zero_grad()
    second = clipper.backward(losses_of(model, x, y))
    assert list(second.norms) == ["0", "3"]
    assert_close(second.weights["0"], first.weights["0"] * (3 / 2) ** 0.5, 1e-9)
    assert first.sensitivity == second.sensitivity


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PerLayer(0.0), ValueError, "max_norm must be a finite number > 0"),
        (lambda: PerLayer(1.0, {"0": 1.0}), ValueError, "exclude each other"),
        (lambda: PerLayer(thresholds={"0": -1.0}), ValueError, r"thresholds\['0'\] must be"),
        (lambda: PerLayer(thresholds={}), TypeError, "thresholds must be"),
        (lambda: PerLayer({}), TypeError, "thresholds must be"),
        (lambda: PerLayer({"0": 1.0}, thresholds={"0": 1.0}), ValueError, "exclude each other"),
        (lambda: PerLayer(thresholds={"0": 1.0}), ValueError, r"missing: \['2', '3'\], unknown: none"),
        (lambda: PerLayer({"*": 1.0, "7*": 1.0}), ValueError, r"missing: none, unknown: \['7\*'\]"),
        (lambda: PerLayer({"*": 1.0, "[0-2]": 1.0}), ValueError, r"'0' fits '\*', '\[0-2\]'"),
        (lambda: Grouped({}), ValueError, "at least one group"),
        (lambda: Grouped({"a": []}), ValueError, "at least one pattern"),
        (lambda: Grouped({"a": "0.*"}), TypeError, "lists of name patterns"),
        (lambda: Grouped(["0"]), TypeError, r"groups must be .*such as \{"),
        (lambda: Grouped({"0.*": 0.5}), TypeError, r'such as \{"encoder": .*; got 0.5 for .*into thresholds='),
        (lambda: Grouped({"a": ["*"]}, thresholds={"b": 1.0}), ValueError, r"missing: \['a'\], unknown: \['b'\]"),
        (lambda: Grouped({"a": ["0", "2"]}), ValueError, "'3.weight' is in none of a"),
        (lambda: Grouped({"a": ["*"], "b": ["2.*"]}), ValueError, "'2.weight' is in several: a, b"),
        (lambda: Grouped({"a": ["*", "7.*"]}), ValueError, "fit none: '7.\\*' of 'a'"),
        (lambda: Custom(lambda n: n, 1.0, {"a": ["0"]}), ValueError, "'2.weight' is in none"),
        (lambda: Custom(lambda n: n, -1.0, {"a": ["*"]}), ValueError, "sensitivity must be"),
    ],
)
def test_wrong_groups_are_named_at_once(make, error, message):
    model, _, _ = model_and_batch()
    with pytest.raises(error, match=message):
        ghostclip.GhostClipper(model, make())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n: n["all"], r"weights for the groups \['all'\]; got Tensor"),
        (lambda n: {"other": n["all"]}, r"got \['other'\]"),
        (lambda n: {"all": n["all"].sum()}, r"shape \[6\] for 'all'; got \[\]"),
    ],
)
def test_a_custom_function_of_another_shape_is_refused(answer, message):
    model, x, y = model_and_batch()
    clipper = ghostclip.GhostClipper(model, Custom(answer, 1.0, {"all": ["*"]}))
    with pytest.raises(ValueError, match=message):
        clipper.backward(losses_of(model, x, y))
    assert all(p.grad is None for p in model.parameters())
