"""Faults inside of a logical batch: nothing unclipped or uncharged is released, and training goes on."""

import contextlib
import copy
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import private_runs as runs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ghostclip
from ghostclip import PrivacyError
from ghostclip.clipping import Adaptive, Custom, PerLayer
from ghostclip.engine import PrivacyEngine
from ghostclip.engine.micro_batching import rows_of
from ghostclip.errors import is_out_of_memory

PACKAGE = str(Path(ghostclip.__file__).parent)
NORM, RATE = 0.1, 2.0


def small_engine(**changes: Any) -> PrivacyEngine:
    """An engine without noise whose norm nearly every example is clipped to."""
    model = runs.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"clipping": NORM, "max_physical_batch_size": 4, "self_check": False, **changes}
    return runs.engine_for(model, optimizer, options.pop("data", None), **options)


def update_of(model: nn.Module, batch: list[list[Tensor]]) -> Tensor:
    """What a step over these physical batches adds to the parameters, by the loop over single examples."""
    plain = ghostclip.unwrap(copy.deepcopy(model))
    total = torch.zeros_like(runs.weights(plain))
    for inputs, labels in batch:
        for example in range(len(labels)):
            plain.zero_grad()
            runs.losses_of(plain, [inputs[example : example + 1], labels[example : example + 1]]).sum().backward()
            total += runs.grads(plain) * min(1.0, NORM / float(runs.grads(plain).norm()))
    return -RATE * total / 8


class Training:
    """Steps of an engine, each compared with what the loop over single examples would have done."""

    def __init__(self, engine: PrivacyEngine, by_hand: bool = False) -> None:
        self.engine, self.by_hand = engine, by_hand
        self.epoch: Iterator[Any] = iter(())
        self.seen: list[list[Tensor]] = []

    def next_batch(self) -> Any:
        for _ in range(2):
            for batch in self.epoch:
                return batch
            self.epoch = iter(self.engine.batches())
        raise AssertionError("an epoch without batches")

    def losses_of(self, model: nn.Module, examples: list[Tensor]) -> Tensor:
        self.seen.append(examples)
        return runs.losses_of(model, examples)

    def step(self) -> Any:
        self.seen = []
        batch = self.next_batch()
        if not self.by_hand:
            self.engine.step(batch, self.losses_of)
            return batch
        for examples in batch.physical():
            self.engine.backward(self.losses_of(self.engine.model, examples))
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        return batch

    def checked_step(self) -> None:
        """A step that uses each example of its batch once, and releases their clipped sum and nothing else."""
        if self.by_hand:
            self.engine.optimizer.zero_grad()
        before, charged = copy.deepcopy(self.engine.model), self.engine.steps_taken
        batch = self.step()
        assert self.engine.steps_taken == charged + 1
        assert [len(labels) for _, labels in self.seen] == batch.sizes
        rows = [tuple(row) for inputs, _ in self.seen for row in inputs.tolist()]
        assert len(set(rows)) == len(rows)
        moved = runs.weights(self.engine.model) - runs.weights(before)
        torch.testing.assert_close(moved, update_of(before, self.seen), atol=1e-6, rtol=1e-4)


# --- out of memory


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def real_failure() -> None:
    torch.empty(2**50)


def raising(error: Callable[[], Exception]) -> Callable[[], None]:
    def fail() -> None:
        raise error()

    return fail


class Fragile(torch.autograd.Function):
    """The identity, whose backward fails when a budget of backwards of large batches is spent."""

    left = 0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if len(grad) > 2:
            Fragile.left -= 1
            if Fragile.left < 0:
                raise no_memory()
        return grad


