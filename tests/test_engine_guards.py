"""Wrong use of the engine: nothing is released, nothing is charged, and the message says what to do."""

import gc
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ghostclip import BudgetExceededError, GradientLeakError, LossShapeError, PrivacyError, UnsupportedModelError
from ghostclip.clipping import Custom, PerLayer
from ghostclip.engine import PrivacyEngine
from ghostclip.engine.privacy_engine import FIXED


@pytest.fixture
def model() -> nn.Sequential:
    return runs.network()


@pytest.fixture
def engine(model: nn.Sequential) -> PrivacyEngine:
    return runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, max_physical_batch_size=2)


def plain_backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    runs.losses_of(model, runs.data(dtype=dtype)[:4]).mean().backward()


def assert_refused(
    engine: PrivacyEngine, error: type[Exception], message: str, call: Callable[[], Any] | None = None
) -> None:
    """``call`` (optimizer.step) raises, moves no parameter and charges nothing; then training goes on."""
    before, charged = runs.weights(engine.model), engine.steps_taken
    with pytest.raises(error, match=message):
        (call or engine.optimizer.step)()
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == charged
    engine.optimizer.zero_grad()
    engine.step(next(runs.nonempty(engine)), runs.losses_of)
    assert engine.steps_taken == charged + 1


def test_a_step_without_a_batch(engine: PrivacyEngine) -> None:
    assert_refused(engine, PrivacyError, r"optimizer\.step\(\) was called without a logical batch.*engine\.batches\(\)")


def test_a_second_step_of_one_batch(engine: PrivacyEngine) -> None:
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step()
    assert_refused(engine, PrivacyError, "without a logical batch")


def test_a_step_without_a_backward(engine: PrivacyEngine) -> None:
    next(runs.nonempty(engine))
    assert_refused(engine, PrivacyError, r"after 0 of the \d+ physical batches.*engine\.backward\(\)")


def test_a_step_before_all_physical_batches_ran(engine: PrivacyEngine) -> None:
    parts = next(runs.nonempty(engine)).physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    assert_refused(engine, PrivacyError, r"after 1 of the \d+ physical batches of this logical batch")


def test_a_batch_that_is_left_early_is_told_by_what_it_gave(engine: PrivacyEngine) -> None:
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        break
    assert_refused(
        engine, PrivacyError, rf"after 1 of the {len(batch.sizes)} physical batches.*left early is discarded"
    )


def test_plain_backwards_of_all_physical_batches(engine: PrivacyEngine) -> None:
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        runs.losses_of(engine.model, examples).sum().backward()
        engine.optimizer.zero_grad()
    assert_refused(engine, PrivacyError, rf"ran for 0 of the {len(batch.sizes)} physical batches.*doesn't count")


def test_a_plain_backward_alone(engine: PrivacyEngine, model: nn.Module) -> None:
    next(runs.nonempty(engine))
    plain_backward(model)
    assert_refused(engine, PrivacyError, "after 0 of the")


def empty_batch(engine: PrivacyEngine) -> Any:
    """A logical batch without examples."""
    while (batch := next(iter(engine.batches()))).sizes:
        runs.leave(engine)
    return batch


def test_a_plain_backward_in_an_empty_batch(model: nn.Module) -> None:
    engine = runs.engine_for(model, dataset=runs.data(2), batch_size=1, noise_multiplier=1.0)
    empty_batch(engine)
    plain_backward(model)
    before = runs.weights(model)
    with pytest.raises(GradientLeakError, match="filled by something other than per-example clipping"):
        engine.optimizer.step()
    assert torch.equal(runs.weights(model), before)


def test_a_plain_backward_before_ours(engine: PrivacyEngine, model: nn.Module) -> None:
    batch = next(runs.nonempty(engine))
    plain_backward(model)
    examples = next(batch.physical())
    assert_refused(
        engine, GradientLeakError, r"filled by something other.*plain \.backward\(\).*zero_grad",
        lambda: engine.backward(runs.losses_of(model, examples)),
    )  # fmt: skip


