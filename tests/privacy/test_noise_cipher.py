"""The cipher's words and what is drawn from them: binomial numbers and subsets, exactly as likely as they should be."""

import math
from fractions import Fraction

import numpy as np
import private_runs as runs
import pytest
from scipy import stats

from ghostclip.noise import noise_source
from ghostclip.noise.cipher import CipherGenerator, KeyStream

# A false alarm once in a million runs for each p-value.
RARE = 1e-6


def test_the_key_stream_is_aes_256_in_counter_mode() -> None:
    # The blocks of the counters 0 and 1 under the key of zeros, as in test cases 13 and 14 of GCM's specification.
    expected = bytes.fromhex("dc95c078a2408989ad48a21492842087530f8afbc74536b9a963b4f1c4cb738b")
    assert KeyStream(bytes(32)).words64(4).tobytes() == expected
    stream = KeyStream(bytes(32))
    assert stream.words32(3).tobytes() + stream.words32(5).tobytes() == expected


class Given(CipherGenerator):
    """A generator whose words are given."""

    def __init__(self, words: list[int]) -> None:
        super().__init__()
        self._given = list(words)

    def _words(self, count: int) -> np.ndarray:
        taken, self._given = self._given[:count], self._given[count:]
        return np.array(taken, np.uint64)


@pytest.mark.parametrize(("n", "p"), [(7, 0.3), (40, 1 / 3), (3, 0.999), (2000, 1e-3)])
def test_the_cipher_s_binomial_numbers_are_binomial(n: int, p: float) -> None:
    generator = CipherGenerator()
    found = [generator.binomial(n, p) for _ in range(4000)]
    # One cell for each number, and one for each tail, of at least ten expected.
    edges = [k for k in range(n + 1) if 10 < 4000 * stats.binom.cdf(k, n, p) < 3990]
    expected = 4000 * np.diff(stats.binom.cdf([-1, *edges, n], n, p))
    observed = np.bincount(np.searchsorted(edges, found), minlength=len(expected))
    assert stats.chisquare(observed, expected).pvalue > RARE
    assert generator.binomial(n, 1.0) == n


def test_a_draw_is_decided_by_as_many_digits_as_its_probability_has() -> None:
    p = 2.0**-30 + 2.0**-80
    first, second = 2**34, 2**48
    assert Fraction(p) == Fraction(first, 2**64) + Fraction(second, 2**128)
    assert Given([first - 1, first, first + 1, second - 1]).binomial(3, p) == 2
    assert Given([first, second]).binomial(1, p) == 0
    assert Given([first, second - 1]).binomial(1, p) == 1


@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_the_cipher_s_subsets_are_all_equally_likely(size: int) -> None:
    generator, found = CipherGenerator(), {}
    for _ in range(6000):
        chosen = frozenset(generator.choice(9, size, replace=False, shuffle=False).tolist())
        assert len(chosen) == size
        assert chosen <= set(range(9))
        found[chosen] = found.get(chosen, 0) + 1
    assert len(found) == math.comb(9, size)
    assert size == 9 or stats.chisquare(list(found.values())).pvalue > RARE


def test_no_number_is_favoured_by_division_and_nothing_else_is_asked_for() -> None:
    # 2^64 is 4 more than a multiple of 6, whose last four words would favour 0 ... 3.
    assert Given([2**64 - 4, 2**64 - 1, 5, 11]).choice(6, 1).tolist() == [5]
    for wrong in ({"size": 7}, {"size": -1}, {"size": 1, "replace": True}, {"size": 1, "shuffle": True}):
        with pytest.raises(ValueError, match="choice gives distinct numbers in no order, at most 6; got size="):
            CipherGenerator().choice(6, **wrong)


def test_what_was_drawn_ahead_can_be_drawn_again_and_two_generators_differ() -> None:
    generator, other = noise_source("hardened").generator(), noise_source("hardened").generator()
    generator.binomial(10, 0.5)
    before = generator.bit_generator.state
    first = [generator.choice(1000, 5).tolist() for _ in range(3)]
    assert [other.choice(1000, 5).tolist() for _ in range(3)] != first
    generator.bit_generator.state = before
    assert [generator.choice(1000, 5).tolist() for _ in range(3)] == first


@pytest.mark.parametrize("sampling", ["poisson", "without_replacement", "truncated"])
def test_the_engine_samples_from_the_cipher(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    choice = CipherGenerator.choice
    monkeypatch.setattr(CipherGenerator, "choice", lambda *of, **how: drawn.append(choice(*of, **how)) or drawn[-1])
    options = {"max_batch_size": 9} if sampling == "truncated" else {}
    engine = runs.engine_for(runs.network(), noise="hardened", noise_multiplier=1.0, sampling=sampling, **options)
    sizes = []
    for batch in engine.batches():
        sizes.append(sum(batch.sizes))
        batch.discard()
    assert sizes == [len(chosen) for chosen in drawn]
    assert sampling != "without_replacement" or sizes == 3 * [8]
