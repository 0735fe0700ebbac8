"""Several processes train one model: the update is that of one process, with one draw of noise and one charge."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
import torch.distributed as dist
from charged_steps import private, steps
from ledgers import spent
from ranks import OPTIONS, REPEATABLE, assert_independent_noise, assert_like_one, examples, followed, on_ranks, outcome
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ghostclip import BudgetExceededError, PrivacyError, accounting
from ghostclip.clipping import Adaptive
from ghostclip.noise import BufferedToeplitz, noise_source
from ghostclip.noise.hardened import Lattice
from ghostclip.sampling import LogicalBatches

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def trained(wrapped: bool = False, by_hand: bool = False, losses_of: Any = runs.losses_of, **options: Any) -> Any:
    """A few steps, on all ranks that there are: weights after each, epsilon, what the policy came to."""
    model: nn.Module = runs.network(torch.float64)
    if dist.is_initialized() and dist.get_rank():
        # Ranks that begin apart, to be brought together.
        nn.init.normal_(model[0].weight)
    model = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = runs.engine_for(model, optimizer, options.pop("data", examples()), **{**REPEATABLE, **options})

    def take(batch: Any) -> None:
        if not by_hand:
            engine.step(batch, losses_of)
            return
        runs.gather(engine, batch)
        optimizer.step()
        optimizer.zero_grad()

    return followed(engine, take, runs.weights)


def short_of_memory(model: nn.Module, rows: list[Tensor]) -> Tensor:
    """Rank 1 has memory for two examples at a time."""
    if dist.is_initialized() and dist.get_rank() == 1 and len(rows[0]) > 2:
        raise torch.OutOfMemoryError("tried to allocate too much")
    return runs.losses_of(model, rows)


def partly_infinite() -> TensorDataset:
    data = examples()
    data.tensors[0][::5] = torch.inf
    return data


WAYS: dict[str, dict[str, Any]] = OPTIONS | {
    "plain": {},
    "wrapped": {"wrapped": True},
    "wrapped, physical": {"wrapped": True, "max_physical_batch_size": 2},
    "by hand, nothing left on a rank": {"wrapped": True, "by_hand": True, "batch_size": 2},
    "cached": {"second_pass": "cached", "wrapped": True},
    "wrapped, layers": {**OPTIONS["layers"], "wrapped": True},
    "adaptive without noise": {**OPTIONS["adaptive"], "noise_multiplier": 0.0},
    "fixed size": {"sampling": "without_replacement", "neighboring": "replace_one"},
    "correlated by buffers": {
        **OPTIONS["correlated"], "correlation": BufferedToeplitz(2), "sampling": "cyclic", "wrapped": True,
    },
    "not finite": {"data": partly_infinite(), "wrapped": True},
    "out of memory": {"losses_of": short_of_memory},
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.one_in(6)
def test_two_ranks_take_the_steps_of_one(name: str, tmp_path: Path) -> None:
    found = on_ranks(partial(trained, **WAYS[name]), tmp_path)
    one = trained(**{**WAYS[name], "wrapped": False})
    assert_like_one(found, one)
    assert (one["max_norm"] != 0.3) == name.startswith("adaptive")


WIDTH, ROWS, SIGMA, BOUND, BATCH = 100, 40, 1.5, 0.25, 10


def releases(mode: str, steps: int) -> dict[str, Any]:
    """What ``steps`` released in private noise, which is all there is, and which rows each rank had."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    data = TensorDataset(torch.randn(ROWS, WIDTH), torch.arange(ROWS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = runs.engine_for(
        model, optimizer, data, batch_size=BATCH, noise_multiplier=SIGMA, clipping=BOUND, noise=mode, self_check=False
    )
    found: dict[str, Any] = {"grads": [], "rows": []}
    runs.on_step(optimizer, lambda: found["grads"].append(runs.grads(model)))
    while len(found["grads"]) < steps:
        for batch in engine.batches():
            found["rows"].append([])
            for rows in batch.physical():
                found["rows"][-1] += rows[1].tolist()
                engine.backward(0 * model(rows[0]).sum(1))
            optimizer.step()
            optimizer.zero_grad()
    return found | {"draws": engine._steps.release._noise.draws}


