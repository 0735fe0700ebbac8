"""Every case of the table against the slow obvious loop: outputs, norms, per-example gradients, clipped sums."""

from itertools import product

import oracle
import pytest
import torch
from case_types import Case, indices, normal
from cases import CASES, CASES_AND_DTYPES
from comparing import TOLERANCE, assert_close, assert_dicts_close, gradients, ready, truth, typical_norm

import ghostclip
from ghostclip.norms.term import squared_norms
from ghostclip.planner import Planner

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
@pytest.mark.one_in(6)
def test_outputs_equal_torch_bit_for_bit_and_swapping_changes_neither_keys_nor_parameters(case):
    plain, model = case.model(dtype=torch.float32), case.model(dtype=torch.float32)
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    for step in (ghostclip.wrap, ghostclip.wrap, ghostclip.unwrap):
        assert step(model) is model
        assert list(model.state_dict()) == keys
        assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    wrapped, inputs = ghostclip.wrap(model, **case.wrap), case.inputs(dtype=torch.float32)
    torch.testing.assert_close(wrapped(*inputs), plain(*inputs), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(*inputs), plain.eval()(*inputs), rtol=0, atol=0)


# Whose rows come in another order where lengths are others, and two whose examples a mask or an index tells apart.
MEASURED = ("packed", "bare bilinear", "bare by selection", "mask token put in place")


@every_case
@pytest.mark.one_in(16)
def test_few_layers_are_measured_in_every_batch(case):
    """Of the others it is known from the second batch on whose rows are whose."""
    model = ghostclip.wrap(case.model(), **case.wrap)
    clipper = ghostclip.GhostClipper(model, 1.0)
    for _ in range(2):
        model.zero_grad()
        clipper.backward(case.losses(model(*case.inputs())))
    assert clipper.passes.is_open == any(name in case.name for name in MEASURED)


@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES)
@pytest.mark.one_in(24)
def test_the_first_pass_equals_the_loop(case, dtype):
    _, clipper, losses = ready(case, dtype)
    norms = clipper.norms(losses, retain_graph=True)
    assert norms.dtype == dtype
    assert not norms.requires_grad
    assert_close(norms, oracle.norms(truth(case)), TOLERANCE[dtype])
    expected = {"layer": oracle.norms_per_layer(truth(case)), "parameter": oracle.norms_per_parameter(truth(case))}
    for per, values in expected.items():
        found = clipper.norms(losses, per=per, retain_graph=True)
        assert list(found) == list(values)
        for name, value in values.items():
            assert_close(found[name], value, TOLERANCE[dtype], 1e-3 * oracle.norms(truth(case)), f"{per} {name}")
    assert_dicts_close(clipper.per_example_grads(losses), truth(case), TOLERANCE[dtype])


@every_case
@pytest.mark.parametrize(
    ("second_pass", "norm_strategy"),
    [("reweight", "gram"), ("cached", "direct"),
     *(pytest.param(*both, marks=pytest.mark.slow) for both in (("reweight", "direct"), ("cached", "gram")))],
)  # fmt: skip
@pytest.mark.one_in(24)
def test_clipped_sums_equal_the_loop_and_add_up(case, second_pass, norm_strategy):
    max_norm = typical_norm(truth(case))
    model, clipper, losses = ready(case, clipping=max_norm, second_pass=second_pass, norm_strategy=norm_strategy)
    result, expected = clipper.backward(losses), oracle.clipped_sum(truth(case), max_norm)
    assert_close(result.norms, oracle.norms(truth(case)), 1e-10)
    assert_close(result.weights, oracle.clip_weights(truth(case), max_norm), 1e-10)
    assert_dicts_close(gradients(model), expected, 1e-10)
    clipper.backward(case.losses(model(*case.inputs())))
    assert_dicts_close(gradients(model), {name: 2 * value for name, value in expected.items()}, 1e-10)
    assert not any(value.requires_grad for value in gradients(model).values())


@every_case
@pytest.mark.one_in(24)
def test_batches_of_no_and_of_one_example(case):
    for batch, second_pass in product((0, 1), ("reweight", "cached")):
        expected = truth(case, batch)
        model, clipper, losses = ready(case, batch=batch, second_pass=second_pass, norm_strategy="gram")
        if second_pass == "reweight":  # these two know no second pass
            assert_close(clipper.norms(losses, retain_graph=True), oracle.norms(expected), 1e-10)
            assert_dicts_close(clipper.per_example_grads(losses, retain_graph=True), expected, 1e-10)
        result = clipper.backward(losses)
        assert_close(result.norms, oracle.norms(expected), 1e-10)
        assert result.weights.shape == (batch,)
        assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 1.0), 1e-10)


LARGE = [
    Case("large linear", lambda nn: nn.Linear(200, 150), (normal(5, 200),)),
    Case("large conv", lambda nn: nn.Conv2d(32, 40, 3, stride=2, padding=1), (normal(32, 9, 7),)),
    Case("large grouped conv", lambda nn: nn.Conv2d(32, 64, 3, groups=2), (normal(32, 6, 6),)),
    Case("large embedding", lambda nn: nn.Embedding(300, 40), (indices(300, 50),)),
    Case("large lstm", lambda nn: nn.LSTM(40, 90), (normal(7, 40, batch_dim=1),), output_dim=1),
    Case("large attention", lambda nn: nn.TransformerEncoderLayer(64, 4, 96, 0.0, batch_first=True), (normal(20, 64),)),
]


@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.one_in(3)
def test_sizes_that_are_worked_off_in_pieces(case, dtype):
    expected = oracle.per_example_grads(case.model(), case.losses, case.inputs(33), case.batch_dims)
    max_norm = typical_norm(expected)
    for second_pass, norm_strategy in product(("reweight", "cached"), ("gram", "direct")):
        model, clipper, losses = ready(case, dtype, 33, max_norm, second_pass=second_pass, norm_strategy=norm_strategy)
        assert_close(clipper.backward(losses).norms, oracle.norms(expected), TOLERANCE[dtype])
        assert_dicts_close(gradients(model), oracle.clipped_sum(expected, max_norm), TOLERANCE[dtype])


@every_case
@pytest.mark.one_in(9)
def test_every_strategy_gives_the_same_norms(case, monkeypatch):
    def answer(planner, term, keep, room=None, exact=False):
        each = term.per_example()
        squared = each.unsqueeze(-1).flatten(1).square().sum(1)
        for name, strategy in term.candidates().items() if term.closed_form(keep) is None else ():
            for found in (strategy.run(term), strategy.run(term, True)):
                assert_close(found.squared_norms, squared, 1e-10, 1e-6 * squared.max(), name)
                if found.kept is not None:
                    torch.testing.assert_close(found.kept.view_as(each), each, rtol=1e-10, atol=1e-10)
        return chosen(planner, term, keep, room, exact)

    chosen = Planner.answer
    monkeypatch.setattr(Planner, "answer", answer)
    _, clipper, losses = ready(case, second_pass="cached")
    assert_close(clipper.backward(losses).norms, oracle.norms(truth(case)), 1e-10)


@pytest.mark.parametrize("one_thread", [True, False], ids=["one thread", "inner products are not the best"])
def test_long_rows_lose_no_digits(monkeypatch, one_thread):
    # One number after another, the norm of 2.5 million of them would be off by 4e-4.
    if not one_thread:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = torch.rand(2, 2_500_001)
    for some in (rows, rows[:, ::3], rows[:, :70_000], rows[:, :8193]):
        assert_close(squared_norms(some), some.double().square().sum(1), 1e-6)