class FragileNetwork(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = runs.network(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net[2](Fragile.apply(self.net[1](self.net[0](inputs))))


def trained(left: int, dtype: torch.dtype = torch.float32, steps: int = 3, **changes: Any) -> PrivacyEngine:
    """An engine after a few steps, with so many large backwards to go before memory runs out."""
    Fragile.left = left
    model = FragileNetwork(dtype)
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"noise": "test", "seed": 4, "noise_multiplier": 1.0, "clipping": NORM, "max_physical_batch_size": 4}
    engine = runs.engine_for(
        model, optimizer, runs.data(dtype=dtype), **{**options, "self_check": False, **changes}
    )  # fmt: skip
    for batch in engine.batches():
        if steps:
            engine.step(batch, runs.losses_of)
            steps -= 1
    return engine


PLENTY = 10**6


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_divided_batch_gives_the_same_step_with_one_draw_and_one_charge(left: int, second_pass: str) -> None:
    whole, divided = (trained(budget, second_pass=second_pass) for budget in (PLENTY, left))
    torch.testing.assert_close(runs.weights(divided.model), runs.weights(whole.model), atol=1e-6, rtol=1e-5)
    assert divided.steps_taken == whole.steps_taken == 3
    assert divided._snapshots.noise.positions() == whole._snapshots.noise.positions()
    assert divided._steps.micro_batches.most == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"clipping": PerLayer(NORM)},
        {"max_physical_batch_size": None},
        {"unit_ids": [row // 2 for row in range(24)], "batch_size": 4},
    ],
    ids=str,
)
def test_so_it_does_for_other_types_policies_and_users(changes: dict[str, Any]) -> None:
    whole, divided = (trained(budget, **changes) for budget in (PLENTY, 3))
    wide = changes.get("dtype") != torch.bfloat16
    torch.testing.assert_close(
        runs.weights(divided.model), runs.weights(whole.model), atol=1e-6 if wide else 1e-2, rtol=1e-5 if wide else 1e-2
    )
    assert divided._steps.micro_batches.most is not None


