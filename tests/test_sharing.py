"""Work shared among threads: in those torch has, or in new ones; each part once, and the same results."""

import ctypes
from itertools import pairwise

import pytest
import torch

from ghostclip.native import calls, library
from ghostclip.noise.gaussian import ChaCha

pytestmark = pytest.mark.skipif(library("share") is None, reason="no C compiler here")

both_kinds = pytest.mark.parametrize("kind", ["torch's threads", "new threads"])


@pytest.fixture
def threads(kind, monkeypatch):
    """Sets how many threads torch says it has, of which kind, for work however small."""
    if kind == "new threads":
        monkeypatch.setattr(calls, "_runtime", lambda: None)
    monkeypatch.setattr(calls, "SHARE", 1)
    monkeypatch.setattr(calls, "OWN_SHARE", 1)
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def noted(found: list, fails: bool = False):
    """A C function of (word, first, last) that notes what it is called with."""
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_ssize_t)(
        lambda word, first, last: found.append((word, first, last)) or int(fails and first == 0)
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="other builds of torch may have other threads")
def test_torchs_own_runtime_is_found():
    assert calls._runtime() is not None


@both_kinds
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 8, 50, 64])
def test_every_part_is_done_once(count, size, kind, threads):
    threads(count)
    found: list = []
    assert not calls.share_out(noted(found), size, 8, 1000, (7,))
    found.sort()
    assert [(word, *edge) for word, *edge in found] == found
    assert {word for word, _, _ in found} == {7}
    assert found[0][1] == 0
    assert found[-1][2] == size
    assert all(one[2] == other[1] and one[2] % 8 == 0 for one, other in pairwise(found))
    assert len(found) == min(count, -(-size // 8))


@both_kinds
def test_a_part_that_fails_is_told(kind, threads):
    threads(4)
    assert calls.share_out(noted([], fails=True), 64, 8, 1000, (7,))


@pytest.mark.parametrize("work", [0, 10_000])
def test_little_work_stays_in_one_piece(work, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found: list = []
    calls.share_out(noted(found), 64, 8, work, (7,))
    assert found == [(7, 0, 64)]


def test_numbers_that_are_not_whole_go_as_their_bits():
    assert calls._as_word(1.0) == 0x3FF0000000000000
    assert calls._as_word(None) == 0


@both_kinds
@pytest.mark.parametrize("size", [1, 255, 256, 257, 5_000])
def test_noise_does_not_depend_on_the_threads(size, kind, threads):
    ends = []
    for count in (1, 2, 7):
        threads(count)
        stream = ChaCha(library("normal"), 5)
        filled = torch.empty(size)
        stream.fill(filled, 2.0)
        sums = [torch.arange(float(length)) for length in (3, 0, 700, size, 13)]
        assert stream.add(sums, 1.5, 3.0)
        ends.append((torch.cat([filled, *sums]), stream.position))
    assert all(torch.equal(one, ends[0][0]) and place == ends[0][1] for one, place in ends)
