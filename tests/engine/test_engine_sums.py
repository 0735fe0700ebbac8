"""Clipped sums stand in the engine until noise is added: no p.grad holds them, and what is written there is lost."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import private_runs as runs
import pytest
import torch
from graphs import interpret
from ranks import on_ranks
from sharded import QUIET, settled, sharded
from sharded import weights as whole_weights
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import ghostclip
from ghostclip.clipper.second_pass import ParameterSums
from ghostclip.clipping import PerLayer

NORM, RATE = 0.5, 0.5


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Strategies are counted, not timed, so that two runs have the same digits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def filled(model: nn.Module) -> Iterator[Any]:
    """The gradients that someone who works on p.grad finds there."""
    return (p.grad for p in model.parameters() if p.grad is not None)


def assigned(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)


def stepped_with(model: nn.Module) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind(model.parameters(), lr=0.3, weight_decay=0.5).step()


# What is done between a backward and the step.
WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "assigned": assigned,
    "data": lambda model: [grad.data.mul_(10) for grad in filled(model)],
    "storage": lambda model: [grad.data.set_(torch.full_like(grad, 7.0)) for grad in filled(model)],
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "other optimizers": stepped_with,
    "backward": runs.plain_backward,
    "backward, then data": lambda model: (runs.plain_backward(model), WRITES["data"](model)),
}


def engine_for(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = runs.network(dtype)
    given = {"noise": "test", "seed": 3, "clipping": NORM, "max_physical_batch_size": 3, "batch_size": 12, **options}
    torch.manual_seed(2)
    return runs.engine_for(model, torch.optim.SGD(model.parameters(), lr=RATE), runs.data(dtype=dtype), **given)


def no_gradient(model: nn.Module) -> None:
    assert all(parameter.grad is None for parameter in model.parameters())


def scaled_loop(engine: Any, between: Callable[[], None]) -> None:
    scaler = engine._steps._scaling._scaler
    for batch in engine.batches():
        for examples in batch.physical():
            engine.backward(scaler.scale(runs.losses_of(engine.model, examples)))
            between()
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()


def whole_steps(engine: Any, between: Callable[[], None]) -> None:
    """Between the passes of `engine.step` and its update comes the charge."""
    charge = engine._steps.release.charge
    engine._steps.release.charge = lambda terms: (between(), charge(terms))
    for _ in range(4):
        runs.train(engine)


def compiled(engine: Any, between: Callable[[], None]) -> None:
    engine.compile()
    whole_steps(engine, between)


USERS = [row // 2 for row in range(24)]
# By name: how to train, and with which options.
WAYS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "loop": (runs.train_by_hand, {}),
    "users": (runs.train_by_hand, {"unit_ids": USERS, "batch_size": 6, "max_physical_batch_size": 4}),
    "layers, bfloat16": (runs.train_by_hand, {"clipping": PerLayer(NORM), "dtype": torch.bfloat16}),
    "closures": (runs.train_by_closure, {}),
    "scaler": (scaled_loop, {"loss_scale": GradScaler("cpu")}),
    "step": (whole_steps, {}),
    "compiled": (compiled, {"max_physical_batch_size": None, "self_check": False}),
}


def trained(way: str, write: Callable[[nn.Module], Any] | None = None) -> Tensor:
    """The weights after steps without noise, between whose backwards and updates someone writes to p.grad."""
    train, options = WAYS[way]
    engine, seen = engine_for(**copy.deepcopy(options)), []

    def between() -> None:
        if write is None or not seen:
            no_gradient(engine.model)
        seen.append(1)
        if write is not None:
            write(engine.model)

    train(engine, between=between)
    assert len(seen) >= 2
    return runs.weights(engine.model)


undisturbed = cache(trained)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.one_in(6)
def test_what_is_written_between_backward_and_step_has_no_effect(way, name, monkeypatch):
    interpret(monkeypatch)
    assert torch.equal(trained(way, WRITES[name]), undisturbed(way))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_released_gradient_is_the_clipped_mean(dtype: torch.dtype) -> None:
    engine = engine_for(dtype)
    model = runs.network(dtype)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for examples in next(runs.nonempty(engine)).physical():
        engine.backward(runs.losses_of(engine.model, examples))
        assigned(engine.model)
        found = oracle.grads_of_single_losses(model, runs.losses_of(model, examples))
        for name, each in oracle.clipped_sum({name: each.double() for name, each in found.items()}, NORM).items():
            total[name] += each
    engine.optimizer.step()
    near = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 1e-2}[dtype]
    for name, expected in total.items():
        grad, slack = engine.model.get_parameter(name).grad, near * float(expected.abs().max())
        torch.testing.assert_close(grad.double(), expected / 12, rtol=near, atol=slack)


def test_sums_are_the_engine_s_alone_where_a_parameter_is_frozen_or_not_held() -> None:
    model = runs.network()
    engine = runs.engine_for(model, torch.optim.SGD(model[2].parameters(), lr=RATE), max_physical_batch_size=2)
    model[2].weight.requires_grad_(False)
    runs.gather(engine, next(runs.nonempty(engine)))
    assigned(model)
    before = [p.detach().clone() for p in model.parameters()]
    engine.optimizer.step()
    assert [p.grad is None for p in model.parameters()] == [True, True, True, False]
    assert [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)] == [True] * 3 + [False]


def test_the_first_gradient_that_is_lost_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    trained("loop", runs.plain_backward)
    assert caplog.text.count("a gradient of '0.weight' came between engine.backward() and the step") == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_forgotten_zero_grad_changes_nothing(in_place: bool) -> None:
    found = []
    for zeroes in (True, False):
        engine = engine_for(noise_multiplier=1.0)
        for batch in engine.batches():
            runs.gather(engine, batch)
            if batch.sizes:
                no_gradient(engine.model)
            engine.optimizer.step()
            engine.optimizer.zero_grad(set_to_none=not in_place) if zeroes else None
        found.append(runs.weights(engine.model))
    assert torch.equal(*found)


def test_a_gradient_added_to_what_a_step_left_is_refused() -> None:
    engine = engine_for()
    batches = runs.nonempty(engine)
    runs.gather(engine, next(batches))
    engine.optimizer.step()
    runs.plain_backward(engine.model)
    examples = next(next(batches).physical())
    with pytest.raises(ghostclip.GradientLeakError, match=r"optimizer\.zero_grad\(\)"):
        engine.backward(runs.losses_of(engine.model, examples))


def test_a_first_amount_is_kept_as_it_is() -> None:
    rows, others, number = (nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((4, 3), (4, 3), ()))
    sums, amount = ParameterSums({0: rows, 1: others, 2: number}), torch.ones(4, 3)
    sums.add((0, None), amount)
    assert sums.totals[0] is amount
    for place in (0, 1):
        sums.add((place, (1, 3)), torch.ones(2, 3))
    for _ in range(3):
        sums.add((2, None), torch.ones(()))
    assert sums.totals[0].sum(1).tolist() == [3.0, 6.0, 6.0, 3.0]
    assert sums.totals[1].sum(1).tolist() == [0.0, 3.0, 3.0, 0.0]
    assert sums.totals[1].dtype == torch.float32
    assert sums.totals[2] == 3


SHARDED = ["assigned", "data", "backward"]


def on_shards() -> list[Tensor]:
    """Weights after steps of a model sharded by FSDP2, without and with each of the writes."""
    found = []
    for name in [None, *SHARDED]:
        model = sharded(runs.network())
        options = {"clipping": NORM, "max_physical_batch_size": 3, "self_check": False}
        engine = runs.engine_for(model, None, noise="test", seed=3, **options)
        torch.manual_seed(7)
        runs.train_by_hand(engine, between=lambda: (no_gradient(model), name and WRITES[name](model)))  # noqa: B023
        found.append(whole_weights(settled(model)))
    return found


@pytest.mark.filterwarnings(*QUIET)
def test_sharded_models(tmp_path: Path) -> None:
    for expected, *found in on_ranks(on_shards, tmp_path):
        for name, weights in zip(SHARDED, found, strict=True):
            assert torch.equal(weights, expected), name
