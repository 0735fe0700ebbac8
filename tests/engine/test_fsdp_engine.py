"""The engine on models under FSDP2: the steps of one process, noise drawn once for each shard, and checkpoints.

Of correlated noise each process has the history of its own shards.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import OPTIONS, REPEATABLE, assert_independent_noise, assert_like_one, examples, followed, on_ranks, outcome
from sharded import QUIET, grads, settled, sharded, weights, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ghostclip import GhostClipError, PrivacyError
from ghostclip.clipping import Adaptive, ByLayer, Composed, Fixed, ProportionalNoise
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, Correlation

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

NOISE_BY_LAYER = ProportionalNoise({"0": 1.0, "2": 4.0})
WAYS: dict[str, dict[str, Any]] = OPTIONS | {
    "few": {"batch_size": 2, "max_physical_batch_size": 1},
    "memory": {"max_physical_batch_size": "auto", "memory_limit": 1 << 40},
    "noise by layer": {
        "clipping": Composed(ByLayer(), Fixed({"0": 0.3, "2": 0.5}), noise=NOISE_BY_LAYER), "noise_multiplier": 1.0,
    },
}  # fmt: skip


def trained(hybrid: bool = False, **options: Any) -> dict[str, Any]:
    """Steps of Adam, with a forward after each."""
    model = sharded(runs.network(torch.float64), hybrid)
    engine = runs.engine_for(model, torch.optim.Adam(model.parameters(), 0.1), examples(), **{**REPEATABLE, **options})

    def take(batch: Any) -> None:
        engine.step(batch, runs.losses_of)
        runs.losses_of(model, [each[:3] for each in examples().tensors])

    return followed(engine, take, weights)


def open_layouts() -> list[list[bool]]:
    """After each of three steps, whether the next batch will be measured whatever it is; then with hooks of others."""
    found: list[list[bool]] = []
    for hooked in (False, True):
        engine = runs.engine_for(sharded(runs.network(torch.float64)), None, examples(), sampling="without_replacement")

        def losses_of(model: nn.Module, batch: Any, hooked: bool = hooked) -> Tensor:
            losses = runs.losses_of(model, batch)
            if hooked:
                losses.register_hook(lambda grad: grad)
            return losses

        found.append([])
        runs.train(engine, 3, losses_of, lambda: found[-1].append(engine._steps.release.clipper.passes.is_open))  # noqa: B023
    return found


def test_hooks_of_fsdp2_are_no_reason_to_measure_each_batch_and_those_of_others_are(tmp_path: Path) -> None:
    for found in on_ranks(open_layouts, tmp_path):
        assert [each[1:] for each in found] == [[False] * 2, [True] * 2]


def unnamed(events: list[Any]) -> list[dict[str, Any]]:
    """All fields but a mechanism's random name."""
    return [{**vars(event), "mechanism": None} for event in events]


def all_trained(names: list[str], hybrid: bool = False) -> list[dict[str, Any]]:
    return [trained(hybrid, **WAYS[name]) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hybrid"), [(2, False), (4, False), (4, True)])
def test_several_ranks_take_the_steps_of_one(ranks: int, hybrid: bool, tmp_path: Path) -> None:
    names = list(WAYS) if ranks == 2 else ["noise", "few"]
    for name, *found in zip(names, *on_ranks(partial(all_trained, names, hybrid), tmp_path, ranks), strict=True):
        one = trained(**WAYS[name])
        assert_like_one(found, one)
        for rank in found:
            assert unnamed(rank["events"]) == unnamed(one["events"])
        assert name != "adaptive" or one["max_norm"] != 0.3


STD, ROWS = 2.0 * 0.3 / 8, 600


def noise_of(hybrid: bool, mode: str) -> tuple[Tensor, Tensor]:
    """The private gradients of one step on a wide layer, in float32: this rank's shard, and all of it."""
    torch.manual_seed(3)
    model = sharded(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, ROWS)), hybrid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = runs.engine_for(model, optimizer, noise_multiplier=2.0, clipping=0.3, noise=mode)
    batch = next(iter(engine.batches()))
    for rows in batch.physical():
        engine.backward(model(rows[0]).sum(1) * 0)  # so that noise is all there is
    optimizer.step()
    assert engine.noise_std(settled(model)[1].weight) == pytest.approx(STD)  # type: ignore[index]
    return model[1].weight.grad.to_local().flatten().clone(), grads(model)["1.weight"].flatten()  # type: ignore


