"""Subclasses of layers, and published networks: the libraries' own code.

The latter is ``pip install ".[models]"``; without it those tests are skipped.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from comparing import assert_exact
from torch import nn

import ghostclip
from ghostclip.nn import GhostLayer

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

from zoo import SUBJECTS
from zoo.measuring import STEPS, measure


class OwnUse(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.weight.sum()


class UsedTwice(nn.Linear):
    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.weight * self.weight.abs())


class NoUse(nn.Linear):
    def forward(self, x):
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

    module, x = Theirs(6, 4).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    assert_exact(module, x)
    assert type(module).__module__ == "ghostclip.integrations.huggingface_layers"
    assert type(ghostclip.unwrap(module)) is Theirs


# One runs in every suite; all of them are in docs/supported_models.md.
QUICK = "GCN"
MARKED = [
    pytest.param(subject, id=subject.name.replace(" ", "_"), marks=[] if subject.name == QUICK else [pytest.mark.slow])
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
