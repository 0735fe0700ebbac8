"""Experts that connect examples are refused in the batch where they do, or caught by the engine's self-check."""

from contextlib import suppress

import pytest
import torch
from comparing import assert_exact_by_losses
from expert_models import LOSSES, WAYS, Experts

import ghostclip

losses_of = LOSSES["plain"]


def tokens(examples=4, positions=5):
    return torch.randn(examples, positions, 4, dtype=torch.float64)


def test_one_token_sent_to_another_examples_row():
    """A single row among many, in a later batch."""

    def way(m, h, weights, chosen):
        found = torch.zeros_like(h)
        for expert, layer in enumerate(m.layers):
            row, place = torch.where(chosen == expert)
            other = row.clone()
            if m.wrong and expert == 1:
                other[-1] = 0 if row[-1] >= 5 else 19
            found = found.index_add(0, other, layer(h[row]) * weights[row, place, None])
        return found

    model = Experts(way).double()
    model.wrong = False
    clipper = ghostclip.GhostClipper(model)
    clipper.backward(losses_of(model, tokens()))
    model.wrong = True
    with pytest.raises(ghostclip.UnsupportedModelError):
        clipper.backward(losses_of(model, tokens()))


@pytest.mark.parametrize("many", [False, True])
def test_tokens_of_an_expert_that_meet_in_a_product(many):
    """Four picked tokens of four features are four of both, in whichever dimension."""

    def way(m, h, weights, chosen):
        picked = torch.tensor([0, 6, 11, 16] if m.wrong else [0, 1, 2, 3])
        inside = m.layers[0](h[picked])
        pairs = m.layers[1](h[picked]).softmax(1)
        met = torch.bmm(pairs.unsqueeze(0), inside.unsqueeze(0))[0] if many else pairs @ inside
        return torch.zeros_like(h).index_add(0, picked, met)

    model = Experts(way).double()
    clipper = ghostclip.GhostClipper(model)
    model.wrong = False
    with suppress(ghostclip.UnsupportedModelError):  # which may refuse all of it
        clipper.norms(losses_of(model, tokens()))
    model.wrong = True
    with pytest.raises(ghostclip.UnsupportedModelError):
        clipper.norms(losses_of(model, tokens()))


@pytest.mark.parametrize("back", [[0, 1, 6, 12], [0, 1, 6, 2], [0, 1, 2, 6]])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_token_that_comes_back_twice_once_at_another_example(back, at_once):
    """The right place may be the first, the last, or that of the larger number."""
    back = torch.tensor(back)

    def way(m, h, weights, chosen):
        inside = m.layers[0](h[[0, 1, 6]])
        if at_once:
            return torch.zeros_like(h).index_add(0, back, inside[[0, 1, 2, 2]])
        return torch.zeros_like(h).index_add(0, back[:3], inside).index_add(0, back[[0, 1, 3]], inside)

    model = Experts(way).double()
    with pytest.raises(ghostclip.UnsupportedModelError, match="mix"):
        ghostclip.GhostClipper(model).backward(losses_of(model, tokens()))


@pytest.mark.parametrize("way", ["layers", "matrices", "splits"])
def test_a_loss_that_balances_experts_over_the_batch(way):
    model = Experts(WAYS[way]).double()
    with pytest.raises(ghostclip.UnsupportedModelError):
        ghostclip.GhostClipper(model).backward(LOSSES["balanced"](model, tokens()))
    with pytest.raises(ghostclip.UnsupportedModelError, match="mix"):
        ghostclip.GhostClipper(model).clip(LOSSES["balanced"], tokens())


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


def test_experts_over_rows_from_outside_of_the_graph():
    model = Experts(lambda m, h, weights, chosen: WAYS["layers"](m, h.detach(), weights, chosen)).double()
    assert_exact_by_losses(ghostclip.GhostClipper(model), losses_of(model, tokens()))


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_a_penalty_on_all_that_an_expert_says(second_pass):
    def way(m, h, weights, chosen):
        row, _ = torch.where(chosen == 0)
        inside = m.layers[0](h[row])
        return torch.zeros_like(h).index_add(0, row, inside) + m.factor * inside.square().mean()

    model = Experts(way).double()
    clipper = ghostclip.GhostClipper(model, 0.1, second_pass=second_pass)
    for model.factor in (0.0, 0.0, 1.0, 0.0, 1.0):
        losses = losses_of(model, tokens())
        if not model.factor:
            assert_exact_by_losses(clipper, losses)
            continue
        with pytest.raises(ghostclip.UnsupportedModelError, match="mix"):
            clipper.backward(losses)


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
