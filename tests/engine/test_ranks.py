"""Several processes train one model: the update is that of one process, with one draw of noise and one charge.

What they must not do is refused on all of them, and none is waited for that can't come.
"""

import math
import os
from dataclasses import replace
from functools import partial

import private_runs as runs
import pytest
import torch
import torch.distributed as dist
from charged_steps import private, steps
from ledgers import spent
from ranks import OPTIONS, REPEATABLE, assert_independent_noise, assert_like_one, examples, followed, on_ranks, outcome
from sharded import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import ghostclip
from ghostclip import BudgetExceededError, PrivacyError, accounting
from ghostclip.clipping import Adaptive
from ghostclip.noise import BufferedToeplitz
from ghostclip.noise.hardened import Lattice

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def by_hand(engine, batch):
    runs.gather(engine, batch)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def trained(wrapped=False, take=None, losses_of=runs.losses_of, data=examples, **options):
    """A few steps, on all ranks that there are: weights after each, epsilon, what the policy came to."""
    model = runs.network(torch.float64)
    if dist.is_initialized() and dist.get_rank():
        # Ranks that begin apart, to be brought together.
        nn.init.normal_(model[0].weight)
    model = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = runs.engine_for(model, optimizer, data(), **{**REPEATABLE, **options})
    step = partial(take, engine) if take else lambda batch: engine.step(batch, losses_of)
    return followed(engine, step, runs.weights)


def short_of_memory(model, rows):
    """Rank 1 has memory for two examples at a time."""
    if dist.is_initialized() and dist.get_rank() == 1 and len(rows[0]) > 2:
        raise torch.OutOfMemoryError("tried to allocate too much")
    return runs.losses_of(model, rows)


def partly_infinite():
    data = examples()
    data.tensors[0][::5] = torch.inf
    return data


