"""Models that can't be made whole are refused when wrapped, and those sharded later in every pass."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from ranks import on_ranks, outcome
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.sharding.detection import refuse_sharded, sharding_problem

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore::FutureWarning")

X, Y = torch.ones(4, 5), torch.arange(4) % 3
SECOND_PASSES = ("reweight", "cached")


Shard = Callable[[nn.Module], nn.Module]


def mesh() -> Any:
    return init_device_mesh("cpu", (2,))


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh())


def one_layer(shard: Shard, place: int, model: nn.Module) -> nn.Module:
    model[place] = shard(model[place])
    return model


SHARDED: dict[str, Shard] = {
    "FSDP1": partial(fsdp1, use_orig_params=True),
    "FSDP1, flat": fsdp1,
    "FSDP1 of a layer": partial(one_layer, partial(fsdp1, use_orig_params=True), 0),
    "FSDP2": fsdp2,
    "FSDP2 of a layer": partial(one_layer, fsdp2, 2),
    "tensor parallelism": lambda model: parallelize_module(
        model, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
}  # fmt: skip
WRAPPING: dict[str, Callable[[Any], Any]] = {
    "wrap": ghostclip.wrap,
    "wrap of what is inside": lambda model: ghostclip.wrap(getattr(model, "module", model)),
    "GhostClipper": GhostClipper,
    "PrivacyEngine": runs.engine_for,
}


def wrap_after(shard: Shard, name: str) -> None:
    """Wraps a model that is sharded already."""
    model = shard(runs.network())
    if name == "wrap of what is inside":
        runs.losses_of(model, [X, Y])  # while parameters of an FSDP2 root look like any
    WRAPPING[name](model)


def use_after(shard: Shard, call: str, second_pass: str) -> None:
    """Calls what clips a model that is sharded after wrapping."""
    if call == "engine":
        engine = runs.engine_for(runs.network(), second_pass=second_pass, sampling="without_replacement")
        sharded = shard(engine.model)
        engine.step(next(iter(engine.batches())), lambda _, rows: runs.losses_of(sharded, rows))
        return
    clipper = GhostClipper(runs.network(), 0.3, second_pass=second_pass)
    sharded = shard(clipper.model)
    if call == "clip":
        clipper.clip(lambda _, rows: runs.losses_of(sharded, rows), [X, Y])
    else:
        getattr(clipper, call)(runs.losses_of(sharded, [X, Y]))


def all_refused(shard: Shard) -> list[str]:
    """What was not refused as it should be; and `check`'s findings must not be empty."""
    later = shard is fsdp2  # which is exact where it comes first
    works = {} if later else {name: partial(wrap_after, shard, name) for name in WRAPPING}
    calls = ("norms", "per_example_grads", "backward", "clip", "engine")
    works |= {", ".join(each): partial(use_after, shard, *each) for each in product(calls, SECOND_PASSES)}
    found = {name: outcome(work) for name, work in works.items()}
    if bool(ghostclip.check(shard(runs.network()))) == later:
        found["check"] = "nothing"
    return [f"{name}: {said}" for name, said in found.items() if not said.startswith("UnsupportedModelError")]


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.one_in(3)
def test_sharded_models_are_refused_in_every_order(name: str, tmp_path: Path) -> None:
    assert on_ranks(partial(all_refused, SHARDED[name]), tmp_path) == [[], []]


def part_of_a_sharded_root() -> str:
    """A clipper of a layer inside of a model that is sharded later: its class stays, its parameters are exchanged."""
    root = runs.network()
    clipper = GhostClipper(root[0])
    sharded = fsdp2(root)
    return outcome(lambda: clipper.backward(runs.losses_of(sharded, [X, Y])))


def test_a_layer_of_a_model_sharded_later_is_refused(tmp_path: Path) -> None:
    for said in on_ranks(part_of_a_sharded_root, tmp_path):
        assert said.startswith("UnsupportedModelError: weight is another Parameter than when the model was wrapped")


def clipped_in_ddp() -> list[Tensor]:
    """Clipped sums by both second passes, with the model wrapped before and after DistributedDataParallel."""
    found = []
    for second_pass, before in product(SECOND_PASSES, (True, False)):
        model: nn.Module = runs.network(torch.float64)
        inner = GhostClipper(model, 0.3, second_pass=second_pass) if before else None
        model = DistributedDataParallel(model)
        clipper = inner or GhostClipper(model, 0.3, second_pass=second_pass)
        for _ in range(2):
            clipper.backward(runs.losses_of(model, [X.double(), Y]))
        found.append(runs.grads(model))
    return found


def test_distributed_data_parallel_goes_on_working(tmp_path: Path) -> None:
    clipper = GhostClipper(runs.network(torch.float64), 0.3)
    for _ in range(2):
        clipper.backward(runs.losses_of(clipper.model, [X.double(), Y]))
    for sums in on_ranks(clipped_in_ddp, tmp_path):
        for found in sums:
            assert torch.allclose(found, runs.grads(clipper.model), rtol=1e-10)


def test_what_is_whole_is_not_taken_for_sharded() -> None:
    assert sharding_problem(ghostclip.wrap(runs.network())) is None
    with pytest.raises(UnsupportedModelError, match=r"0: it is sharded by FSDPModule; per-example norms"):
        refuse_sharded(nn.Sequential(type("FSDPModule", (nn.Identity,), {})()), {})
