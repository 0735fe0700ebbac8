"""Correlated noise under FSDP2: each process has the history of its own shards, checkpoints have all of it."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
import torch.distributed as dist
from ranks import assert_independent_noise, examples, on_ranks
from sharded import QUIET, grads, sharded
from torch import Tensor, nn

from ghostclip import GhostClipError
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, Correlation

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

STEPS, SIGMA, MAX_NORM, BATCH = 6, 1.5, 2.0, 4
CORRELATIONS: dict[str, tuple[Correlation, str]] = {
    "banded": (BandedToeplitz(bands=3), "cyclic_poisson"),
    "buffers": (BufferedToeplitz(buffers=2), "cyclic"),
}


def nothing(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Losses without a gradient: what is released is noise."""
    return 0 * model(batch[0]).square().sum(1)


def engine_for(name: str, hybrid: bool = False) -> Any:
    correlation, sampling = CORRELATIONS[name]
    torch.manual_seed(0)
    # 7 rows don't part evenly among ranks.
    model: Any = sharded(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 200)).double(), hybrid)
    return runs.engine_for(
        model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), batch_size=BATCH, noise_multiplier=SIGMA,
        clipping=MAX_NORM, steps=STEPS, sampling=sampling, correlation=correlation, self_check=False,
    )  # fmt: skip


def released(name: str, path: Path, restore: bool, steps: int, hybrid: bool = False) -> list[np.ndarray]:
    """The noise in the sums of each of some steps, over its standard deviation, of all ranks; saves what it came to."""
    engine = engine_for(name, hybrid)
    if restore:
        engine.restore(path)
    found: list[np.ndarray] = []
    runs.on_step(engine.optimizer, lambda: found.append(noise_of(engine.model)))
    runs.train(engine, steps, nothing)
    engine.save(path)
    assert len(engine.events) == 1
    return found


def noise_of(model: nn.Module) -> np.ndarray:
    """The private gradient of a step, in units of the noise in a sum."""
    return torch.cat([each.flatten() for each in grads(model).values()]).numpy() * BATCH / (SIGMA * MAX_NORM)


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize(
    ("first", "second", "hybrid"),
    [(2, 2, False), (2, 0, False), (0, 2, False), pytest.param(4, 2, True, marks=pytest.mark.slow)],
)
@pytest.mark.one_in(3)
def test_c_times_the_noise_of_all_shards_is_independent(
    name: str, first: int, second: int, hybrid: bool, tmp_path: Path
) -> None:
    """Before and after a checkpoint, which another number of ranks goes on from; 0: one process, nothing sharded."""

    def on(size: int, restore: bool, hybrid: bool = False) -> np.ndarray:
        found = on_ranks(partial(released, name, tmp_path / "runs", restore, STEPS // 2, hybrid), tmp_path, size)
        assert all(np.array_equal(each, found[0]) for each in found)
        return np.array(found[0])

    noise = np.concatenate([on(first, False, hybrid), on(second, True)])
    assert_independent_noise(CORRELATIONS[name][0].matrix(steps=STEPS) @ noise)
    with pytest.raises(AssertionError):
        assert_independent_noise(noise)


def interrupted() -> tuple[list[int], str]:
    """Steps of each mechanism after rank 1 had no memory for the second one's noise, and what was raised."""
    engine = engine_for("banded")
    runs.train(engine, 1, nothing)
    source = engine._mechanism._source
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():
            patched.setattr(source, "release", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
        with pytest.raises(GhostClipError if dist.get_rank() == 0 else MemoryError, match="none left") as said:
            runs.train(engine, 1, nothing)
    runs.train(engine, 2, nothing)
    return [event.count for event in engine.events], said.typename


def test_noise_that_was_interrupted_on_one_rank_begins_a_new_mechanism_on_all(tmp_path: Path) -> None:
    assert on_ranks(interrupted, tmp_path) == [([2, 2], "PrivacyError"), ([2, 2], "MemoryError")]
