"""Per-example norms in one call: those of single gradients, and nothing of the model changes."""

import random
from typing import Any

import numpy as np
import oracle
import private_runs as runs
import pytest
import torch
from case_models import Wired
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip import UnsupportedModelError, per_example_norms
from ghostclip.nn.base import GhostLayer


def single_grads(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """By one backward an example."""
    return oracle.grads_of_single_losses(model, runs.losses_of(model, batch))


BY = {None: oracle.norms, "layer": oracle.norms_per_layer, "parameter": oracle.norms_per_parameter}


@pytest.mark.parametrize("per", BY)
def test_norms_of_a_batch_are_those_of_single_gradients(per: str | None) -> None:
    model, batch = runs.network(torch.float64), runs.data(dtype=torch.float64)[:]
    found = per_example_norms(model, runs.losses_of, batch, per=per)
    torch.testing.assert_close(found, BY[per](single_grads(model, batch)))


def test_a_loader_gives_its_batches_one_after_another() -> None:
    model, dataset = runs.network(), runs.data(22)
    found = per_example_norms(model, runs.losses_of, DataLoader(dataset, batch_size=8))
    torch.testing.assert_close(found, oracle.norms(single_grads(model, dataset[:])))
    by_layer = per_example_norms(model, runs.losses_of, DataLoader(dataset, batch_size=8), per="layer")
    assert {name: norms.shape for name, norms in by_layer.items()} == {"0": (22,), "2": (22,)}
    nothing = DataLoader(dataset, batch_size=50, drop_last=True)
    assert per_example_norms(model, runs.losses_of, nothing).shape == (0,)
    assert per_example_norms(model, runs.losses_of, nothing, per="layer") == {}


def counting() -> nn.Module:
    """Has a buffer that each forward changes."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return x

    layer = Wired(forward)
    layer.register_buffer("calls", torch.zeros(()))
    return layer


def state(model: nn.Module) -> list[Any]:
    """What one call might change."""
    grads = [(p.grad, 0 if p.grad is None else p.grad._version) for p in model.parameters()]
    modules = [(type(m), m.training, sorted(vars(m))) for m in model.modules()]
    chance = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    values = [tensor.tolist() for tensor in model.state_dict().values()]
    return [grads, modules, chance, values, torch.is_grad_enabled()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["plain", "wrapped", "partly"])
@pytest.mark.one_in(3)
def test_the_model_is_left_as_it_was(kind: str, grad: bool, training: bool) -> None:
    last = ghostclip.nn.Linear(8, 3) if kind == "partly" else nn.Linear(8, 3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), counting(), last).train(training)
    model = ghostclip.wrap(model) if kind == "wrapped" else model
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    loader = DataLoader(runs.data(), batch_size=8, shuffle=True)
    before = state(model)
    with torch.set_grad_enabled(grad):
        first = per_example_norms(model, runs.losses_of, loader)
        again = per_example_norms(model, runs.losses_of, loader)
    assert torch.equal(first, again)
    assert not first.requires_grad
    assert state(model) == before
    assert isinstance(model[0], GhostLayer) == (kind == "wrapped")
    assert isinstance(model[3], GhostLayer) == (kind != "plain")


def test_what_fails_leaves_the_model_as_it_was_too() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batch, before = runs.data()[:], state(model)
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        per_example_norms(model, runs.losses_of, batch)
    assert state(model) == before
    del model[1]
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        per_example_norms(model, lambda *_: 1 / 0, batch)
    assert state(model) == before
    with pytest.raises(ValueError, match="per must be one of 'layer', 'parameter'"):
        per_example_norms(model, runs.losses_of, batch, per="module")
