"""Trained parameters move in charged steps only, and every logical batch has its step, or an error says so."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from graphs import interpret
from torch import Tensor, nn

from ghostclip import BudgetExceededError, GradientLeakError, PrivacyError
from ghostclip.clipping import Adaptive
from ghostclip.engine import PrivacyEngine

MOVED = r"the parameter '.*' was changed outside of this engine's charged steps.*accept_parameters"
OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd one by one": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, foreach=False, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def private(model: nn.Module | None = None, optimizer: Any = None, **changes: Any) -> PrivacyEngine:
    options = {"noise_multiplier": 1.0, "clipping": 1.0, "max_physical_batch_size": 4, **changes}
    return runs.engine_for(runs.network() if model is None else model, optimizer, **options)


def steps(engine: PrivacyEngine, count: int = 1) -> PrivacyEngine:
    """So many steps, each batch by engine.step."""
    for _ in range(count):
        engine.step(next(iter(engine.batches())), runs.losses_of)
    return engine


def by_hand(engine: PrivacyEngine, optimizer: torch.optim.Optimizer, gather: bool = True) -> None:
    """One step of a loop by hand over a batch that isn't empty."""
    batch = next(runs.nonempty(engine))
    if gather:
        runs.gather(engine, batch)
    optimizer.step()
    optimizer.zero_grad()