@pytest.mark.parametrize("mode", ["standard", "hardened"])
def test_noise_is_drawn_once_a_step_and_is_the_same_on_all_ranks(mode: str, tmp_path: Path) -> None:
    steps = 12
    first, second = on_ranks(partial(releases, mode, steps), tmp_path)
    assert (first["draws"], second["draws"]) == (len(first["grads"]), 0)
    for rows, others in zip(first["rows"], second["rows"], strict=True):
        assert len({*rows, *others}) == len(rows) + len(others)
    released = torch.stack(first["grads"])
    assert torch.equal(released, torch.stack(second["grads"]))
    # Where one process would release them, too.
    places = released.double() / Lattice(SIGMA * BOUND, BATCH).step
    assert torch.equal(places, places.round()) == (mode == "hardened")
    # A row for each layer of each step.
    layers = (released.double() * BATCH / (SIGMA * BOUND)).reshape(2 * len(released), -1)
    assert_independent_noise(layers.numpy(), 1e-9)


def test_samples_are_shared_out_whole_and_without_overlap() -> None:
    data, key = TensorDataset(torch.arange(ROWS)), b"k" * 32
    generator = partial(noise_source("standard").generator, key)
    made = [LogicalBatches(data, batch_size=8, generator=generator, share=(rank, 3)) for rank in range(3)]
    whole = LogicalBatches(data, batch_size=8, generator=generator)
    for one, *shares in zip(whole, *made, strict=True):
        rows, *parts = [[row for part in batch.physical() for row in part[0].tolist()] for batch in (one, *shares)]
        assert sorted(row for part in parts for row in part) == rows
        assert len({batch.digest for batch in shares}) == 1


EPSILON = accounting.epsilon(noise_multiplier=1.0, sample_rate=8 / 24, steps=6, delta=1e-5) * 1.0001


def charged(path: Path) -> dict[str, Any]:
    """Three steps on a ledger that another run has spent on, and a refused one."""
    engine = private(ledger=path, max_epsilon=EPSILON, target_delta=1e-5)
    with pytest.raises(BudgetExceededError) as refused:
        runs.train(engine, 10**6)
    found = {name: getattr(engine, name) for name in ("ledger", "events", "steps_taken")}
    found |= {"refused": str(refused.value), "epsilon": engine.epsilon(), "forecast": engine.forecast(2)}
    engine.detach()
    return found


@pytest.mark.one_in(math.inf)
def test_one_rank_charges_and_all_know(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    steps(private(ledger=path), 3).detach()
    lead, other = on_ranks(partial(charged, path), tmp_path)
    assert lead["steps_taken"] == other["steps_taken"] == 3
    assert spent(path) == 6
    assert (lead["ledger"].path, other["ledger"]) == (path, None)
    for name in ("events", "epsilon", "forecast"):
        assert lead[name] == other[name]
    assert lead["epsilon"] == pytest.approx(EPSILON, rel=1e-3)
    assert other["refused"] == lead["refused"] + " (on rank 0, which leads)"


def interrupted() -> dict[str, Any]:
    """Steps of which the second fails on rank 1, in its loss function."""
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, clipping=1.0)
    found: dict[str, Any] = {"said": [], "weights": []}

    def losses_of(model: nn.Module, rows: list[Tensor]) -> Tensor:
        if dist.get_rank() == 1 and len(found["said"]) == 1:
            raise RuntimeError("a spoilt file")
        return runs.losses_of(model, rows)

    for batch in engine.batches():
        found["said"].append(outcome(partial(engine.step, batch, losses_of)))
        found["weights"].append(runs.weights(engine.model))
    return found | {"steps": engine.steps_taken}


def test_a_failure_on_one_rank_ends_the_step_on_all_and_training_goes_on(tmp_path: Path) -> None:
    lead, other = on_ranks(interrupted, tmp_path)
    assert other["said"] == ["nothing", "RuntimeError: a spoilt file", "nothing"]
    assert "nothing was released, because rank 1 failed: RuntimeError: a spoilt file" in lead["said"][1]
    assert lead["steps"] == other["steps"] == 2
    for one, two in zip(lead["weights"], other["weights"], strict=True):
        assert torch.equal(one, two)
    assert torch.equal(lead["weights"][0], lead["weights"][1])


