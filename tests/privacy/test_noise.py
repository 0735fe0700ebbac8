"""Noise: its distribution, independence across parameters, steps and processes, precision, and who may seed it."""

import copy
import ctypes
import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from ledgers import in_child
from scipy import stats

from ghostclip.native import library
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, Correlation, noise_source
from ghostclip.noise.gaussian import CHUNK, SMALL, Aes, ChaCha, Normal, box_muller
from ghostclip.noise.history import history_of
from ghostclip.noise.release import NoiseRecurrence
from ghostclip.noise.standard import StandardNoise

# A false alarm once in a hundred thousand runs for each test.
RARE = 1e-5


def numbers(source: StandardNoise, count: int, std: float = 1.0) -> np.ndarray:
    return source.release([torch.zeros(count)], std)[0].numpy()


def assert_different(*drawn: list[float]) -> None:
    """Numbers of hardened noise are multiples of a step, so single ones may agree; two sequences never do."""
    assert max(np.mean(np.equal(one, other)) for i, one in enumerate(drawn) for other in drawn[:i]) < 0.2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["standard", "hardened"])
def test_a_fork_does_not_repeat_its_parents_noise(kind: str, tmp_path: Path) -> None:
    source = noise_source(kind)
    numbers(source, 8)
    assert in_child(lambda: np.save(tmp_path / "theirs.npy", numbers(source, 50))) == 0
    assert_different(np.load(tmp_path / "theirs.npy").tolist(), numbers(source, 50).tolist())


@pytest.mark.parametrize(("kind", "compiling"), [("standard", True), ("standard", False), ("hardened", True)])
def test_copies_do_not_repeat_each_other(kind: str, compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiling:
        monkeypatch.setattr("ghostclip.noise.gaussian.library", lambda name: None)
    source = noise_source(kind)
    numbers(source, 8)
    copies = [copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))]
    assert_different(*(numbers(each, 50).tolist() for each in (source, *copies)))


@pytest.mark.parametrize("kind", ["standard", "hardened"])
def test_torch_seeds_have_no_influence(kind: str) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        found.append(numbers(noise_source(kind), 50).tolist())
    assert_different(*found)


def test_every_hardened_release_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy, asked = os.urandom, []
    monkeypatch.setattr("os.urandom", lambda count: asked.append(entropy(count)) or asked[-1])
    source = noise_source("hardened")
    asked.clear()
    assert_different(*(numbers(source, 50).tolist() for _ in range(3)))
    assert [len(key) for key in asked] == [32, 32, 32]
    assert len(set(asked)) == source.draws == 3
    # The same key alone would repeat the noise: everything random comes from it, and all of it is used.
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    assert numbers(source, 50).tolist() == numbers(source, 50).tolist()
    assert ChaCha(compiled())._key == Aes()._key == bytes(32)


def compiled() -> ctypes.CDLL:
    found = library("normal")
    if found is None:
        pytest.skip("no C compiler here")
    return found


def chacha(key: bytes, counter: int, nonce: int = 0, rounds: int = 12) -> list[int]:
    """A block of the key stream as RFC 8439 tells it, with a counter of 64 bits and as much of the nonce."""
    start = [
        *struct.unpack("<4I", b"expand 32-byte k"),
        *struct.unpack("<8I", key),
        counter % 2**32,
        counter >> 32,
        nonce,
        0,
    ]
    state = list(start)
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for a, b, c, d in rounds // 2 * (columns + diagonals):
        for to, other, turned, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[to] = (state[to] + state[other]) % 2**32
            mixed = state[turned] ^ state[to]
            state[turned] = (mixed << by | mixed >> (32 - by)) % 2**32
    return [(left + right) % 2**32 for left, right in zip(state, start, strict=True)]


def test_the_key_stream_is_chachas() -> None:
    # RFC 8439, appendix A.1, test vector 1.
    first = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert struct.pack("<16I", *chacha(bytes(32), 0, rounds=20)).hex() == first
    lanes = compiled().ghostclip_lanes()
    source = ChaCha(compiled())
    source.position = before = 2**32 - lanes
    words = source.words(2 * 16 * lanes + 1)[: 2 * 16 * lanes].reshape(2, 16, lanes)
    assert source.position == before + 3 * lanes
    for group in range(2):
        for lane in range(lanes):
            assert words[group, :, lane].tolist() == chacha(source._key, before + group * lanes + lane)


