"""wrap, unwrap, check: every obstacle in one error, and everything but the classes stays as it was."""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
from case_models import cnn, transformer
from torch import nn

import ghostclip
from ghostclip import UnsupportedModelError
from ghostclip.nn import GhostLayer

# name: a module with that obstacle, and words its remedy must contain; those of tables are in test_layer_rules.py
OBSTACLES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), "GroupNorm"),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), "GroupNorm"),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), "GroupNorm"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), "GroupNorm"),
    "BatchNorm without affine": (lambda: nn.BatchNorm1d(4, affine=False), "GroupNorm"),
    "BatchNorm frozen": (lambda: nn.BatchNorm1d(4).requires_grad_(False), "GroupNorm"),
    "BatchNorm of no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), "GroupNorm"),
    "LazyLinear": (lambda: nn.LazyLinear(4), "batch"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused():
    model = nn.Sequential(nn.Linear(3, 4))
    for scripted in (torch.jit.script(model), torch.jit.trace(model, torch.ones(2, 3))):
        assert all("torch.jit" in str(finding) for finding in ghostclip.check(scripted))
        with pytest.raises(UnsupportedModelError, match=r"give the model that it was made of"):
            ghostclip.wrap(scripted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_unwrapped_model_needs_nothing_of_this_package():
    model = nn.Sequential(nn.Linear(3, 4))
    clipper = ghostclip.GhostClipper(model)
    assert model._forward_pre_hooks
    ghostclip.unwrap(model)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    assert b"ghostclip" not in pickle.dumps(model)
    torch.jit.script(model)
    clipper.calls.detach()  # whose hook is gone already


def test_a_model_that_is_wrapped_again_is_watched_again():
    """A hook on a tensor that is registered after the model was called has each batch measured."""
    model = nn.Sequential(nn.Linear(3, 4))
    clipper = ghostclip.GhostClipper(model)
    ghostclip.wrap(ghostclip.unwrap(model))
    losses = model(torch.ones(2, 3)).sum(1)
    losses.register_hook(lambda grad: grad)
    assert clipper.calls.hooked(losses.grad_fn._sequence_nr())
    assert clipper.calls.behind(losses) is not None


def test_parts_that_are_scripted_and_frozen_are_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).requires_grad_(False).eval())
    assert ghostclip.check(nn.Sequential(part, nn.Linear(3, 2))) == []
    part[0].weight.requires_grad_(True)
    (finding,) = ghostclip.check(nn.Sequential(part, nn.Linear(3, 2)))
    assert "torch.jit" in str(finding)


def test_a_clipper_that_is_gone_leaves_no_hook_and_no_inputs():
    model = nn.Sequential(nn.Linear(3, 4))
    clipper = ghostclip.GhostClipper(model)
    model(inputs := torch.ones(2, 3))
    kept = weakref.ref(inputs)
    del clipper, inputs
    gc.collect()
    assert not model._forward_pre_hooks
    assert kept() is None


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_is_found_with_its_path_and_remedy(name):
    build, remedy = OBSTACLES[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"inner": build()}))
    (finding,) = ghostclip.check(model)
    assert "1.inner" in str(finding)
    assert remedy in str(finding)
    for refused in (ghostclip.wrap, ghostclip.GhostClipper):
        with pytest.raises(UnsupportedModelError, match=rf"(?s)1\.inner.*{remedy}"):
            refused(model)


def test_all_findings_come_at_once_and_nothing_is_changed():
    model = nn.ModuleDict({name: build() for name, (build, _) in OBSTACLES.items()} | {"fine": nn.Linear(3, 3)})
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError) as error:
        ghostclip.wrap(model)
    assert {finding.path for finding in ghostclip.check(model)} == {*OBSTACLES}
    assert all(name in str(error.value) for name in OBSTACLES)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("build", [cnn, transformer])
def test_wrapping_is_in_place_and_undone_by_unwrap(build):
    model = build(nn)
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    assert ghostclip.check(model) == []
    assert "no batch was run" in repr(ghostclip.check(model))
    assert ghostclip.wrap(model) is model
    assert ghostclip.check(model) == []
    once = [type(module) for module in model.modules()]
    assert [type(module) for module in ghostclip.wrap(model).modules()] == once
    wrapped = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    assert all(isinstance(module, GhostLayer) for module in wrapped)
    assert all(isinstance(module, before[name][1]) for name, module in model.named_modules())
    ghostclip.wrap(model, batch_dim=1)
    ghostclip.unwrap(model)
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before
    assert not any("ghost" in key for module in model.modules() for key in vars(module))


def test_hooks_and_attributes_survive():
    model, seen = nn.Sequential(nn.Linear(3, 4)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model[0].note = "mine"
    ghostclip.wrap(model)(torch.randn(2, 3))
    assert seen == [(2, 4)]
    assert ghostclip.unwrap(model)[0].note == "mine"


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's, whose forward doesn't call its parent's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, input):
        normal = nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return self.act(self.drop(normal))


def test_what_follows_a_replaced_batchnorm_stays():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), BatchNormAct2d(6))
    with pytest.raises(ghostclip.UnsupportedModelError, match=r"1: BatchNormAct2d .*\"BatchNormAct2d\": \"GroupNorm\""):
        ghostclip.wrap(model)
    ghostclip.wrap(model, replace={"BatchNormAct2d": "GroupNorm"})
    assert [type(module).__name__ for module in model[1]] == ["GroupNorm", "Identity", "ReLU"]
    assert model[1].act(torch.tensor(-1.0)) == 0
    assert ghostclip.check(model) == []


@pytest.mark.parametrize(("kind", "channels"), [("1d", 3), ("1d", 16), ("1d", 100), ("2d", 32)])
@pytest.mark.parametrize("new", ["GroupNorm", "LayerNorm"])
def test_batchnorm_is_replaced_on_request(kind, channels, new):
    """Of features by groups of many: a group of one value would be 0 for every input."""
    norm = getattr(nn, f"BatchNorm{kind}")
    model = nn.Sequential(norm(channels), nn.Sequential(norm(channels)))
    ghostclip.wrap(model, replace={f"BatchNorm{kind}": new})
    x = torch.randn(5, channels, *[3] * (2 if kind == "2d" else 0))
    assert ghostclip.GhostClipper(model).norms(model(x).square().flatten(1).sum(1)).shape == (5,)
    assert channels / model[0].num_groups >= min(channels, 16) or kind == "2d"
    assert model[0](x).std(0).min() > 0.1
