"""What an engine is built of and attached to: optimizers, models, settings and hooks that it must refuse."""

import copy
import io
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn

from ghostclip import PrivacyError, UnsupportedModelError
from ghostclip.clipping import PerLayer
from ghostclip.engine import PrivacyEngine


@pytest.fixture
def model() -> nn.Sequential:
    return runs.network()


@pytest.fixture
def engine(model: nn.Sequential) -> PrivacyEngine:
    return runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, max_physical_batch_size=2)


@pytest.mark.parametrize("name", sorted(PrivacyEngine.fixed_names))
def test_settings_are_not_changed_afterwards(engine: PrivacyEngine, name: str) -> None:
    before = getattr(engine, name)
    with pytest.raises(AttributeError, match=rf"{name} of a PrivacyEngine can't be changed.*build a new engine"):
        setattr(engine, name, 5.0)
    assert getattr(engine, name) is before


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
    runs.assert_refused(
        engine, PrivacyError, r"a GradScaler called this step.*Call optimizer\.step\(\) itself",
        lambda: scaler.step(optimizer),
    )  # fmt: skip
    engine.detach()
    assert optimizer.__dict__.get("_step_supports_amp_scaling", False) is ("fused" in options)


def test_a_second_engine_on_one_optimizer(engine: PrivacyEngine, model: nn.Module) -> None:
    with pytest.raises(PrivacyError, match=r"another PrivacyEngine is attached.*detach\(\)"):
        runs.engine_for(model, engine.optimizer)
    engine.detach()
    runs.train(second := runs.engine_for(model, engine.optimizer, noise_multiplier=1.0), 1)
    assert (engine.steps_taken, second.steps_taken) == (0, 1)


def test_detaching_leaves_an_ordinary_optimizer(engine: PrivacyEngine, model: nn.Module) -> None:
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.detach()
    assert all(p.grad is None for p in model.parameters())
    runs.plain_backward(model)
    gradient, before = runs.grads(model).clone(), runs.weights(model)
    engine.optimizer.step()
    torch.testing.assert_close(runs.weights(model), before - 0.5 * gradient)
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


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda model: runs.engine_for(model, torch.optim.LBFGS(model.parameters())),
            PrivacyError,
            "LBFGS evaluates the loss several times",
        ),
        (lambda model: runs.engine_for(model, {}), TypeError, r"optimizer must be a torch\.optim\.Optimizer; got dict"),
        (lambda model: runs.engine_for(model.requires_grad_(False)), ValueError, "no trainable parameter"),
        (lambda model: runs.engine_for(model, noise_multiplyer=1.0), TypeError, "noise_multiplyer"),
        (lambda model: runs.engine_for(model, clipping=PerLayer), TypeError, "clipping is the class PerLayer itself"),
    ],
)
def test_what_no_engine_can_be_built_of(model: nn.Module, build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(model)


def test_a_model_that_mixes_examples_leaves_the_optimizer_alone() -> None:
    optimizer = torch.optim.SGD((mixing := nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))).parameters())
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d"):
        runs.engine_for(mixing, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


TARGET = {"noise_multiplier": None, "target_epsilon": 3.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": None}, "either noise_multiplier, or target_epsilon .* got neither"),
        ({"target_epsilon": 3.0, "epochs": 1}, "either noise_multiplier, or target_epsilon .* got both"),
        ({"steps": 3}, "epochs and steps say what target_epsilon is to be calibrated for"),
        (TARGET, "give either epochs or steps; got neither"),
        ({**TARGET, "epochs": 1, "steps": 3}, "epochs or steps; got both"),
        ({**TARGET, "epochs": 0}, "^epochs must be a whole number >= 1; got 0"),
        ({**TARGET, "steps": 1.5}, "^steps must be a whole number >= 1; got 1.5"),
        ({**TARGET, "target_epsilon": -1.0, "steps": 1}, "^target_epsilon must be a finite number > 0"),
        ({"noise_multiplier": float("nan")}, "^noise_multiplier must be a finite number >= 0; got nan"),
        ({"target_delta": 0.0}, "^target_delta must be a number in"),
        ({"batch_size": None}, "batch_size must be given with a dataset"),
        ({"clipping": 0.0}, "^clipping must be a finite number > 0"),
        ({"second_pass": "fast"}, "^second_pass must be one of"),
        ({"noise": "loud"}, "^noise must be one of"),
        ({"sampling": "truncated"}, "max_batch_size must be given"),
        ({"max_physical_batch_size": "big"}, "max_physical_batch_size must be a number, 'auto' or None"),
        ({"max_physical_batch_size": "auto", "memory_limit": 0}, "memory_limit must be"),
        ({"max_physical_batch_size": 8, "memory_limit": 1}, 'memory_limit is for max_physical_batch_size="auto"'),
        ({"max_physical_batch_size": "auto", "unit_ids": [0] * 24}, "don't go together"),
    ],
)
def test_arguments_out_of_range_or_that_do_not_go_together(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=message):
        PrivacyEngine(model, optimizer, runs.data(), **{"noise_multiplier": 1.0, "batch_size": 8, **options})
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("wrong", [{"delta": 0.0}, {"delta": float("nan")}, {"accountant": "gdp"}])
def test_epsilon_checks_its_arguments_even_when_it_is_infinite(model: nn.Module, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        runs.engine_for(model, noise_multiplier=0.0).epsilon(**wrong)


def stored(model: nn.Module) -> nn.Module:
    torch.save(model, content := io.BytesIO())
    content.seek(0)
    loaded: nn.Module = torch.load(content, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, stored])
