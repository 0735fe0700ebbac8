"""ghostclip.nn as a drop-in for torch.nn: names, classes, constructors, and what it refuses to build."""

import inspect

import pytest
import torch
from torch import nn as torch_nn

import ghostclip
from ghostclip import UnsupportedModelError, nn
from ghostclip.nn import GhostLayer

WRAPPERS = {
    "Linear": (3, 4),
    "Conv1d": (2, 4, 3),
    "Conv2d": (2, 4, 3),
    "Conv3d": (2, 4, 3),
    "Bilinear": (3, 4, 2),
    "ConvTranspose1d": (2, 4, 3),
    "ConvTranspose2d": (2, 4, 3),
    "ConvTranspose3d": (2, 4, 3),
    "Embedding": (5, 4),
    "EmbeddingBag": (5, 4),
    "LayerNorm": (4,),
    "RMSNorm": (4,),
    "GroupNorm": (2, 4),
    "InstanceNorm1d": (4,),
    "InstanceNorm2d": (4,),
    "InstanceNorm3d": (4,),
    "PReLU": (4,),
    "RNN": (3, 4),
    "LSTM": (3, 4),
    "GRU": (3, 4),
    "MultiheadAttention": (4, 2),
}
MIXERS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
PUBLIC = [name for name in dir(torch_nn) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_of_torch_nn_is_here(name):
    ours, theirs = getattr(nn, name), getattr(torch_nn, name)
    if isinstance(theirs, type) and issubclass(theirs, torch_nn.Module):
        assert issubclass(ours, theirs)
    elif inspect.ismodule(theirs):  # ours may be a file of the same name, which then passes torch's names through
        assert all(getattr(ours, inner) is getattr(theirs, inner) for inner in getattr(theirs, "__all__", ()))
    else:
        assert ours is theirs


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_a_subclass_with_the_same_constructor_and_keys(name):
    ours, theirs = getattr(nn, name), getattr(torch_nn, name)
    assert issubclass(ours, theirs)
    assert issubclass(ours, GhostLayer)
    assert ours.__name__ == name
    assert inspect.signature(ours) == inspect.signature(theirs)
    torch.manual_seed(3)
    found = ours(*WRAPPERS[name]).state_dict()
    torch.manual_seed(3)
    expected = theirs(*WRAPPERS[name]).state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", WRAPPERS)
def test_states_load_both_ways(name):
    ours, theirs = getattr(nn, name)(*WRAPPERS[name]), getattr(torch_nn, name)(*WRAPPERS[name])
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())


@pytest.mark.parametrize("name", MIXERS)
def test_layers_that_mix_examples_raise_when_constructed(name):
    with pytest.raises(UnsupportedModelError, match="GroupNorm") as error:
        getattr(nn, name)(4)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "name", ["ReLU", "Sequential", "MaxPool2d", "CrossEntropyLoss", "Dropout", "Module", "Parameter"]
)
def test_layers_without_parameters_are_torchs_own(name):
    assert getattr(nn, name) is getattr(torch_nn, name)


def test_submodules_of_torch_nn_pass_through():
    from ghostclip.nn import functional, init, utils

    assert functional is torch_nn.functional
    assert init is torch_nn.init
    assert utils is torch_nn.utils
    with pytest.raises(AttributeError, match="Linaer"):
        nn.Linaer  # noqa: B018


def test_options_of_constructors_arrive():
    layer = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False, padding_mode="circular", dtype=torch.float64)
    assert (layer.stride, layer.groups, layer.padding_mode, layer.bias) == ((2, 2), 2, "circular", None)
    assert layer.weight.dtype == torch.float64
    attention = nn.MultiheadAttention(8, 2, dropout=0.25, kdim=3, vdim=5, batch_first=True)
    assert (attention.dropout, attention.batch_first, attention.k_proj_weight.shape) == (0.25, True, (8, 3))
    pretrained = nn.Embedding.from_pretrained(torch.eye(3), freeze=False)
    assert isinstance(pretrained, GhostLayer)


@pytest.mark.parametrize("training", [True, False])
def test_attention_dropout_follows_torchs_random_numbers(training):
    torch.manual_seed(1)
    ours = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).train(training)
    theirs = torch_nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).train(training)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 8)
    torch.manual_seed(2)
    found = ours(x, x, x)
    torch.manual_seed(2)
    expected = theirs(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers_are_torchs_own_built_of_wrappers(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    assert isinstance(layer, torch_nn.TransformerEncoderLayer)
    clipper = ghostclip.GhostClipper(layer)
    owners = [layer.get_submodule(name.rpartition(".")[0]) for name, _ in layer.named_parameters()]
    assert all(isinstance(module, GhostLayer) for module in owners)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    assert clipper.norms(layer(x).square().sum((1, 2))).shape == (3,)


def test_unbatched_inputs_work_outside_of_training():
    with torch.no_grad():
        assert nn.Linear(3, 4)(torch.randn(3)).shape == (4,)
        assert nn.Conv2d(2, 4, 3)(torch.randn(2, 5, 5)).shape == (4, 3, 3)
        assert nn.ConvTranspose2d(2, 4, 3)(torch.randn(2, 5, 5)).shape == (4, 7, 7)
        assert nn.InstanceNorm1d(2, affine=True)(torch.randn(2, 5)).shape == (2, 5)
        assert nn.LSTM(3, 4)(torch.randn(6, 3))[0].shape == (6, 4)
        assert nn.MultiheadAttention(4, 2)(*[torch.randn(5, 4)] * 3)[0].shape == (5, 4)


@pytest.mark.parametrize("name", WRAPPERS)
def test_layers_move_between_types_and_print_as_torchs_do(name):
    ours, theirs = getattr(nn, name)(*WRAPPERS[name]), getattr(torch_nn, name)(*WRAPPERS[name])
    assert repr(ours) == repr(theirs)
    assert all(p.dtype == torch.float64 for p in ours.double().parameters())
