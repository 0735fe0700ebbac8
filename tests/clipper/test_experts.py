"""Experts: what the laws don't say of support/expert_models.py, and what connects examples in an engine."""

import pytest
import torch
from case_models import Wired
from comparing import assert_exact_by_losses
from expert_models import EXPERTS, LOSSES, WAYS, Experts

import ghostclip

losses_of = LOSSES["plain"]


def tokens(examples=4, dtype=torch.float64):
    return torch.randn(examples, 5, 4, dtype=dtype)


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


def test_a_capacity_shared_by_the_batch_is_caught():
    model = Experts(capacity_of_the_batch).double()
    data = torch.utils.data.TensorDataset(tokens(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = ghostclip.PrivacyEngine(model, optimizer, data, batch_size=16, noise_multiplier=1.0)
    with pytest.raises(ghostclip.GhostClipError, match=r"examples mix|examples that mix"):  # noqa: PT012
        for batch in engine.batches():
            engine.step(batch, lambda model, batch: losses_of(model, batch[0]))


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


@pytest.mark.parametrize("sent", [[1, 1, 1, 1], [1, 1, 2, 3], [1, 1, 1, 1, 1, 2, 3, 3]])
def test_as_many_rows_as_examples_of_which_some_are_not_finite_leave_out_nobody_else(sent):
    """Where an expert is sent so many rows that they could be one, or two, of each example."""

    def wiring(m, x):
        h, row = m.below(x).tanh(), torch.tensor(sent)
        return (h + torch.zeros_like(h).index_add(0, row, m.expert(h[row]))).square().sum(1)

    model, x = Wired(wiring, below=torch.nn.Linear(4, 4), expert=torch.nn.Linear(4, 4)).double(), tokens()[:, 0]
    x[1] = torch.nan
    result = ghostclip.GhostClipper(model, 0.1).backward(model(x))
    assert (result.weights == 0).tolist() == [False, True, False, False]
