"""Steps, backwards and batches out of their order, and gradients of others: nothing is released or charged."""

import gc
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn

from ghostclip import BudgetExceededError, GradientLeakError, LossShapeError, PrivacyError
from ghostclip.engine import PrivacyEngine


@pytest.fixture
def model() -> nn.Sequential:
    return runs.network()


@pytest.fixture
def engine(model: nn.Sequential) -> PrivacyEngine:
    return runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, max_physical_batch_size=2)


def test_a_step_without_a_batch(engine: PrivacyEngine) -> None:
    runs.assert_refused(
        engine, PrivacyError, r"optimizer\.step\(\) was called without a logical batch.*engine\.batches\(\)"
    )


def test_a_second_step_of_one_batch(engine: PrivacyEngine) -> None:
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step()
    runs.assert_refused(engine, PrivacyError, "without a logical batch")


def test_a_step_without_a_backward(engine: PrivacyEngine) -> None:
    next(runs.nonempty(engine))
    runs.assert_refused(engine, PrivacyError, r"after 0 of the \d+ physical batches.*engine\.backward\(\)")


def test_a_step_before_all_physical_batches_ran(engine: PrivacyEngine) -> None:
    parts = next(runs.nonempty(engine)).physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    runs.assert_refused(engine, PrivacyError, r"after 1 of the \d+ physical batches of this logical batch")


def test_a_batch_left_early_is_refused_with_how_many_parts_ran(engine: PrivacyEngine) -> None:
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        break
    runs.assert_refused(
        engine, PrivacyError, rf"after 1 of the {len(batch.sizes)} physical batches.*left early is discarded"
    )


def test_plain_backwards_of_all_physical_batches(engine: PrivacyEngine) -> None:
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        runs.losses_of(engine.model, examples).sum().backward()
        engine.optimizer.zero_grad()
    runs.assert_refused(engine, PrivacyError, rf"ran for 0 of the {len(batch.sizes)} physical batches.*doesn't count")


def test_a_plain_backward_alone(engine: PrivacyEngine, model: nn.Module) -> None:
    next(runs.nonempty(engine))
    runs.plain_backward(model)
    runs.assert_refused(engine, PrivacyError, "after 0 of the")


def empty_batch(engine: PrivacyEngine) -> Any:
    """A logical batch without examples."""
    while (batch := next(iter(engine.batches()))).sizes:
        runs.leave(engine)
    return batch


def test_a_plain_backward_in_an_empty_batch(model: nn.Module) -> None:
    engine = runs.engine_for(model, dataset=runs.data(2), batch_size=1, noise_multiplier=1.0)
    empty_batch(engine)
    runs.plain_backward(model)
    before = runs.weights(model)
    with pytest.raises(GradientLeakError, match="filled or changed by something other than per-example clipping"):
        engine.optimizer.step()
    assert torch.equal(runs.weights(model), before)


def test_a_plain_backward_before_ours(engine: PrivacyEngine, model: nn.Module) -> None:
    batch = next(runs.nonempty(engine))
    runs.plain_backward(model)
    examples = next(batch.physical())
    runs.assert_refused(
        engine, GradientLeakError, r"filled or changed by something other.*plain \.backward\(\).*zero_grad",
        lambda: engine.backward(runs.losses_of(model, examples)),
    )  # fmt: skip


def test_zeroing_in_place_is_zeroing(engine: PrivacyEngine) -> None:
    for batch in engine.batches():
        runs.gather(engine, batch)
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=False)
    assert engine.steps_taken == len(engine.batches())


def test_a_backward_without_a_batch(engine: PrivacyEngine, model: nn.Module) -> None:
    losses = runs.losses_of(model, runs.data()[:2])
    runs.assert_refused(
        engine,
        PrivacyError,
        r"engine\.backward\(\) was called without a logical batch",
        lambda: engine.backward(losses),
    )