def assert_all_refuse(engine: PrivacyEngine, message: str, folder: Path) -> None:
    """The next batch, twice, and what is said of the privacy that was spent."""
    charged = engine.steps_taken
    calls: list[Callable[[], Any]] = [
        lambda: next(iter(engine.batches())), lambda: next(iter(engine.batches())),
        engine.epsilon, engine.guarantee, lambda: engine.save(folder / "x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PrivacyError, match=message):
            call()
    assert engine.steps_taken == charged
    assert not (folder / "x").exists()


# --- steps of others


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("first", [0, 2], ids=["at first", "after steps"])
def test_a_second_optimizer_is_noticed_at_the_next_batch_and_in_every_report(
    name: str, first: int, tmp_path: Path
) -> None:
    engine = steps(private(), first)
    by_hand(engine, OTHERS[name](engine.model.parameters(), lr=0.1))
    assert_all_refuse(engine, MOVED, tmp_path)
    assert engine.steps_taken == first


def test_a_second_optimizer_is_noticed_between_a_batch_s_start_and_its_first_backward() -> None:
    engine = private()
    other = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    examples = next(next(runs.nonempty(engine)).physical())
    runs.losses_of(engine.model, examples).mean().backward()
    other.step()
    other.zero_grad()
    with pytest.raises(PrivacyError, match=MOVED):
        engine.backward(runs.losses_of(engine.model, examples))
    assert all(parameter.grad is None for parameter in engine.model.parameters())


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "in place": lambda model: model[2].bias.add_(1.0),
    "zeros": lambda model: nn.init.zeros_(model[0].weight),
    "at once": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "state dict": lambda model: model.load_state_dict(runs.network().state_dict()),
    "vector": lambda model: nn.utils.vector_to_parameters(torch.zeros(8 * 5 + 8 + 3 * 8 + 3), model.parameters()),
    "clipped": lambda model: model[0].weight.clamp_(-0.1, 0.1),
    "averaged": lambda model: model[0].weight.lerp_(torch.zeros(8, 5), 0.1),
    "other memory": lambda model: setattr(model[0].bias, "data", torch.zeros(8)),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changes_from_outside_are_refused_until_they_are_accepted(name: str, tmp_path: Path) -> None:
    with torch.enable_grad():
        engine = steps(private())
    CHANGES[name](engine.model)
    assert_all_refuse(engine, MOVED, tmp_path)
    engine.accept_parameters()
    assert engine.epsilon() > 0
    engine.save(tmp_path / "x")
    with torch.enable_grad():
        steps(engine, 3)
    assert engine.steps_taken == 4


def test_values_written_through_data_are_not_seen() -> None:
    """As SECURITY.md says."""
    engine = steps(private())
    engine.model[0].weight.data.add_(1.0)
    assert steps(engine).steps_taken == 2


def test_what_comes_before_the_first_batch_needs_no_acceptance(tmp_path: Path) -> None:
    engine = private()
    engine.model.load_state_dict({name: value + 1 for name, value in engine.model.state_dict().items()})
    assert engine.epsilon() == 0
    steps(engine, 2).save(tmp_path / "x")


def test_frozen_parameters_may_change_and_thawed_ones_may_not(tmp_path: Path) -> None:
    engine = steps(private())
    layer = engine.model[0].requires_grad_(False)
    nn.init.zeros_(layer.weight)
    engine.epsilon()
    layer.requires_grad_(True)
    assert_all_refuse(engine, MOVED, tmp_path)
    layer.requires_grad_(False)
    steps(engine)
    layer.requires_grad_(True)
    steps(engine)


def test_sums_that_are_gathered_can_not_be_accepted_away() -> None:
    engine = private()
    parts = next(runs.nonempty(engine)).physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
    with pytest.raises(PrivacyError, match=r"engine\.accept_parameters\(\) was called inside of a logical batch"):
        engine.accept_parameters()
    examples = next(parts)
    with pytest.raises(GradientLeakError, match="was changed between"):
        engine.backward(runs.losses_of(engine.model, examples))


def test_restoring_and_reports_within_a_step_are_no_changes(tmp_path: Path) -> None:
    engine = steps(private())
    engine.save(tmp_path / "x")
    engine.restore(tmp_path / "x")
    reported: list[float] = []
    for register in (engine.optimizer.register_step_pre_hook, engine.optimizer.register_step_post_hook):
        register(lambda *_: reported.append(engine.epsilon()))
    steps(engine)
    assert len(reported) == 2
    nn.init.zeros_(engine.model[0].bias)
    engine.restore(tmp_path / "x")
    steps(engine)


def test_a_detached_engine_reports_what_it_spent() -> None:
    engine = steps(private())
    spent = engine.epsilon()
    engine.detach()
    nn.init.zeros_(engine.model[0].bias)
    assert engine.epsilon() == spent


class Decaying(torch.optim.SGD):
    """Changes parameters after its parent's step, whose hooks are called for both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        torch._foreach_mul_(self.param_groups[0]["params"], 0.9)
        return value


@pytest.mark.parametrize(
    "make",
    [Decaying, *OTHERS.values(), lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True)],
    ids=["decaying", *OTHERS, "fused"],
)
@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_s_own_update_is_no_change(make: Callable[..., Any], closure: bool) -> None:
    model = runs.network()
    engine = private(model, make(model.parameters(), lr=0.01))
    for batch in engine.batches():
        if closure:
            engine.optimizer.step(lambda batch=batch: runs.gather(engine, batch))
        else:
            runs.gather(engine, batch)
            engine.optimizer.step()
        engine.optimizer.zero_grad()
    steps(engine, 2)
    assert engine.steps_taken == 5


# --- types and objects


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def grown(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


OBJECTS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "bfloat16": (lambda model: model.to(torch.bfloat16), "is torch.bfloat16 and was torch.float32"),
    "float64": (lambda model: model.double(), "is torch.float64 and was torch.float32"),
    "one layer": (lambda model: model[2].half(), r"'2\.weight' is torch.float16"),
    "assigned": (
        lambda model: model.load_state_dict(runs.network().state_dict(), assign=True),
        r"'0\.weight' is another object",
    ),
    "a parameter": (replaced, r"'0\.weight' is another object"),
    "a layer": (lambda model: model.__setitem__(2, nn.Linear(8, 3)), r"'2\.weight' is another object"),
    "one more": (grown, r"'3\.weight' is another object"),
    "one less": (lambda model: model.__delitem__(2), r"'2\.weight' is another object"),
    "without": (lambda model: setattr(model[0], "bias", None), r"'0\.bias' is another object"),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("when", ["before the first batch", "after steps", "before the step"])
def test_types_and_objects_that_change_are_refused(name: str, when: str, tmp_path: Path) -> None:
    engine = private()
    change, message = OBJECTS[name]
    if when == "before the step":
        runs.gather(engine, next(runs.nonempty(engine)))
        change(engine.model)
        with pytest.raises(PrivacyError, match=message):
            engine.optimizer.step()
    else:
        steps(engine, 2 * (when == "after steps"))
        change(engine.model)
        assert_all_refuse(engine, message, tmp_path)
        with pytest.raises(PrivacyError, match=message):
            engine.accept_parameters()
    assert engine.steps_taken == 2 * (when == "after steps")


def test_modules_without_parameters_may_come_and_go() -> None:
    engine = steps(private())
    engine.model[1] = nn.ReLU()
    steps(engine)
    engine.model.append(nn.Identity())
    assert steps(engine).steps_taken == 3


# --- steps without noise


def hooks_lost(engine: PrivacyEngine) -> None:
    engine.optimizer.__init__(engine.model.parameters(), lr=0.5)  # type: ignore[misc]


def hooks_cleared(engine: PrivacyEngine) -> None:
    engine.optimizer._optimizer_step_pre_hooks.clear()
    engine.optimizer._optimizer_step_post_hooks.clear()


@torch.no_grad()
def plain_update(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.sub_(0.5 * parameter.grad)


def replaced_on_instance(engine: PrivacyEngine) -> None:
    engine.optimizer.step = lambda closure=None: plain_update(engine.optimizer)  # type: ignore[method-assign]


def replaced_on_class(engine: PrivacyEngine) -> None:
    engine.optimizer.__class__ = type("Patched", (torch.optim.SGD,), {})
    type(engine.optimizer).step = lambda self, closure=None: plain_update(self)  # type: ignore[method-assign]


LOST = [hooks_lost, hooks_cleared, replaced_on_instance, replaced_on_class]
every_loss = pytest.mark.parametrize("lose", LOST)


@every_loss
def test_a_loop_by_hand_without_the_engine_s_hooks_is_noticed(
    lose: Callable[[PrivacyEngine], None], tmp_path: Path
) -> None:
    engine = steps(private())
    lose(engine)
    by_hand(engine, engine.optimizer)
    assert_all_refuse(engine, MOVED, tmp_path)
    assert engine.steps_taken == 1


KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "hardened": {"noise": "hardened"},
    "adaptive": {"clipping": Adaptive(1.0)},
    "compiled": {},
}


@every_loss
@pytest.mark.parametrize("kind", KINDS)
def test_engine_step_releases_with_noise_even_without_hooks(
    lose: Callable[[PrivacyEngine], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "hardened":
        pytest.importorskip("cryptography")
    interpret(monkeypatch)
    found = []
    for broken in (False, True):
        model = runs.network()
        engine = private(model, torch.optim.SGD(model.parameters(), lr=0.5), batch_size=24, **KINDS[kind])
        engine._steps._sums.release = noted = Releases(engine._steps._sums.release)
        engine.compile() if kind == "compiled" else None
        lose(engine) if broken else None
        before = runs.weights(model)
        steps(engine, 3)
        assert engine.steps_taken == 3
        assert engine.epsilon() > 0
        torch.testing.assert_close(runs.weights(model), before - 0.5 * sum(noted.made), atol=1e-5, rtol=1e-5)
        found.append(len(noted.made))
    assert found == [3, 3]


class Releases:
    """Notes what is put in place of sums."""

    def __init__(self, release: Callable[..., None]) -> None:
        self.release, self.made = release, []

    def __call__(self, held: Any, make_private: Callable[[list[Tensor]], list[Tensor]]) -> None:
        def noted(sums: list[Tensor]) -> list[Tensor]:
            before = [total.clone() for total in sums]
            private = make_private(sums)
            assert not any(torch.equal(total / 24, part) for total, part in zip(before, private, strict=True))
            self.made.append(torch.cat([part.flatten() for part in private]))
            return private

        self.release(held, noted)


class Deaf(torch.optim.SGD):
    """Takes a closure and doesn't call it."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class Wordless(torch.optim.Optimizer):
    """Steps without calling the closure or a parent's step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        plain_update(self)


def test_a_closure_that_is_not_called_is_a_step_without_noise(tmp_path: Path) -> None:
    model = runs.network()
    engine = private(model, Wordless(model.parameters()))
    runs.gather(engine, next(runs.nonempty(engine)))
    with pytest.raises(PrivacyError, match=r"without the engine's noise or charge \(its closure was not called"):
        engine.optimizer.step(lambda: None)
    assert_all_refuse(engine, MOVED, tmp_path)
    model = runs.network()
    # torch calls hooks in SGD's own step once there was an SGD.
    torch.optim.SGD(model.parameters(), lr=0.1)
    engine = private(model, Deaf(model.parameters(), lr=0.1))
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step(lambda: pytest.fail("called"))
    assert engine.steps_taken == 1


@pytest.mark.parametrize(
    "take", [copy.copy, copy.deepcopy, pickle.dumps, lambda engine: copy.deepcopy({"trainer": [engine]})]
)
def test_an_engine_is_not_copied_or_pickled(take: Callable[[Any], Any]) -> None:
    engine = steps(private())
    with pytest.raises(PrivacyError, match=r"can't be copied or pickled.*build a new engine.*restore\(\)"):
        take(engine)
    copy.deepcopy((engine.model, engine.optimizer))
    steps(engine)


# --- logical batches without a step


def small(batch_size: int = 1, **changes: Any) -> PrivacyEngine:
    """An engine of which a third of the batches is empty."""
    return private(dataset=runs.data(6), batch_size=batch_size, max_physical_batch_size=None, **changes)


def step_inside(engine: PrivacyEngine, batch: Any) -> None:
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def every_second(engine: PrivacyEngine, batch: Any) -> None:
    runs.gather(engine, batch)
    if engine._snapshots.loader._taken % 2 == 0:
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def first_part_only(engine: PrivacyEngine, batch: Any) -> None:
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        break


def only_zeroed(engine: PrivacyEngine, batch: Any) -> None:
    runs.gather(engine, batch)
    engine.optimizer.zero_grad()


def swallowed(engine: PrivacyEngine, batch: Any) -> None:
    try:
        for _ in batch.physical():
            raise OSError
    except OSError:
        return


LOOPS = [step_inside, every_second, first_part_only, only_zeroed, swallowed, lambda engine, batch: None]


def train(engine: PrivacyEngine, loop: Callable[[PrivacyEngine, Any], None], seen: list[Any]) -> None:
    """Ten epochs of a loop, which goes through the batches ``seen``."""
    for _ in range(10):
        for batch in engine.batches():
            loop(engine, batch)
            seen.append(batch)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_without_a_step_is_refused_when_the_next_is_taken(loop: Callable[[PrivacyEngine, Any], None]) -> None:
    engine, seen = small(), list[Any]()
    with pytest.raises(PrivacyError, match=r"had no step(.|\n)*for examples in batch\.physical\(\)(.|\n)*discard\(\)"):
        train(engine, loop, seen)
    assert engine.steps_taken == len(seen) - 1
    assert [batch.stepped for batch in seen] == [True] * (len(seen) - 1) + [False]
    for _ in range(2 * (not seen[-1].interrupted)):
        with pytest.raises(PrivacyError, match="had no step"):
            next(iter(engine.batches()))
    charged = engine.steps_taken
    seen[-1].discard()
    assert engine.steps_taken == charged + 1
    steps(engine)


def test_the_last_batch_of_an_epoch_needs_its_step_too() -> None:
    engine = private(batch_size=24)
    with pytest.raises(PrivacyError, match="had no step"):
        for _ in engine.batches():
            pass
    assert engine.steps_taken == 0


def test_the_step_that_is_missing_may_still_be_taken() -> None:
    engine = private()
    epoch = iter(engine.batches())
    batch = next(epoch)
    runs.gather(engine, batch)
    with pytest.raises(PrivacyError, match="had no step"):
        next(epoch)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.step(next(epoch), runs.losses_of)
    assert engine.steps_taken == 2


def test_the_loop_in_the_message_trains() -> None:
    engine = small()
    for batch in engine.batches():
        runs.gather(engine, batch)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.steps_taken == len(engine.batches())


def test_a_discarded_batch_is_charged_and_releases_nothing(tmp_path: Path) -> None:
    engine = private(ledger=tmp_path / "run.ledger")
    before = runs.weights(engine.model)
    for number, batch in enumerate(engine.batches()):
        runs.gather(engine, batch) if number % 2 else None
        batch.discard()
        batch.discard()
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        with pytest.raises(PrivacyError, match="without a logical batch"):
            engine.optimizer.step()
        assert engine.steps_taken == sum(event.count for event in engine.events) == number + 1
        engine.save(tmp_path / "x")
        assert engine.restore(tmp_path / "x").steps == number + 1
        break
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.epsilon() > 0
    batch = next(iter(engine.batches()))
    engine.step(batch, runs.losses_of)
    with pytest.raises(PrivacyError, match="this one had its step"):
        batch.discard()
    next(iter(engine.batches()))
    engine.batches().discard()
    engine.batches().discard()
    assert engine.steps_taken == 3


def test_a_discard_past_the_budget_is_refused_and_discards() -> None:
    engine = private(max_epsilon=0.1)
    batch = next(iter(engine.batches()))
    with pytest.raises(BudgetExceededError, match="one more step would pass max_epsilon"):
        batch.discard()
    next(iter(engine.batches()))


def test_an_exception_that_leaves_the_loops_discards() -> None:
    engine = private(self_check=False)

    def a_loop() -> None:
        for batch in runs.nonempty(engine):
            for examples in batch.physical():
                engine.backward(runs.losses_of(engine.model, examples))
                raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            a_loop()
    steps(engine)
    assert engine.steps_taken == 1


def failing(*_: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("place", ["step", "backward", "charge", "loss function"])
def test_an_exception_in_the_engine_discards(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = private(self_check=False)
    epoch = runs.nonempty(engine)

    def a_turn(batch: Any) -> None:
        if place in ("step", "loss function"):
            engine.step(batch, failing if place == "step" else None)  # type: ignore[arg-type]
        runs.gather(engine, batch)
        engine.optimizer.step()

    for _ in range(3):
        batch = next(epoch)
        with monkeypatch.context() as patch:
            patch.setattr(engine._steps._clipper.passes, "clip", failing) if place == "backward" else None
            patch.setattr(engine._steps.release, "charge", failing) if place == "charge" else None
            with pytest.raises((MemoryError, TypeError)):
                a_turn(batch)
    engine.step(next(epoch), runs.losses_of)
    assert engine.steps_taken == 1


def test_a_call_that_is_mended_after_an_exception_still_needs_its_step() -> None:
    engine = private(self_check=False)
    epoch = runs.nonempty(engine)
    for examples in next(epoch).physical():
        with pytest.raises(ValueError, match="reduction"):
            engine.backward(runs.losses_of(engine.model, examples).sum())
        engine.backward(runs.losses_of(engine.model, examples))
    with pytest.raises(PrivacyError, match="had no step"):
        next(epoch)
