"""Published networks: what laws/test_law_of_norms.py can't ask of small ones, and the libraries' own code.

The latter is ``pip install ".[models]"``; without it those tests are skipped, and the small ones cover the same.
"""

import importlib.util
import sys
from pathlib import Path

import oracle
import pytest
import torch
from case_types import project
from comparing import assert_dicts_close, assert_exact
from real_models import MODELS, Conv1D
from torch import Tensor, nn

import ghostclip
from ghostclip.nn import GhostLayer

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

from zoo import SUBJECTS
from zoo.measuring import STEPS, measure


def test_frozen_bases_cost_nothing():
    build, inputs = MODELS["GPT with LoRA"]
    model = ghostclip.wrap(build().double())
    found = ghostclip.GhostClipper(model).norms(project(model(inputs(4))), per="parameter")
    assert list(found) == ["attention.a.default.weight", "attention.b.default.weight"]
    ghostclip.GhostClipper(model).backward(project(model(inputs(4))))
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


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
    assert_exact(nn.Sequential(nn.Linear(3, 3), kind(3, 2)).double(), torch.randn(4, 3, dtype=torch.float64))


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
QUICK = {"CLIP, contrastive", "GCN"}
MARKED = [
    pytest.param(subject, id=subject.name.replace(" ", "_"), marks=[] if subject.name in QUICK else [pytest.mark.slow])
    for subject in SUBJECTS
]


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
