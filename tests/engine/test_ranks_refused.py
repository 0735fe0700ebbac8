"""What several processes must not do is refused on all of them, and none is waited for that can't come."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, outcome
from sharded import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset, TensorDataset

import ghostclip
from ghostclip import PrivacyError
from ghostclip.clipping import Adaptive

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def out_of_turn() -> None:
    engine = runs.engine_for(runs.network())
    batches = iter(engine.batches())
    if dist.get_rank():
        next(batches)
        runs.leave(engine)
    engine.step(next(batches), runs.losses_of)


def without_a_step() -> None:
    """One rank forgets its step, as one without examples does where steps are taken between physical batches."""
    engine = runs.engine_for(runs.network())
    for batch in engine.batches():
        if dist.get_rank() == 0:
            engine.step(batch, runs.losses_of)


def discarded_by_one() -> None:
    engine = runs.engine_for(runs.network())
    batch = next(iter(engine.batches()))
    if dist.get_rank() == 0:
        engine.step(batch, runs.losses_of)
    batch.discard()


def moved_on_one() -> None:
    engine = runs.engine_for(model := runs.network())
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
        if dist.get_rank() == 1:
            torch.nn.init.zeros_(model[0].bias)


def built(of_rank: Callable[[int], dict[str, Any]], model: Callable[[], nn.Module] = runs.network) -> None:
    runs.engine_for(model(), **of_rank(dist.get_rank()))


def wrapped_later() -> None:
    model = runs.network()
    engine, wrapper = runs.engine_for(model), DistributedDataParallel(model)
    for batch in engine.batches():
        engine.step(batch, lambda _, rows: runs.losses_of(wrapper, rows))


def partly_sharded() -> nn.Module:
    model = runs.network()
    fully_shard(model[2], mesh=mesh_of())
    return model


def of_apart_rows() -> None:
    """As by random_split without a generator, after `torch.manual_seed(rank)`."""
    rows = Subset(runs.data(), torch.randperm(24, generator=torch.Generator().manual_seed(dist.get_rank()))[:20])
    runs.engine_for(runs.network(), dataset=rows)


def frozen_apart() -> None:
    """Ranks that train another layer of one size each."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    engine = runs.engine_for(model)
    model[dist.get_rank()].requires_grad_(False)
    engine.step(next(iter(engine.batches())), runs.losses_of)


def with_states_apart() -> None:
    """Each rank keeps what `state_dict` gave in a file of its own, and those are of other steps."""
    engine = runs.engine_for(runs.network())
    states = [engine.state_dict()]
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
        states.append(engine.state_dict())
    engine.detach()
    runs.engine_for(runs.network()).load_state_dict(states[1 + dist.get_rank()])


def other_noise() -> None:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0)
    batch = next(iter(engine.batches()))
    release = engine._steps.release
    release.settings = replace(release.settings, noise_multiplier=1.0 + dist.get_rank())
    engine.step(batch, runs.losses_of)


def of_a_search() -> None:
    ghostclip.select(
        lambda _: 1, [1, 2], score=float, expected_runs=2, noise_multiplier=1.0, sample_rate=0.1, steps=3, delta=1e-5
    )


