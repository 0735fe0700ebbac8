"""Lent memory is nobody else's until the last reference to it is gone, is used again then, and stays under its cap."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ghostclip
from ghostclip.norms.memory import FRESH, SMALL_BYTES, Memory, MemoryTrials, first_touch
from ghostclip.norms.outer import OuterProduct
from ghostclip.planner import Planner

LIKE = torch.empty(0)
NUMBERS = 1 << 16


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_first_touches_cost_in_proportion_and_small_ones_nothing():
    assert first_touch(SMALL_BYTES) == first_touch(-1) == 0.0
    assert first_touch(1 << 21) == pytest.approx(2 * first_touch(1 << 20))
    assert 0.0 <= first_touch(1 << 20) < 1e3


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


def test_a_larger_block_serves_less_and_the_cap_holds():
    memory = Memory(5 * NUMBERS)
    wheres = {address(memory.empty(LIKE, size)) for size in (NUMBERS, NUMBERS - 1, NUMBERS // 2)}
    assert len(wheres) == 1
    first, second = memory.empty(LIKE, NUMBERS), memory.empty(LIKE, NUMBERS)
    assert memory.nbytes == 4 * NUMBERS
    assert address(first) != address(second)
    del first, second
    large = memory.empty(LIKE, NUMBERS * 5 // 4)
    assert memory.nbytes == large.nbytes


def test_the_smallest_block_that_is_large_enough_is_lent():
    memory = Memory(1 << 22)
    small, large = memory.empty(LIKE, NUMBERS), memory.empty(LIKE, 2 * NUMBERS)
    where = address(small)
    del large, small
    assert address(memory.empty(LIKE, NUMBERS // 2)) == where


def test_what_is_given_up_is_freed_and_what_is_lent_then_is_freed_as_it_comes_back():
    memory = Memory(1 << 22)
    lent = memory.empty(LIKE, NUMBERS).fill_(1)
    memory.empty(LIKE, NUMBERS)
    memory.give_up()
    assert memory.nbytes == 0
    other = memory.empty(LIKE, NUMBERS).fill_(2)
    assert (lent.sum(), memory.nbytes) == (NUMBERS, other.nbytes)
    del lent
    third = memory.empty(LIKE, NUMBERS)
    assert memory.nbytes == other.nbytes + third.nbytes


def test_what_is_given_up_is_gone_while_something_else_is_lent():
    memory = Memory(1 << 22)
    lent = memory.empty(LIKE, NUMBERS)
    free = StorageWeakRef(memory.empty(LIKE, NUMBERS).untyped_storage())
    assert not free.expired()
    memory.give_up()
    assert free.expired()
    assert lent.shape == (NUMBERS,)


def test_a_planner_gives_up_its_memory_with_every_answer():
    planner = Planner()
    for keep in (False, True):
        planner.answer(OuterProduct(torch.randn(8, 70, 64), torch.randn(8, 70, 64), torch.Size((64, 64))), keep=keep)
        assert planner.memory.nbytes == 0


def test_nothing_is_kept_without_a_cap_or_for_little():
    for memory, size in ((FRESH, NUMBERS), (Memory(1 << 20), 10)):
        memory.empty(LIKE, size)
        assert memory.nbytes == 0


def test_what_is_kept_is_lent_in_trials_only():
    for kind, lent in ((Memory, 0), (MemoryTrials, 4 * NUMBERS)):
        memory = kind(1 << 20)
        where = address(memory.to_keep(LIKE, NUMBERS))
        assert memory.nbytes == lent
        if lent:
            assert address(memory.to_keep(LIKE, NUMBERS)) == where


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
    kept_everywhere(monkeypatch)
    planner = Planner()
    terms = [OuterProduct(torch.randn(8, 5, 64), torch.randn(8, 5, 64), torch.Size((64, 64))) for _ in range(3)]
    answers = [planner.answer(term, keep=True, room=1 << 20)[0] for term in terms]
    for term, answer in zip(terms, answers, strict=True):
        torch.testing.assert_close(answer.kept, term.per_example())
    assert len({address(answer.kept) for answer in answers}) == 3
