"""Mixtures of experts of transformers, unmodified, against the loop over single examples."""

import pytest
import torch
from comparing import assert_exact_by_losses
from torch import nn

import ghostclip

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # the library's own

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32,
    "decoder_sparse_step": 1, "pad_token_id": 0,
}  # fmt: skip
SWITCH = {
    "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2,
    "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "pad_token_id": 0,
    "decoder_start_token_id": 0, "dropout_rate": 0.0, "router_jitter_noise": 0.0, "expert_capacity": 3,
}  # fmt: skip


def family(name, experts="eager"):
    config = getattr(transformers, f"{name}Config")(**TEXT, experts_implementation=experts)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def token_losses(model, tokens, **options):
    """[B], the cross entropy of each text's next words."""
    found = model(input_ids=tokens, use_cache=False, **options)
    logits = found.logits[:, :-1].transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)
    return losses + found.aux_loss if options else losses


def sequence_losses(model, tokens):
    logits = model(input_ids=tokens, decoder_input_ids=tokens[:, :4], use_cache=False).logits.transpose(1, 2)
    return nn.functional.cross_entropy(logits, tokens[:, 1:5], reduction="none").mean(1)


def assert_exact(model, losses_of, tolerance):
    """Norms and both clipped sums of two batches, whose tokens go other ways."""
    for second_pass in ("cached", "reweight"):
        clipper = ghostclip.GhostClipper(model, 0.3, second_pass=second_pass)
        for _ in range(2):
            assert_exact_by_losses(clipper, losses_of(model, torch.randint(1, 32, (4, 7))), tolerance)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
@pytest.mark.one_in(4)
def test_families_against_the_loop(name, experts):
    """torch's kernel of grouped products has no float64 on a processor."""
    if experts == "eager":
        assert_exact(family(name).double(), token_losses, 1e-10)
    else:
        assert_exact(family(name, experts), token_losses, 2e-4)


@pytest.mark.slow
def test_switch_with_dropped_tokens():
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**SWITCH))
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.dtype = torch.float64  # of the router, which computes in float32
    assert_exact(model.double(), sequence_losses, 1e-10)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_routers_loss_over_the_batch_is_refused(name, experts):
    model = family(name, experts)
    tokens = torch.randint(1, 32, (4, 7))
    options = {"output_router_logits": True, "labels": tokens}
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model))
    with pytest.raises(ghostclip.UnsupportedModelError):
        clipper.backward(token_losses(model, tokens, **options))
    with pytest.raises(ghostclip.UnsupportedModelError, match="mix"):
        clipper.clip(lambda model, tokens: token_losses(model, tokens, **options), tokens)