def test_two_backwards_of_one_physical_batch(engine: PrivacyEngine, model: nn.Module) -> None:
    examples = next(next(runs.nonempty(engine)).physical())
    engine.backward(runs.losses_of(model, examples))
    again = runs.losses_of(model, examples)
    runs.assert_refused(
        engine, PrivacyError, "ran for 1 of the 1 physical batches.*exactly once", lambda: engine.backward(again)
    )


def test_a_physical_batch_left_out(engine: PrivacyEngine, model: nn.Module) -> None:
    parts = next(runs.nonempty(engine)).physical()
    next(parts)
    losses = runs.losses_of(model, next(parts))
    runs.assert_refused(engine, PrivacyError, "ran for 0 of the 2 physical batches", lambda: engine.backward(losses))


def test_losses_that_are_not_one_for_each_example(engine: PrivacyEngine, model: nn.Module) -> None:
    batch = next(runs.nonempty(engine))
    parts = batch.physical()
    examples = next(parts)
    losses = runs.losses_of(model, examples)
    for wrong in (torch.cat([losses, losses]), losses[:1], losses[:, None], losses.sum()):
        with pytest.raises(LossShapeError):
            engine.backward(wrong)
    # Nothing was gathered, so the right losses may still come.
    engine.backward(runs.losses_of(model, examples))
    gather_rest(engine, parts)
    engine.optimizer.step()


def gather_rest(engine: PrivacyEngine, parts: Any) -> None:
    for examples in parts:
        engine.backward(runs.losses_of(engine.model, examples))


def test_a_wrong_call_later_in_a_batch_keeps_what_was_gathered() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = runs.network(dtype)
        engine = runs.engine_for(model, dataset=runs.data(dtype=dtype), max_physical_batch_size=2)
        parts = next(runs.nonempty(engine)).physical()
        engine.backward(runs.losses_of(model, next(parts)))
        examples = next(parts)
        with pytest.raises(LossShapeError):
            engine.backward(runs.losses_of(model, examples).sum())
        engine.backward(runs.losses_of(model, examples))
        gather_rest(engine, parts)
        engine.optimizer.step()
        assert engine.steps_taken == 1


