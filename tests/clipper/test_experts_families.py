"""Mixtures of experts of transformers, unmodified, against the loop; experiments/zoo has more, and what is refused."""

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


def token_losses(model, tokens):
    """[B], the cross entropy of each text's next words."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].transpose(1, 2)
    return nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


# torch's kernel of grouped products has no float64 on a processor.
@pytest.mark.parametrize(
    ("experts", "dtype", "tolerance"), [("eager", torch.float64, 1e-10), ("grouped_mm", torch.float32, 2e-4)]
)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
@pytest.mark.one_in(4)
def test_families_against_the_loop(name, experts, dtype, tolerance):
    """Two batches, whose tokens go other ways."""
    config = getattr(transformers, f"{name}Config")(**TEXT, experts_implementation=experts)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    for second_pass in ("cached", "reweight"):
        clipper = ghostclip.GhostClipper(model, 0.3, second_pass=second_pass)
        for _ in range(2):
            assert_exact_by_losses(clipper, token_losses(model, torch.randint(1, 32, (4, 7))), tolerance)
