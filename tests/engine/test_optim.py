"""What is done with private gradients after their release: DP-AdamBC and low-pass filters."""

import numpy as np
import private_runs as runs
import pytest
import torch
from scipy.signal import butter, lfilter
from torch import nn

from ghostclip.errors import PrivacyError
from ghostclip.optim import AdamBC, LowPassFilter


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))


GRADS = [torch.tensor(row, dtype=torch.float64) for row in np.random.default_rng(0).normal(size=(12, 3))]


def stepped(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> torch.Tensor:
    for grad in GRADS:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach().clone()


@pytest.mark.parametrize(("std", "floor"), [(0.0, 1e-30), (0.8, 0.05)])
def test_the_variance_of_the_noise_is_subtracted(std, floor) -> None:
    """Without noise it is Adam."""
    p, (b1, b2) = parameter(), (0.8, 0.95)
    optimizer = AdamBC([p], lr=0.1, betas=(b1, b2), floor=floor)
    optimizer.noise_std = lambda p: std
    expected, m, v = p.detach().clone(), 0.0, 0.0
    for step, grad in enumerate(GRADS, 1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        second = (v / (1 - b2**step) - std**2).clamp(min=floor)
        expected -= 0.1 * (m / (1 - b1**step)) / second.sqrt()
    torch.testing.assert_close(stepped(optimizer, p), expected, rtol=1e-12, atol=1e-14)


FILTERS = [((1.0,), ()), ((0.1,), (-0.9,)), ((0.5, 0.3, 0.2), ()), (butter(2, 0.3)[0], butter(2, 0.3)[1][1:])]


@pytest.mark.parametrize(("b", "a"), FILTERS)
def test_gradients_are_filtered_as_scipy_does(b, a) -> None:
    p, seen = parameter(), []
    optimizer = torch.optim.SGD([p], lr=0.0)
    LowPassFilter(optimizer, b, a)
    optimizer.register_step_post_hook(lambda *_: seen.append(p.grad.clone()))
    stepped(optimizer, p)
    grads = torch.stack(GRADS).numpy()
    expected = lfilter(b, [1.0, *a], grads, axis=0) / lfilter(b, [1.0, *a], np.ones((len(grads), 1)), axis=0)
    np.testing.assert_allclose(torch.stack(seen).numpy(), expected, rtol=1e-10, atol=1e-12)


def test_a_filter_goes_on_where_it_was_and_can_be_removed() -> None:
    p, q = parameter(), parameter()
    first, second = torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1)
    here, there = LowPassFilter(first), LowPassFilter(second)
    stepped(first, p)
    there.load_state_dict(here.state_dict())
    with torch.no_grad():
        q.copy_(p)
    assert torch.equal(stepped(first, p), stepped(second, q))
    here.remove()
    before = p.detach().clone()
    assert torch.allclose(stepped(first, p), before - 0.1 * torch.stack(GRADS).sum(0))


def test_both_work_behind_an_engine(tmp_path) -> None:
    def made():
        model = runs.network()
        optimizer = AdamBC(model.parameters(), lr=0.05)
        engine = runs.engine_for(model, optimizer, clipping=1.0, noise_multiplier=1.0, noise="test", seed=1)
        optimizer.noise_std = engine.noise_std
        return engine, LowPassFilter(optimizer)

    engine, filtered = made()
    assert engine.noise_std(engine.model[0].weight) == 1.0 / 8
    runs.train(engine)
    engine.save(tmp_path / "saved", {"filter": filtered})
    again, other = made()
    again.restore(tmp_path / "saved", {"filter": other})
    for one in (engine, again):
        runs.train(one)
    assert torch.equal(runs.weights(engine.model), runs.weights(again.model))


def trained(train, first: bool) -> torch.Tensor:
    """Weights after filtered steps by one of the loops; the filter is made before the engine, or after it."""
    optimizer = torch.optim.SGD((model := runs.network()).parameters(), lr=0.5)
    make = [
        lambda: runs.engine_for(model, optimizer, clipping=1.0, noise_multiplier=1.0, noise="test", seed=1),
        lambda: LowPassFilter(optimizer),
    ]
    made = [each() for each in (reversed(make) if first else make)]
    train(made[first])
    return runs.weights(model)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("train", [runs.train, runs.train_by_hand, runs.train_by_closure])
def test_every_loop_is_filtered_alike_by_a_filter_made_before_the_engine_or_after(train, first) -> None:
    assert torch.equal(trained(train, first), trained(runs.train, False))


def filtered_by(*coefficients):
    return LowPassFilter(torch.optim.SGD([parameter()], lr=0.1), *coefficients)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: stepped(AdamBC([p := parameter()]), p), PrivacyError, r"optimizer.noise_std = engine.noise_std"),
        (lambda: AdamBC([parameter()], lr=0.0), ValueError, "lr"),
        (lambda: AdamBC([parameter()], floor=0.0), ValueError, "floor"),
        (lambda: AdamBC([parameter()], betas=(0.9, 1.0)), ValueError, "betas"),
        (lambda: filtered_by((), ()), ValueError, r"b must have"),
        (lambda: filtered_by((1.0, -1.0), ()), ValueError, r"b must have"),
        (lambda: filtered_by((1.0,), (-1.0,)), ValueError, "without bound"),
        (lambda: filtered_by((1.0,), (0.0, 1.5)), ValueError, "without bound"),
    ],
)
def test_what_cannot_work_is_refused(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()
