"""What private training computes: ordinary training plus clipping and noise, once a step, whatever the optimizer."""

import gc
import itertools
import math
from functools import partial
from itertools import pairwise
from typing import Any

import private_runs as runs
import pytest
import torch
from case_fallback import with_parameters
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import GhostClipper, accounting
from ghostclip.clipping import PerLayer
from ghostclip.engine import PrivacyEngine
from ghostclip.events import SampledGaussian

REPEATABLE = {"noise_multiplier": 1.0, "clipping": 0.3, "noise": "test", "seed": 4}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=1e-3, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_clipping_it_is_ordinary_training_step_for_step(name: str, second_pass: str) -> None:
    private, plain = runs.network(torch.float64), runs.network(torch.float64)
    ours, theirs = OPTIMIZERS[name](private.parameters()), OPTIMIZERS[name](plain.parameters())
    data = runs.data(dtype=torch.float64)
    engine = runs.engine_for(private, ours, data, second_pass=second_pass, max_physical_batch_size=3)
    for batch in (batch for _ in range(3) for batch in engine.batches()):
        seen = runs.gather(engine, batch)
        ours.step()
        ours.zero_grad()
        theirs.zero_grad()
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for examples in seen:
            (runs.losses_of(plain, examples).sum() / engine.batch_size).backward()
        theirs.step()
        torch.testing.assert_close(runs.weights(private), runs.weights(plain), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("noise", ["standard", "hardened"])
@pytest.mark.parametrize("physical", [1, None])
def test_noise_has_its_standard_deviation_and_comes_once_a_step(noise: str, physical: int | None) -> None:
    """In batches without examples' influence, however they are divided."""
    model, found = nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 40)), []
    options = {"noise": noise, "noise_multiplier": 1.7, "clipping": 0.3, "max_physical_batch_size": physical}
    engine = runs.engine_for(model, **options)
    runs.on_step(engine.optimizer, lambda: found.append(runs.grads(model).clone()))
    runs.train(engine, 6, lambda model, examples: model(examples[0]).sum(1) * 0.0)
    assert engine._steps.release._noise.draws == len(found) == 6
    for row in found:
        assert stats.kstest(row.numpy(), stats.norm(0, 1.7 * 0.3 / engine.batch_size).cdf).pvalue > 1e-6
    for left, right in pairwise(found):
        assert stats.pearsonr(left.numpy(), right.numpy()).pvalue > 1e-6


def test_an_empty_batch_is_a_step_of_noise_and_is_charged() -> None:
    engine = runs.engine_for(runs.network(), dataset=runs.data(2), batch_size=1, noise_multiplier=1.0, clipping=1.0)
    before, record = runs.weights(engine.model), None
    while record is None or len(record.losses):
        before = runs.weights(engine.model)
        (record,) = runs.train(engine, 1)
    assert record.losses.shape == record.norms.shape == record.weights.shape == (0,)
    assert (runs.weights(engine.model) != before).all()
    assert engine.events == [SampledGaussian(0.5, 1.0, count=engine.steps_taken)]


def test_parameters_without_a_gradient_get_noise() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(50, 40)})
    engine = runs.engine_for(model, noise_multiplier=1.0, clipping=2.0)
    before = model["unused"].weight.detach().clone()
    runs.train(engine, 1, lambda model, examples: runs.losses_of(model["used"], examples))
    moved = (model["unused"].weight.detach() - before) / 0.5
    assert stats.kstest(moved.flatten().numpy(), stats.norm(0, 2.0 / 8).cdf).pvalue > 1e-5


