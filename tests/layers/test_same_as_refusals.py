"""What `ghostclip.same_as` refuses: other values, gradients or effects, other parameters, wrong arguments."""

import copy

import declared_layers as mine
import pytest
import torch
from declared_layers import declared
from torch import nn

import ghostclip
from ghostclip import UnsupportedModelError
from ghostclip.nn.declared import DECLARED

pytestmark = pytest.mark.usefixtures("declarations")
ROWS, TOKENS, IMAGES = torch.randn(5, 3), torch.zeros(2, 3, dtype=torch.long), torch.randn(2, 1, 7, 7)

# name: (class, torch's, arguments of the class, an input, words of the error)
DIFFERENT = {
    "values": (mine.Doubled, nn.Linear, (3, 4), ROWS, "other values"),
    "gradient": (mine.DetachedBias, nn.Linear, (3, 4), ROWS, "not its gradient"),
    "padding": (mine.IndexEmbedding, nn.Embedding, (7, 4, 0), TOKENS, "not its gradient"),
    "shape": (mine.CroppedConv2d, nn.Conv2d, (1, 2, 3), IMAGES, r"\[2, 2, 3, 3\] on cpu, not"),
    "noise": (mine.Jittered, nn.Linear, (3, 4), ROWS, "other values"),
    "new buffer": (mine.Observed, nn.Linear, (3, 4), ROWS, "it changes largest"),
    "weight": (mine.Renormed, nn.Linear, (3, 4), ROWS, "it changes weight"),
    "attribute": (mine.KeptInput, nn.Linear, (3, 4), ROWS, "it changes seen"),
    "containers": (mine.Listing, nn.Linear, (3, 4), ROWS, "it changes .*penalties"),
    "input": (mine.InPlaceInput, nn.Linear, (3, 4), ROWS, "it changes its input"),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_refused_on_first_use_and_leaves_no_trace(name, grad):
    kind, target, args, x, words = DIFFERENT[name]
    if "gradient" in words and not grad:
        return
    model = declared(kind, target, *args)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes, values = dict(vars(model[1])), x.clone()
    with torch.set_grad_enabled(grad), pytest.raises(UnsupportedModelError, match=words) as error:
        model(x)
    assert f"1 ({kind.__name__})" in str(error.value)
    assert f"remove ghostclip.same_as({kind.__name__}" in str(error.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert vars(model[1]) == attributes
    assert torch.equal(x, values)
    assert torch.equal(torch.get_rng_state(), state)


REPLACED = mine.linear("Replaced")


def replace_forward(model):
    model(ROWS)
    REPLACED.forward = mine.Doubled.forward


# name: (class, a use that shows no difference, words of the error when it is used on rows, perhaps in eval mode)
LATER = {
    "an empty batch": (mine.Doubled, lambda model: model(ROWS[:0]), "other values"),
    "no gradient": (mine.DetachedBias, torch.no_grad()(lambda model: model(ROWS)), "not its"),
    "eval mode": (mine.FlaggedLinear, lambda model: (model(ROWS), model.eval()), "other values"),
    "another forward": (REPLACED, replace_forward, "other values"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_difference_is_found_when_it_shows(name):
    kind, first, words = LATER[name]
    model = declared(kind, nn.Linear, 3, 4)
    first(model)
    with pytest.raises(UnsupportedModelError, match=words):
        model(ROWS)


# name: (class, torch's, a module, words of the finding)
MISFITS = {
    "parameters more": (mine.LoRALinear, nn.Linear, lambda: mine.LoRALinear(3, 4), "another parameter up"),
    "attributes less": (mine.HandRMSNorm, nn.RMSNorm, lambda: mine.HandRMSNorm(4), "no attribute normalized_shape"),
    "parameters less": (mine.NoWeight, nn.LayerNorm, lambda: mine.NoWeight(4), "lacks the parameter weight"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_can_not_be_the_same_is_found_by_check_and_refused_by_wrap(name):
    kind, target, build, words = MISFITS[name]
    ghostclip.same_as(kind, target)
    model = nn.ModuleDict({"inner": build(), "frozen": build().requires_grad_(False)})
    findings = ghostclip.check(model)
    assert [finding.path for finding in findings] == ["inner", "frozen"]
    assert all(words in finding.problem and kind.__name__ in finding.problem for finding in findings)
    with pytest.raises(UnsupportedModelError, match=words):
        ghostclip.wrap(model)
    assert type(model["inner"]) is kind


@pytest.mark.parametrize(
    ("kind", "target", "error", "words"),
    [
        (3, nn.Linear, TypeError, "kind must be a class of modules"),
        (mine.MyLinear, "Linear", TypeError, "torch_class must be a class of modules"),
        (mine.MyLinear, nn.ReLU, ValueError, "ReLU has no rule"),
        (mine.MyLinear, nn.MultiheadAttention, ValueError, "is built of layers that have rules"),
        (nn.Linear, nn.Linear, ValueError, "Linear is torch's"),
        (ghostclip.nn.Linear, nn.Linear, ValueError, "Linear has one already"),
    ],
)
def test_arguments_that_declare_nothing(kind, target, error, words):
    with pytest.raises(error, match=words):
        ghostclip.same_as(kind, target)
    assert not DECLARED


def test_a_class_is_the_same_as_one_other():
    ghostclip.same_as(mine.MyLinear, nn.Linear)
    ghostclip.same_as(mine.MyLinear, ghostclip.nn.Linear)
    with pytest.raises(ValueError, match="MyLinear was declared to be the same as Linear"):
        ghostclip.same_as(mine.MyLinear, nn.Bilinear)


def test_out_of_memory_is_no_difference():
    def out_of_memory(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(RuntimeError, match="allocate memory"):
        declared(mine.linear("OutOfMemory", out_of_memory), nn.Linear, 3, 4)(ROWS)
