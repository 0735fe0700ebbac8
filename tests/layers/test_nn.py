"""ghostclip.nn as a drop-in for torch.nn: names, classes, constructors, and what it refuses to build."""

import inspect

import pytest
import torch
from torch import nn as torch_nn

from ghostclip import UnsupportedModelError, nn
from ghostclip.nn import GhostLayer

WRAPPERS = {
    "Linear": (3, 4), "Bilinear": (3, 4, 2), "Embedding": (5, 4), "EmbeddingBag": (5, 4), "LayerNorm": (4,),
    "RMSNorm": (4,), "GroupNorm": (2, 4), "PReLU": (4,), "RNN": (3, 4), "LSTM": (3, 4), "GRU": (3, 4),
    "MultiheadAttention": (4, 2), "TransformerEncoderLayer": (4, 2, 6), "TransformerDecoderLayer": (4, 2, 6),
    "Transformer": (4, 2, 1, 1, 6),
    **{f"{kind}{dims}d": (2, 4, 3) for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)},
    **{f"InstanceNorm{dims}d": (4,) for dims in (1, 2, 3)},
}  # fmt: skip
# Of two layers.
STACKS = {"TransformerEncoder": "TransformerEncoderLayer", "TransformerDecoder": "TransformerDecoderLayer"}
MIXERS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
PUBLIC = [name for name in dir(torch_nn) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_of_torch_nn_is_here(name):
    ours, theirs = getattr(nn, name), getattr(torch_nn, name)
    if name in {*WRAPPERS, *STACKS, *MIXERS} or name.startswith(("RNN", "LSTM", "GRU")):
        assert issubclass(ours, theirs)
    elif ours is not theirs:  # a file of ours of the same name, which then passes torch's names through
        assert ours.__name__ == f"ghostclip.nn.{name}"
        assert all(getattr(ours, inner) is getattr(theirs, inner) for inner in getattr(theirs, "__all__", ()))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", [*WRAPPERS, *STACKS])
def test_a_wrapper_is_a_subclass_with_the_same_constructor_keys_and_words(name):
    ours, theirs = getattr(nn, name), getattr(torch_nn, name)
    assert issubclass(ours, theirs)
    assert ours.__name__ == name
    assert inspect.signature(ours) == inspect.signature(theirs)
    made = []
    for namespace in (nn, torch_nn):
        torch.manual_seed(3)
        options = WRAPPERS.get(name) or (getattr(namespace, STACKS[name])(4, 2, 6), 2)
        made.append(getattr(namespace, name)(*options))
    owners = [made[0].get_submodule(parameter.rpartition(".")[0]) for parameter, _ in made[0].named_parameters()]
    assert all(isinstance(owner, GhostLayer) for owner in owners)
    found, expected = (layer.state_dict() for layer in made)
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert repr(made[0]) == repr(made[1])
    assert all(p.dtype == torch.float64 for p in made[0].double().parameters())


@pytest.mark.parametrize("name", MIXERS)
def test_layers_that_mix_examples_raise_when_constructed(name):
    with pytest.raises(UnsupportedModelError, match="GroupNorm") as error:
        getattr(nn, name)(4)
    assert name in str(error.value)


def test_unbatched_inputs_work_outside_of_training():
    with torch.no_grad():
        assert nn.Linear(3, 4)(torch.randn(3)).shape == (4,)
        assert nn.Conv2d(2, 4, 3)(torch.randn(2, 5, 5)).shape == (4, 3, 3)
        assert nn.ConvTranspose2d(2, 4, 3)(torch.randn(2, 5, 5)).shape == (4, 7, 7)
        assert nn.InstanceNorm1d(2, affine=True)(torch.randn(2, 5)).shape == (2, 5)
        assert nn.LSTM(3, 4)(torch.randn(6, 3))[0].shape == (6, 4)
        assert nn.MultiheadAttention(4, 2)(*[torch.randn(5, 4)] * 3)[0].shape == (5, 4)