@pytest.mark.parametrize("ledgers", ["both", "the second", "none"])
def test_a_model_that_another_engine_trained(
    ledgers: str, copied: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """Steps of it, or of what it is a copy of, aren't counted by the new one, which says so; in one ledger they are."""
    model = runs.network()
    for has_ledger in (ledgers == "both", ledgers != "none"):
        ledger = tmp_path / "run.ledger" if has_ledger else None
        runs.train(engine := runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, ledger=ledger), 1)
        engine.detach()
        model = copied(model)
    assert [record.getMessage() for record in caplog.records] == (ledgers != "both") * [
        "another engine took 1 step with this model before; epsilon() of the new one doesn't count them. Give both the "
        'same ledger="..." so that they add up, or train a new model'
    ]


def engine_of_part(model: nn.Module, part: int, **options: Any) -> PrivacyEngine:
    """An engine that trains one layer of a model."""
    for number, layer in enumerate(model):
        layer.requires_grad_(number == part)
    optimizer = torch.optim.SGD(model[part].parameters(), lr=0.1)
    return runs.engine_for(model, optimizer, noise_multiplier=1.0, clipping=1.0, **options)


@pytest.mark.parametrize("shared", [True, False])
def test_two_engines_that_train_parts_of_a_model_in_turn(
    shared: bool, model: nn.Module, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """Built before any step, neither counts the other's, which is said once; in one ledger both do."""
    options = {"ledger": tmp_path / "run.ledger"} if shared else {}
    first, second = engine_of_part(model, 0, **options), engine_of_part(model, 2, **options)
    for _ in range(2):
        for engine, part in ((first, 0), (second, 2)):
            for number, layer in enumerate(model):
                layer.requires_grad_(number == part)
            engine.accept_parameters()
            runs.train(engine, 1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == (not shared) * [
        "another engine may take steps with this model, too; epsilon() of neither counts those of the other. Give both "
        'the same ledger="..." so that they add up, or call detach() of the engine that isn\'t used'
    ]


@pytest.mark.parametrize("ended", [True, False])
def test_an_engine_that_was_given_up_before_a_step_is_not_warned_of(
    ended: bool, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a notebook's cell is run twice, where the first engine is there until the second one is built."""
    kept = []
    for _ in range(2):
        engine = runs.engine_for(model)
        batches = engine.batches()
        if ended and not kept:
            engine.detach()
            kept.append(engine)
    for batch in batches:
        engine.step(batch, runs.losses_of)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.usefixtures("coarse_losses")
def test_a_limit_below_the_target_is_said(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    options = {"noise_multiplier": None, "target_epsilon": 2.0, "steps": 4}
    for limit in (1.0, 2.0):
        runs.engine_for(model, max_epsilon=limit, **options)
    said = "max_epsilon=1.0 is below target_epsilon=2.0: training ends before its last step"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [said]


def test_an_engine_that_could_not_be_built_leaves_the_optimizer_alone(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Neither its hooks nor its ledger keep the next one from being built."""
    optimizer, ledger = torch.optim.SGD(model.parameters()), tmp_path / "run.ledger"
    with monkeypatch.context() as patched:
        patched.setattr("ghostclip.engine.privacy_engine.keep_unsynchronised", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runs.engine_for(model, optimizer, ledger=ledger)
    runs.train(runs.engine_for(model, optimizer, ledger=ledger), 1)


def test_a_guarantee_without_noise_says_so(model: nn.Module) -> None:
    runs.train(engine := runs.engine_for(model, noise_multiplier=0.0), 1)
    assert engine.guarantee().endswith(" No noise was added, so nothing is promised.")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("options", [{}, {"second_pass": "cached"}, {"clipping": PerLayer(1.0)}])
def test_a_hook_on_a_parameter_is_refused(model: nn.Module, register: str, options: dict[str, Any]) -> None:
    """It could make a clipped sum as large as it likes, before the noise is added."""
    engine = runs.engine_for(model, max_physical_batch_size=3, **options)
    runs.train(engine, 1)
    handle = getattr(model[0].weight, register)(lambda *given: None)
    for work in (lambda: runs.engine_for(model, **options), lambda: runs.train(engine, 1)):
        with pytest.raises(PrivacyError, match=r"'0\.weight' has a hook"):
            work()
    handle.remove()
    runs.train(engine, 1)
    assert engine.steps_taken == 2
