"""What the experiments with TRL's trainers run on: random Llamas, a tokenizer of one token a word, texts and pairs."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL reports its use otherwise

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["QUIET", "llama", "pairs", "texts", "tokenizer"]

disable_progress_bars()
SPECIAL = ("<pad>", "<eos>", "<unk>")
# Of SFTConfig and DPOConfig.
QUIET: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_strategy": "no",
    "max_grad_norm": 0.0, "gradient_checkpointing": False,
}  # fmt: skip


def tokenizer(words: int) -> Any:
    """One token a word: "w3" is the token 3."""
    names = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), words))]
    inner = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(words: int, width: int, layers: int, seed: int = 0, **options: Any) -> Any:
    """Random weights by ``seed``; a head is 32 wide, or 8 in a model narrower than 64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // (32 if width >= 64 else 8), pad_token_id=0, eos_token_id=1, bos_token_id=None,
        **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def texts(rows: int, words: int, low: int, high: int, seed: int = 0, *, many_short: bool = False) -> Dataset:
    """Texts of ``low`` to ``high`` random words: each length as likely, or each logarithm, so that most are short."""
    draw = torch.Generator().manual_seed(seed)
    return Dataset.from_list([{"text": _text(words, low, high, draw, many_short)} for _ in range(rows)])


def pairs(rows: int, words: int, low: int, high: int, seed: int = 0) -> Dataset:
    """Prompts and two completions of each, of such lengths; completions end with "<eos>", so that TRL adds none."""
    draw = torch.Generator().manual_seed(seed)

    def completion() -> str:
        return f" {_text(words, low, high, draw)} <eos>"

    return Dataset.from_list(
        [
            {"prompt": _text(words, low, high, draw), "chosen": completion(), "rejected": completion()}
            for _ in range(rows)
        ]
    )


def _text(words: int, low: int, high: int, draw: torch.Generator, many_short: bool = False) -> str:
    share = float(torch.rand((), generator=draw))
    length = round(low * (high / low) ** share) if many_short else low + int(share * (high - low + 1))
    drawn = torch.randint(len(SPECIAL), words, (length,), generator=draw)
    return " ".join(f"w{number}" for number in drawn.tolist())
