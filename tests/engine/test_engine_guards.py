"""Steps, backwards and batches out of their order, and losses that are none: refused, and training goes on."""

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


@pytest.fixture
def model():
    return runs.network()


@pytest.fixture
def engine(model):
    return runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, max_physical_batch_size=2)


def backward(engine, examples):
    engine.backward(runs.losses_of(engine.model, examples))


def a_second_step(engine):
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step()


def plain_backwards(engine):
    for examples in next(runs.nonempty(engine)).physical():
        runs.losses_of(engine.model, examples).sum().backward()
        engine.optimizer.zero_grad()


def a_backward_twice(engine):
    examples = next(next(runs.nonempty(engine)).physical())
    backward(engine, examples)
    return lambda: backward(engine, examples)


def losses_of_the_part_before(engine):
    parts = next(runs.nonempty(engine)).physical()
    losses = runs.losses_of(engine.model, next(parts))
    engine.backward(losses, retain_graph=True)
    next(parts)
    return lambda: (engine.backward(losses, retain_graph=True), parts)


def a_part_left_out(engine):
    parts = next(runs.nonempty(engine)).physical()
    next(parts)
    examples = next(parts)
    return lambda: backward(engine, examples)


def a_closure_without_a_backward(engine):
    next(runs.nonempty(engine))
    return lambda: engine.optimizer.step(lambda: None)