def test_compiled_numbers_are_box_and_mullers_of_the_key_stream() -> None:
    source, words = ChaCha(compiled(), 5), ChaCha(compiled(), 5)
    group = 16 * compiled().ghostclip_lanes()
    found = torch.empty(300 * group + 1)
    source.fill(found, 2.0)
    first, second = np.split(words.words(300 * group).reshape(300, group), 2, axis=1)
    radius = 2.0 * np.sqrt(-2.0 * np.log(((first >> 1) * 2.0**-31 + 2.0**-32).astype(np.float32).astype(float)))
    x = (second & ~np.uint32(3)).view(np.int32) * (np.pi / 2.0**33)
    cosine = np.cos(x) * (1.0 - 2.0 * (second & 1))
    turned = (second & 2).astype(bool)
    expected = np.concatenate(
        [radius * np.where(turned, np.sin(x), cosine), radius * np.where(turned, cosine, np.sin(x))], axis=1
    )
    assert np.abs(found[: 300 * group].numpy().reshape(300, group) - expected).max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_words_make_finite_numbers_of_the_right_size(dtype: torch.dtype) -> None:
    whole = {torch.float32: np.int32, torch.float64: np.int64}[dtype]
    # Radii from the least and the greatest numbers, angles of zero; 32 bits of zeros or ones where more are asked for.
    extremes = np.array([np.iinfo(whole).max, np.iinfo(whole).min, 0, -1, 0, 0, 0, 0], whole).view(np.uint32)
    for more, bits in ((0, 64), (2**32 - 1, 31 if dtype == torch.float32 else 64)):
        given = iter([extremes, np.full(2, more, np.uint32)])
        out = torch.empty(8, dtype=dtype)
        box_muller(lambda count, given=given: next(given), out, 1.0)
        assert torch.isfinite(out).all()
        radii = out[:4].hypot(out[4:])
        assert radii[:2].max() < 1e-3
        assert radii[2:].tolist() == pytest.approx(2 * [np.sqrt(2 * np.log(2) * bits)], rel=1e-6)


