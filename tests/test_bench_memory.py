"""Peak memory: what a fresh process reports, and the search for the largest batch."""

import pytest

from ghostclip.bench.memory import ask, largest_batch, peaks, within

MIB = 2**20


@pytest.mark.slow  # three processes, each of which imports torch
def test_a_fresh_process_finds_what_a_step_needs():
    found = peaks("mlp", ["nxbp"], batch_size=4096)
    plain = found["nonprivate"]
    # Gradients and Adam's two moments are 1.6 MiB; inputs of the hidden layers 4096 x (128 + 256) x 4 bytes, twice.
    assert 6 * MIB < plain["peak"] < 60 * MIB
    assert plain["steady"] <= plain["peak"]
    assert found["nxbp"]["over_nonprivate"] == found["nxbp"]["peak"] / plain["peak"] < 1


def test_what_fails_in_the_process_is_told():
    assert ask("mlp", "no such contender", 4)["failed"] == "KeyError: 'no such contender'"
    with pytest.raises(RuntimeError, match="unknown on mlp, batch 4: KeyError"):
        within(MIB, "mlp", "unknown")(4)


@pytest.mark.parametrize(("limit", "start"), [(1000, 16), (1000, 4000), (7, 3), (1, 8), (0, 8)])
def test_the_largest_batch_is_found_to_within_five_percent(limit, start):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    found = largest_batch(fits, start)
    assert limit / 1.05 - 1 < found <= limit
    assert len(asked) == len(set(asked)) < 16