# What is done before the call (the optimizer's step, or what is returned) that is refused, and a part of the error.
OUT_OF_TURN = {
    "a step without a batch": (
        lambda engine: None, r"optimizer\.step\(\) was called without a logical batch.*engine\.batches\(\)",
    ),
    "a second step": (a_second_step, "called twice for one logical batch"),
    "a step without a backward": (
        lambda engine: (next(runs.nonempty(engine)), None)[1],
        r"after 0 of the \d+ physical batches.*engine\.backward\(\)",
    ),
    "a closure without a backward": (a_closure_without_a_backward, "after 0 of the"),
    "plain backwards": (plain_backwards, r"ran for 0 of the \d+ physical batches.*doesn't count"),
    "a backward without a batch": (
        lambda engine: lambda: backward(engine, runs.data()[:2]),
        r"engine\.backward\(\) was called without a logical batch",
    ),
    "a backward twice": (a_backward_twice, "ran for 1 of the 1 physical batches.*exactly once"),
    "losses of the part before": (losses_of_the_part_before, "losses of the physical batch before again.*twice"),
    "a part left out": (a_part_left_out, "ran for 0 of the 2 physical batches"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_TURN)
def test_a_call_out_of_turn(engine, name):
    prepare, message = OUT_OF_TURN[name]
    runs.assert_refused(engine, PrivacyError, message, prepare(engine))


def test_a_batch_left_early_is_refused_with_how_many_parts_ran(engine):
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        backward(engine, examples)
        break
    runs.assert_refused(
        engine, PrivacyError, rf"after 1 of the {len(batch.sizes)} physical batches.*left early is discarded"
    )


def test_a_plain_backward_before_ours(engine, model):
    examples = next(next(runs.nonempty(engine)).physical())
    runs.plain_backward(model)
    runs.assert_refused(
        engine, GradientLeakError, r"filled or changed by something other.*plain \.backward\(\).*zero_grad",
        lambda: backward(engine, examples),
    )  # fmt: skip


def test_a_plain_backward_in_an_empty_batch(model):
    engine = runs.engine_for(model, dataset=runs.data(2), batch_size=1, noise_multiplier=1.0)
    while next(iter(engine.batches())).sizes:
        runs.leave(engine)
    runs.plain_backward(model)
    before = runs.weights(model)
    with pytest.raises(GradientLeakError, match="filled or changed by something other than per-example clipping"):
        engine.optimizer.step()
    assert torch.equal(runs.weights(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_a_wrong_shape_keep_what_was_gathered(dtype):
    model = runs.network(dtype)
    engine = runs.engine_for(model, dataset=runs.data(dtype=dtype), max_physical_batch_size=2)
    for examples in next(runs.nonempty(engine)).physical():
        losses = runs.losses_of(model, examples)
        for wrong in (torch.cat([losses, losses]), losses[:0], losses[:, None], losses.sum()):
            with pytest.raises(LossShapeError):
                engine.backward(wrong)
        backward(engine, examples)
    engine.optimizer.step()
    assert engine.steps_taken == 1


def test_a_backward_that_fails_half_way_leaves_the_sums_before_it(engine, model, monkeypatch):
    batch = next(batch for batch in runs.nonempty(engine) if len(batch.sizes) > 2 or runs.leave(engine))
    parts = batch.physical()
    backward(engine, next(parts))
    losses = runs.losses_of(model, next(parts))
    sums, passes = engine._steps._sums, engine._steps._clipper.passes
    before = [total.clone() for total in sums.complete(model.parameters())]
    clip = passes.clip

    def fails(losses, add, **options):
        clip(losses, add, **options)
        raise MemoryError("in the middle")

    monkeypatch.setattr(passes, "clip", fails)
    with pytest.raises(MemoryError):
        engine.backward(losses)
    monkeypatch.undo()
    assert all(torch.count_nonzero(total) for total in before)
    assert all(map(torch.equal, sums.complete(model.parameters()), before))
    runs.assert_refused(engine, PrivacyError, "after 2 of the")


def test_batches_out_of_their_turn(engine):
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


def test_a_closure_that_runs_twice(model):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    engine = runs.engine_for(model, Twice(model.parameters(), lr=0.1), noise_multiplier=1.0)
    before = runs.weights(model)
    with pytest.raises(PrivacyError, match="was called before"):
        runs.train_by_closure(engine)
    assert torch.equal(runs.weights(model), before)


@pytest.mark.usefixtures("coarse_losses")
def test_a_spent_budget_stops_a_loop_by_hand_before_anything_is_released(model):
    engine = runs.engine_for(model, noise_multiplier=None, target_epsilon=0.5, epochs=1, clipping=1.0)
    runs.train(engine)
    before = runs.weights(model)
    with pytest.raises(BudgetExceededError, match=r"all 3 planned steps were taken.*epsilon = 0.5"):
        runs.train_by_hand(engine)
    assert engine.planned_steps == engine.steps_taken == 3
    assert 0.499 < engine.epsilon() <= 0.5
    assert torch.equal(runs.weights(model), before)


def blown_up(model, batch):
    losses = runs.losses_of(model, batch)
    return losses.mean().expand(len(losses))


def of_two_shapes(model, batch):
    return (model(batch[0])[:, :1] - batch[0][:, 1]).square()


MISTAKES = {
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
def test_another_thing_in_the_loss_function_s_place(engine, name):
    loss_fn, error, message = MISTAKES[name]
    batch = next(runs.nonempty(engine))
    raised = runs.assert_refused(engine, error, message, lambda: engine.step(batch, loss_fn))
    assert max(map(len, str(raised.value).splitlines())) < 500
    short = error in (LossShapeError, StaleInputError)
    assert len(raised.traceback) == 3 or not short  # two of this test, one of ours


@pytest.mark.parametrize("self_check", [True, False])
def test_a_squeeze_that_takes_the_dimension_of_the_one_example_is_named(model, self_check):
    engine = runs.engine_for(model, max_physical_batch_size=1, self_check=self_check)
    batch = next(runs.nonempty(engine))
    with pytest.raises(LossShapeError, match=r"of one example must have shape \[1\].* write squeeze\(-1\)"):
        engine.step(batch, lambda model, batch: runs.losses_of(model, batch).squeeze())


@pytest.mark.parametrize("call", ["check", "per_example_norms", "clip", "verify"])
def test_another_thing_in_the_place_of_a_loss_function(model, call):
    def work(*given):
        if hasattr(ghostclip, call):
            return getattr(ghostclip, call)(model, *given)
        return getattr(ghostclip.GhostClipper(model), call)(*given)

    batch = runs.data(4)[:]
    for given, message in (
        ((batch, runs.losses_of), r"got tuple first: are they swapped\?"),
        ((nn.CrossEntropyLoss(), batch), r"got CrossEntropyLoss.*lambda model, batch: criterion\(model"),
        ((lambda model: model, batch), "which it can't be: too many"),
    ):
        with pytest.raises(TypeError, match=message):
            work(*given)


@pytest.mark.parametrize("fails_always", [True, False])
def test_what_fails_in_the_self_check_is_said_unless_the_step_fails_too(engine, caplog, fails_always):
    calls = []

    def losses_of(model, batch):
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
