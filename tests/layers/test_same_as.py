"""`ghostclip.same_as`: a user's class gets the rule of torch's, if it computes the same; all else is refused."""

import copy
import pickle
from functools import partial

import declared_layers as mine
import oracle
import pytest
import torch
from case_models import Wired
from case_types import project
from comparing import assert_close, assert_compiled_exact, assert_exact
from declared_layers import declared
from graphs import interpret
from torch import nn

import ghostclip
from ghostclip import UnsupportedModelError
from ghostclip.nn.base import GhostLayer
from ghostclip.nn.declared import DECLARED, Declared

pytestmark = pytest.mark.usefixtures("declarations")


def of(kind, *sizes, **options):
    return lambda: kind(*sizes, **options)


# name: (torch's, one of the class, an input of four examples)
SAME = {
    "linear": (nn.Linear, of(mine.MyLinear, 5, 4), torch.randn(4, 5)),
    "linear 3-D": (nn.Linear, of(mine.MyLinear, 5, 4), torch.randn(4, 3, 5)),
    "no subclass": (nn.Linear, of(mine.HandLinear, 5, 4), torch.randn(4, 5)),
    "conv": (nn.Conv2d, of(mine.MyConv2d, 2, 3, 3, padding=1), torch.randn(4, 2, 5, 4)),
    "layer norm": (nn.LayerNorm, of(mine.MyLayerNorm, 4), torch.randn(4, 3, 4)),
    "embedding": (nn.Embedding, of(mine.IndexEmbedding, 7, 4), torch.randint(7, (4, 3))),
    "random numbers": (nn.Linear, of(mine.DrawingLinear, 5, 4), torch.randn(4, 5)),
}


def twice_or_once(m, x, times):
    inputs = [x * (1 + turn) if x.is_floating_point() else x for turn in range(times)]
    return [*map(m.first, inputs), m.second(x)]


def made(name, times=1):
    target, build, x = SAME[name]
    torch.manual_seed(3)
    model = Wired(partial(twice_or_once, times=times), first=build(), second=build()).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ghostclip.same_as(type(model.first), target)
    return model, x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "options", [{"second_pass": "cached"}, {"second_pass": "reweight"}, {"norm_strategy": "gram"}], ids=str
)
def test_declared_layers_are_the_loop(name, times, options):
    model, x = made(name, times)
    clipper = assert_exact(model, x, **options)
    assert {row.rule for row in clipper.explain()} == {f"{SAME[name][0].__name__} (declared)"}


def test_a_declaration_covers_no_subclass():
    ghostclip.same_as(mine.MyLinear, nn.Linear)
    model, x = nn.Sequential(mine.SubclassOfMine(3, 4)).double(), torch.randn(5, 3).double()
    assert_exact(model, x)
    assert not isinstance(model[0], Declared)


def test_a_parametrization_takes_a_module_out():
    before = mine.MyLinear(3, 4)
    nn.utils.parametrizations.weight_norm(before)
    model = declared(mine.MyLinear, nn.Linear, 3, 3)
    model.append(before)
    assert not isinstance(ghostclip.wrap(model)[2], Declared)
    assert ghostclip.GhostClipper(model).norms(project(model(torch.randn(5, 3)))).shape == (5,)
    nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(UnsupportedModelError, match="class was changed after it was wrapped"):
        model(torch.randn(5, 3))


def test_the_forward_of_the_class_runs_once_for_each_module_and_mode(monkeypatch):
    monkeypatch.setattr(mine.MyLinear, "calls", 0)
    model, x = made("linear")
    ghostclip.wrap(model)
    counts = []
    for prepare in (model.train, model.train, model.eval, model.train, model.eval, model.float, model.double):
        prepare()
        model(x.to(model.first.weight.dtype))
        counts.append(mine.MyLinear.calls)
    assert counts == [2, 2, 4, 4, 4, 6, 6]
    model.first.weight.requires_grad_(False)
    with torch.no_grad():
        model(x)
    assert mine.MyLinear.calls == 8


def test_the_class_comes_back_with_its_keys_and_has_its_methods_meanwhile():
    model = nn.Sequential(mine.MyLinear(3, 4))
    keys, attributes = list(model.state_dict()), set(vars(model[0]))
    ghostclip.same_as(mine.MyLinear, nn.Linear)
    ghostclip.wrap(model)(torch.randn(5, 3))
    assert isinstance(model[0], GhostLayer)
    assert isinstance(model[0], mine.MyLinear)
    assert model[0].describe() == "mine, 4 wide"
    assert list(model.state_dict()) == keys
    assert repr(model[0]) == repr(mine.MyLinear(3, 4))
    ghostclip.unwrap(model)
    assert type(model[0]) is mine.MyLinear
    assert set(vars(model[0])) == attributes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_declared_and_verified_anew(copied, monkeypatch):
    model, x = made("linear")
    expected = oracle.per_example_grads(model, project, (x,))
    ghostclip.wrap(model)(x)
    twin = copied(model)
    monkeypatch.setattr(mine.MyLinear, "calls", 0)
    assert type(twin.first) is type(model.first)
    assert_close(ghostclip.GhostClipper(twin).norms(project(twin(x))), oracle.norms(expected), 1e-10)
    assert mine.MyLinear.calls == 2


def test_a_wrapped_model_is_not_loaded_without_the_declaration():
    saved = pickle.dumps(declared(mine.MyLinear, nn.Linear, 3, 4))
    DECLARED.clear()
    with pytest.raises(UnsupportedModelError, match=r"call ghostclip.same_as\(MyLinear, Linear\) before"):
        pickle.loads(saved)


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_compiled_steps(second_pass, monkeypatch):
    interpret(monkeypatch)
    model, x = made("linear")
    losses = lambda outputs: sum(out.square().sum(1) for out in outputs)  # noqa: E731
    assert_compiled_exact(model, x, losses, second_pass=second_pass)