def test_words_of_which_few_bits_are_left_get_more_of_another_nonce() -> None:
    lanes = compiled().ghostclip_lanes()
    group, source = 16 * lanes, ChaCha(compiled(), 5)
    whole = source.words(20_000 * group).reshape(-1, 16 * lanes)[:, : group // 2] >> 1
    places = np.argwhere(whole < SMALL)
    assert len(places) > 0
    out = torch.empty(group)
    for at, pair in places:
        again = ChaCha(compiled(), 5)
        again.position = int(at) * lanes
        again.fill(out, 1.0)
        word, lane = divmod(int(pair), lanes)
        more = chacha(source._key, int(at) * lanes + lane, nonce=1)[word]
        u = (int(whole[at, pair]) * 2.0**32 + more + 0.5) * 2.0**-63
        assert float(out[pair].hypot(out[pair + group // 2])) == pytest.approx(np.sqrt(-2 * np.log(u)), rel=1e-6)


def streams() -> list[Normal]:
    return [Aes()] if library("normal") is None else [Aes(), ChaCha(compiled())]


@pytest.mark.parametrize("size", [0, 1, 3, 257, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_of_every_size_is_filled(size: int, dtype: torch.dtype) -> None:
    for stream in streams():
        guarded = torch.full((size + 1,), torch.nan, dtype=dtype)
        stream.fill(guarded[:size], 1.0)
        assert torch.isfinite(guarded[:size]).all()
        assert torch.isnan(guarded[size])
        assert len(guarded[:size].unique()) >= 0.99 * size


@pytest.mark.parametrize("before", [0, 3, 9])
def test_the_stream_of_aes_is_that_of_openssl_and_goes_on_in_the_middle_of_a_block(before: int) -> None:
    key = hashlib.sha256(b"5").digest()
    whole = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * 20))
    stream, resumed = Aes(5), Aes(5)
    first = stream.words(before)
    resumed.position = stream.position
    assert [*first, *stream.words(7)] == np.frombuffer(whole, np.uint32)[: before + 7].tolist()
    assert resumed.words(7).tolist() == np.frombuffer(whole, np.uint32)[before : before + 7].tolist()
    assert resumed.position == stream.position == before + 7


@pytest.mark.parametrize("kind", ["standard", "hardened"])
def test_released_sums_are_noisy_and_divided_and_narrow_ones_refused(kind: str) -> None:
    sums = [torch.full((50_000,), 10.0), torch.full((50_000,), 10.0, dtype=torch.float64)]
    for tensor in noise_source(kind).release(sums, 3.0, 4.0):
        assert stats.kstest(tensor.numpy(), stats.norm(2.5, 0.75).cdf).pvalue > RARE
    source = noise_source(kind)
    assert torch.equal(source.release([torch.ones(3)], 0.0, 4.0)[0], torch.full((3,), 0.25))
    assert source.release([], 1.0) == []
    with pytest.raises(TypeError, match=r"float32 or float64, and cast afterwards; got a sum in torch\.bfloat16"):
        source.release([torch.zeros(2, dtype=torch.bfloat16)], 1.0)
    for std, divisor, name in ((-1.0, 1.0, "std"), (np.nan, 1.0, "std"), (np.inf, 1.0, "std"), (1.0, 0.0, "divisor")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            source.release([torch.ones(3)], std, divisor)
    for dtype in (torch.float32, torch.float64):
        least = 2.0**24 * torch.finfo(dtype).tiny
        if kind == "standard" or dtype == torch.float32:  # hardened noise has a larger least one in float64
            (released,) = source.release([torch.zeros(50_000, dtype=dtype)], 8 * least, 8.0)
            assert stats.kstest(released.double().numpy() / least, stats.norm.cdf).pvalue > RARE
        with pytest.raises(ValueError, match="would be lost in rounding"):
            source.release([torch.zeros(3, dtype=dtype)], 7.9 * least, 8.0)


def test_noise_in_place_is_the_flat_draw_of_all_sums() -> None:
    group = 16 * compiled().ghostclip_lanes()
    shapes = [(3,), (2, group), (0,), (), (group - 5,), (4, 4)]
    sums = [torch.full(shape, 10.0) for shape in shapes]
    flat = torch.empty(sum(tensor.numel() for tensor in sums))
    one, other = ChaCha(compiled(), 5), ChaCha(compiled(), 5)
    other.fill(flat, 3.0)
    before = [tensor._version for tensor in sums]
    assert one.add(sums, 3.0, 4.0)
    assert torch.allclose(torch.cat([tensor.flatten() for tensor in sums]), 2.5 + flat, rtol=1e-6)
    assert all(tensor._version > version for tensor, version in zip(sums, before, strict=True))
    assert one.position == other.position


@pytest.mark.parametrize("correlation", [BandedToeplitz(bands=4), BufferedToeplitz(buffers=3)], ids=str)
@pytest.mark.parametrize("skipped", [(), (0,), (2, 5)], ids=str)
def test_the_kernel_makes_the_noise_of_tensor_operations(correlation: Correlation, skipped: tuple[int, ...]) -> None:
    """With sizes that end within a group of the cipher's blocks, and steps without a release in between."""
    ends = []
    for by_kernel in (True, False):
        source, history = noise_source("test", seed=5), history_of(correlation, 12)
        assert history is not None
        sums = [torch.ones(shape) for shape in [(3,), (2, 700), (0,), (), (5, 4, 3, 3)]]
        if not by_kernel:  # which leaves numbers that lie in another order to tensor operations
            sums[1] = sums[1].t().contiguous().t()
        for step in range(12):
            if step in skipped:
                history.skip(source, 2.0)
            else:
                history.release(source, sums, 2.0, 4.0)
        assert history.step == 12
        kept = history.state_dict()["kept"]
        ends.append(torch.cat([each.flatten() for each in (*sums, *kept)]))
        now = NoiseRecurrence(kept, *correlation.recurrence(correlation.series(12), 12), 1.0, 1.0)
        assert source.release_correlated(sums, now, 1.0, 1.0) == (by_kernel and library("normal") is not None)
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("odd", [torch.ones(4, 6).t(), torch.ones(3, dtype=torch.float64)])
def test_sums_that_c_can_not_take_get_their_noise_all_the_same(odd: torch.Tensor) -> None:
    assert not ChaCha(compiled()).add([torch.ones(2), odd], 1.0, 1.0)
    released = noise_source().release([torch.ones(2), odd], 1.0)
    assert [tensor.shape for tensor in released] == [(2,), odd.shape]
    assert not any(bool((tensor == 1.0).any()) for tensor in released)


def test_test_mode_repeats_itself_and_is_not_private() -> None:
    sources = [noise_source("test", seed=seed) for seed in (3, 3, 4)]
    first, second, other = (numbers(source, 9).tolist() for source in sources)
    assert first == second != other
    assert [source.private for source in (*sources, noise_source())] == [False, False, False, True]


@pytest.mark.parametrize(
    ("mode", "seed", "message"),
    [
        ("test", None, 'noise="test" needs a seed'),
        ("standard", 1, r'seed=1 would make the noise predictable.*noise="test"'),
        ("hardened", 1, r'seed=1 would make the noise predictable, so noise="hardened" takes none'),
        ("Standard", None, "noise must be one of 'standard', 'hardened', 'test'; got 'Standard'"),
        ("test", -1, "seed must be a whole number"),
        ("test", 2**63, "seed must be below"),
    ],
)
def test_modes_and_seeds_that_do_not_go_together(mode: str, seed: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_source(mode, seed=seed)


@pytest.mark.skipif(library("normal") is None, reason="no C compiler here")
def test_sums_in_channels_last_get_their_noise_where_they_are():
    """Noise of the first layout read in the order of memory; a copy would leave gradients unlike their parameters."""
    sums = torch.randn(6, 5, 3, 2).to(memory_format=torch.channels_last)
    plain = sums.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
    (found,) = StandardNoise(seed=1).release([sums], 2.0, 4)
    (expected,) = StandardNoise(seed=1).release([plain], 2.0, 4)
    assert found is sums
    assert torch.equal(found.permute(0, 2, 3, 1), expected)
