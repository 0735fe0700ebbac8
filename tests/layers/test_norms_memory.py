"""Materialised gradients that are kept lie apart from one another, and within their share of memory."""

import oracle
import torch
from comparing import assert_dicts_close, gradients
from torch import nn

import ghostclip
from ghostclip.norms.outer import OuterProduct
from ghostclip.planner import Planner


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers).double(), torch.randn(8, 70, 64).double()


def kept_everywhere(monkeypatch):
    """Has every planner keep per-example gradients."""
    monkeypatch.setattr(
        "ghostclip.planner.worth_measuring",
        lambda ordered, candidates: [name for name in ordered if candidates[name].keeps][:1],
    )


def test_two_layers_of_one_shape_in_one_pass_and_a_graph_gone_through_twice(monkeypatch):
    net, x = model()
    singles = oracle.per_example_grads(net, lambda out: out.square().sum((1, 2)), (x,))
    kept_everywhere(monkeypatch)
    clipper = ghostclip.GhostClipper(net, 0.5, second_pass="cached")
    for times in (1, 1, 2):
        net.zero_grad()
        losses = net(x).square().sum((1, 2))
        for left in reversed(range(times)):
            clipper.backward(losses, retain_graph=left > 0)
        assert [row.kept for row in clipper.explain() if row.parameter == "weight"] == [True, True]
        expected = {name: times * total for name, total in oracle.clipped_sum(singles, 0.5).items()}
        assert_dicts_close(gradients(net), expected, 1e-10)


def test_kept_gradients_take_no_more_than_their_share(monkeypatch):
    """A kept gradient of 16 KiB an example, each layer's pre-activation and input 256 bytes a position."""
    kept_everywhere(monkeypatch)
    found = {}
    for positions in (2, 22, 33):
        net, _ = model()
        net.float()
        clipper = ghostclip.GhostClipper(net, 0.5, second_pass="cached")
        clipper.backward(net(torch.randn(8, positions, 64)).square().sum((1, 2)))
        found[positions] = [row.kept for row in clipper.explain() if row.parameter == "weight"]
    # No more than the pre-activation's gradient and the input, which it frees: half a KiB a position and example.
    assert found == {2: [False, False], 22: [False, False], 33: [True, True]}


def test_answers_of_two_batches_in_flight(monkeypatch):
    kept_everywhere(monkeypatch)
    planner = Planner()
    terms = [OuterProduct(torch.randn(8, 5, 64), torch.randn(8, 5, 64), torch.Size((64, 64))) for _ in range(3)]
    answers = [planner.answer(term, keep=True, room=1 << 20)[0] for term in terms]
    for term, answer in zip(terms, answers, strict=True):
        torch.testing.assert_close(answer.kept, term.per_example())
    assert len({address(answer.kept) for answer in answers}) == 3
