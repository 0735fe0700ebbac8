"""Lent memory is nobody else's until the last reference to it is gone, is used again then, and stays under its cap."""

import copy
import gc

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.norms.memory import FRESH, Memory
from ghostclip.planner import Planner

LIKE = torch.empty(0)
NUMBERS = 1 << 16


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_memory_given_up_is_lent_again():
    memory = Memory(1 << 20)
    first = memory.empty(LIKE, 4, NUMBERS // 4)
    where = address(first)
    del first
    assert address(memory.empty(LIKE, NUMBERS)) == where
    assert memory.nbytes == 4 * NUMBERS


def test_two_of_one_shape_at_once_are_apart():
    memory = Memory(1 << 20)
    first, second = memory.empty(LIKE, NUMBERS).fill_(1), memory.empty(LIKE, NUMBERS).fill_(2)
    assert address(first) != address(second)
    assert first.sum() == NUMBERS


@pytest.mark.parametrize("grad", [False, True])
def test_a_view_keeps_its_memory(grad):
    memory = Memory(1 << 20)
    with torch.set_grad_enabled(grad):
        view = memory.empty(LIKE, 4, NUMBERS // 4).fill_(1).flatten()[5:]
        gc.collect()
        memory.empty(LIKE, NUMBERS).fill_(2)
    assert view.sum() == NUMBERS - 5


def test_nearly_equal_sizes_share_and_the_cap_holds():
    memory = Memory(5 * NUMBERS)
    wheres = {address(memory.empty(LIKE, size)) for size in (NUMBERS, NUMBERS - 1, NUMBERS - NUMBERS // 20)}
    assert len(wheres) == 1
    first, second = memory.empty(LIKE, NUMBERS), memory.empty(LIKE, NUMBERS)
    assert memory.nbytes == 4 * NUMBERS
    assert address(first) != address(second)
    del first, second
    large = memory.empty(LIKE, NUMBERS * 5 // 4)
    assert memory.nbytes == large.nbytes


def test_nothing_is_kept_without_a_cap_or_for_little():
    for memory, size in ((FRESH, NUMBERS), (Memory(1 << 20), 10)):
        memory.empty(LIKE, size)
        assert memory.nbytes == 0


def test_a_copy_starts_empty():
    memory = Memory(1 << 20)
    lent = memory.empty(LIKE, NUMBERS)
    twin = copy.deepcopy(memory)
    assert (twin.cap, twin.nbytes) == (memory.cap, 0)
    assert address(twin.empty(LIKE, NUMBERS)) != address(lent)


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers).double(), torch.randn(8, 70, 64).double()


def kept_everywhere(monkeypatch):
    """Has every planner keep per-example gradients; returns the sizes of the blocks it lends."""
    monkeypatch.setattr(
        "ghostclip.planner.worth_measuring",
        lambda ordered, candidates: [name for name in ordered if candidates[name].keeps][:1],
    )


def expected(net, x):
    reference = ghostclip.GhostClipper(copy.deepcopy(net), 0.5)
    reference.backward(reference.model(x).square().sum((1, 2)))
    return [p.grad for p in reference.model.parameters()]


def test_two_layers_of_one_shape_in_one_pass(monkeypatch):
    net, x = model()
    sums = expected(net, x)
    kept_everywhere(monkeypatch)
    clipper = ghostclip.GhostClipper(net, 0.5, second_pass="cached")
    for _ in range(3):
        net.zero_grad()
        clipper.backward(net(x).square().sum((1, 2)))
        assert [row.kept for row in clipper.explain() if row.parameter == "weight"] == [True, True]
        for p, each in zip(net.parameters(), sums, strict=True):
            torch.testing.assert_close(p.grad, each, rtol=1e-10, atol=1e-12)


def test_a_graph_gone_through_twice(monkeypatch):
    net, x = model()
    sums = expected(net, x)
    kept_everywhere(monkeypatch)
    clipper = ghostclip.GhostClipper(net, 0.5, second_pass="cached")
    losses = net(x).square().sum((1, 2))
    clipper.backward(losses, retain_graph=True)
    clipper.backward(losses)
    for p, each in zip(net.parameters(), sums, strict=True):
        torch.testing.assert_close(p.grad, 2 * each, rtol=1e-10, atol=1e-12)


def test_answers_of_two_batches_in_flight(monkeypatch):
    from ghostclip.norms.outer import Outer

    kept_everywhere(monkeypatch)
    planner = Planner()
    terms = [Outer(torch.randn(8, 5, 64), torch.randn(8, 5, 64), torch.Size((64, 64))) for _ in range(3)]
    answers = [planner.answer(term, keep=True)[0] for term in terms]
    for term, answer in zip(terms, answers, strict=True):
        torch.testing.assert_close(answer.kept, term.per_example())
    wheres = {address(answer.kept) for answer in answers}
    assert len(wheres) == 3
    del answers, answer
    assert address(planner.answer(terms[0], keep=True)[0].kept) in wheres