@pytest.mark.parametrize("mode", ["standard", "hardened"])
def test_each_shard_gets_noise_of_its_own_once(mode: str, tmp_path: Path) -> None:
    (first, released), (second, same) = on_ranks(partial(noise_of, False, mode), tmp_path)
    assert torch.equal(released, same)
    assert torch.equal(released, torch.cat([first, second]))
    assert_independent_noise(torch.stack([first, second]).numpy() / STD)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_share_the_noise_of_their_shards(ranks: int, tmp_path: Path) -> None:
    found = on_ranks(partial(noise_of, True, "standard"), tmp_path, ranks)
    shards = [shard for shard, _ in found]
    for one, other in zip(shards[: ranks // 2], shards[ranks // 2 :], strict=True):
        assert torch.equal(one, other)
    assert_independent_noise(torch.stack(shards[: ranks // 2]).numpy() / STD)
    assert all(torch.equal(released, found[0][1]) for _, released in found)


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(runs.network(torch.float64))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def continued(path: Path, restore: bool, steps: int, save: bool) -> tuple[Tensor, int]:
    """Weights after so many steps, after a checkpoint or before one; forwards in between leave the root whole."""
    model, optimizer = model_and_optimizer()
    engine = runs.engine_for(model, optimizer, examples(), **REPEATABLE, noise_multiplier=1.0)

    def forward() -> None:
        runs.losses_of(model, list(examples().tensors))

    forward()
    if restore:
        engine.restore(path)
    runs.train(engine, steps, after=forward)
    if save:
        engine.save(path)
    return weights(model), engine.steps_taken


@pytest.mark.parametrize(("first", "second"), [(2, 0), (0, 2), (1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.one_in(3)
def test_a_run_goes_on_with_another_number_of_ranks(first: int, second: int, tmp_path: Path) -> None:
    """0 stands for a process alone whose model isn't sharded."""
    place = tmp_path / "runs"
    on_ranks(partial(continued, place, False, 2, True), tmp_path, first)
    expected, _ = continued(place, False, 4, False)
    for found, steps in on_ranks(partial(continued, place, True, 2, False), tmp_path, second):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
        assert steps == 4


def moved_on_one(model: Any, engine: Any) -> None:
    batches = iter(engine.batches())
    engine.step(next(batches), runs.losses_of)
    if dist.get_rank():
        with torch.no_grad():
            settled(model)[0].bias.to_local().add_(1.0)
    next(batches)


def leaked(model: Any, engine: Any) -> None:
    batch = next(iter(engine.batches()))
    runs.losses_of(model, [each[:3] for each in examples().tensors]).mean().backward()
    runs.gather(engine, batch)


def saved_within(model: Any, engine: Any) -> None:
    next(iter(engine.batches()))
    engine.save("nowhere")


def written_within(model: Any, engine: Any) -> None:
    runs.gather(engine, next(iter(engine.batches())))
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    engine.optimizer.step()


@torch.no_grad()
def doubled(module: nn.Module, *_: Any) -> None:
    module.weight.mul_(2.0)


def written_in_forward(model: Any, engine: Any) -> None:
    model[0].register_forward_pre_hook(doubled)
    runs.gather(engine, next(iter(engine.batches())))


def failed_on_one(model: Any, engine: Any) -> None:
    def losses_of(model: nn.Module, rows: list[Tensor]) -> Tensor:
        losses = runs.losses_of(model, rows)
        return losses[1:] if dist.get_rank() else losses

    engine.step(next(iter(engine.batches())), losses_of)


def in_a_group_of_its_own(model: Any, engine: Any) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    runs.engine_for(sharded(runs.network()), process_group=alone)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "moved": (moved_on_one, ["PrivacyError: nothing was released, because rank 1", "PrivacyError: the parameter '0.b"]),
    "leaked": (leaked, ["GradientLeakError: the gradient of '0.weight' was filled or changed by"] * 2),
    "save": (saved_within, ["PrivacyError: engine.save() was called inside of a logical batch, in which"] * 2),
    "written": (written_within, ["PrivacyError: the parameter '0.weight' was changed outside of this"] * 2),
    "written whole": (written_in_forward, ["PrivacyError: the parameter '0.weight' was changed outside of this"] * 2),
    "failed": (failed_on_one, ["PrivacyError: nothing was released, because rank 1 failed", "LossShapeError"]),
    "trace": (lambda _, engine: engine.trace("nowhere"), ["ValueError: trace()"] * 2),
    "compile": (lambda _, engine: engine.compile(), ["ValueError"] * 2),
    "group": (in_a_group_of_its_own, ["PrivacyError: the process group isn't that of the mesh"] * 2),
}


def said() -> list[tuple[str, bool]]:
    """What each mistake raised, and whether the weights are as they were after it."""
    found = []
    for mistake, _ in REFUSED.values():
        model = sharded(runs.network(torch.float64))
        engine = runs.engine_for(model, None, examples(), sampling="without_replacement")
        before = weights(model)
        found.append((outcome(partial(mistake, model, engine)), torch.equal(weights(model), before)))
    return found


def test_mistakes_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for (name, (_, messages)), *ranks in zip(REFUSED.items(), *on_ranks(said, tmp_path), strict=True):
        for message, (text, same) in zip(messages, ranks, strict=True):
            assert text.startswith(message), f"{name}: {text}"
            assert same or name in ("moved", "written")  # where the mistake itself moved them


SAVED: dict[str, Any] = {"noise_multiplier": 1.0, "clipping": Adaptive(0.3, count_noise=2.0)}


def saved(folder: Path) -> tuple[Tensor, list[Tensor], float, float]:
    """Three steps, and what is in the checkpoint after them: weights, Adam's moments, epsilon and the adaptive norm."""
    model, optimizer = model_and_optimizer()
    engine = runs.engine_for(model, optimizer, examples(), **SAVED)
    runs.train(engine)
    settled(model)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1], "engine": engine}, checkpoint_id=folder)
    return weights(model), moments(optimizer), engine.epsilon(), engine.clipping.sensitivity


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [whole(state["exp_avg"]) for state in optimizer.state.values()]


def resumed(folder: Path) -> tuple[Tensor, list[Tensor], float, float, int]:
    """The same of a new engine that takes it all back, and how many steps it counts after three more."""
    model, optimizer = model_and_optimizer()
    found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    engine = runs.engine_for(model, optimizer, examples(), **SAVED)
    dcp.load({"engine": engine}, checkpoint_id=folder)
    there = weights(model), moments(optimizer), engine.epsilon(), engine.clipping.sensitivity
    runs.train(engine)
    return *there, engine.steps_taken


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.one_in(math.inf)
def test_torch_s_checkpoints_are_read_by_another_number_of_ranks(first: int, second: int, tmp_path: Path) -> None:
    before = on_ranks(partial(saved, tmp_path / "checkpoint"), tmp_path, first)[0]
    for after in on_ranks(partial(resumed, tmp_path / "checkpoint"), tmp_path, second):
        torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
        assert after[2:] == (*before[2:], 6)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"takes what engine.state_dict\(\) gave"),
        ({"progress": "1"}, r"takes what engine.state_dict\(\) gave"),
        (None, r"noise_multiplier is 1\.0 in it and 2\.0 here"),
    ],
)
def test_states_of_others_are_refused(state: Any, message: str) -> None:
    """None stands for an engine of another configuration."""
    one, other = (runs.engine_for(runs.network(), noise_multiplier=each) for each in (1.0, 2.0))
    with pytest.raises(PrivacyError, match=message):
        other.load_state_dict(one.state_dict() if state is None else state)


STEPS, SIGMA, MAX_NORM, BATCH = 6, 1.5, 2.0, 4
CORRELATIONS: dict[str, tuple[Correlation, str]] = {
    "banded": (BandedToeplitz(bands=3), "cyclic_poisson"),
    "buffers": (BufferedToeplitz(buffers=2), "cyclic"),
}


def nothing(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Losses without a gradient: what is released is noise."""
    return 0 * model(batch[0]).square().sum(1)


def correlated(name: str, hybrid: bool = False) -> Any:
    correlation, sampling = CORRELATIONS[name]
    torch.manual_seed(0)
    # 7 rows don't part evenly among ranks.
    model: Any = sharded(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 200)).double(), hybrid)
    return runs.engine_for(
        model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), batch_size=BATCH, noise_multiplier=SIGMA,
        clipping=MAX_NORM, steps=STEPS, sampling=sampling, correlation=correlation, self_check=False,
    )  # fmt: skip


def released(name: str, path: Path, restore: bool, steps: int, hybrid: bool = False) -> np.ndarray:
    """The noise in the sums of each of some steps, over its standard deviation, of all ranks; saves what it came to."""
    engine = correlated(name, hybrid)
    if restore:
        engine.restore(path)
    found: list[Tensor] = []
    runs.on_step(
        engine.optimizer, lambda: found.append(torch.cat([each.flatten() for each in grads(engine.model).values()]))
    )
    runs.train(engine, steps, nothing)
    engine.save(path)
    assert len(engine.events) == 1
    return torch.stack(found).numpy() * BATCH / (SIGMA * MAX_NORM)


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize(
    ("first", "second", "hybrid"),
    [(2, 2, False), (2, 0, False), (0, 2, False), pytest.param(4, 2, True, marks=pytest.mark.slow)],
)
@pytest.mark.one_in(3)
def test_c_times_the_noise_of_all_shards_is_independent(name, first, second, hybrid, tmp_path):
    """Before and after a checkpoint, which another number of ranks goes on from; 0: one process, nothing sharded."""

    def on(size: int, restore: bool, hybrid: bool = False) -> np.ndarray:
        found = on_ranks(partial(released, name, tmp_path / "runs", restore, STEPS // 2, hybrid), tmp_path, size)
        assert all(np.array_equal(each, found[0]) for each in found)
        return found[0]

    noise = np.concatenate([on(first, False, hybrid), on(second, True)])
    assert_independent_noise(CORRELATIONS[name][0].matrix(steps=STEPS) @ noise)
    with pytest.raises(AssertionError):
        assert_independent_noise(noise)


def interrupted_noise() -> tuple[list[int], str]:
    """Steps of each mechanism after rank 1 had no memory for the second one's noise, and what was raised."""
    engine = correlated("banded")
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
    assert on_ranks(interrupted_noise, tmp_path) == [([2, 2], "PrivacyError"), ([2, 2], "MemoryError")]
