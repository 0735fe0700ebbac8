"""Saving and restoring an engine: a run goes on as if never interrupted, and what was spent is never forgotten."""

import contextlib
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import Wired, tie
from checkpointed_runs import OPTIMIZERS, engine_of, go, private, state_of
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Subset

import ghostclip
from ghostclip import BudgetExceededError, LedgerError, PrivacyError, accounting, checkpoint
from ghostclip.clipping import Adaptive, Custom, PerLayer
from ghostclip.engine import PrivacyEngine
from ghostclip.noise import BandedToeplitz

RUNS: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS} | {
    "float64, per layer": {"optimizer": "adam", "dtype": torch.float64, "clipping": PerLayer(1.0)},
    "wide": {"optimizer": "wide", "dtype": torch.bfloat16},
    "bfloat16, adaptive": {"optimizer": "adam", "dtype": torch.bfloat16, "clipping": Adaptive(0.5)},
    "fixed size": {"sampling": "without_replacement"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.one_in(3)
def test_a_restored_test_run_is_bit_equal_to_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = go(engine_of(**copy.deepcopy(RUNS[name])), 7)
    for at in (1, 5):
        saved, other = (engine_of(**copy.deepcopy(RUNS[name])) for _ in range(2))
        go(saved, at).save(tmp_path / "x")
        torch.manual_seed(99)
        found = other.restore(tmp_path / "x")
        assert (found.steps, found.epoch, found.steps_in_epoch) == (at, at // 3, at % 3)
        assert state_of(go(other, 7 - at)) == state_of(whole)
        assert other.steps_taken == 7
        assert other.clipping.sensitivity == whole.clipping.sensitivity


@pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced")
def test_a_run_with_lasting_workers_goes_on_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def build() -> PrivacyEngine:
        model = nn.Sequential(nn.Dropout(0.2), runs.network())
        loader = DataLoader(runs.data(), num_workers=1, persistent_workers=True)
        return runs.engine_for(model, OPTIMIZERS["sgd"](model), loader, noise="test", seed=5)

    whole, saved, other = build(), build(), build()
    each = len(whole.batches())
    torch.manual_seed(3)
    go(whole, 2 * each)
    torch.manual_seed(3)
    go(saved, each).save(tmp_path / "x")
    other.restore(tmp_path / "x")
    assert state_of(go(other, each)) == state_of(whole)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain = state_of(go(engine_of(), 5))
    saving = engine_of()
    assert state_of(go(saving, 5, lambda: saving.save(tmp_path / "x"))) == plain


def scheduled() -> tuple[PrivacyEngine, Any]:
    engine = engine_of()
    parts = [lr_scheduler.ConstantLR(engine.optimizer), lr_scheduler.ExponentialLR(engine.optimizer, 0.9)]
    return engine, lr_scheduler.SequentialLR(engine.optimizer, parts, [2])


def test_schedules_go_on(tmp_path: Path) -> None:
    whole, plan = scheduled()
    go(whole, 6, plan.step)
    first, plan = scheduled()
    go(first, 3, plan.step).save(tmp_path / "x", extra={"schedule": plan})
    other, plan = scheduled()
    other.restore(tmp_path / "x", extra={"schedule": plan})
    assert state_of(go(other, 3, plan.step)) == state_of(whole)


def test_a_half_done_batch_is_not_stored(tmp_path: Path) -> None:
    engine = go(private(), 1)
    batch = next(runs.nonempty(engine))
    engine.save(tmp_path / "x")
    parts = batch.physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    for call in (engine.save, engine.restore):
        with pytest.raises(PrivacyError, match=r"inside of a logical batch, with private sums of 1 of its physical"):
            call(tmp_path / "x")
    for examples in parts:
        engine.backward(runs.losses_of(engine.model, examples))
    engine.optimizer.step()
    engine.save(tmp_path / "x")
    assert checkpoint.load(tmp_path / "x").public["progress"]["steps"] == 2


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_batch_comes_again(at: int, tmp_path: Path) -> None:
    def losses_of(model: nn.Module, examples: list[Tensor]) -> Tensor:
        if engine.steps_taken >= at - 1:
            raise KeyboardInterrupt
        return runs.losses_of(model, examples)

    engine, other = private(batch_size=12, self_check=False), private(batch_size=12)
    with contextlib.suppress(KeyboardInterrupt):
        runs.train(engine, loss_fn=losses_of)
    taken = engine._snapshots.loader._taken
    engine.save(tmp_path / "x")
    found = other.restore(tmp_path / "x")
    assert found.steps == found.steps_in_epoch == engine.steps_taken == taken - 1 == at - 1
    other.save(tmp_path / "x")
    assert other.restore(tmp_path / "x") == found
    assert len([runs.leave(other) for _ in other.batches()]) == 2 - (at - 1)


def test_an_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    engine = private(batch_size=4)
    assert len(engine.batches()) == 6
    go(engine, 8).save(tmp_path / "x")
    other = private(batch_size=4)
    found = other.restore(tmp_path / "x")
    assert (found.steps, found.epoch, found.steps_in_epoch) == (8, 1, 2)
    assert [len([runs.leave(other) for _ in other.batches()]) for _ in range(2)] == [4, 6]
    assert len(other.batches()) == 6


def test_batches_of_before_a_restore_are_refused(tmp_path: Path) -> None:
    engine = private()
    epoch = iter(engine.batches())
    engine.step(next(epoch), runs.losses_of)
    engine.save(tmp_path / "x")
    engine.restore(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"engine\.restore\(\) was called inside of a loop.*start a new loop"):
        next(epoch)
    go(engine, 2)


def tied() -> nn.Module:
    model = Wired(lambda m, x: m.out(m.into(x) * m.scale), into=nn.Linear(5, 5), out=nn.Linear(5, 5))
    model.register_buffer("scale", torch.tensor(2.0))
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    return tie(model, "into", "out")


def test_tied_weights_buffers_and_wrapping_survive(tmp_path: Path) -> None:
    options = {"dataset": runs.data(), "noise": "test", "seed": 1, "noise_multiplier": 1.0, "clipping": 1.0}
    whole, other = (runs.engine_for(tied(), **options) for _ in range(2))
    whole.model.scale.fill_(3.0)
    go(whole, 2).save(tmp_path / "x")
    other.restore(tmp_path / "x")
    assert other.model.into.weight is other.model.out.weight
    assert list(checkpoint.load(tmp_path / "x").public["model"]) == list(tied().state_dict())
    assert torch.equal(other.model.scale, torch.tensor(3.0))
    torch.testing.assert_close(runs.weights(go(other, 2).model), runs.weights(go(whole, 2).model))


@pytest.mark.slow
def test_a_compiled_engine_goes_on(tmp_path: Path) -> None:
    def fresh() -> PrivacyEngine:
        engine = engine_of("adam", torch.float64, max_physical_batch_size=None)
        # Padding moves random numbers from one example to another.
        engine.model[2].p = 0.0
        engine.compile()
        return engine

    first = go(fresh(), 12)
    first.save(tmp_path / "x")
    other = fresh()
    other.restore(tmp_path / "x")
    assert state_of(other) == state_of(first)
    assert other.steps_taken == 12
    # Going back changes tensors that graphs were made for.
    ends = []
    for _ in range(2):
        other.restore(tmp_path / "x")
        ends.append(runs.weights(go(other, 12).model))
    assert not torch.allclose(ends[0], runs.weights(first.model))
    torch.testing.assert_close(*ends)
    torch.testing.assert_close(runs.weights(go(first, 12).model), ends[0])


def test_an_older_checkpoint_never_lowers_what_was_spent(tmp_path: Path) -> None:
    engine = go(private(noise_multiplier=3.0), 2)
    engine.save(tmp_path / "x")
    go(engine, 2)
    spent, found = engine.epsilon(), engine.restore(tmp_path / "x")
    assert (found.steps, engine.steps_taken, engine.epsilon()) == (2, 4, spent)
    go(engine, 2)
    setting: dict[str, Any] = {"noise_multiplier": 3.0, "sample_rate": 8 / 24, "delta": 1e-5}
    full = accounting.epsilon(steps=6, **setting)
    assert full <= engine.epsilon() <= full * (1 + 1e-3)
    engine.save(tmp_path / "y")
    later = private(noise_multiplier=3.0)
    assert later.restore(tmp_path / "y").steps == 4
    assert later.epsilon() == accounting.epsilon(steps=6, **setting)


def test_runs_that_part_and_meet_again_count_each_step_once(tmp_path: Path) -> None:
    first = go(private(), 2)
    first.save(tmp_path / "first")
    second = private()
    second.restore(tmp_path / "first")
    go(second, 3).save(tmp_path / "second")
    go(first, 1)
    first.restore(tmp_path / "second")
    assert first.steps_taken == 2 + 3 + 1
    first.restore(tmp_path / "second")
    assert first.steps_taken == 6


def test_redone_steps_draw_fresh_samples_and_noise(tmp_path: Path) -> None:
    engine = go(private(), 1)
    engine.save(tmp_path / "x")
    ends = []
    for other in (engine, private(), private()):
        other.restore(tmp_path / "x")
        go(other, 1)
        ends.append(runs.weights(other.model))
    assert not any(torch.equal(ends[left], ends[right]) for left in range(3) for right in range(left))
    stored = checkpoint.load(tmp_path / "x")
    assert (stored.private["noise"], stored.private["sampler"]) == ({}, None)


def test_a_plan_holds_over_interruptions_and_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "noise_for", lambda *_, **__: 3.0)  # calibration isn't what is tested here
    planned = partial(private, noise_multiplier=None, target_epsilon=4.0)
    go(planned(steps=4), 3).save(tmp_path / "x")
    other = planned(steps=4)
    other.restore(tmp_path / "x")
    go(other, 1)
    with pytest.raises(BudgetExceededError, match="all 4 planned steps"):
        go(other, 1)
    for length, found in (({"steps": 5}, 5), ({"epochs": 1}, 3)):
        with pytest.raises(PrivacyError, match=f"another configuration: planned_steps is 4 in it and {found} here"):
            planned(**length).restore(tmp_path / "x")


def test_a_restore_that_fails_late_has_not_forgotten_what_was_spent(tmp_path: Path) -> None:
    engine = go(private(), 3)
    engine.save(tmp_path / "x", extra={"plan": lr_scheduler.ConstantLR(engine.optimizer)})

    class Broken(lr_scheduler.ConstantLR):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("broken")

    other = private()
    with pytest.raises(RuntimeError, match="broken"):
        other.restore(tmp_path / "x", extra={"plan": Broken(other.optimizer)})
    assert other.steps_taken == 3


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def test_with_a_ledger_what_a_run_spent_after_its_checkpoint_counts(tmp_path: Path, ledger: Path) -> None:
    engine = go(private(ledger=ledger), 2)
    engine.save(tmp_path / "x")
    go(engine, 2)
    engine.detach()
    other = private(ledger=ledger)
    found = other.restore(tmp_path / "x")
    go(other, 1)
    assert found.steps == 2
    assert sum(event.count for event in other.events) == 5
    assert other.events == other.ledger.events
    other.save(tmp_path / "x")
    other.detach()
    again = private(ledger=ledger)
    assert again.restore(tmp_path / "x").steps == 3
    assert sum(event.count for event in again.events) == 5


def test_a_checkpoint_with_a_ledger_needs_that_ledger(tmp_path: Path, ledger: Path) -> None:
    engine = go(private(ledger=ledger), 1)
    old = ledger.read_bytes()
    engine.detach()
    engine = go(private(ledger=ledger), 1)
    engine.save(tmp_path / "x")
    engine.detach()
    with pytest.raises(LedgerError, match=r"belongs to a run with a ledger.*build the engine with ledger=\.\.\."):
        private().restore(tmp_path / "x")
    other = private(ledger=tmp_path / "other.ledger")
    with pytest.raises(LedgerError, match="is another one, or an older copy; put the file of that run back"):
        other.restore(tmp_path / "x")
    (tmp_path / "old.ledger").write_bytes(old)
    rolled_back = private(ledger=tmp_path / "old.ledger")
    with pytest.raises(LedgerError, match="another one, or an older copy"):
        rolled_back.restore(tmp_path / "x")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps of `engine_of`."""
    folder = tmp_path_factory.mktemp("saved") / "x"
    go(engine_of(), 2).save(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.5}, r"noise_multiplier is 1\.0 in it and 1\.5 here"),
        ({"batch_size": 6}, r"sampling is Poisson\(.*batch_size=8.* in it and Poisson\(.*batch_size=6.* here"),
        ({"sampling": "without_replacement"}, r"sampling is Poisson\(.* in it and WithoutReplacement\(.* here"),
        ({"neighboring": "replace_one"}, "relation='add_or_remove_one'.* in it and .*relation='replace_one'"),
        ({"clipping": 2.0}, r"clipping is Flat\(max_norm=1\.0\) in it and Flat\(max_norm=2\.0\) here"),
        ({"clipping": PerLayer(1.0)}, r"clipping is Flat\(max_norm=1\.0\) in it and PerLayer\("),
        ({"clipping": Adaptive(1.0)}, r"clipping is Flat\(max_norm=1\.0\) in it and Adaptive\("),
        ({"clipping": Custom(torch.ones_like, 1.0)}, r"clipping is .* and Custom\(function=.*ones_like"),
        ({"noise": "standard", "seed": None}, "noise is test in it and standard here"),
        ({"seed": 6}, "seed is 5 in it and 6 here"),
        ({"optimizer": "adam"}, "the optimizer's class is torch.optim.sgd.SGD in it and torch.optim.adam.Adam here"),
        ({"dtype": torch.float64}, r"0\.weight is float32 \[8, 5\] in it and float64 \[8, 5\] here"),
    ],
)
def test_another_configuration_is_refused_by_name(changes: dict[str, Any], message: str, saved: Path) -> None:
    other = go(engine_of(**changes), 1)
    before = state_of(other)
    with pytest.raises(PrivacyError, match=f"is of another configuration: .*{message}"):
        other.restore(saved)
    assert state_of(other) == before
    assert other.steps_taken == 1
    go(other, 1)


def test_users_with_other_rows_are_refused_and_told_to_nobody(tmp_path: Path) -> None:
    """As many users as before: who had three rows of one user might be three users now."""
    users = {"unit_ids": [row // 3 for row in range(24)]}
    first = go(engine_of(**users), 1)
    first.save(tmp_path / "x")
    with pytest.raises(PrivacyError, match="users have other rows than here"):
        engine_of(unit_ids=[row % 8 for row in range(24)]).restore(tmp_path / "x")
    assert engine_of(**users).restore(tmp_path / "x").steps == 1
    digest = first._loader.units_digest
    public = [file for file in (tmp_path / "x").rglob("*") if file.is_file() and "private" not in file.name]
    assert public
    assert not any(digest.encode() in file.read_bytes() for file in public)
    assert digest not in str(first.state_dict())


def in_turn(rows: list[int], sampling: str = "cyclic") -> PrivacyEngine:
    """An engine over some rows of a data set, with six steps planned."""
    turns = {} if sampling == "poisson" else {"correlation": BandedToeplitz(bands=2), "steps": 6}
    options = {"sampling": sampling, "noise_multiplier": 1.0, "self_check": False, **turns}
    return runs.engine_for(runs.network(), None, Subset(runs.data(32), rows), **options)


@pytest.mark.parametrize("sampling", ["cyclic", "cyclic_poisson"])
@pytest.mark.parametrize("rows", [[*range(8, 32)], [*range(23, -1, -1)]], ids=["other rows", "another order"])
def test_other_rows_are_refused_where_examples_take_turns(sampling: str, rows: list[int], tmp_path: Path) -> None:
    """They would have the turns of others, and more than are charged."""
    go(in_turn([*range(24)], sampling), 2).save(tmp_path / "x")
    other = in_turn(rows, sampling)
    with pytest.raises(PrivacyError, match="the data set picked other rows, or the same in another order"):
        other.restore(tmp_path / "x")
    assert other.steps_taken == 0
    assert in_turn([*range(24)], sampling).restore(tmp_path / "x").steps == 2


def test_a_checkpoint_that_does_not_say_its_rows_is_warned_of(tmp_path: Path, caplog: Any) -> None:
    """As those of earlier versions, where examples take turns. Where each step draws anew, other rows are fine."""
    for sampling, rows, warned in (("poisson", range(8, 32), False), ("cyclic", range(24), True)):
        go(in_turn([*range(24)], sampling), 2).save(tmp_path / sampling)
        assert in_turn([*rows], sampling).restore(tmp_path / sampling).steps == 2
        stored = checkpoint.load(tmp_path / sampling)
        private = {name: state for name, state in stored.private.items() if name != "rows"}
        checkpoint.save(tmp_path / sampling, stored.public, private)
        assert in_turn([*rows], sampling).restore(tmp_path / sampling).steps == 2
        assert ("doesn't say which rows a Subset picked" in caplog.text) == warned


def test_another_data_set_model_frozen_parameter_or_order_is_refused(saved: Path) -> None:
    wide, frozen, turned = nn.Sequential(nn.Linear(5, 3)), runs.network(), engine_of().model
    frozen[0].bias.requires_grad_(False)
    cases = [
        (runs.network(), runs.data(25), "the number of examples is 24 in it and 25 here"),
        (wide, runs.data(), r"0\.weight is float32 \[8, 5\] in it and float32 \[3, 5\] here; .* and \d+ more"),
        (frozen, runs.data(), r"trained is \['0\.weight', '0\.bias', .* in it and \['0\.weight', '2\.weight'"),
        (turned, runs.data(), r"the optimizer's group 0 is \['0\.weight', .* in it and \['3\.bias'"),
    ]
    for model, data, message in cases:
        optimizer = torch.optim.SGD(reversed([*model.parameters()]) if model is turned else model.parameters(), lr=0.1)
        other = runs.engine_for(model, optimizer, data, noise="test", seed=5, noise_multiplier=1.0, clipping=1.0)
        with pytest.raises(PrivacyError, match=message):
            other.restore(saved)


def test_extra_objects_must_be_the_same(tmp_path: Path) -> None:
    engine = private()
    plan = lr_scheduler.ConstantLR(engine.optimizer)
    engine.save(tmp_path / "x", extra={"plan": plan})
    with pytest.raises(PrivacyError, match=r"saved with extra=\['plan'\], and restore got \[\]"):
        engine.restore(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"restore got \['other'\]"):
        engine.restore(tmp_path / "x", extra={"other": plan})
    for wrong, message in [(plan, "extra must be a dict"), ({"epoch": 3}, r"extra\['epoch'\] must be an object with")]:
        with pytest.raises(TypeError, match=message):
            engine.save(tmp_path / "x", extra=wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("coarse_losses")
def test_steps_whose_losses_nothing_tested_stay_untested(tmp_path: Path) -> None:
    """In each later engine, whose own tests are of other steps; what older versions saved doesn't tell."""
    untested = "which was not tested"
    engine = go(private(self_check=False), 1)
    for _ in range(2):
        other = private()
        engine.save(tmp_path / "x")
        other.restore(tmp_path / "x")
        assert untested in engine.guarantee()
        assert untested in other.guarantee()
        engine = go(other, 1)
    assert untested in engine.guarantee()
    assert ghostclip.check(engine.model, runs.losses_of, list(runs.data(6)[:])) == []
    assert untested not in engine.guarantee()
    tested = private()
    tested.load_state_dict(go(private(), 2).state_dict())  # a batch of one row tests nothing
    assert untested not in tested.guarantee()
    progress = json.loads(go(private(), 2).state_dict()["progress"])
    assert progress["dict"].pop("untested") is False
    tested.load_state_dict({"progress": json.dumps(progress)})
    assert untested not in tested.guarantee()


@pytest.mark.usefixtures("coarse_losses")
def test_the_noise_of_earlier_steps_is_named_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were taken where there are no C kernels. Of checkpoints of older versions only their own ledger knows."""
    with monkeypatch.context() as patched:
        patched.setattr("ghostclip.noise.gaussian.library", lambda name: None)
        state = go(private(), 1).state_dict()
    here, there = private(), " AES-256, a cipher, in OpenSSL"
    made_by = here._snapshots.noise.generator_for(here.model)
    here.load_state_dict(state)
    assert f"Its noise comes from{there}. M" in here.guarantee()
    others = "" if there[1:] == made_by else f"; of other steps from {made_by}"
    assert f"Its noise comes from{there}{others}. M" in go(here, 1).guarantee()
    here.load_state_dict(state)
    again = private()
    again.load_state_dict(here.state_dict())
    assert f"Its noise comes from{there}{others}. M" in again.guarantee()
    older = json.loads(state["progress"])
    del older["dict"]["noises"]
    here = private()
    here.load_state_dict({"progress": json.dumps(older)})
    assert "Its noise" not in here.guarantee()
    unknown = f"Its noise comes from {made_by}; of other steps from a generator that was not recorded. M"
    assert unknown in go(here, 1).guarantee()


@pytest.mark.usefixtures("coarse_losses")
def test_the_ledger_knows_the_noise_of_an_older_version_s_checkpoint(tmp_path: Path) -> None:
    options = {"ledger": tmp_path / "run.ledger", "noise": "hardened"}
    first = go(engine_of(seed=None, **options), 1)
    state, said = json.loads(first.state_dict()["progress"]), first.guarantee()
    assert "Its noise comes from AES-256" in said
    first.detach()
    del state["dict"]["noises"]
    later = engine_of(seed=None, **options)
    later.load_state_dict({"progress": json.dumps(state)})
    assert later.guarantee() == said
