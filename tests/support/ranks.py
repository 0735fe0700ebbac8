"""Several processes that train together over gloo, forked from a test, and what each of them came to."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

SECONDS = 60


def on_ranks(work: Callable[[], Any], folder: Path, size: int = 2) -> list[Any]:
    """What ``work`` returns on each of ``size`` processes, joined by torch.distributed; fails when one of them does."""
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


REPEATABLE = {"noise": "test", "seed": 7, "clipping": 0.3}


def examples(size: int = 24) -> TensorDataset:
    """float64 rows that say which they are."""
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 5, dtype=torch.float64, generator=made), torch.arange(size) % 3)


def assert_like_one(found: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The same weights on all ranks, to the bit, and those of one process up to the order of sums."""
    for rank in found:
        for mine, lead, alone in zip(rank["weights"], found[0]["weights"], one["weights"], strict=True):
            assert torch.equal(mine, lead)
            assert torch.allclose(mine, alone, rtol=1e-10, atol=1e-12)
    together = torch.tensor([rank["sizes"] for rank in found]).sum(0)
    assert together.tolist() == one["sizes"]
