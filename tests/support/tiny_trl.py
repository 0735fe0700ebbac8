"""Tiny Llamas with a tokenizer trained on the spot, texts, conversations and pairs, for the tests of TRL's trainers."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL reports its use otherwise

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from ghostclip.integrations.trl import PrivacyArguments, PrivateDPOTrainer, PrivateSFTTrainer

disable_progress_bars()

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "hill", "red", "blue", "fast", "slowly", "home", "and"]
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<assistant> {% generation %}"
    "{{ message['content'] }} <eos>{% endgeneration %}{% else %}<user> {{ message['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.chat_template = TEMPLATE
    return found


def llama(seed: int = 0) -> Any:
    """One layer of width 8, its weights by ``seed``."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + len(SPECIAL), hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    """A GPT-2 of that size, whose linear layers are transformers' own."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS) + len(SPECIAL), n_embd=8, n_inner=12, n_layer=1, n_head=2, n_positions=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def words(count: int, draw: torch.Generator) -> str:
    return " ".join(WORDS[int(place)] for place in torch.randint(len(WORDS), (count,), generator=draw))


def drawn(rows: int, row: Any) -> Dataset:
    """So many rows, each ``row(words)`` with a function that makes a text of 2 to 8 words."""
    draw = torch.Generator().manual_seed(3)

    def some() -> str:
        return words(int(torch.randint(2, 9, (), generator=draw)), draw)

    return Dataset.from_list([row(some) for _ in range(rows)])


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


TEXTS = {
    "text": lambda some: {"text": some()},
    "prompt and completion": lambda some: {"prompt": some(), "completion": " " + some()},
    "conversation": lambda some: {
        "messages": [message for role in ("user", "assistant") * 2 for message in said(role, some())]
    },
    "prompt and answer": lambda some: {"prompt": said("user", some()), "completion": said("assistant", some())},
}
PAIRS = {
    "texts": lambda some: {"prompt": some(), "chosen": " " + some(), "rejected": " " + some()},
    "conversations": lambda some: {
        "prompt": said("user", some()), "chosen": said("assistant", some()), "rejected": said("assistant", some())
    },
}  # fmt: skip


def arguments(kind: Any, folder: Any, **changes: Any) -> Any:
    """Three steps of about two examples, each processed by one physical batch of four."""
    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "learning_rate": 0.5,
        "optim": "sgd", "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "report_to": [],
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0,
        "gradient_checkpointing": False, "max_length": 24, "seed": 1,
    }  # fmt: skip
    return kind(str(folder), **{**options, **changes})


def privacy(folder: Any, **changes: Any) -> PrivacyArguments:
    """Without noise, and without the self-check, which takes longer than all steps."""
    options = {"noise_multiplier": 0.0, "target_delta": 1e-2, "ledger": str(folder / "run.ledger"), "self_check": False}
    return PrivacyArguments(**{**options, **changes})


def made(kind: Any, config: Any, folder: Any, data: Any, more: dict[str, Any], changes: dict[str, Any]) -> Any:
    """A trainer, private unless ``kind`` is one of TRL's own."""
    private = {} if kind in (SFTTrainer, DPOTrainer) else {"privacy": privacy(folder)}
    options = {"processing_class": tokenizer(), **private, **more}
    if "model" not in options:
        options["model"] = llama()
    return kind(args=arguments(config, folder, **changes), train_dataset=data, **options)


def sft(folder: Any, data: Any, kind: Any = PrivateSFTTrainer, more: Any = None, **changes: Any) -> Any:
    """An SFT trainer; ``more`` are arguments of its constructor, ``changes`` of SFTConfig."""
    return made(kind, SFTConfig, folder, data, more or {}, changes)


def dpo(folder: Any, data: Any, kind: Any = PrivateDPOTrainer, more: Any = None, **changes: Any) -> Any:
    """A DPO trainer, with a reference model of other weights unless an adapter is trained."""
    more = more or {}
    reference = {} if "peft_config" in more else {"ref_model": llama(1)}
    return made(kind, DPOConfig, folder, data, {**reference, **more}, changes)
