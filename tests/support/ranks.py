"""Several processes that train together over gloo, forked from a test, and what each of them came to."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch.utils.data import TensorDataset

from ghostclip.clipping import Adaptive, PerLayer
from ghostclip.noise import BandedToeplitz

SECONDS = 60


def on_ranks(work: Callable[[], Any], folder: Path, size: int = 2) -> list[Any]:
    """What ``work`` returns on each of ``size`` processes, joined by torch.distributed; fails when one of them does.

    A size of 0 stands for this process, which isn't joined to any.
    """
    if not size:
        return [work()]
    store = folder / f"store-{len(list(folder.iterdir()))}"
    children = [_forked(work, rank, size, store) for rank in range(size)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    places = [store.with_name(f"{store.name}-{rank}.pt") for rank in range(size)]
    found = [torch.load(place, weights_only=False) if place.exists() else "nothing" for place in places]
    failed = [text for text in found if isinstance(text, str) and text.startswith("Traceback")]
    assert not any(codes), f"ranks failed: {codes}\n" + "\n".join(failed)
    return found


def _forked(work: Callable[[], Any], rank: int, size: int, store: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    found: Any = None
    try:
        torch.set_num_threads(1)
        method = f"file://{store}"
        dist.init_process_group(
            "gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
        )
        found = work()
        dist.barrier()
        status = 0
    except BaseException:
        found = traceback.format_exc()
    try:
        torch.save(found, store.with_name(f"{store.name}-{rank}.pt"))
    except BaseException:
        status = 2
    finally:
        os._exit(status)


def told() -> bool:
    """Whether this is one of two forked processes; then libraries find what a launcher would tell them."""
    if joined := dist.is_initialized():
        rank = str(dist.get_rank())
        os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2"})
        os.environ.update({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    return joined


def outcome(work: Callable[[], Any]) -> str:
    """What ``work`` raised, or "nothing"."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


REPEATABLE = {"noise": "test", "seed": 7, "clipping": 0.3}
# Options of engines whose steps several processes take as one does.
OPTIONS: dict[str, dict[str, Any]] = {
    "noise": {"noise_multiplier": 1.0},
    "physical": {"max_physical_batch_size": 2, "noise_multiplier": 1.0},
    "layers": {"clipping": PerLayer(0.3), "max_physical_batch_size": 3},
    "users": {"unit_ids": [row // 3 for row in range(24)], "batch_size": 3},
    "adaptive": {
        "clipping": Adaptive(0.3, count_noise=2.0), "noise_multiplier": 1.0, "max_physical_batch_size": 3,
    },
    "correlated": {
        "correlation": BandedToeplitz(2), "sampling": "cyclic_poisson", "steps": 6, "noise_multiplier": 1.0,
    },
}  # fmt: skip


def examples(size: int = 24) -> TensorDataset:
    """float64 rows that say which they are."""
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 5, dtype=torch.float64, generator=made), torch.arange(size) % 3)


def followed(engine, take, weights_of):
    """Four steps or more, each by ``take(batch)``: weights after each, epsilon, what the policy came to."""
    found: dict[str, Any] = {"weights": [], "sizes": []}
    while len(found["weights"]) < 4:
        for batch in engine.batches():
            take(batch)
            found["weights"].append(weights_of(engine.model))
            found["sizes"].append(sum(batch.sizes))
    return found | {"epsilon": engine.epsilon(), "events": engine.events, "max_norm": engine.clipping.sensitivity}


def assert_independent_noise(draws: np.ndarray, chance: float = 2e-6) -> None:
    """Rows are independent of each other, of variance 1; it fails by chance at this rate."""
    pairs = np.triu_indices(len(draws), 1)
    rare, numbers = chance / (len(draws) + len(pairs[0])), draws.shape[1]
    squares = (draws**2).sum(1)
    assert np.minimum(stats.chi2.cdf(squares, numbers), stats.chi2.sf(squares, numbers)).min() > rare / 2
    correlations = np.atleast_2d(np.corrcoef(draws))[pairs]
    assert np.abs(correlations).max(initial=0.0) * numbers**0.5 < stats.norm.isf(rare / 2)


def assert_like_one(found: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The same weights on all ranks, to the bit, and those of one process up to the order of sums."""
    for rank in found:
        for mine, lead, alone in zip(rank["weights"], found[0]["weights"], one["weights"], strict=True):
            assert torch.equal(mine, lead)
            assert torch.allclose(mine, alone, rtol=1e-10, atol=1e-12)
        assert rank["max_norm"] == found[0]["max_norm"] == pytest.approx(one["max_norm"], rel=1e-12)
    together = torch.tensor([rank["sizes"] for rank in found]).sum(0)
    assert together.tolist() == one["sizes"]
