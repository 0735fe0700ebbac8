"""Experts: what the laws don't say of support/expert_models.py, and those of transformers, unmodified.

experiments/zoo has more families, and what is refused.
"""

import pytest
import torch
from case_models import Wired
from comparing import assert_exact_by_losses
from expert_models import EXPERTS, LOSSES, WAYS, Experts

import ghostclip

losses_of = LOSSES["plain"]


def tokens(examples=4, dtype=torch.float64):
    return torch.randn(examples, 5, 4, dtype=dtype)


def test_an_expert_that_no_token_reaches_gets_zeros():
    model = Experts(WAYS["matrices"]).double()
    with torch.no_grad():
        model.router.bias[EXPERTS - 1] = -1e3
    clipper = ghostclip.GhostClipper(model)
    grads = clipper.per_example_grads(losses_of(model, tokens(3)))
    assert not grads["up"][:, -1].any()
    assert grads["up"][:, 0].any()
    assert_exact_by_losses(clipper, losses_of(model, tokens(3)))


def test_a_row_that_nothing_uses_harms_no_other_example():
    """What is dropped isn't finite, of an example that is; it belongs to nobody."""

    def way(m, h, weights, chosen):
        rows = m.layers[0]((h / torch.tensor(m.divisor).view(-1, 1))[[0, 5, 10, 15, 16]])
        return torch.zeros_like(h).index_add(0, torch.tensor([0, 5, 10, 15]), rows[:4])

    model = Experts(way).double()
    model.divisor = [1.0] * 20
    x, clipper = tokens(), ghostclip.GhostClipper(model, 0.1)
    clean = clipper.norms(losses_of(model, x))
    model.divisor[16] = 0.0
    norms = clipper.norms(losses_of(model, x))
    assert torch.allclose(norms[:3], clean[:3], rtol=1e-10)


@pytest.mark.parametrize("sent", [[1, 1, 1, 1], [1, 1, 2, 3], [1, 1, 1, 1, 1, 2, 3, 3]])
def test_as_many_rows_as_examples_of_which_some_are_not_finite_leave_out_nobody_else(sent):
    """Where an expert is sent so many rows that they could be one, or two, of each example."""

    def wiring(m, x):
        h, row = m.below(x).tanh(), torch.tensor(sent)
        return (h + torch.zeros_like(h).index_add(0, row, m.expert(h[row]))).square().sum(1)

    model, x = Wired(wiring, below=torch.nn.Linear(4, 4), expert=torch.nn.Linear(4, 4)).double(), tokens()[:, 0]
    x[1] = torch.nan
    result = ghostclip.GhostClipper(model, 0.1).backward(model(x))
    assert (result.weights == 0).tolist() == [False, True, False, False]


TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32,
    "decoder_sparse_step": 1, "pad_token_id": 0,
}  # fmt: skip


def token_losses(model, tokens):
    """[B], the cross entropy of each text's next words."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


# torch's kernel of grouped products has no float64 on a processor.
@pytest.mark.parametrize(
    ("experts", "dtype", "tolerance"), [("eager", torch.float64, 1e-10), ("grouped_mm", torch.float32, 2e-4)]
)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
@pytest.mark.one_in(8)
@pytest.mark.filterwarnings("default")  # the library's own
def test_families_against_the_loop(name, experts, dtype, tolerance):
    """Two batches, whose tokens go other ways."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**TEXT, experts_implementation=experts)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    for second_pass in ("cached", "reweight"):
        clipper = ghostclip.GhostClipper(model, 0.3, second_pass=second_pass)
        for _ in range(2):
            assert_exact_by_losses(clipper, token_losses(model, torch.randint(1, 32, (4, 7))), tolerance)
