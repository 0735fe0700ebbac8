"""Experts: rows that are picked by index and put back are clipped as the loop over single examples has them."""

import copy

import oracle
import pytest
import torch
from comparing import assert_close, assert_dicts_close, gradients
from expert_models import EXPERTS, LOSSES, WAYS, Experts
from torch import nn

import ghostclip

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_pass = pytest.mark.parametrize("second_pass", ["cached", "reweight"])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
losses_of = LOSSES["plain"]


def tokens(examples, positions=5, dtype=torch.float64):
    return torch.randn(examples, positions, 4, dtype=dtype)


def loop(model, x):
    """Per-example gradients by the loop, in float64."""
    plain = ghostclip.unwrap(copy.deepcopy(model)).double()
    return oracle.per_example_grads(plain, lambda out: out.square().sum(2).mean(1), (x.double(),))


def assert_exact(model, x, second_pass, tolerance=1e-10, clipper=None):
    truth = loop(model, x)
    norms = oracle.norms(truth)
    max_norm = float(norms.median()) if len(x) else 1.0
    clipper = ghostclip.GhostClipper(model, max_norm, second_pass=second_pass) if clipper is None else clipper
    max_norm = clipper.sensitivity
    losses = losses_of(model, x)
    assert_close(clipper.norms(losses, retain_graph=True), norms, tolerance)
    assert_dicts_close(clipper.norms(losses, per="parameter", retain_graph=True),
                       oracle.norms_per_parameter(truth), tolerance)  # fmt: skip
    assert_dicts_close(clipper.per_example_grads(losses, retain_graph=True), truth, tolerance)
    model.zero_grad()
    clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(truth, max_norm), tolerance)
    model.zero_grad()


@every_way
@every_pass
@pytest.mark.one_in(3)
def test_experts_against_the_loop(way, second_pass):
    model = Experts(way).double()
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
    for examples, positions in [(4, 5), (4, 5), (6, 3), (2, 7), (9, 5)]:  # routes are others in each batch
        assert_exact(model, tokens(examples, positions), second_pass, clipper=clipper)


@every_way
def test_experts_in_float32_and_of_few_examples(way):
    assert_exact(Experts(way), tokens(5, dtype=torch.float32), "cached", 1e-4)
    for examples in (0, 1):
        assert_exact(Experts(way).double(), tokens(examples), "reweight")


# The [T * B * k] rows of the two others are in no simple order.
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("splits", "biases")])
def test_tokens_that_lie_time_first(way):
    model = ghostclip.wrap(Experts(WAYS[way], time_first=True).double(), batch_dim={"below": 1, "head": 1})
    assert_exact(model, tokens(4, 6), "cached")


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
    assert_exact(model, tokens(3), "cached")


@pytest.mark.parametrize("way", ["layers", "matrices", "splits"])
def test_later_batches_take_no_more_backwards(way, monkeypatch):
    model = Experts(WAYS[way]).double()
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass="cached")
    counted = []
    original = ghostclip.graph.mixing_test.first_pass
    monkeypatch.setattr(
        ghostclip.graph.mixing_test, "first_pass", lambda *a, **k: counted.append(1) or original(*a, **k)
    )
    for _ in range(3):
        clipper.backward(losses_of(model, tokens(6, 20)))
    tests = len(counted)
    assert tests > 0
    for _ in range(5):
        clipper.backward(losses_of(model, tokens(6, 20)))
    assert len(counted) == tests


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

    assert_exact(Experts(way).double(), tokens(3), "cached")


def test_rows_picked_by_a_mask_and_summed_by_example():
    """Masked tokens of all examples in one list, as heads of masked language models take them."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.head = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x):
            mask = x[..., 0] > 0
            h = self.below(x).tanh()[mask]
            found = self.head(h).log_softmax(1)
            losses = -found.gather(1, torch.zeros(len(h), 1, dtype=torch.int64)).squeeze(1)
            return h.new_zeros(len(x)).index_add(0, mask.nonzero()[:, 0], losses)

    model = Masked().double()
    clipper = ghostclip.GhostClipper(model)
    for examples in (4, 6):
        x = tokens(examples)
        truth = oracle.per_example_grads(ghostclip.unwrap(copy.deepcopy(model)), lambda out: out, (x,))
        assert_close(clipper.norms(model(x)), oracle.norms(truth), 1e-10)
