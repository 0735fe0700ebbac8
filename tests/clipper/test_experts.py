"""Experts: what the laws don't say of support/expert_models.py, and what connects examples in an engine."""

import pytest
import torch
from comparing import assert_dicts_close, assert_exact_by_losses, gradients
from expert_models import EXPERTS, LOSSES, WAYS, Experts

import ghostclip

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_pass = pytest.mark.parametrize("second_pass", ["cached", "reweight"])
losses_of = LOSSES["plain"]


def tokens(examples=4, dtype=torch.float64):
    return torch.randn(examples, 5, 4, dtype=dtype)


@every_way
def test_an_empty_batch(way):
    model = Experts(way).double()
    assert ghostclip.GhostClipper(model).backward(losses_of(model, tokens(0))).norms.shape == (0,)
    assert not any(bool(grad.any()) for grad in gradients(model).values())


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
    assert_exact_by_losses(clipper, losses_of(model, tokens(3)))


def capacity_of_the_batch(m, h, weights, chosen):
    """An expert takes no more than its share of all tokens, in the order of the batch."""
    found = torch.zeros_like(h)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where(chosen == expert)
        row, place = row[: len(h) // 4], place[: len(h) // 4]
        found.index_add_(0, row, layer(h[row]) * weights[row, place, None])
    return found


def capacity_of_an_example(m, h, weights, chosen):
    """The same of its share of an example's tokens."""
    found, kept = torch.zeros_like(h), torch.zeros_like(chosen, dtype=torch.bool)
    for expert in range(len(m.layers)):
        mine = (chosen == expert).view(-1, 5, chosen.shape[1])
        kept |= (mine & (mine.any(2).cumsum(1) <= 2).unsqueeze(2)).view_as(kept)
    for expert, layer in enumerate(m.layers):
        row, place = torch.where((chosen == expert) & kept)
        found.index_add_(0, row, layer(h[row]) * weights[row, place, None])
    return found


def engine_of(model):
    data = torch.utils.data.TensorDataset(torch.randn(64, 5, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return ghostclip.PrivacyEngine(model, optimizer, data, batch_size=16, noise_multiplier=1.0)


def train(engine):
    for batch in engine.batches():
        engine.step(batch, lambda model, batch: losses_of(model, batch[0]))


def test_a_capacity_shared_by_the_batch_is_caught():
    model = Experts(capacity_of_the_batch).double()
    with pytest.raises(ghostclip.GhostClipError, match="loss"):
        train(engine_of(model))
    fresh = Experts(capacity_of_the_batch).double()
    with pytest.raises(ghostclip.GhostClipError):
        ghostclip.GhostClipper(fresh).verify(losses_of, tokens(8))


@pytest.mark.parametrize("way", [capacity_of_an_example, WAYS["layers"], WAYS["splits"]])
def test_private_steps(way):
    model = Experts(way).double()
    engine = engine_of(model)
    before = [parameter.detach().clone() for parameter in model.layers.parameters()]
    train(engine)
    assert engine.steps_taken == 4
    moved = [not torch.equal(old, new) for old, new in zip(before, model.layers.parameters(), strict=True)]
    assert all(moved)
    assert ghostclip.GhostClipper(model).verify(losses_of, tokens()) < 1e-9


def test_a_row_that_nothing_uses_harms_no_other_example():
    """What is dropped isn't finite, of an example that is; it belongs to nobody."""

    def way(m, h, weights, chosen):
        rows = m.layers[0]((h / torch.tensor(m.divisor).view(-1, 1))[[0, 5, 10, 15, 16]])
        return torch.zeros_like(h).index_add(0, torch.tensor([0, 5, 10, 15]), rows[:4])

    model = Experts(way).double()
    model.divisor = [1.0] * 20
    x, clipper = tokens(), ghostclip.GhostClipper(model, 0.1)
    clean = clipper.norms(losses_of(model, x))
    model.divisor[16] = 0.0
    norms = clipper.norms(losses_of(model, x))
    assert torch.allclose(norms[:3], clean[:3], rtol=1e-10)
