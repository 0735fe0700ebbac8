"""Published networks: their mechanisms in small, and the libraries' own code where the libraries are installed.

The latter is ``pip install ".[models]"``; without it those tests are skipped, and the former cover the same.
"""

import importlib.util
import sys
from pathlib import Path

import oracle
import pytest
import torch
from case_types import project
from comparing import assert_close, assert_dicts_close, gradients
from real_models import MODELS, Conv1D, LayerNorm2d, LearnedPositions, OffsetRMSNorm, RMSNorm, ScaledEmbedding
from torch import Tensor, nn

import ghostclip
from ghostclip.nn import GhostLayer

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

from zoo import SUBJECTS
from zoo.measuring import STEPS, measure

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])


def ready(name: str) -> tuple[nn.Module, Tensor]:
    """A model in float64, norms and biases random too, and four examples."""
    build, inputs = MODELS[name]
    torch.manual_seed(2)
    model = build().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, inputs(4)


@pytest.mark.parametrize("name", MODELS)
@every_pass
def test_networks_as_they_are_published(name, second_pass):
    model, inputs = ready(name)
    expected = oracle.per_example_grads(model, project, (inputs,))
    max_norm = float(oracle.norms(expected).median())
    clipper = ghostclip.GhostClipper(model, max_norm, second_pass=second_pass)
    found = clipper.norms(project(model(inputs)), per="parameter")
    for key, norms in oracle.norms_per_parameter(expected).items():
        assert_close(found[key], norms, 1e-10, scale=1e-3 * oracle.norms(expected), what=key)
    for _ in range(2):  # the second batch uses the decisions of the first
        model.zero_grad()
        clipper.backward(project(model(inputs)))
        assert_dicts_close(gradients(model), oracle.clipped_sum(expected, max_norm), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_networks_clipped_layer_by_layer(name):
    model, inputs = ready(name)
    expected = oracle.per_example_grads(model, project, (inputs,))
    policy = ghostclip.clipping.PerLayer(0.5)
    clipper = ghostclip.GhostClipper(model, policy)
    result = clipper.backward(project(model(inputs)))
    groups = policy.partition(list(expected))
    for group in dict.fromkeys(groups.values()):
        own = {key: grad for key, grad in expected.items() if groups[key] == group}
        threshold = 0.5 / len(set(groups.values())) ** 0.5
        assert_close(result.norms[group], oracle.norms(own), 1e-10, scale=1e-6)
        assert_dicts_close({key: gradients(model)[key] for key in own}, oracle.clipped_sum(own, threshold), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_networks_in_batches_of_other_sizes(name):
    model, _ = ready(name)
    inputs = MODELS[name][1](7)
    expected = oracle.per_example_grads(model, project, (inputs,))
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass="cached")
    for part in (slice(0, 4), slice(4, 7), slice(0, 1), slice(1, 3)):
        model.zero_grad()
        clipper.backward(project(model(inputs[part])))
        own = {key: grad[part] for key, grad in expected.items()}
        assert_dicts_close(gradients(model), oracle.clipped_sum(own, 0.5), 1e-10)


def test_frozen_bases_cost_nothing():
    model, inputs = ready("GPT with LoRA")
    ghostclip.wrap(model)
    losses = project(model(inputs))
    found = ghostclip.GhostClipper(model).norms(losses, per="parameter")
    assert list(found) == ["attention.a.default.weight", "attention.b.default.weight"]
    ghostclip.GhostClipper(model).backward(project(model(inputs)))
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


class PairNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x).roll(1, -1)


NORMS = {
    "RMSNorm": (lambda: RMSNorm(5), -1),
    "RMSNorm of 1 + weight": (lambda: OffsetRMSNorm(5), -1),
    "LayerNorm over channels": (lambda: LayerNorm2d(5), 1),
    "LayerNorm over channels, no bias": (lambda: LayerNorm2d(5, bias=False), 1),
    "a weight used twice": (lambda: PairNorm(5), -1),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_other_libraries_are_followed_through_the_graph(name):
    build, dim = NORMS[name]
    model = nn.Sequential(nn.Conv2d(2, 5, 1) if dim == 1 else nn.Linear(5, 5), ghostclip.wrap(build())).double()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter)
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64) if dim == 1 else torch.randn(4, 3, 2, 5, dtype=torch.float64)
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, 0.3)
    assert_dicts_close(clipper.per_example_grads(project(model(x))), expected, 1e-10)
    clipper.backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.3), 1e-10)


@pytest.mark.parametrize("kind", [ScaledEmbedding, LearnedPositions])
def test_a_subclass_that_leaves_its_parameters_to_its_parent_keeps_the_rule(kind):
    module = ghostclip.wrap(kind(7, 4))
    assert isinstance(module, GhostLayer)
    assert isinstance(module, kind)
    assert type(ghostclip.unwrap(module)) is kind


class OwnUse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.sum()


class UsedTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.weight * self.weight.abs())


class NoUse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def test_a_subclass_that_does_not_call_its_parent_gets_no_rule():
    assert isinstance(ghostclip.wrap(OwnUse(3, 2)), GhostLayer)
    assert not isinstance(ghostclip.wrap(NoUse(3, 2)), GhostLayer)


@pytest.mark.parametrize("kind", [OwnUse, UsedTwice, NoUse])
def test_a_subclass_that_uses_its_parameters_is_exact(kind):
    model, x = nn.Sequential(nn.Linear(3, 3), kind(3, 2)).double(), torch.randn(4, 3, dtype=torch.float64)
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, 0.3)
    clipper.backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.3), 1e-10)


def test_transformers_conv1d_has_a_rule():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D as Theirs

    module = ghostclip.wrap(Theirs(6, 4)).double()
    assert type(module).__module__ == "ghostclip.integrations.huggingface_layers"
    ours = Conv1D(6, 4).double()
    ours.load_state_dict(module.state_dict())
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = oracle.per_example_grads(ours, project, (x,))
    assert_dicts_close(ghostclip.GhostClipper(module).per_example_grads(project(module(x))), expected, 1e-10)
    assert type(ghostclip.unwrap(module)) is Theirs


# One or two of a kind run in every suite; all of them are in docs/supported_models.md.
QUICK = {"GPT-2", "CLIP, contrastive", "ViT", "GCN"}
MARKED = [
    pytest.param(subject, id=subject.name.replace(" ", "_"), marks=[] if subject.name in QUICK else [pytest.mark.slow])
    for subject in SUBJECTS
]


def test_the_quick_ones_are_among_them():
    assert {subject.name for subject in SUBJECTS} >= QUICK


@pytest.mark.parametrize("subject", MARKED)
@pytest.mark.filterwarnings("default")  # other libraries' own
def test_models_of_other_libraries(subject):
    if importlib.util.find_spec(subject.library) is None:
        pytest.skip(f"{subject.library} is not installed")
    if subject.refused:
        with pytest.raises(ghostclip.UnsupportedModelError, match=subject.refused):
            measure(subject)
        return
    figures = measure(subject)
    assert figures.worst <= 1e-8
    assert figures.steps == STEPS
    assert figures.neighbours <= 1 + 1e-5
