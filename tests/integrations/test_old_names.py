"""Names of Opacus raise errors that say what to write here."""

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import ghostclip

OPACUS_ARGUMENTS = ghostclip.PrivacyEngine.refused_names
DATA = TensorDataset(torch.zeros(20, 3), torch.zeros(20, dtype=torch.long))
ATTRIBUTES = {
    "get_epsilon": r"engine\.epsilon\(delta",
    "accountant": r"engine\.epsilon\(\)",
    "make_private": r"PrivacyEngine\(model, optimizer, data",
    "make_private_with_epsilon": r"PrivacyEngine\(model, optimizer, data",
    "save_checkpoint": r"engine\.save",
    "load_checkpoint": r"engine\.restore",
}


def engine(**options: Any) -> ghostclip.PrivacyEngine:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ghostclip.PrivacyEngine(model, optimizer, DATA, batch_size=5, noise_multiplier=1.0, **options)


@pytest.mark.parametrize("name", OPACUS_ARGUMENTS)
def test_argument_of_the_engine(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument {name}; use {OPACUS_ARGUMENTS[name][:8]}"):
        engine(**{name: 1.0})
    instead = OPACUS_ARGUMENTS[name].partition("=")[0]
    assert instead in inspect.signature(ghostclip.PrivacyEngine).parameters or instead.startswith("engine.epsilon(")


@pytest.mark.parametrize(("name", "meant"), [("target_eps", "target_epsilon"), ("batchsize", "batch_size")])
def test_an_argument_that_is_nearly_one_of_the_engine(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"PrivacyEngine has no argument {name}; did you mean {meant}?"):
        engine(**{name: 1.0})


@pytest.mark.parametrize("name", ["max_grad_norm", "max_norm"])
def test_argument_of_the_clipper(name: str) -> None:
    with pytest.raises(TypeError, match=f"GhostClipper has no argument {name}; use clipping"):
        ghostclip.GhostClipper(torch.nn.Linear(3, 2), **{name: 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "instead"), ATTRIBUTES.items())
def test_attribute(name: str, instead: str) -> None:
    built = engine()
    for owner in (built, ghostclip.PrivacyEngine):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"no {name}; .*{instead}"):
            getattr(owner, name)


def test_engine_without_arguments() -> None:
    with pytest.raises(TypeError, match=r"build engine = PrivacyEngine\(model, optimizer, data.*compat\.opacus"):
        ghostclip.PrivacyEngine()  # type: ignore[call-arg]


def test_other_names_are_python_s_own_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        engine(foo=3)
    with pytest.raises(AttributeError, match="has no attribute 'epsilons'"):
        engine().epsilons  # type: ignore[attr-defined]  # noqa: B018
