"""Noise: its distribution, independence across parameters, steps and processes, precision, and who may seed it."""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from scipy import stats

from ghostclip.noise import Noise, noise_source

MILLION = 1_000_000
# A false alarm once in a hundred thousand runs for each test.
RARE = 1e-5
SHAPES = [torch.zeros(3, 5), torch.zeros(()), torch.zeros(0, 4), torch.zeros(7)]


def numbers(source: Noise, count: int = MILLION, std: float = 1.0) -> np.ndarray:
    return source.draw([torch.zeros(count)], std)[0].numpy()


def test_a_million_coordinates_are_gaussian() -> None:
    found = numbers(noise_source(), std=2.5).astype(np.float64) / 2.5
    assert stats.kstest(found, "norm").pvalue > RARE
    edges = stats.norm.ppf(np.linspace(0, 1, 201))
    counts, _ = np.histogram(found, edges)
    assert stats.chisquare(counts).pvalue > RARE
    # The variance of a million Gaussian numbers is within 7 standard errors of its value but once in 4e11 times.
    assert found.var() == pytest.approx(1.0, abs=7 * np.sqrt(2 / MILLION))


def test_tails_are_gaussian() -> None:
    found = np.abs(numbers(noise_source()))
    for bound in (3.0, 4.0):
        expected = MILLION * 2 * stats.norm.sf(bound)
        assert abs((found > bound).sum() - expected) < 6 * np.sqrt(expected)


def test_two_steps_and_two_parameters_are_independent() -> None:
    source = noise_source()
    first, second = (source.draw([torch.zeros(MILLION), torch.zeros(MILLION)], 1.0) for _ in range(2))
    pairs = [(first[0], first[1]), (first[0], second[0]), (first[1], second[0]), (first[1], second[1])]
    for left, right in pairs:
        assert stats.pearsonr(left.numpy(), right.numpy()).pvalue > RARE
        assert stats.pearsonr(left.abs().numpy(), right.abs().numpy()).pvalue > RARE


def test_neighbouring_coordinates_are_independent() -> None:
    found = numbers(noise_source())
    for lag in (1, 2, 8, 16):
        assert stats.pearsonr(found[:-lag], found[lag:]).pvalue > RARE


def test_every_source_and_process_draws_its_own() -> None:
    code = (
        "import torch; from ghostclip.noise import noise_source as n; print(n().draw([torch.zeros(1)], 1.0)[0].item())"
    )
    ours = str(noise_source().draw([torch.zeros(1)], 1.0)[0].item())
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    theirs = process.stdout.decode().strip()
    again = str(noise_source().draw([torch.zeros(1)], 1.0)[0].item())
    assert len({ours, again, theirs}) == 3


def _send_numbers(source: Noise, pipe: Connection) -> None:
    pipe.send(numbers(source, 8).tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_repeat_its_parents_noise() -> None:
    source = noise_source()
    numbers(source, 8)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_send_numbers, args=(source, theirs))
    child.start()
    assert ours.poll(30)
    assert not set(ours.recv()) & set(numbers(source, 8).tolist())
    child.join()


def test_torch_seeds_have_no_influence() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        found.append(numbers(noise_source(), 4).tolist())
    assert found[0] != found[1]


def test_the_whole_state_of_the_generator_comes_from_the_system() -> None:
    # torch's own seeding keeps 32 bits: generators seeded alike in those agree, and all could be tried.
    assert torch.equal(
        torch.randn(4, generator=torch.Generator().manual_seed(5)),
        torch.randn(4, generator=torch.Generator().manual_seed(5 + 2**32)),
    )
    source = noise_source()
    state = source._generator(torch.device("cpu")).get_state()
    seeded_alike = torch.Generator().manual_seed(source._generator(torch.device("cpu")).initial_seed())
    assert (state != seeded_alike.get_state()).sum() > 2000
    assert torch.equal(source.draw([torch.zeros(4)], 1.0)[0], _from_state(state))


def _from_state(state: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    return torch.empty(4).normal_(generator=generator)


def test_one_flat_draw_serves_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    normal = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda self, *a, **k: calls.append(self.numel()) or normal(self, *a, **k)
    )
    drawn = noise_source().draw(SHAPES, 1.0)
    assert calls == [3 * 5 + 1 + 0 + 7]
    assert [tuple(tensor.shape) for tensor in drawn] == [(3, 5), (), (0, 4), (7,)]


def test_noise_is_float32_or_wider() -> None:
    like = [torch.zeros(4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    drawn = noise_source().draw(like, 1.0)
    assert [tensor.dtype for tensor in drawn] == [torch.float32] * 3 + [torch.float64]


def test_add_changes_in_place_and_refuses_narrow_sums() -> None:
    sums = [torch.full((50_000,), 10.0), torch.full((50_000,), 10.0, dtype=torch.float64)]
    noise_source().add_(sums, 3.0)
    for tensor in sums:
        assert stats.kstest(tensor.numpy(), "norm", args=(10.0, 3.0)).pvalue > RARE
    with pytest.raises(TypeError, match=r"float32 or float64, and cast afterwards; got a sum in torch\.bfloat16"):
        noise_source().add_([torch.zeros(2, dtype=torch.bfloat16)], 1.0)


def test_no_noise_and_nothing_to_add_to() -> None:
    kept = torch.ones(3)
    noise_source().add_([kept], 0.0)
    noise_source().add_([], 1.0)
    assert torch.equal(kept, torch.ones(3))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="std must be"):
            noise_source().draw(SHAPES, wrong)


def test_test_mode_repeats_itself_and_is_not_private() -> None:
    first, second, other = noise_source("test", seed=3), noise_source("test", seed=3), noise_source("test", seed=4)
    assert not first.private
    assert noise_source().private
    assert torch.equal(torch.from_numpy(numbers(first, 9)), torch.from_numpy(numbers(second, 9)))
    assert numbers(first, 9).tolist() != numbers(other, 9).tolist()


def test_modes_and_seeds_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match='noise="test" needs a seed'):
        noise_source("test")
    with pytest.raises(ValueError, match=r'seed=1 would make the noise predictable.*noise="test"'):
        noise_source("standard", seed=1)
    with pytest.raises(ValueError, match="noise must be one of 'standard', 'hardened', 'test'; got 'Standard'"):
        noise_source("Standard")
    with pytest.raises(ValueError, match="seed must be a whole number"):
        noise_source("test", seed=-1)
    with pytest.raises(ValueError, match="seed must be below"):
        noise_source("test", seed=2**63)
    with pytest.raises(NotImplementedError, match='noise="hardened" is not there yet'):
        noise_source("hardened")