def of_static_graph() -> None:
    runs.engine_for(DistributedDataParallel(runs.network(), static_graph=True))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "subset": (of_apart_rows, "must agree on the rows of the data set (a digest of Subset.indices) when"),
    "frozen": (frozen_apart, "the ranks must agree on what is trained at every step"),
    "states": (with_states_apart, "must agree on the steps of a checkpoint when they load a state"),
    "noise": (other_noise, "must agree on noise multiplier and batch size at every step"),
    "search": (of_a_search, "select() draws how many runs there are"),
    "static graph": (of_static_graph, "with static_graph=True"),
    "budget": (partial(built, lambda rank: {"max_epsilon": 1.0 + rank}), "must agree on max_epsilon when"),
    "delta": (partial(built, lambda rank: {"target_delta": 1e-5 * (1 + rank)}), "must agree on target_delta when"),
    "ledger": (
        partial(built, lambda rank: {"ledger": os.devnull if rank else None}),
        "agree on whether there is a ledger",
    ),
    "turn": (out_of_turn, "PrivacyError: the ranks must agree on the sample"),
    "forgotten": (without_a_step, "the logical batch before this one had no step"),
    "discarded": (discarded_by_one, "the ranks must agree on whether the batch is discarded"),
    "moved": (moved_on_one, "the parameter '0.bias' was changed outside of this engine's charged steps"),
    "rows": (partial(built, lambda rank: {"dataset": runs.data(24 + rank)}), "must agree on sampling when engines"),
    "users": (partial(built, lambda rank: {"unit_ids": [rank, *range(23)]}), "must agree on unit_ids when"),
    "policy": (partial(built, lambda rank: {"clipping": Adaptive(rank + 0.5)}), "must agree on the state of clipping"),
    "model": (partial(built, lambda _: {}, lambda: nn.Linear(5, 3 + dist.get_rank())), "must agree on weight when"),
    "compile": (lambda: runs.engine_for(runs.network()).compile(), "compile() isn't there for several"),
    "later": (wrapped_later, "the model was called inside of a DistributedDataParallel that averages its gradients"),
    "sharded": (partial(built, lambda _: {}, partly_sharded), "is a DTensor, of which each process holds a part"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_must_not_do_is_refused_on_all(name: str, tmp_path: Path) -> None:
    work, message = REFUSED[name]
    for said in on_ranks(partial(outcome, work), tmp_path):
        assert message in said


def test_processes_that_join_later_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = runs.engine_for(runs.network())
    batch = next(batch for batch in engine.batches())
    runs.gather(engine, batch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(PrivacyError, match="processes were joined after this PrivacyEngine was built"):
        engine.optimizer.step()


def in_a_group_made_anew(folder: Path, wrapped: bool) -> str:
    """Each rank builds its engine in a world of one, which is destroyed and made one of two."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/alone-{rank}", rank=0, world_size=1)
    model = runs.network()
    engine = runs.engine_for(DistributedDataParallel(model) if wrapped else model)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/together", rank=rank, world_size=2)
    return outcome(lambda: engine.step(next(iter(engine.batches())), runs.losses_of))


@pytest.mark.parametrize("wrapped", [False, True])
def test_processes_that_join_anew_are_noticed(wrapped: bool, tmp_path: Path) -> None:
    for said in on_ranks(partial(in_a_group_made_anew, tmp_path, wrapped), tmp_path):
        assert "processes were joined after this PrivacyEngine was built" in said


def with_buffers() -> int:
    """DDP exchanges buffers in a wrapper's first forward, which a rank without an example doesn't have."""
    model = runs.network().append(nn.BatchNorm1d(3, affine=False).eval())
    engine = runs.engine_for(DistributedDataParallel(model), batch_size=1)
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    return engine.steps_taken


def with_a_spoilt_row() -> str:
    """A row can't be read on one rank, in a loop that computes its own losses."""
    engine = runs.engine_for(runs.network(), dataset=SpoiltRow(runs.data()))

    def take() -> None:
        for batch in engine.batches():
            runs.gather(engine, batch)
            engine.optimizer.step()

    return outcome(take)


class SpoiltRow(Dataset[Any]):
    """Rows of a data set of which rank 1 can read none."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        if dist.get_rank() == 1:
            raise OSError("file spoilt")
        return self.rows[row]


def test_no_rank_is_waited_for_that_has_no_forward_or_no_row(tmp_path: Path) -> None:
    assert on_ranks(with_buffers, tmp_path) == [24, 24]
    lead, other = on_ranks(with_a_spoilt_row, tmp_path)
    assert other == "OSError: file spoilt"
    assert "nothing was released, because rank 1 failed: file spoilt" in lead