def test_a_divided_batch_is_counted_once_by_an_adaptive_norm() -> None:
    norms = []
    for budget in (PLENTY, 1):
        policy = Adaptive(NORM)
        trained(budget, clipping=policy)
        norms.append(policy.max_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    assert norms[0] != NORM


@pytest.mark.parametrize("fail", [raising(no_memory), raising(MemoryError), real_failure])
def test_what_fits_is_remembered_and_told(fail: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def losses_of(model: nn.Module, examples: list[Tensor]) -> Tensor:
        tried.append(len(examples[1]))
        if tried[-1] > 3:
            fail()
        return runs.losses_of(model, examples)

    engine = small_engine(max_physical_batch_size=None, batch_size=24)
    for batch in engine.batches():
        record = engine.step(batch, losses_of)
    assert tried == [24, 12, 6, *[3] * 8]
    assert len(record.losses) == len(record.norms) == 24
    assert "memory ran out with 24 examples in a physical batch" in caplog.text
    assert "max_physical_batch_size=3 would save the attempt" in caplog.text
    for batch in engine.batches():
        engine.step(batch, losses_of)
    assert max(tried[11:]) == 3


@pytest.mark.parametrize(
    ("labels_of", "message"),
    [
        (lambda rows: [int(label) for _, label in rows], "it holds something of type int"),
        (lambda rows: torch.tensor(3), r"it holds a tensor of shape \[\]"),
    ],
)
def test_what_can_t_be_divided_says_so_and_is_discarded(labels_of: Any, message: str) -> None:
    def collate(rows: Any) -> Any:
        return torch.stack([inputs for inputs, _ in rows]), labels_of(rows)

    failing = True

    def losses(model: nn.Module, examples: Any) -> Tensor:
        if failing:
            raise no_memory()
        return model(examples[0]).square().sum(1)

    with pytest.warns(UserWarning, match="is replaced by"):
        engine = small_engine(data=DataLoader(runs.data(), 8, collate_fn=collate))
    before = runs.weights(engine.model)
    with pytest.raises(torch.OutOfMemoryError, match=f"can't be divided: {message}.*smaller max_physical_batch_size"):
        engine.step(next(runs.nonempty(engine)), losses)
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == 0
    failing = False
    engine.step(next(runs.nonempty(engine)), losses)
    assert engine.steps_taken == 1


def test_a_single_example_that_does_not_fit() -> None:
    def losses(model: nn.Module, examples: Any) -> Tensor:
        raise no_memory()

    engine = small_engine()
    with pytest.raises(torch.OutOfMemoryError, match="with 1 example in a physical batch, which can't be divided"):
        engine.step(next(runs.nonempty(engine)), losses)
    assert engine.steps_taken == 0


def test_other_errors_are_not_tried_again() -> None:
    calls = []

    def losses(model: nn.Module, examples: Any) -> Tensor:
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    engine = small_engine()
    with pytest.raises(RuntimeError, match="mat1"):
        engine.step(next(runs.nonempty(engine)), losses)
    assert len(calls) == 1
    assert not is_out_of_memory(KeyboardInterrupt())


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Bag(dict):
    """A mapping of someone's own."""


def test_rows_are_taken_from_any_nesting() -> None:
    numbers = torch.arange(12).view(6, 2)
    found = rows_of(Bag(a=[numbers, (numbers, None)], b=Pair(numbers, numbers[:, 0])), 6, 2, 4)
    assert type(found) is Bag
    assert type(found["b"]) is Pair
    for part in (found["a"][0], found["a"][1][0], found["b"].left):
        assert torch.equal(part, numbers[2:4])
    assert found["b"].right.tolist() == [4, 6]
    for wrong in (numbers[:5], torch.tensor(1), ["a"], {"x": 3}, Pair(numbers, "text"), numbers.to_sparse()):
        with pytest.raises(TypeError, match=r"it holds (a tensor|something)"):
            rows_of(wrong, 6, 2, 4)


# --- interruptions


class Interruption:
    """Raises KeyboardInterrupt at the n-th of the package's lines that are reached, each counted once."""

    def __init__(self, at: int, folders: tuple[str, ...]) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._at = at
        self._places = tuple(os.path.join(PACKAGE, folder) for folder in folders)

    def __enter__(self) -> "Interruption":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._places):
            return None
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self._at:
                self._at = 0
                raise KeyboardInterrupt
        return self._trace


def lines_of_a_step(training: Training, folders: tuple[str, ...]) -> int:
    """How many lines of the package a step goes through."""
    reached = 0
    for _ in range(8):
        with Interruption(0, folders) as counted:
            training.step()
        reached = max(reached, len(counted.lines))
    return reached


def interrupt_everywhere(engine: PrivacyEngine, by_hand: bool, folders: tuple[str, ...], stride: int) -> int:
    """Interrupts one step after another, each a few lines later; returns how many were."""
    training = Training(engine, by_hand)
    count = 0
    for at in range(1, lines_of_a_step(training, folders) + 1, stride):
        before, charged = runs.weights(engine.model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, folders):
            training.step()
        # Never a release that wasn't charged.
        assert torch.equal(runs.weights(engine.model), before) or engine.steps_taken == charged + 1
        assert engine.steps_taken in (charged, charged + 1)
        if at % 2:
            training.epoch = iter(())
        # What a handler does that goes on with the same iterator; after engine.step only where its first line was hit.
        engine.batches().discard()
        training.checked_step()
        count += 1
    return count


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_ctrl_c_anywhere_in_the_engine(by_hand: bool) -> None:
    assert interrupt_everywhere(small_engine(), by_hand, ("engine", "sampling", "noise"), stride=4) > 40


@pytest.mark.slow
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_ctrl_c_at_every_line_of_the_package(by_hand: bool, second_pass: str, tmp_path: Path) -> None:
    engine = small_engine(second_pass=second_pass, ledger=tmp_path / "run.ledger")
    assert interrupt_everywhere(engine, by_hand, ("",), stride=1) > 500


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_ctrl_c_at_every_line_with_narrow_sums(by_hand: bool) -> None:
    model = runs.network(torch.bfloat16)
    engine = runs.engine_for(model, dataset=runs.data(dtype=torch.bfloat16), clipping=NORM, max_physical_batch_size=4)
    training = Training(engine, by_hand)
    for at in range(1, lines_of_a_step(training, ("engine",)) + 1):
        before, charged = runs.weights(model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, ("engine",)):
            training.step()
        assert torch.equal(runs.weights(model), before) or engine.steps_taken == charged + 1
        engine.optimizer.zero_grad()
        engine.batches().discard()
        before = runs.weights(model)
        batch = training.step()
        moved = (runs.weights(model) - before).float().norm()
        assert float(moved) <= 0.5 * NORM * sum(batch.sizes) / 8 * 1.05 + 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 4])
def test_ctrl_c_at_every_line_of_a_compiled_step(limit: int | None) -> None:
    engine = small_engine(max_physical_batch_size=limit)
    engine.compile()
    training = Training(engine)
    for _ in range(15):
        training.step()
    for at in range(1, lines_of_a_step(training, ("engine", "compiled")) + 1, 3):
        before, charged = runs.weights(engine.model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, ("engine", "compiled")):
            training.step()
        assert torch.equal(runs.weights(engine.model), before) or engine.steps_taken == charged + 1
        before, charged = runs.weights(engine.model), engine.steps_taken
        batch = training.step()
        assert engine.steps_taken == charged + 1
        moved = float((runs.weights(engine.model) - before).norm())
        assert moved <= RATE * NORM * sum(batch.sizes) / 8 * (1 + 1e-4) + 1e-6