WAYS = OPTIONS | {
    "plain": {},
    "wrapped, physical": {"wrapped": True, "max_physical_batch_size": 2},
    "by hand, nothing left on a rank": {"wrapped": True, "take": by_hand, "batch_size": 2},
    "cached": {"second_pass": "cached", "wrapped": True},
    "wrapped, layers": {**OPTIONS["layers"], "wrapped": True},
    "adaptive without noise": {**OPTIONS["adaptive"], "noise_multiplier": 0.0},
    "fixed size": {"sampling": "without_replacement", "neighboring": "replace_one"},
    "correlated by buffers": {
        **OPTIONS["correlated"], "correlation": BufferedToeplitz(2), "sampling": "cyclic", "wrapped": True,
    },
    "not finite": {"data": partly_infinite, "wrapped": True},
    "out of memory": {"losses_of": short_of_memory},
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.one_in(8)
def test_two_ranks_take_the_steps_of_one(name, tmp_path):
    found = on_ranks(partial(trained, **WAYS[name]), tmp_path)
    one = trained(**{**WAYS[name], "wrapped": False})
    assert_like_one(found, one)
    assert (one["max_norm"] != 0.3) == name.startswith("adaptive")


WIDTH, ROWS, SIGMA, BOUND, BATCH = 100, 40, 1.5, 0.25, 10


def releases(mode, steps):
    """What ``steps`` released in private noise, which is all there is, and which rows each rank had."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    data = TensorDataset(torch.randn(ROWS, WIDTH), torch.arange(ROWS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = runs.engine_for(
        model, optimizer, data, batch_size=BATCH, noise_multiplier=SIGMA, clipping=BOUND, noise=mode, self_check=False
    )
    grads, rows = [], []
    runs.on_step(optimizer, lambda: grads.append(runs.grads(model)))

    def no_losses(model, examples):
        rows.append((len(grads), examples[1].tolist()))
        return 0 * model(examples[0]).sum(1)

    runs.train(engine, steps, no_losses)
    return {"grads": grads, "rows": rows, "draws": engine._steps.release._noise.draws}


@pytest.mark.parametrize("mode", ["standard", "hardened"])
def test_noise_is_drawn_once_a_step_and_is_the_same_on_all_ranks(mode, tmp_path):
    first, second = on_ranks(partial(releases, mode, 12), tmp_path)
    assert (first["draws"], second["draws"]) == (12, 0)
    taken = [(step, row) for rank in (first, second) for step, rows in rank["rows"] for row in rows]
    assert len(set(taken)) == len(taken)
    released = torch.stack(first["grads"])
    assert torch.equal(released, torch.stack(second["grads"]))
    # Where one process would release them, too.
    places = released.double() / Lattice(SIGMA * BOUND, BATCH).step
    assert torch.equal(places, places.round()) == (mode == "hardened")
    # A row for each layer of each step.
    layers = (released.double() * BATCH / (SIGMA * BOUND)).reshape(2 * len(released), -1)
    assert_independent_noise(layers.numpy(), 1e-9)


def budget():
    """Of six steps."""
    return accounting.epsilon(noise_multiplier=1.0, sample_rate=8 / 24, steps=6, delta=1e-5) * 1.0001


def charged(path):
    """Three steps on a ledger that another run has spent on, and a refused one."""
    engine = private(ledger=path, max_epsilon=budget(), target_delta=1e-5)
    with pytest.raises(BudgetExceededError) as refused:
        runs.train(engine, 10**6)
    found = {name: getattr(engine, name) for name in ("ledger", "events", "steps_taken")}
    found |= {"refused": str(refused.value), "epsilon": engine.epsilon(), "forecast": engine.forecast(2)}
    engine.detach()
    return found


@pytest.mark.one_in(math.inf)
def test_one_rank_charges_and_all_know(tmp_path):
    path = tmp_path / "run.ledger"
    steps(private(ledger=path), 3).detach()
    lead, other = on_ranks(partial(charged, path), tmp_path)
    assert lead["steps_taken"] == other["steps_taken"] == 3
    assert spent(path) == 6
    assert (lead["ledger"].path, other["ledger"]) == (path, None)
    for name in ("events", "epsilon", "forecast"):
        assert lead[name] == other[name]
    assert lead["epsilon"] == pytest.approx(budget(), rel=1e-3)
    assert other["refused"] == lead["refused"] + " (on rank 0, which leads)"


def interrupted():
    """Steps of which the second fails on rank 1, in its loss function."""
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, clipping=1.0)
    said, weights = [], []

    def losses_of(model, rows):
        if dist.get_rank() == 1 and len(said) == 1:
            raise RuntimeError("a spoilt file")
        return runs.losses_of(model, rows)

    for batch in engine.batches():
        said.append(outcome(partial(engine.step, batch, losses_of)))
        weights.append(runs.weights(engine.model))
    return said, torch.stack(weights), engine.steps_taken


def test_a_failure_on_one_rank_ends_the_step_on_all_and_training_goes_on(tmp_path):
    (lead, weights, *count), (other, same, *as_many) = on_ranks(interrupted, tmp_path)
    assert other == ["nothing", "RuntimeError: a spoilt file", "nothing"]
    assert "nothing was released, because rank 1 failed: RuntimeError: a spoilt file" in lead[1]
    assert count == as_many == [2]
    assert torch.equal(weights, same)
    assert torch.equal(weights[0], weights[1])


def two_engines(path):
    """Epsilon of the first of two engines on one ledger, after steps of the second; and what a state says of it."""
    first, second = (
        runs.engine_for(runs.network(), noise_multiplier=1.0, ledger=path, noise=noise)
        for noise in ("standard", "hardened")
    )
    for engine in (first, second):
        runs.train(engine, 3)
    assert '"ledger": {' in first.state_dict()["progress"]
    return [first.epsilon(1e-5), second.epsilon(1e-5), first.guarantee(1e-5)]


@pytest.mark.usefixtures("coarse_losses")
def test_all_ranks_know_what_other_engines_charged_to_the_ledger(tmp_path):
    lead, other = on_ranks(partial(two_engines, tmp_path / "run.ledger"), tmp_path)
    assert lead == other
    assert lead[0] == lead[1] > 0
    assert "; of other steps from AES-256, a cipher, in OpenSSL, with a key of its own" in lead[2]


class SharedOut(torch.optim.SGD):
    """An optimizer that has its state on rank 0 alone, once it was gathered there, as ZeroRedundancyOptimizer."""

    gathered = False

    def state_dict(self):
        if not self.gathered or dist.get_rank():
            raise RuntimeError("not gathered here")
        return super().state_dict()


def by_zero(path):
    """Saves it before that, and after."""
    model = runs.network()
    optimizer = SharedOut(model.parameters(), lr=0.1, momentum=0.9)
    engine = runs.engine_for(model, optimizer)
    runs.train(engine, 2)
    said = [outcome(lambda: engine.save(path))]
    optimizer.gathered = True
    return [*said, outcome(lambda: engine.save(path))]


def test_the_leading_rank_alone_is_asked_for_an_optimizer_s_state(tmp_path):
    for before, after in on_ranks(partial(by_zero, tmp_path / "saved"), tmp_path):
        assert "not gathered here" in before
        assert after == "nothing"


@pytest.mark.parametrize("loop", [runs.train, runs.train_by_hand])
@pytest.mark.usefixtures("coarse_losses")
def test_an_engine_whose_budget_is_used_up_can_be_saved(loop, tmp_path):
    options = {"noise_multiplier": 1.0, "max_epsilon": budget(), "target_delta": 1e-5}
    engine = runs.engine_for(runs.network(), **options)
    with pytest.raises(BudgetExceededError):
        [loop(engine) for _ in range(10**3)]
    engine.save(tmp_path / "saved")
    assert runs.engine_for(runs.network(), **options).restore(tmp_path / "saved").steps == engine.steps_taken


def test_a_sampler_that_shares_out_is_told_who_does():
    data = runs.data()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(PrivacyError, match="the engine shares every logical batch out itself"):
        runs.engine_for(runs.network(), None, loader)


def apart():
    """Each process by itself: rank 0 takes two steps, and rank 1 one."""
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    engine = runs.engine_for(runs.network(), process_group=own)
    runs.train(engine, 2 - dist.get_rank())
    return engine.steps_taken


def test_processes_that_do_not_train_together_have_groups_of_their_own(tmp_path):
    assert on_ranks(apart, tmp_path) == [2, 1]


def resumed(path, restore):
    """Nine steps with dropout and repeatable noise, or the last five of them, after a checkpoint."""
    model = runs.network(torch.float64)
    model.insert(2, nn.Dropout(0.2))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {**REPEATABLE, "noise_multiplier": 1.0, "clipping": Adaptive(0.5), "batch_size": 4}
    engine = runs.engine_for(model, optimizer, examples(), **options)
    if restore:
        assert engine.restore(path).steps == 4
    runs.train(engine, 5 if restore else 9, after=lambda: engine.steps_taken == 4 and engine.save(path))
    return {"weights": runs.weights(model), "steps": engine.steps_taken, "events": engine.events}


def test_a_run_of_two_ranks_goes_on_as_if_never_interrupted(tmp_path):
    path = tmp_path / "saved"
    whole = on_ranks(partial(resumed, path, False), tmp_path)
    for rank in on_ranks(partial(resumed, path, True), tmp_path):
        assert torch.equal(rank["weights"], whole[0]["weights"])
        assert (rank["steps"], rank["events"]) == (9, whole[0]["events"])


def out_of_turn(engine, rank):
    batches = iter(engine.batches())
    if rank:
        next(batches)
        runs.leave(engine)
    engine.step(next(batches), runs.losses_of)


def without_a_step(engine, rank):
    """One rank forgets its step, as one without examples does where steps are taken between physical batches."""
    for batch in engine.batches():
        rank or engine.step(batch, runs.losses_of)


def discarded_by_one(engine, rank):
    batch = next(iter(engine.batches()))
    rank or engine.step(batch, runs.losses_of)
    batch.discard()


def wrapped_later(engine, rank):
    wrapper = DistributedDataParallel(engine.model)
    runs.train(engine, 1, lambda _, rows: runs.losses_of(wrapper, rows))


def frozen_apart(engine, rank):
    """Ranks that train another layer of one size each."""
    engine.detach()
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    engine = runs.engine_for(model)
    model[rank].requires_grad_(False)
    runs.train(engine, 1)


def with_states_apart(engine, rank):
    """Each rank keeps what `state_dict` gave in a file of its own, and those are of other steps."""
    states = []
    runs.train(engine, 2, after=lambda: states.append(engine.state_dict()))
    engine.detach()
    runs.engine_for(runs.network(), noise_multiplier=1.0).load_state_dict(states[rank])


def other_noise(engine, rank):
    batch = next(iter(engine.batches()))
    release = engine._steps.release
    release.settings = replace(release.settings, noise_multiplier=1.0 + rank)
    engine.step(batch, runs.losses_of)


def of_a_search(engine, rank):
    ghostclip.select(
        lambda _: 1, [1, 2], score=float, expected_runs=2, noise_multiplier=1.0, sample_rate=0.1, steps=3, delta=1e-5
    )


def apart_rows(rank):
    """As by random_split without a generator, after `torch.manual_seed(rank)`."""
    return Subset(runs.data(), torch.randperm(24, generator=torch.Generator().manual_seed(rank))[:20])


def partly_sharded(rank):
    model = runs.network()
    fully_shard(model[2], mesh=mesh_of())
    return model


# What is done to an engine on each rank.
AMISS = {
    "turn": (out_of_turn, "PrivacyError: the ranks must agree on the sample"),
    "forgotten": (without_a_step, "the logical batch before this one had no step"),
    "discarded": (discarded_by_one, "the ranks must agree on whether the batch is discarded"),
    "moved": (
        lambda engine, rank: runs.train(engine, 2, after=lambda: rank and nn.init.zeros_(engine.model[0].bias)),
        "the parameter '0.bias' was changed outside of this engine's charged steps",
    ),
    "later": (wrapped_later, "the model was called inside of a DistributedDataParallel that averages its gradients"),
    "frozen": (frozen_apart, "the ranks must agree on what is trained at every step"),
    "states": (with_states_apart, "must agree on the steps of a checkpoint when they load a state"),
    "noise": (other_noise, "must agree on noise multiplier and batch size at every step"),
    "search": (of_a_search, "select() draws how many runs there are"),
    "compile": (lambda engine, rank: engine.compile(), "compile() isn't there for several"),
}
# What an engine is built of on each rank.
BUILT = {
    "subset": (lambda rank: {"dataset": apart_rows(rank)}, "on the rows of the data set (a digest of Subset.indices"),
    "static graph": (
        lambda rank: {"model": DistributedDataParallel(runs.network(), static_graph=True)}, "with static_graph=True",
    ),
    "budget": (lambda rank: {"max_epsilon": 1.0 + rank}, "must agree on max_epsilon when"),
    "delta": (lambda rank: {"target_delta": 1e-5 * (1 + rank)}, "must agree on target_delta when"),
    "ledger": (lambda rank: {"ledger": os.devnull if rank else None}, "agree on whether there is a ledger"),
    "rows": (lambda rank: {"dataset": runs.data(24 + rank)}, "must agree on sampling when engines"),
    "users": (lambda rank: {"unit_ids": [rank, *range(23)]}, "must agree on unit_ids when"),
    "policy": (lambda rank: {"clipping": Adaptive(rank + 0.5)}, "must agree on the state of clipping"),
    "model": (lambda rank: {"model": nn.Linear(5, 3 + rank)}, "must agree on weight when"),
    "sharded": (
        lambda rank: {"model": partly_sharded(rank)}, "is a DTensor, of which each process holds a part",
    ),
}  # fmt: skip


def done_amiss(change):
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0)
    said = outcome(lambda: change(engine, dist.get_rank()))
    engine.detach()
    return said


def amiss():
    """What each of all that came to on a rank."""
    said = {name: done_amiss(change) for name, (change, _) in AMISS.items()}
    given = {name: {"model": runs.network(), **options(dist.get_rank())} for name, (options, _) in BUILT.items()}
    return said | {name: outcome(lambda of=options: runs.engine_for(**of)) for name, options in given.items()}


@pytest.fixture(scope="module")
def said_by_ranks(tmp_path_factory):
    return on_ranks(amiss, tmp_path_factory.mktemp("amiss"))


@pytest.mark.parametrize("name", AMISS | BUILT)
def test_what_ranks_must_not_do_is_refused_on_all(name, said_by_ranks):
    for said in said_by_ranks:
        assert (AMISS | BUILT)[name][1] in said[name]


def in_a_group_made_anew(folder, wrapped):
    """Each rank builds its engine in a world of one, which is destroyed and made one of two."""
    rank = dist.get_rank()
    dist.barrier()  # else one may leave before the other has joined
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/alone-{rank}", rank=0, world_size=1)
    model = runs.network()
    engine = runs.engine_for(DistributedDataParallel(model) if wrapped else model)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/together", rank=rank, world_size=2)
    return outcome(lambda: runs.train(engine, 1))


@pytest.mark.parametrize("wrapped", [False, True])
def test_processes_that_join_later_are_noticed(wrapped, tmp_path):
    for said in on_ranks(partial(in_a_group_made_anew, tmp_path, wrapped), tmp_path):
        assert "processes were joined after this PrivacyEngine was built" in said


def with_buffers():
    """DDP exchanges buffers in a wrapper's first forward, which a rank without an example doesn't have."""
    model = runs.network().append(nn.BatchNorm1d(3, affine=False).eval())
    engine = runs.engine_for(DistributedDataParallel(model), batch_size=1)
    runs.train(engine)
    return engine.steps_taken


class SpoiltRows(TensorDataset):
    """Rows of which rank 1 can read none."""

    def __getitem__(self, row):
        if dist.get_rank() == 1:
            raise OSError("file spoilt")
        return super().__getitem__(row)


def with_spoilt_rows():
    """In a loop that computes its own losses."""
    return outcome(
        lambda: runs.train_by_hand(runs.engine_for(runs.network(), dataset=SpoiltRows(*runs.data().tensors)))
    )


def test_no_rank_is_waited_for_that_has_no_forward_or_no_row(tmp_path):
    assert on_ranks(with_buffers, tmp_path) == [24, 24]
    lead, other = on_ranks(with_spoilt_rows, tmp_path)
    assert other == "OSError: file spoilt"
    assert "nothing was released, because rank 1 failed: file spoilt" in lead