def assigned(model: nn.Sequential) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


def scaled_at_once(model: nn.Sequential) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 1.0)


@pytest.mark.parametrize(
    "touch",
    [
        plain_backward,
        assigned,
        scaled_at_once,
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: model[2].bias.grad.add_(1),
        lambda model: setattr(model[0].bias, "grad", model[0].bias.grad.clone()),
        lambda model: setattr(model[0].bias, "grad", None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_touched_between_backward_and_step(touch: Callable[[nn.Module], Any], dtype: torch.dtype) -> None:
    model = runs.network(dtype)
    engine = runs.engine_for(model, dataset=runs.data(dtype=dtype), noise_multiplier=1.0, max_physical_batch_size=2)
    runs.gather(engine, next(runs.nonempty(engine)))
    touch(model)
    assert_refused(
        engine, GradientLeakError, r"was changed between engine\.backward\(\) and the step.*leave p\.grad alone"
    )


def test_gradients_touched_between_physical_batches(engine: PrivacyEngine, model: nn.Module) -> None:
    parts = next(runs.nonempty(engine)).physical()
    engine.backward(runs.losses_of(model, next(parts)))
    model.zero_grad()
    second = next(parts)
    assert_refused(
        engine, GradientLeakError, "was changed between", lambda: engine.backward(runs.losses_of(model, second))
    )


def test_a_forgotten_zero_grad(engine: PrivacyEngine, model: nn.Module) -> None:
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step()
    examples = next(next(runs.nonempty(engine)).physical())
    assert_refused(
        engine, PrivacyError, r"still the one of the last step; call optimizer\.zero_grad\(\)",
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
    assert_refused(
        engine,
        PrivacyError,
        r"engine\.backward\(\) was called without a logical batch",
        lambda: engine.backward(losses),
    )


def test_two_backwards_of_one_physical_batch(engine: PrivacyEngine, model: nn.Module) -> None:
    examples = next(next(runs.nonempty(engine)).physical())
    engine.backward(runs.losses_of(model, examples))
    again = runs.losses_of(model, examples)
    assert_refused(
        engine, PrivacyError, "ran for 1 of the 1 physical batches.*exactly once", lambda: engine.backward(again)
    )


def test_a_physical_batch_left_out(engine: PrivacyEngine, model: nn.Module) -> None:
    parts = next(runs.nonempty(engine)).physical()
    next(parts)
    losses = runs.losses_of(model, next(parts))
    assert_refused(engine, PrivacyError, "ran for 0 of the 2 physical batches", lambda: engine.backward(losses))


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


def test_a_backward_that_fails_half_way_discards_the_batch(
    engine: PrivacyEngine, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(batch for batch in runs.nonempty(engine) if len(batch.sizes) > 2 or runs.leave(engine))
    parts = batch.physical()
    engine.backward(runs.losses_of(model, next(parts)))
    second = next(parts)
    clipper = engine._steps._clipper

    def fails(losses: Any, retain_graph: bool) -> None:
        model[0].weight.grad.add_(1)
        raise MemoryError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(clipper.passes, "clip", fails)
        with pytest.raises(MemoryError):
            engine.backward(runs.losses_of(model, second))
    assert all(p.grad is None for p in model.parameters())
    assert_refused(engine, PrivacyError, "after 2 of the")


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


def test_a_closure_that_runs_twice_or_without_a_backward(engine: PrivacyEngine, model: nn.Module) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    batch = next(runs.nonempty(engine))
    assert_refused(engine, PrivacyError, "after 0 of the", lambda: engine.optimizer.step(lambda: None))
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


def test_another_optimizer_that_steps_with_sums_that_have_no_noise(engine: PrivacyEngine) -> None:
    other = torch.optim.SGD(engine.model.parameters(), lr=1e-3)
    runs.gather(engine, next(runs.nonempty(engine)))
    other.step()
    before = runs.weights(engine.model)
    with pytest.raises(GradientLeakError, match=r"the parameter '0\.weight' was changed.*If another optimizer did"):
        engine.optimizer.step()
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == 0
    engine.optimizer.zero_grad()
    with pytest.raises(PrivacyError, match=r"the parameter '0\.weight' was changed outside.*accept_parameters"):
        next(iter(engine.batches()))


@pytest.mark.parametrize("name", sorted(FIXED))
def test_settings_are_not_changed_afterwards(engine: PrivacyEngine, name: str) -> None:
    before = getattr(engine, name)
    with pytest.raises(AttributeError, match=rf"{name} of a PrivacyEngine can't be changed.*build a new engine"):
        setattr(engine, name, 5.0)
    assert getattr(engine, name) is before


class Joint:
    """A policy of one's own whose bound holds for each share, and whose weights follow from the largest norm."""

    sensitivity = 1.0

    def weights(self, norms: torch.Tensor) -> torch.Tensor:
        return (1.0 / norms.max()).expand_as(norms)


@pytest.mark.parametrize("clipping", [
    Joint(),
    Custom(lambda norms: 1.0 / norms.median().expand_as(norms), 1.0),
    Custom(lambda norms: norms / norms.max(), 1.0),
    Custom(lambda norms: (norms <= norms.median()).float(), 1.0),
    Custom(lambda norms: {g: 1.0 / n.sum().expand_as(n) for g, n in norms.items()}, 1.0, groups={"all": ["*"]}),
])  # fmt: skip
def test_weights_that_follow_from_other_examples(model: nn.Module, clipping: Any) -> None:
    engine = runs.engine_for(model, clipping=clipping, batch_size=24, noise_multiplier=1.0)
    batch, before = next(iter(engine.batches())), runs.weights(model)
    with pytest.raises(PrivacyError, match=r"function of the Custom clipping policy.*that example's norm alone"):
        engine.step(batch, runs.losses_of)
    assert torch.equal(runs.weights(model), before)
    assert engine.steps_taken == 0


def test_weights_that_follow_from_each_example_alone(model: nn.Module) -> None:
    dataset = runs.data()
    dataset.tensors[0][3] = float("nan")
    clipping = Custom(lambda norms: 1.0 / (0.1 + norms).sqrt(), 1.0)
    engine = runs.engine_for(model, dataset=dataset, clipping=clipping, batch_size=24, max_physical_batch_size=5)
    engine.step(next(iter(engine.batches())), runs.losses_of)
    assert engine.steps_taken == 1


@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("groups", [None, {"all": ["*"]}])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_a_margin_for_rounding_is_no_weight_of_other_examples(rest: float, groups: Any, second_pass: str) -> None:
    """Positions that cancel make the norm that is weighed by another one than the norm that was measured."""
    model, signs = nn.Linear(6, 4), torch.tensor([1.0, -1.0 - rest]).repeat(4)
    inputs, targets = 1e3 * torch.randn(8, 1, 6).expand(8, 8, 6), torch.randn(8, 1, 4) * signs[:, None]

    def alone(norms: Any) -> Any:
        return 1.0 / (0.1 + norms).sqrt() if groups is None else {g: 1.0 / (0.1 + n) for g, n in norms.items()}

    engine = runs.engine_for(
        model, dataset=TensorDataset(inputs, targets), clipping=Custom(alone, 1.0, groups), second_pass=second_pass
    )
    engine.step(next(iter(engine.batches())), lambda model, batch: (model(batch[0]) * batch[1]).sum((1, 2)))
    assert engine.steps_taken == 1


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_a_grad_scaler_is_refused(model: nn.Module, options: dict[str, bool], unscale_first: bool) -> None:
    optimizer = torch.optim.Adam(model.parameters(), **options)
    engine = runs.engine_for(model, optimizer, noise_multiplier=1.0, max_physical_batch_size=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    runs.gather(engine, next(runs.nonempty(engine)))
    if unscale_first:
        scaler.unscale_(optimizer)
    assert_refused(
        engine, PrivacyError, r"a GradScaler called this step.*Call optimizer\.step\(\) itself",
        lambda: scaler.step(optimizer),
    )  # fmt: skip
    engine.detach()
    assert optimizer.__dict__.get("_step_supports_amp_scaling", False) is ("fused" in options)


def test_a_second_engine_on_one_optimizer(engine: PrivacyEngine, model: nn.Module) -> None:
    with pytest.raises(PrivacyError, match=r"another PrivacyEngine is attached.*detach\(\)"):
        runs.engine_for(model, engine.optimizer)
    engine.detach()
    second = runs.engine_for(model, engine.optimizer, noise_multiplier=1.0)
    second.step(next(iter(second.batches())), runs.losses_of)
    assert (engine.steps_taken, second.steps_taken) == (0, 1)


def test_detaching_leaves_an_ordinary_optimizer(engine: PrivacyEngine, model: nn.Module) -> None:
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.detach()
    assert all(p.grad is None for p in model.parameters())
    plain_backward(model)
    gradient, before = model[0].weight.grad.clone(), model[0].weight.detach().clone()
    engine.optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.5 * gradient)
    with pytest.raises(PrivacyError, match="this engine was detached"):
        engine.batches()


def test_parameters_of_another_model(engine: PrivacyEngine, model: nn.Module) -> None:
    foreign = nn.Linear(2, 7)
    with pytest.raises(PrivacyError, match=r"parameter of shape \[7, 2\] \(group 0\) that the model doesn't own"):
        runs.engine_for(model, torch.optim.SGD([*model.parameters(), *foreign.parameters()], lr=0.1))
    batch = next(runs.nonempty(engine))
    engine.optimizer.add_param_group({"params": foreign.parameters()})
    runs.gather(engine, batch)
    with pytest.raises(PrivacyError, match=r"parameter of shape \[7, 2\] \(group 1\)"):
        engine.optimizer.step()
    assert engine.steps_taken == 0


def test_optimizers_and_models_that_can_not_be_used(model: nn.Module) -> None:
    with pytest.raises(PrivacyError, match="LBFGS evaluates the loss several times"):
        runs.engine_for(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer; got dict"):
        runs.engine_for(model, {})
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got function"):
        PrivacyEngine(plain_backward, torch.optim.SGD(model.parameters()), runs.data())  # type: ignore[arg-type]
    mixing = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(mixing.parameters())
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d"):
        runs.engine_for(mixing, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(ValueError, match="no trainable parameter"):
        runs.engine_for(model.requires_grad_(False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": None}, "either noise_multiplier, or target_epsilon .* got neither"),
        ({"target_epsilon": 3.0, "epochs": 1}, "either noise_multiplier, or target_epsilon .* got both"),
        ({"epochs": 3}, "epochs and steps say what target_epsilon is to be calibrated for"),
        ({"steps": 3}, "epochs and steps say what target_epsilon is to be calibrated for"),
        ({"noise_multiplier": None, "target_epsilon": 3.0}, "give either epochs or steps; got neither"),
        ({"noise_multiplier": None, "target_epsilon": 3.0, "epochs": 1, "steps": 3}, "epochs or steps; got both"),
        ({"noise_multiplier": None, "target_epsilon": 3.0, "epochs": 0}, "^epochs must be a whole number >= 1; got 0"),
        (
            {"noise_multiplier": None, "target_epsilon": 3.0, "steps": 1.5},
            "^steps must be a whole number >= 1; got 1.5",
        ),
        ({"noise_multiplier": None, "target_epsilon": -1.0, "steps": 1}, "^target_epsilon must be a finite number > 0"),
        ({"noise_multiplier": -0.1}, "^noise_multiplier must be a finite number >= 0"),
        ({"noise_multiplier": float("nan")}, "^noise_multiplier must be a finite number >= 0; got nan"),
        ({"noise_multiplier": 1.0, "target_delta": 0.0}, "^target_delta must be a number in"),
        ({"noise_multiplier": 1.0, "batch_size": None}, "batch_size must be given with a dataset"),
        ({"noise_multiplier": 1.0, "batch_size": 25}, r"batch_size must be at most len\(dataset\) = 24"),
        ({"noise_multiplier": 1.0, "max_physical_batch_size": 0}, "^max_physical_batch_size must be a whole number"),
        ({"noise_multiplier": 1.0, "clipping": 0.0}, "^clipping must be a finite number > 0"),
        ({"noise_multiplier": 1.0, "second_pass": "fast"}, "^second_pass must be one of"),
        ({"noise_multiplier": 1.0, "noise": "loud"}, "^noise must be one of"),
        ({"noise_multiplier": 1.0, "noise": "test"}, 'noise="test" needs a seed'),
        ({"noise_multiplier": 1.0, "seed": 1}, "seed=1 would make the noise predictable"),
    ],
)
def test_arguments_out_of_range_or_that_do_not_go_together(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=message):
        PrivacyEngine(model, optimizer, runs.data(), **{"noise_multiplier": 1.0, "batch_size": 8, **options})
    assert not optimizer._optimizer_step_pre_hooks


def test_a_misspelt_argument_is_refused(model: nn.Module) -> None:
    fresh = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="noise_multiplyer"):
        runs.engine_for(model, fresh, noise_multiplyer=1.0)


def test_samplers_of_the_users_own_are_refused(model: nn.Module) -> None:
    loader = DataLoader(runs.data(), 4, sampler=WeightedRandomSampler([1.0] * 24, 24))
    with pytest.raises(PrivacyError, match="WeightedRandomSampler"):
        runs.engine_for(model, None, loader)


@pytest.mark.parametrize("wrong", [{"delta": 0.0}, {"delta": float("nan")}, {"accountant": "gdp"}])
def test_epsilon_checks_its_arguments_even_when_it_is_infinite(model: nn.Module, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        runs.engine_for(model, noise_multiplier=0.0).epsilon(**wrong)


def test_a_model_that_another_engine_trained(model: nn.Sequential, caplog: pytest.LogCaptureFixture, tmp_path) -> None:
    """Its steps aren't counted by the new one, which says so; in one ledger they are."""

    def trained(ledger: Any = None) -> PrivacyEngine:
        engine = runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, ledger=ledger)
        engine.step(next(iter(engine.batches())), runs.losses_of)
        engine.detach()
        return engine

    first = trained()
    assert not caplog.records
    trained(tmp_path / "run.ledger")
    assert [record.getMessage() for record in caplog.records] == [
        "another engine took 1 step with this model before; epsilon() of the new one doesn't count them. Give both the "
        'same ledger="..." so that they add up, or train a new model'
    ]
    del first
    caplog.clear()
    trained(tmp_path / "run.ledger")
    assert not caplog.records


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("options", [{}, {"second_pass": "cached"}, {"clipping": PerLayer(1.0)}])
def test_a_hook_on_a_parameter_is_refused(model: nn.Module, register: str, options: dict[str, Any]) -> None:
    """It could make a clipped sum as large as it likes, before the noise is added."""
    engine = runs.engine_for(model, max_physical_batch_size=3, **options)
    engine.step(next(runs.nonempty(engine)), runs.losses_of)
    handle = getattr(model[0].weight, register)(lambda *given: None)
    with pytest.raises(PrivacyError, match=r"'0\.weight' has a hook"):
        engine.step(next(runs.nonempty(engine)), runs.losses_of)
    handle.remove()
    engine.step(next(runs.nonempty(engine)), runs.losses_of)
    assert engine.steps_taken == 2
