"""torch's Transformer layers built of wrappers, and attention: what a row of the table can't show."""

import warnings
from functools import partial

import oracle
import pytest
import torch
from case_types import project
from comparing import assert_dicts_close, exact_or_refused, gradients
from torch import nn as torch_nn
from torch.nn import functional

import ghostclip
from ghostclip import nn

SMALL = {"d_model": 8, "nhead": 2, "dim_feedforward": 6}


def encoder(namespace, layers=2, **options):
    torch.random.default_generator.manual_seed(1)
    one = namespace.TransformerEncoderLayer(**SMALL | {"batch_first": True, "dropout": 0.0} | options)
    return namespace.TransformerEncoder(one, layers, norm=namespace.LayerNorm(8)).double()


@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "not padded"])
def test_inference_is_torchs_and_leaves_nothing_behind(norm_first, padded):
    with warnings.catch_warnings():  # what torch says of nested tensors
        warnings.simplefilter("ignore")
        ours, theirs = (encoder(namespace, norm_first=norm_first).eval() for namespace in (nn, torch_nn))
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        padding = torch.arange(5) >= torch.tensor([[5], [3], [2]]) if padded else None
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found = ours(x, src_key_padding_mask=padding)
                assert torch.equal(found, theirs(x, src_key_padding_mask=padding))
                assert not found.requires_grad
    assert exact_or_refused(ours, (x,)) is None  # in eval mode, but with gradients
    ours.zero_grad()
    assert exact_or_refused(ours.train(), (x,)) is None


def test_dropout_draws_what_torch_draws_and_is_the_same_in_both_passes():
    ours, theirs = (encoder(namespace, dropout=0.3) for namespace in (nn, torch_nn))
    x, outputs = torch.randn(4, 5, 8, dtype=torch.float64), []
    for model in (ours, theirs):
        torch.random.default_generator.manual_seed(2)
        outputs.append(model(x))
    assert torch.equal(*outputs)
    expected = oracle.grads_of_single_losses(theirs, project(outputs[1]))
    result = ghostclip.GhostClipper(ours, clipping=0.5).backward(project(outputs[0]))
    torch.testing.assert_close(result.norms, oracle.norms(expected), rtol=1e-10, atol=0.0)
    assert_dicts_close(gradients(ours), oracle.clipped_sum(expected, 0.5), 1e-10)


@pytest.mark.parametrize("kind", ["encoder", "whole"])
def test_the_fast_attention_kernel_is_used_and_no_other(kind, monkeypatch):
    fast, calls = functional.scaled_dot_product_attention, []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fast(*a, **k))
    monkeypatch.setattr(torch, "bmm", lambda *a, **k: pytest.fail("attention weights were formed"))
    whole = nn.Transformer(**SMALL, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert (encoder(nn)(x) if kind == "encoder" else whole.double()(x, x)).requires_grad
    assert len(calls) == (2 if kind == "encoder" else 3)


class Gated(nn.TransformerEncoderLayer):
    """A user's own layer with one more part and a forward around torch's."""

    def __init__(self, width):
        super().__init__(width, 2, 6, dropout=0.0, batch_first=True)
        self.gate = nn.Linear(width, width)

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        return torch.sigmoid(self.gate(src)) * super().forward(src, src_mask, src_key_padding_mask, is_causal)


@pytest.mark.parametrize("namespace", [nn, torch_nn], ids=["ours", "torch's"])
def test_time_first_is_exact_with_as_many_steps_as_examples(namespace):
    model, x = namespace.TransformerEncoderLayer(**SMALL, dropout=0.0), torch.randn(5, 5, 8, dtype=torch.float64)
    assert exact_or_refused(model.double(), (x,), [1], partial(project, batch_dim=1)) is None


def test_a_user_s_layer_made_of_one_is_exact():
    model = torch_nn.Sequential(Gated(8), nn.TransformerEncoder(Gated(8), 1, enable_nested_tensor=False))
    assert exact_or_refused(model.double(), (torch.randn(5, 5, 8, dtype=torch.float64),)) is None