def numbered(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A layer and two parameters that are single numbers."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.layer(x.to(dtype)) * m.scale + m.shift

    return with_parameters(forward, {"scale": (), "shift": ()}, layer=nn.Linear(5, 3)).to(dtype)


class CallsItsParent(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


LOOPS = [runs.train_by_hand, runs.train_by_closure, partial(runs.train_by_closure, keyword=True)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, CallsItsParent])
@pytest.mark.parametrize("loop", LOOPS, ids=["by hand", "closure", "closure by keyword"])
def test_every_loop_takes_the_steps_of_engine_step(loop: Any, kind: Any) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch calls hooks in SGD's own step once there was an SGD
    results = []
    for train, of in ((runs.train, torch.optim.SGD), (loop, kind)):
        model = runs.network()
        engine = runs.engine_for(model, of(model.parameters(), lr=0.5), **REPEATABLE)
        train(engine)
        assert engine.steps_taken == len(engine.batches())
        results.append(runs.weights(model))
    assert torch.equal(*results)


def test_noise_follows_the_largest_sensitivity_of_a_batch() -> None:
    """Of a threshold that is changed between physical batches, behind the engine's back."""
    model = nn.Linear(5, 4000)
    engine = runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, batch_size=20, max_physical_batch_size=4)
    bounds = itertools.chain([1.0, 3.0], itertools.repeat(2.0))
    for examples, bound in zip(next(runs.nonempty(engine)).physical(), bounds, strict=False):
        object.__setattr__(engine.clipping, "max_norm", bound)
        engine.backward(0.0 * model(examples[0]).sum(1))
    engine.optimizer.step()
    assert runs.grads(model).std().item() == pytest.approx(3.0 / 20, rel=0.05)


@pytest.mark.parametrize("options", [{"noise_multiplier": 0.0}, {"noise_multiplier": 1.0, "noise": "test", "seed": 0}])
def test_epsilon_is_infinite_without_private_noise(options: dict[str, Any]) -> None:
    engine = runs.engine_for(runs.network(), **options)
    assert engine.epsilon() == engine.epsilon(accountant="rdp") == math.inf
    runs.train(engine)
    assert engine.epsilon() == math.inf
    assert accounting.epsilon_of(engine.events, delta=1e-5) == math.inf


def test_a_loader_brings_its_batch_size_and_collation() -> None:
    model = runs.network()
    collate = lambda items: {"x": torch.stack([x for x, _ in items])}  # noqa: E731
    loader = DataLoader(runs.data(), 6, shuffle=True, collate_fn=collate)
    with pytest.warns(UserWarning, match="RandomSampler is replaced by Poisson sampling") as said:
        engine = PrivacyEngine(model, torch.optim.SGD(model.parameters()), loader, noise_multiplier=1.0)
    assert said[0].filename == __file__
    assert (engine.batch_size, engine.sample_rate, len(engine.batches())) == (6, 6 / 24, 4)
    runs.train(engine, loss_fn=lambda model, examples: model(examples["x"]).square().sum(1))
    assert engine.steps_taken == 4


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize(("dtype", "clipping"), [(torch.float32, PerLayer(1.0)), (torch.bfloat16, 1.0)])
def test_parameters_that_are_single_numbers(dtype: torch.dtype, clipping: Any, second_pass: str) -> None:
    options = {"clipping": clipping, "second_pass": second_pass, "max_physical_batch_size": 3}
    engine = runs.engine_for(numbered(dtype), noise="test", seed=1, **options)
    before = runs.weights(engine.model)
    runs.train(engine)
    assert not torch.equal(runs.weights(engine.model), before)


@pytest.mark.parametrize("second_pass", [None, "cached", "reweight"])
def test_steady_steps_leave_no_reference_cycles(second_pass: str | None) -> None:
    """Of an engine or a clipper: Python's collector would stop training to look for them."""
    attention = nn.TransformerEncoderLayer(5, 1, 4, 0.0, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 5)), attention, nn.Flatten(), nn.Linear(5, 3))
    batch = list(runs.data(8).tensors)
    if second_pass:
        clipper = GhostClipper(model, 1.0, second_pass=second_pass)
        step = lambda: (clipper.clip(runs.losses_of, batch), model.zero_grad())  # noqa: E731
    else:
        engine = runs.engine_for(model, sampling="without_replacement")
        step = lambda: runs.train(engine, 1)  # noqa: E731
    for _ in range(12):
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step()
        assert gc.collect() == 0
    finally:
        gc.enable()
