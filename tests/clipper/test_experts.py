"""Experts: rows that are picked by index and put back are clipped as the loop over single examples has them."""

import copy

import oracle
import pytest
import torch
from comparing import assert_close, assert_dicts_close, gradients
from expert_models import EXPERTS, LOSSES, WAYS, Experts

import ghostclip

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_pass = pytest.mark.parametrize("second_pass", ["cached", "reweight"])
losses_of = LOSSES["plain"]


def tokens(examples, positions=5, dtype=torch.float64):
    return torch.randn(examples, positions, 4, dtype=dtype)


def loop(model, x):
    """Per-example gradients by the loop, in float64."""
    plain = ghostclip.unwrap(copy.deepcopy(model)).double()
    return oracle.per_example_grads(plain, lambda out: out.square().sum(2).mean(1), (x.double(),))


def assert_exact(model, x):
    truth = loop(model, x)
    clipper = ghostclip.GhostClipper(model, float(oracle.norms(truth).median()) if len(x) else 1.0)
    losses = losses_of(model, x)
    assert_dicts_close(clipper.per_example_grads(losses, retain_graph=True), truth, 1e-10)
    clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(truth, clipper.sensitivity), 1e-10)
    model.zero_grad()


@every_way
def test_few_examples(way):
    model = Experts(way).double()
    for examples in (0, 1, 3):
        assert_exact(model, tokens(examples))


@every_way
def test_tokens_that_lie_time_first(way):
    model = ghostclip.wrap(Experts(way, time_first=True).double(), batch_dim={"below": 1, "head": 1})
    assert_exact(model, tokens(4, 6))


@every_way
@every_pass
@pytest.mark.one_in(3)
def test_an_example_that_is_not_finite_contributes_nothing(way, second_pass):
    model = Experts(way).double()
    x = tokens(4)
    x[1, 2] = float("nan")
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
    others = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
    for _ in range(2):
        model.zero_grad()
        result = clipper.backward(losses_of(model, x))
        found = gradients(model)
        model.zero_grad()
        others.backward(losses_of(model, x[[0, 2, 3]]))
        assert result.weights[1] == 0
        assert_dicts_close(found, gradients(model), 1e-10)


@every_way
@pytest.mark.one_in(3)
def test_one_more_example_moves_the_sum_by_no_more_than_the_bound(way):
    model = Experts(way)
    for scale in (1.0, 1e-3, 30.0):
        x = scale * tokens(5, dtype=torch.float32)
        for second_pass in ("cached", "reweight"):
            sums = []
            for batch in (x, x[:-1]):
                model.zero_grad()
                ghostclip.GhostClipper(model, 0.01, second_pass=second_pass).backward(losses_of(model, batch))
                sums.append(torch.cat([grad.double().flatten() for grad in gradients(model).values()]))
            assert (sums[0] - sums[1]).norm() <= 0.01 * (1 + 1e-5)


def test_an_expert_that_no_token_reaches_gets_zeros():
    model = Experts(WAYS["matrices"]).double()
    with torch.no_grad():
        model.router.bias[EXPERTS - 1] = -1e3
    clipper = ghostclip.GhostClipper(model)
    grads = clipper.per_example_grads(losses_of(model, tokens(3)))
    assert not grads["up"][:, -1].any()
    assert grads["up"][:, 0].any()
    assert_exact(model, tokens(3))


def test_autocast_to_bfloat16():
    model = Experts(WAYS["matrices"])
    x, clipper = tokens(4, dtype=torch.float32), ghostclip.GhostClipper(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_of(model, x).float()
    norms = clipper.norms(losses)
    assert_close(norms.double(), oracle.norms(loop(model, x)), 0.1)


def test_experts_of_a_checkpointed_block():
    def way(m, h, weights, chosen):
        return torch.utils.checkpoint.checkpoint(WAYS["matrices"], m, h, weights, chosen, use_reentrant=False)

    assert_exact(Experts(way).double(), tokens(3))