# --- exceptions of others


class Broken(Exception):
    pass


def broken(*_: Any, **__: Any) -> Any:
    raise Broken


PLACES: dict[str, Callable[[PrivacyEngine, pytest.MonkeyPatch], object]] = {
    "clip": lambda engine, patch: patch.setattr(engine._steps._clipper.passes, "clip", broken),
    "charge": lambda engine, patch: patch.setattr(engine._steps.release, "charge", broken),
    "noise": lambda engine, patch: patch.setattr(engine._steps.release._noise, "release", broken),
    "zero_grad": lambda engine, patch: patch.setattr(engine.optimizer, "zero_grad", broken),
    "sums": lambda engine, patch: patch.setattr("ghostclip.clipper.collector.weighted_sums_of", broken),
    # Small layers are kept, and go without it.
    "second backward": lambda engine, patch: (
        patch.setattr(engine._steps._clipper.passes, "_memory_budget", 1),
        patch.setattr(engine._steps._clipper.passes, "_second_backward", broken),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_at_any_stage_of_a_step(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(small_engine())
    training.checked_step()
    engine, before = training.engine, runs.weights(training.engine.model)
    with monkeypatch.context() as patch:
        PLACES[place](engine, patch)
        with pytest.raises(Broken):
            engine.step(next(runs.nonempty(engine)), runs.losses_of)
    late = place in ("noise", "zero_grad")
    assert engine.steps_taken == 1 + late
    assert torch.equal(runs.weights(engine.model), before) == (place != "zero_grad")
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    training.checked_step()


def test_an_optimizer_that_fails_half_way() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(self.param_groups[0]["params"][0].grad)
                raise Broken
            return super().step(closure)

    model = runs.network()
    optimizer = Failing(model.parameters(), lr=RATE)
    training = Training(runs.engine_for(model, optimizer, clipping=NORM, max_physical_batch_size=4, self_check=False))
    with pytest.raises(Broken):
        training.step()
    assert training.engine.steps_taken == 1
    optimizer.fails = False
    training.checked_step()


def test_a_policy_s_function_that_fails() -> None:
    fails = True

    def weights(norms: Tensor) -> Tensor:
        return broken() if fails else (NORM / norms).clamp(max=1.0)

    training = Training(small_engine(clipping=Custom(weights, NORM)))
    with pytest.raises(Broken):
        training.engine.step(next(runs.nonempty(training.engine)), runs.losses_of)
    fails = False
    training.checked_step()


class Deadly(Dataset[Any]):
    """Ends the process that reads a certain row, once."""

    def __init__(self, once: Path, end: Callable[[], Any]) -> None:
        self.rows, self.once, self.end = runs.data(), once, end

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if not self.once.exists():
            self.once.touch()
            self.end()
        return self.rows[index]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "DataLoader worker .*(killed by signal|exited unexpectedly)"),
        (lambda: os._exit(3), "DataLoader worker .*exited unexpectedly"),
        (broken, "Caught Broken"),
    ],
    ids=["killed", "exited", "raised"],
)
def test_a_worker_s_death_costs_its_batch_and_no_more(
    end: Callable[[], Any], error: str, persistent: bool, tmp_path: Path
) -> None:
    loader = DataLoader(Deadly(tmp_path / "once", end), 8, num_workers=1, persistent_workers=persistent)
    with pytest.warns(UserWarning, match="is replaced by"):
        training = Training(small_engine(data=loader))
    with pytest.raises(Broken if "Broken" in error else RuntimeError, match=error):
        training.step()
    assert training.engine.steps_taken == 0
    for _ in range(4):
        training.checked_step()
    training.engine.detach()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_what_was_drawn_ahead_of_a_failure_is_drawn_again(tmp_path: Path) -> None:
    def members(once: Path) -> list[list[Tensor]]:
        torch.manual_seed(0)
        loader = DataLoader(Deadly(once, lambda: os._exit(3)), 8, num_workers=1, prefetch_factor=4)
        with pytest.warns(UserWarning, match="is replaced by"):
            engine = small_engine(data=loader, noise="test", seed=3)
        found = []
        for batch in engine.batches():
            found.append([])
            with contextlib.suppress(RuntimeError):
                found[-1] += [inputs for inputs, _ in batch.physical()]
            batch.discard()
        engine.detach()
        return found

    (tmp_path / "never").touch()
    (lost, *rest), (_, *expected) = members(tmp_path / "once"), members(tmp_path / "never")
    assert lost == []
    assert len(rest) == len(expected) == 2
    for found, wanted in zip(rest, expected, strict=True):
        torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=0, atol=0)


