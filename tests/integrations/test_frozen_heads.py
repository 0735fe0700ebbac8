"""Losses in chunks behind an output layer that isn't trained: against logits, and clipped sums against a loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import oracle
import transformers
from comparing import gradients
from dispatched import Live
from peft import LoraConfig, get_peft_model

from ghostclip import GhostClipper
from ghostclip.integrations import frozen_heads
from ghostclip.integrations.frozen_heads import IGNORED, frozen_head_losses
from ghostclip.integrations.huggingface_losses import next_token_losses, token_log_probabilities

pytestmark = pytest.mark.filterwarnings("ignore:`.*` is deprecated:FutureWarning")

EXAMPLES, LENGTH, WIDTH, WORDS = 4, 7, 8, 50
LLAMA: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None, "initializer_range": 0.5,
}  # fmt: skip


def adapted(kind: str = "Llama", checkpointing: bool = False, **more: Any) -> nn.Module:
    """A tiny model in float64 whose adapters alone are trained, none of them zero."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**LLAMA, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=2, **options)).double().train()


def batch() -> dict[str, Tensor]:
    """Texts of 7, 5, 3 and 7 tokens, padded; the first two have a prompt without loss."""
    torch.manual_seed(1)
    texts, lengths = torch.randint(2, WORDS, (EXAMPLES, LENGTH)), torch.tensor([7, 5, 3, 7])
    mask = torch.arange(LENGTH) < lengths[:, None]
    labels = texts.masked_fill(~mask, IGNORED)
    labels[:2, :3] = IGNORED
    return {"input_ids": texts * mask, "attention_mask": mask.long(), "labels": labels}


def by_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """[B]: the mean over an example's own label tokens."""
    labels = inputs["labels"][:, 1:]
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.mT, labels, reduction="none").sum(1) / (labels != IGNORED).sum(1)


@pytest.fixture(params=[1 << 27, 8 * WORDS * 3], ids=["one chunk", "several"])
def chunk(request: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(frozen_heads, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_are_those_of_logits(bias: bool) -> None:
    head = nn.Linear(WIDTH, WORDS, bias=bias, dtype=torch.float64).requires_grad_(False)
    hidden = torch.randn(EXAMPLES, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = batch()["labels"]
    found = frozen_head_losses(hidden, head, labels)
    expected = F.cross_entropy(head(hidden).mT, labels, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    for _ in range(2):  # of one graph
        weights = torch.rand_like(found)
        grads = [torch.autograd.grad(each, hidden, weights, retain_graph=True)[0] for each in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
        assert float(grads[0].abs().max()) > 0.1


def test_under_autocast_logits_have_its_type() -> None:
    head = nn.Linear(WIDTH, WORDS).requires_grad_(False)
    hidden, labels = torch.randn(3, WIDTH, requires_grad=True), torch.tensor([3, 4, 5])
    with torch.autocast("cpu", torch.bfloat16):
        found, logits = frozen_head_losses(hidden, head, labels), head(hidden)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(found, F.cross_entropy(logits.float(), labels, reduction="none"), rtol=1e-6, atol=1e-6)


def test_a_trained_head_is_refused() -> None:
    hidden, labels = torch.randn(3, WIDTH), torch.tensor([3, 4, 5])
    with pytest.raises(ValueError, match=r"requires_grad_\(False\)"):
        frozen_head_losses(hidden, nn.Linear(WIDTH, WORDS), labels)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.one_in(2)
def test_clipped_sums_are_those_of_a_loop_by_logits(checkpointing: bool, second_pass: str) -> None:
    """With padding and prompts that have no loss. Llama normalizes in float32, so that sums round as the loop's do."""
    model, inputs = adapted(checkpointing=checkpointing), batch()
    losses = by_logits(model, inputs)
    loop = oracle.grads_of_single_losses(model, losses)
    norms = oracle.norms(loop)
    bound = float(norms.median())
    clipper = GhostClipper(model, bound, second_pass=second_pass)
    for _ in range(3):  # the third isn't measured
        model.zero_grad()
        result = clipper.clip(next_token_losses, inputs)
    torch.testing.assert_close(result.losses, losses.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.norms, norms, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(model), oracle.clipped_sum(loop, bound), rtol=1e-6, atol=1e-9)
    assert clipper.verify(next_token_losses, inputs) < 1e-9


def hooked(factor: float) -> Any:
    """A hook of the head, which only looks as the self-check's do if its factor is one."""
    return lambda head: head.register_forward_hook(lambda head, given, logits: factor * logits)


# Model, its options, what is done to its head, and whether logits of all tokens are held then.
HEADS: dict[str, tuple[str, dict[str, Any], Any, bool]] = {
    "capped": ("Gemma2", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}, None, True),
    "scaled": ("Granite", {"logits_scaling": 3.0}, None, True),
    "frozen": ("Llama", {}, None, False),
    "trained": ("Llama", {}, nn.Module.requires_grad_, True),
    "watched": ("Llama", {}, hooked(1.0), False),
    "changed": ("Llama", {}, hooked(2.0), True),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_trained_or_whose_logits_are_changed_are_seen(name: str) -> None:
    """What is compared depends on no example: the same for texts that begin with padding."""
    kind, more, change, held = HEADS[name]
    model, inputs = adapted(kind, **more), batch()
    if change is not None:
        change(model.get_base_model().lm_head)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0
    inputs = {name: inputs[name].flip(1) for name in ("input_ids", "labels")}
    labels = inputs["labels"][:, 1:]
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    expected = -F.cross_entropy(logits.mT, labels, reduction="none")
    for _ in range(2):
        found, counted = token_log_probabilities(model, inputs)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(counted, labels != IGNORED)
    with Live({8 * EXAMPLES * positions * WORDS for positions in (LENGTH, LENGTH - 1)}) as live:
        token_log_probabilities(model, inputs)[0].sum().backward()
    assert (live.peak > 0) == held