def two_engines(path: Path) -> list[Any]:
    """Epsilon of the first of two engines on one ledger, after steps of the second; and what a state says of it."""
    first, second = (
        runs.engine_for(runs.network(), noise_multiplier=1.0, ledger=path, noise=noise)
        for noise in ("standard", "hardened")
    )
    for engine in (first, second):
        runs.train(engine, 3)
    assert '"ledger": {' in first.state_dict()["progress"]
    return [first.epsilon(1e-5), second.epsilon(1e-5), first.guarantee(1e-5)]


def test_all_ranks_know_what_other_engines_charged_to_the_ledger(tmp_path: Path) -> None:
    lead, other = on_ranks(partial(two_engines, tmp_path / "run.ledger"), tmp_path)
    assert lead == other
    assert lead[0] == lead[1] > 0
    assert "; of other steps from AES-256, a cipher, in OpenSSL, with a key of its own" in lead[2]


class SharedOut(torch.optim.SGD):
    """An optimizer that has its state on rank 0 alone, once it was gathered there, as ZeroRedundancyOptimizer."""

    gathered = False

    def state_dict(self) -> dict[str, Any]:
        if not self.gathered or dist.get_rank():
            raise RuntimeError("not gathered here")
        return super().state_dict()


def by_zero(path: Path) -> list[str]:
    """Saves it before that, and after."""
    model = runs.network()
    optimizer = SharedOut(model.parameters(), lr=0.1, momentum=0.9)
    engine = runs.engine_for(model, optimizer)
    runs.train(engine, 2)
    said = [outcome(lambda: engine.save(path))]
    optimizer.gathered = True
    return [*said, outcome(lambda: engine.save(path))]


def test_the_leading_rank_alone_is_asked_for_an_optimizer_s_state(tmp_path: Path) -> None:
    for before, after in on_ranks(partial(by_zero, tmp_path / "saved"), tmp_path):
        assert "not gathered here" in before
        assert after == "nothing"


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_engine_whose_budget_is_used_up_can_be_saved(by_hand: bool, tmp_path: Path) -> None:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, max_epsilon=EPSILON, target_delta=1e-5)

    def take(batch: Any) -> None:
        if not by_hand:
            engine.step(batch, runs.losses_of)
            return
        runs.gather(engine, batch)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    def train() -> None:
        for _ in range(10**3):
            for batch in engine.batches():
                take(batch)

    with pytest.raises(BudgetExceededError):
        train()
    taken = engine.steps_taken
    engine.save(tmp_path / "saved")
    assert (
        runs.engine_for(runs.network(), noise_multiplier=1.0, max_epsilon=EPSILON, target_delta=1e-5)
        .restore(tmp_path / "saved")
        .steps
        == taken
    )


def test_a_sampler_that_shares_out_is_told_who_does() -> None:
    data = runs.data()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(PrivacyError, match="the engine shares every logical batch out itself"):
        runs.engine_for(runs.network(), None, loader)


def apart() -> int:
    """Each process by itself: rank 0 takes two steps, and rank 1 one."""
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    engine = runs.engine_for(runs.network(), process_group=own)
    for _, batch in zip(range(2 - dist.get_rank()), engine.batches(), strict=False):
        engine.step(batch, runs.losses_of)
    return engine.steps_taken


def test_processes_that_do_not_train_together_have_groups_of_their_own(tmp_path: Path) -> None:
    assert on_ranks(apart, tmp_path) == [2, 1]


def resumed(path: Path, restore: bool) -> dict[str, Any]:
    """Nine steps with dropout and repeatable noise, or the last five of them, after a checkpoint."""
    model = runs.network(torch.float64)
    model.insert(2, nn.Dropout(0.2))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"noise": "test", "seed": 5, "noise_multiplier": 1.0, "clipping": Adaptive(0.5), "batch_size": 4}
    engine = runs.engine_for(model, optimizer, examples(), **options)

    def save_once() -> None:
        if engine.steps_taken == 4:
            engine.save(path)

    if restore:
        assert engine.restore(path).steps == 4
    runs.train(engine, 5 if restore else 9, after=save_once)
    return {"weights": runs.weights(model), "steps": engine.steps_taken, "events": engine.events}


def test_a_run_of_two_ranks_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    whole = on_ranks(partial(resumed, path, False), tmp_path)
    for rank in on_ranks(partial(resumed, path, True), tmp_path):
        assert torch.equal(rank["weights"], whole[0]["weights"])
        assert (rank["steps"], rank["events"]) == (9, whole[0]["events"])