# --- values that are no numbers, and batches of nobody


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e38])
@pytest.mark.parametrize("place", ["inputs", "activations", "losses"])
@pytest.mark.parametrize("changes", [{}, {"second_pass": "cached"}, {"clipping": PerLayer(NORM)}], ids=str)
def test_an_example_beyond_all_numbers_moves_no_other(value: float, place: str, changes: dict[str, Any]) -> None:
    def losses_with(model: nn.Sequential, examples: list[Tensor], scale: float) -> Tensor:
        factor = torch.ones(len(examples[1]), 1)
        factor[0] = scale
        inputs = examples[0] * (factor if place == "inputs" else 1.0)
        hidden = model[1](model[0](inputs)) * (factor if place == "activations" else 1.0)
        losses = nn.functional.cross_entropy(model[2](hidden), examples[1], reduction="none")
        return losses * (factor[:, 0] if place == "losses" else 1.0)

    def release(scale: float) -> Tensor:
        model = runs.network()
        torch.manual_seed(2)
        options = {"clipping": NORM, "batch_size": 24, "self_check": False, **changes}
        engine = runs.engine_for(model, torch.optim.SGD(model.parameters(), lr=24.0), runs.data(), **options)
        before = runs.weights(model)
        for batch in engine.batches():
            engine.step(batch, lambda model, examples: losses_with(model, examples, scale))
        assert engine.steps_taken == 1
        return runs.weights(model) - before

    without = release(float("nan"))
    found = release(value)
    assert torch.isfinite(found).all()
    if abs(value) == float("inf") or value != value or place == "losses":
        torch.testing.assert_close(found, without, atol=1e-6, rtol=0)
    assert float((found - without).norm()) <= NORM * (1 + 1e-4)


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_empty_batches_are_steps_wherever_they_come(by_hand: bool, tmp_path: Path) -> None:
    engine = small_engine(data=runs.data(3), batch_size=1, noise_multiplier=1.0)
    training = Training(engine, by_hand)
    empty = 0
    for step in range(1, 25):
        before = runs.weights(engine.model)
        batch = training.step()
        empty += not batch.sizes
        assert not torch.equal(runs.weights(engine.model), before)
        assert engine.steps_taken == step
        if not batch.sizes:
            engine.save(tmp_path / "x")
            assert engine.restore(tmp_path / "x").steps == step
            training.epoch = iter(())
    assert empty


def test_a_foreign_gradient_is_still_complained_about_after_a_failure() -> None:
    engine = small_engine()
    batch = next(runs.nonempty(engine))
    runs.losses_of(engine.model, runs.data()[:4]).mean().backward()
    with pytest.raises(PrivacyError, match="filled by something other"):
        engine.step(batch, runs.losses_of)


def test_unrounded_sums_of_another_backward_are_not_taken_for_this_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model = runs.network(torch.bfloat16)
    engine = runs.engine_for(model, dataset=runs.data(dtype=torch.bfloat16), clipping=NORM, self_check=False)

    def clip(losses: Any, **_: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        norms = torch.zeros(len(losses))
        return norms, norms

    batch = next(batch for batch in engine.batches() if batch.sizes)
    before = runs.weights(model)
    engine._steps._sums._exact.update({id(parameter): parameter + 1 for parameter in model.parameters()})
    monkeypatch.setattr(engine._steps._clipper.passes, "clip", clip)
    engine.step(batch, runs.losses_of)
    assert torch.equal(runs.weights(model), before)


def test_nothing_of_a_batch_is_left_in_memory_after_a_failure() -> None:
    engine = small_engine()
    with pytest.raises(Broken):
        engine.step(next(runs.nonempty(engine)), broken)
    sums: Mapping[Any, Any] = vars(engine._steps._sums)
    assert not sums["_known"]
    assert not sums["_wide"]
    assert sums["count"] == 0