def test_a_backward_that_fails_half_way_leaves_the_sums_before_it(
    engine: PrivacyEngine, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(batch for batch in runs.nonempty(engine) if len(batch.sizes) > 2 or runs.leave(engine))
    parts = batch.physical()
    engine.backward(runs.losses_of(model, next(parts)))
    second = next(parts)
    sums, clipper = engine._steps._sums, engine._steps._clipper
    before = [total.clone() for total in sums.complete(model.parameters())]
    clip = clipper.passes.clip

    def fails(losses: Any, add: Any, **options: Any) -> None:
        clip(losses, add, **options)
        raise MemoryError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(clipper.passes, "clip", fails)
        with pytest.raises(MemoryError):
            engine.backward(runs.losses_of(model, second))
    assert all(torch.count_nonzero(total) for total in before)
    assert all(map(torch.equal, sums.complete(model.parameters()), before))
    runs.assert_refused(engine, PrivacyError, "after 2 of the")


def interrupted_by_an_exception(engine: PrivacyEngine, batch: Any) -> None:
    def one_turn() -> None:
        for examples in batch.physical():
            engine.backward(runs.losses_of(engine.model, examples))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one_turn()


def interrupted_inside_of_step(engine: PrivacyEngine, batch: Any) -> None:
    def fails_the_second_time(model: nn.Module, examples: Any) -> Any:
        if batch.handed == 2:
            raise RuntimeError("out of luck")
        return runs.losses_of(model, examples)

    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step(batch, fails_the_second_time)


@pytest.mark.parametrize("leave", [interrupted_by_an_exception, interrupted_inside_of_step])
def test_an_interrupted_batch_is_discarded_and_not_charged(leave: Callable[[PrivacyEngine, Any], None]) -> None:
    finished = []
    for interrupt in (True, False):
        torch.manual_seed(2)
        model = runs.network()
        engine = runs.engine_for(model, noise="test", seed=9, clipping=0.5, max_physical_batch_size=2)
        first = next(runs.nonempty(engine))
        if interrupt:
            leave(engine, first)
            gc.collect()
            assert all(p.grad is None for p in model.parameters())
            with pytest.raises(PrivacyError):
                engine.optimizer.step()
        else:
            runs.leave(engine)
        engine.step(next(runs.nonempty(engine)), runs.losses_of)
        assert engine.steps_taken == 1
        finished.append(runs.weights(model))
    assert torch.equal(*finished)


def test_leaving_the_epoch_discards_too(engine: PrivacyEngine, model: nn.Module) -> None:
    for batch in engine.batches():
        for examples in batch.physical():
            engine.backward(runs.losses_of(model, examples))
            break
        break
    for batch in engine.batches():
        assert all(p.grad is None for p in model.parameters())
        engine.step(batch, runs.losses_of)
    assert engine.steps_taken == len(engine.batches())


def test_batches_out_of_their_turn(engine: PrivacyEngine) -> None:
    with pytest.raises(PrivacyError, match="had no step"):
        list(engine.batches())
    runs.leave(engine)
    first = next(iter(engine.batches()))
    runs.leave(engine)
    with pytest.raises(PrivacyError, match=r"engine\.step\(\) was called without a logical batch"):
        engine.step(first, runs.losses_of)
    next(iter(engine.batches()))
    with pytest.raises(PrivacyError, match=r"engine\.step\(\) got another logical batch"):
        engine.step(first, runs.losses_of)
    assert engine.steps_taken == 0


def test_what_is_no_logical_batch_of_its_own_turn(engine: PrivacyEngine) -> None:
    batches = iter(engine.batches())
    batch = next(batches)
    with pytest.raises(PrivacyError, match=r"got function first: are they swapped\?"):
        engine.step(runs.losses_of, batch)  # type: ignore[arg-type]
    with pytest.raises(
        PrivacyError, match=r"got tuple first: call it once .* engine\.backward\(losses\) for each physical one"
    ):
        engine.step((torch.zeros(2, 3), torch.zeros(2)), runs.losses_of)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"called as loss_fn\(model, examples\), which it can't be: too many"):
        engine.step(batch, lambda model: model)  # type: ignore[arg-type, misc]
    engine.step(batch, runs.losses_of)
    next(batches)
    with pytest.raises(PrivacyError, match="got a logical batch that had its step; take the next one"):
        engine.step(batch, runs.losses_of)
    assert engine.steps_taken == 1


def test_a_closure_that_runs_twice_or_without_a_backward(engine: PrivacyEngine, model: nn.Module) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    batch = next(runs.nonempty(engine))
    runs.assert_refused(engine, PrivacyError, "after 0 of the", lambda: engine.optimizer.step(lambda: None))
    twice = runs.engine_for(model, Twice(model.parameters(), lr=0.1), noise_multiplier=1.0)
    batch = next(iter(twice.batches()))

    def closure() -> None:
        twice.optimizer.zero_grad()
        runs.gather(twice, batch)

    before = runs.weights(model)
    with pytest.raises(PrivacyError, match="was called before"):
        twice.optimizer.step(closure)
    assert torch.equal(runs.weights(model), before)


def test_a_spent_budget_stops_before_anything_is_released(model: nn.Module) -> None:
    engine = runs.engine_for(model, noise_multiplier=None, target_epsilon=0.5, epochs=1, clipping=1.0)
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    before = runs.weights(model)
    batch = next(iter(engine.batches()))
    with pytest.raises(BudgetExceededError, match=r"all 3 planned steps were taken.*epsilon = 0.5"):
        engine.step(batch, lambda *_: pytest.fail("the model ran"))
    runs.gather(engine, batch)
    with pytest.raises(BudgetExceededError):
        engine.optimizer.step()
    assert engine.steps_taken == 3
    assert torch.equal(runs.weights(model), before)
