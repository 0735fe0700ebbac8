"""Steps, backwards and batches out of their order, and the mistakes of those who come from other libraries' loops."""

from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn

import ghostclip
from ghostclip import (
    BudgetExceededError,
    GradientLeakError,
    LossShapeError,
    PrivacyError,
    StaleInputError,
    VerificationError,
)
from ghostclip.engine import PrivacyEngine


@pytest.fixture
def model() -> nn.Sequential:
    return runs.network()


@pytest.fixture
def engine(model: nn.Sequential) -> PrivacyEngine:
    return runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, max_physical_batch_size=2)


def a_second_step(engine: PrivacyEngine) -> None:
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step()


def without_a_backward(engine: PrivacyEngine) -> None:
    next(runs.nonempty(engine))


def plain_backwards(engine: PrivacyEngine) -> None:
    for examples in next(runs.nonempty(engine)).physical():
        runs.losses_of(engine.model, examples).sum().backward()
        engine.optimizer.zero_grad()


def a_plain_backward(engine: PrivacyEngine) -> None:
    next(runs.nonempty(engine))
    runs.plain_backward(engine.model)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda engine: None, r"optimizer\.step\(\) was called without a logical batch.*engine\.batches\(\)"),
        (a_second_step, "called twice for one logical batch"),
        (without_a_backward, r"after 0 of the \d+ physical batches.*engine\.backward\(\)"),
        (plain_backwards, r"ran for 0 of the \d+ physical batches.*doesn't count"),
        (a_plain_backward, "after 0 of the"),
    ],
)
def test_a_step_out_of_turn(engine: PrivacyEngine, mistake: Callable[[PrivacyEngine], None], message: str) -> None:
    mistake(engine)
    runs.assert_refused(engine, PrivacyError, message)


def test_a_plain_backward_in_an_empty_batch(model: nn.Module) -> None:
    engine = runs.engine_for(model, dataset=runs.data(2), batch_size=1, noise_multiplier=1.0)
    while next(iter(engine.batches())).sizes:
        runs.leave(engine)
    runs.plain_backward(model)
    before = runs.weights(model)
    with pytest.raises(GradientLeakError, match="filled or changed by something other than per-example clipping"):
        engine.optimizer.step()
    assert torch.equal(runs.weights(model), before)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"engine\.backward\(\) was called without a logical batch"),
        ([True, None], "ran for 1 of the 1 physical batches.*exactly once"),
        ([False, True], "ran for 0 of the 2 physical batches"),
    ],
    ids=["no batch", "twice", "left out"],
)
def test_a_backward_out_of_turn(engine: PrivacyEngine, parts: list[bool | None], message: str) -> None:
    """True: a physical batch with its backward; False: one without; None: the same again."""
    examples = runs.data()[:2]
    physical = next(runs.nonempty(engine)).physical() if parts else None
    for number, part in enumerate(parts):
        examples = examples if part is None else next(physical)
        if part and number < len(parts) - 1:
            engine.backward(runs.losses_of(engine.model, examples))
    losses = runs.losses_of(engine.model, examples)
    runs.assert_refused(engine, PrivacyError, message, lambda: engine.backward(losses))


def test_a_batch_left_early_is_refused_with_how_many_parts_ran(engine: PrivacyEngine) -> None:
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        break
    runs.assert_refused(
        engine, PrivacyError, rf"after 1 of the {len(batch.sizes)} physical batches.*left early is discarded"
    )


