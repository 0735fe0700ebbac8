"""wrap, unwrap, check: every obstacle in one error, and everything but the classes stays as it was."""

import pytest
import torch
from case_models import Wired, cnn, transformer
from cases import case
from comparing import assert_dicts_close, exact_or_refused, gradients
from torch import nn

import ghostclip
from ghostclip import UnsupportedModelError
from ghostclip.nn import GhostLayer

# name: a module with that obstacle, and words its remedy must contain
OBSTACLES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), "GroupNorm"),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), "GroupNorm"),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), "GroupNorm"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), "GroupNorm"),
    "BatchNorm without affine": (lambda: nn.BatchNorm1d(4, affine=False), "GroupNorm"),
    "BatchNorm frozen": (lambda: nn.BatchNorm1d(4).requires_grad_(False), "GroupNorm"),
    "BatchNorm in eval mode without statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(),
        "GroupNorm",
    ),
    "InstanceNorm with statistics": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), "track_running_stats"),
    "Embedding max_norm": (lambda: nn.Embedding(5, 4, max_norm=1.0), "max_norm"),
    "Embedding scale_grad_by_freq": (lambda: nn.Embedding(5, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "Embedding sparse": (lambda: nn.Embedding(5, 4, sparse=True), "sparse=False"),
    "LazyLinear": (lambda: nn.LazyLinear(4), "batch"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_is_found_with_its_path_and_remedy(name):
    build, remedy = OBSTACLES[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"inner": build()}))
    (finding,) = ghostclip.check(model)
    assert "1.inner" in str(finding)
    assert remedy in str(finding)
    with pytest.raises(UnsupportedModelError, match=r"1\.inner") as error:
        ghostclip.wrap(model)
    assert remedy in str(error.value)
    with pytest.raises(UnsupportedModelError, match=r"1\.inner"):
        ghostclip.GhostClipper(model)


def test_all_findings_come_at_once_and_nothing_is_changed():
    model = nn.ModuleDict({name.replace(".", " "): build() for name, (build, _) in OBSTACLES.items()})
    model["fine"] = nn.Linear(3, 3)
    kinds = [type(module) for module in model.modules()]
    findings = [str(finding) for finding in ghostclip.check(model)]
    with pytest.raises(UnsupportedModelError) as error:
        ghostclip.wrap(model)
    assert len(findings) == len(OBSTACLES)
    for name in OBSTACLES:
        assert any(name in finding for finding in findings)
        assert name in str(error.value)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("build", [cnn, transformer])
def test_a_good_model_has_no_findings(build):
    assert ghostclip.check(build(nn)) == []
    assert ghostclip.check(ghostclip.wrap(build(nn))) == []


@pytest.mark.parametrize("trained", [True, False])
def test_a_bare_parameter_in_a_forward_of_the_users_own(trained):
    model = Wired(lambda m, x: m.body(x) + m.token, body=nn.Linear(3, 4))
    model.register_parameter("token", nn.Parameter(torch.zeros(4), requires_grad=trained))
    assert ghostclip.check(model) == []
    assert exact_or_refused(model.double(), (torch.randn(5, 3, dtype=torch.float64),)) is None


def test_a_parametrized_weight_is_exact():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    assert ghostclip.check(model) == []
    assert exact_or_refused(model.double(), (torch.randn(5, 3, dtype=torch.float64),)) is None


def test_batchnorm_in_eval_mode_is_the_affine_map_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).requires_grad_(False)).double().eval()
    assert ghostclip.check(model) == []
    clipper, x = ghostclip.GhostClipper(model, clipping=1e9), torch.randn(5, 3, dtype=torch.float64)
    clipper.backward(model(x).square().sum(1))
    found = gradients(model)
    model.zero_grad()
    ghostclip.unwrap(model)(x).square().sum().backward()
    assert_dicts_close(found, gradients(model), 1e-10)


def test_batchnorm_put_back_into_train_mode_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).requires_grad_(False)).eval()
    clipper = ghostclip.GhostClipper(model)
    model.train()
    with pytest.raises(UnsupportedModelError):
        clipper.backward(model(torch.randn(5, 3)).square().sum(1))


@pytest.mark.parametrize("build", [cnn, transformer])
def test_wrapping_is_in_place_and_undone_by_unwrap(build):
    model = build(nn)
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    assert ghostclip.wrap(model) is model
    once = [type(module) for module in model.modules()]
    assert [type(module) for module in ghostclip.wrap(model).modules()] == once
    wrapped = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    assert all(isinstance(module, GhostLayer) for module in wrapped)
    assert all(isinstance(module, before[name][1]) for name, module in model.named_modules())
    ghostclip.wrap(model, batch_dim=1)
    ghostclip.unwrap(model)
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before
    assert not any("ghost" in key for module in model.modules() for key in vars(module))


def test_an_optimizer_built_before_wrapping_stays_valid():
    model = case("cnn").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model))
    clipper.backward(case("cnn").losses(model(*case("cnn").inputs())))
    moved = gradients(model)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] - moved[name])


def test_hooks_and_attributes_survive():
    model, seen = nn.Sequential(nn.Linear(3, 4)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model[0].note = "mine"
    ghostclip.wrap(model)(torch.randn(2, 3))
    assert seen == [(2, 4)]
    assert ghostclip.unwrap(model)[0].note == "mine"


class PlainSubclass(nn.Linear):
    """Torch's own forward."""


class OtherForward(nn.Linear):
    """A forward that Linear's rule does not describe, measured by the fallback."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x) * self.bias


@pytest.mark.parametrize("kind", [PlainSubclass, OtherForward])
def test_a_subclass_is_exact_whether_or_not_the_rule_describes_its_forward(kind):
    model = kind(3, 4).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = [torch.autograd.grad(kind.forward(model, row[None]).sum(), list(model.parameters())) for row in x]
    assert ghostclip.check(model) == []
    found = ghostclip.GhostClipper(model).norms(model(x).sum(1))
    exact = torch.stack([torch.cat([part.flatten() for part in parts]).norm() for parts in expected])
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=0)


@pytest.mark.parametrize("new", ["GroupNorm", "LayerNorm"])
def test_batchnorm_is_replaced_on_request(new):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Sequential(nn.BatchNorm2d(6))).double()
    model = ghostclip.wrap(model, replace={"BatchNorm2d": new})
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    clipper = ghostclip.GhostClipper(model)
    assert clipper.norms(model(torch.randn(2, 3, 5, 5).double()).square().sum((1, 2, 3))).shape == (2,)


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


def test_layers_with_the_same_problem_share_a_line():
    layers = [nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.DataParallel(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)]
    with pytest.raises(ghostclip.UnsupportedModelError) as refusal:
        ghostclip.wrap(nn.Sequential(*layers))
    _, norms, parallel = str(refusal.value).splitlines()
    assert norms.startswith("  1. 0, 1, 3: BatchNorm2d")
    assert parallel.startswith("  2. 2: DataParallel")


@pytest.mark.parametrize(
    "options",
    [
        {"batch_dim": -1},
        {"batch_dim": {"nothing": 1}},
        {"batch_dim": {"0": True}},
        {"replace": {"Linear": "GroupNorm"}},
    ],
)
def test_options_that_name_nothing_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ghostclip.wrap(nn.Sequential(nn.Linear(3, 4)), **options)