def test_a_plain_backward_before_ours(engine: PrivacyEngine, model: nn.Module) -> None:
    batch = next(runs.nonempty(engine))
    runs.plain_backward(model)
    examples = next(batch.physical())
    runs.assert_refused(
        engine, GradientLeakError, r"filled or changed by something other.*plain \.backward\(\).*zero_grad",
        lambda: engine.backward(runs.losses_of(model, examples)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_a_wrong_shape_keep_what_was_gathered(dtype: torch.dtype) -> None:
    model = runs.network(dtype)
    engine = runs.engine_for(model, dataset=runs.data(dtype=dtype), max_physical_batch_size=2)
    for examples in next(runs.nonempty(engine)).physical():
        losses = runs.losses_of(model, examples)
        for wrong in (torch.cat([losses, losses]), losses[:0], losses[:, None], losses.sum()):
            with pytest.raises(LossShapeError):
                engine.backward(wrong)
        engine.backward(runs.losses_of(model, examples))
    engine.optimizer.step()
    assert engine.steps_taken == 1


def test_a_backward_that_fails_half_way_leaves_the_sums_before_it(
    engine: PrivacyEngine, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(batch for batch in runs.nonempty(engine) if len(batch.sizes) > 2 or runs.leave(engine))
    parts = batch.physical()
    engine.backward(runs.losses_of(model, next(parts)))
    losses = runs.losses_of(model, next(parts))
    sums, passes = engine._steps._sums, engine._steps._clipper.passes
    before = [total.clone() for total in sums.complete(model.parameters())]
    clip = passes.clip

    def fails(losses: Any, add: Any, **options: Any) -> None:
        clip(losses, add, **options)
        raise MemoryError("in the middle")

    monkeypatch.setattr(passes, "clip", fails)
    with pytest.raises(MemoryError):
        engine.backward(losses)
    monkeypatch.undo()
    assert all(torch.count_nonzero(total) for total in before)
    assert all(map(torch.equal, sums.complete(model.parameters()), before))
    runs.assert_refused(engine, PrivacyError, "after 2 of the")


def test_batches_out_of_their_turn(engine: PrivacyEngine) -> None:
    first = next(iter(engine.batches()))
    runs.leave(engine)
    with pytest.raises(PrivacyError, match=r"engine\.step\(\) was called without a logical batch"):
        engine.step(first, runs.losses_of)
    batch = next(iter(engine.batches()))
    with pytest.raises(PrivacyError, match=r"engine\.step\(\) got another logical batch"):
        engine.step(first, runs.losses_of)
    engine.step(batch, runs.losses_of)
    next(iter(engine.batches()))
    with pytest.raises(PrivacyError, match="got a logical batch that had its step; take the next one"):
        engine.step(batch, runs.losses_of)
    assert engine.steps_taken == 1


def test_a_closure_that_runs_twice_or_without_a_backward(engine: PrivacyEngine, model: nn.Module) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    next(runs.nonempty(engine))
    runs.assert_refused(engine, PrivacyError, "after 0 of the", lambda: engine.optimizer.step(lambda: None))
    twice = runs.engine_for(model, Twice(model.parameters(), lr=0.1), noise_multiplier=1.0)
    batch, before = next(iter(twice.batches())), runs.weights(model)
    with pytest.raises(PrivacyError, match="was called before"):
        twice.optimizer.step(lambda: (twice.optimizer.zero_grad(), runs.gather(twice, batch)))
    assert torch.equal(runs.weights(model), before)


@pytest.mark.usefixtures("coarse_losses")
def test_a_spent_budget_stops_a_loop_by_hand_before_anything_is_released(model: nn.Module) -> None:
    engine = runs.engine_for(model, noise_multiplier=None, target_epsilon=0.5, epochs=1, clipping=1.0)
    runs.train(engine)
    before = runs.weights(model)
    with pytest.raises(BudgetExceededError, match=r"all 3 planned steps were taken.*epsilon = 0.5"):
        runs.train_by_hand(engine)
    assert engine.steps_taken == 3
    assert torch.equal(runs.weights(model), before)


def blown_up(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = runs.losses_of(model, batch)
    return losses.mean().expand(len(losses))


def of_two_shapes(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0])[:, :1] - batch[0][:, 1]).square()


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "a criterion": (nn.CrossEntropyLoss(reduction="none"), TypeError, r"CrossEntropyLoss.*criterion\(model"),
    "losses": (torch.zeros(2, requires_grad=True), TypeError, r"got Tensor.*engine\.backward\(losses\)"),
    "one argument": (lambda model: model, TypeError, r"loss_fn\(model, examples\), which it can't be: too many"),
    "a mean": (lambda model, batch: runs.losses_of(model, batch).mean(), LossShapeError, r'reduction="none"'),
    "[B, 1] and [B]": (of_two_shapes, LossShapeError, r"outputs \[B, 1\] and labels"),
    "no return": (lambda m, batch: None, LossShapeError, r"got NoneType: is a `return` missing"),
    "a number": (lambda m, batch: runs.losses_of(m, batch).mean().item(), LossShapeError, r"leave out \.item\(\)"),
    "detached": (lambda m, batch: runs.losses_of(m, batch).detach(), StaleInputError, "not attached to a graph"),
    "their mean": (
        lambda m, batch: of_two_shapes(m, batch).mean(1),
        VerificationError,
        r"^the loss function makes \[B, B\] of two shapes, such as outputs \[B, 1\] and labels",
    ),
    "a mean for each": (blown_up, VerificationError, r'own example only \(reduction="none"\)'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_another_thing_in_the_loss_function_s_place(engine: PrivacyEngine, name: str) -> None:
    loss_fn, error, message = MISTAKES[name]
    batch = next(runs.nonempty(engine))
    raised = runs.assert_refused(engine, error, message, lambda: engine.step(batch, loss_fn))
    assert max(map(len, str(raised.value).splitlines())) < 500
    short = error in (LossShapeError, StaleInputError)
    assert len(raised.traceback) == 3 or not short  # two of this test, one of ours


def test_a_logical_batch_is_no_batch_of_a_loader(engine: PrivacyEngine) -> None:
    batch = next(runs.nonempty(engine))
    with pytest.raises(TypeError, match=r"can't be unpacked.*engine\.step\(batch, loss_fn\).*batch\.physical\(\)"):
        _inputs, _targets = batch
    with pytest.raises(TypeError, match=r"unpacked or indexed.*: hand it to engine\.step\(batch, loss_fn\)"):
        engine.model(batch[0])
    engine.step(batch, runs.losses_of)  # nothing of it was used


@pytest.mark.parametrize("fails_always", [True, False])
def test_what_fails_in_the_self_check_is_said_unless_the_step_fails_too(
    engine: PrivacyEngine, caplog: pytest.LogCaptureFixture, fails_always: bool
) -> None:
    calls = []

    def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        if fails_always or len(calls) == 1:
            raise RuntimeError("shapes cannot be multiplied")
        return runs.losses_of(model, batch)

    batch = next(each for each in engine.batches() if len(each.sizes) > 0 and each.sizes[0] > 1)
    if fails_always:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            engine.step(batch, losses_of)
    else:
        engine.step(batch, losses_of)
    assert ("can't be compared" in caplog.text) is not fails_always


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        (runs.losses_of, [], r"got function first: are they swapped\?"),
        ((torch.zeros(2, 3), torch.zeros(2)), runs.losses_of, r"got tuple first: call it once .* for each physical"),
        ([torch.zeros(2, 5)], runs.losses_of, r"not one of a DataLoader of yours.*for batch in engine\.batches\(\)"),
    ],
)
def test_another_thing_in_the_logical_batch_s_place(
    engine: PrivacyEngine, batch: Any, loss_fn: Any, message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        engine.step(batch, loss_fn)


@pytest.mark.parametrize(
    "call",
    [
        ghostclip.per_example_norms,
        ghostclip.check,
        lambda model, *others: ghostclip.GhostClipper(model).clip(*others),
        lambda model, *others: ghostclip.GhostClipper(model).verify(*others),
    ],
    ids=["norms", "check", "clip", "verify"],
)
def test_another_thing_in_the_place_of_a_loss_function(model: nn.Module, call: Callable[..., Any]) -> None:
    batch = runs.data(4)[:]
    with pytest.raises(TypeError, match=r"got tuple first: are they swapped\?"):
        call(model, batch, runs.losses_of)
    with pytest.raises(TypeError, match=r"got CrossEntropyLoss.*lambda model, batch: criterion\(model"):
        call(model, nn.CrossEntropyLoss(reduction="none"), batch)
    with pytest.raises(TypeError, match="which it can't be: too many"):
        call(model, lambda model: model, batch)


def test_a_data_set_is_no_batch(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"batch must be.*got TensorDataset: give DataLoader\(dataset\)"):
        ghostclip.check(model, runs.losses_of, runs.data(4))


@pytest.mark.parametrize("kind", [tuple, list])
def test_tensors_that_are_no_dataset(model: nn.Module, kind: type) -> None:
    said = rf"{kind.__name__} of 2 tensors \(\[24, 5\], \[24\]\).*TensorDataset\(inputs, targets\)"
    with pytest.raises(TypeError, match=said):
        runs.engine_for(model, dataset=kind((torch.zeros(24, 5), torch.zeros(24))))


@pytest.mark.parametrize("shapes", [[(5,)] * 24, [(3, n, n) for n in range(1, 25)], [(n, 5) for n in range(1, 25)]])
def test_a_list_of_single_examples_is_a_dataset(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    assert runs.engine_for(model, dataset=[torch.zeros(shape) for shape in shapes]).steps_taken == 0


def test_an_engine_is_no_loop_over_batches(engine: PrivacyEngine) -> None:
    with pytest.raises(TypeError, match=r"write `for batch in engine\.batches\(\)`"):
        iter(engine)


def test_several_optimizers_are_one_with_groups(model: nn.Module) -> None:
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with pytest.raises(TypeError, match="got list: build one optimizer, with a parameter group for each"):
        runs.engine_for(model, optimizers)


@pytest.mark.parametrize(
    "call",
    [
        ghostclip.wrap,
        ghostclip.unwrap,
        ghostclip.check,
        ghostclip.GhostClipper,
        lambda function: PrivacyEngine(function, torch.optim.SGD(runs.network().parameters()), runs.data()),
    ],
)
def test_no_module(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got function"):
        call(lambda x: x)
