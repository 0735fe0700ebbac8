"""Tiny random models of transformers with data, and a PrivateTrainer for them; for the tests of the integration."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments

from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer
from ghostclip.ledger import Ledger

WORDS, LENGTH, WIDTH, CLASSES, EXAMPLES = 19, 7, 8, 3, 6
IGNORED = -100
BERT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16, "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

Example = dict[str, Tensor]


def gpt2(dropout: float = 0.0) -> nn.Module:
    options = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": dropout, "embd_pdrop": dropout}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=2, attn_pdrop=dropout, **options
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=8,
            patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def wav2vec2() -> nn.Module:
    return transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
            conv_dim=(6, 6), conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2, mask_time_prob=0.0,
            feat_extract_norm="layer", do_stable_layer_norm=True, num_conv_pos_embeddings=4, layerdrop=0.0,
            num_conv_pos_embedding_groups=2, ctc_loss_reduction="mean", hidden_dropout=0.0, attention_dropout=0.0,
            feat_proj_dropout=0.0, final_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
        )
    )  # fmt: skip


def bert(task: str, **changes: Any) -> nn.Module:
    """BERT for a task; ``task`` ends the name of its class."""
    return getattr(transformers, f"BertFor{task}")(transformers.BertConfig(**BERT | changes))


def tokens() -> Tensor:
    return torch.randint(1, WORDS, (LENGTH,))


def text() -> Example:
    """A text to continue, whose first tokens (of a random number) have no label."""
    ids = tokens()
    labels = ids.clone()
    labels[: int(torch.randint(0, 4, ()))] = IGNORED
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def masked_text() -> Example:
    ids = tokens()
    return {"input_ids": ids, "labels": torch.where(torch.rand(LENGTH) < 0.4, ids, IGNORED)}


def labelled_tokens() -> Example:
    labels = torch.randint(0, CLASSES, (LENGTH,))
    labels[0] = IGNORED
    return {"input_ids": tokens(), "labels": labels}


def labelled_text() -> Example:
    return {"input_ids": tokens(), "labels": torch.randint(0, CLASSES, ())}


def translation() -> Example:
    """A text and another that ends early."""
    labels = tokens()[:5]
    labels[int(torch.randint(2, 5, ())) :] = IGNORED
    return {"input_ids": tokens(), "labels": labels}


def image() -> Example:
    return {"pixel_values": torch.randn(3, 8, 8, dtype=torch.float64), "labels": torch.randint(0, CLASSES, ())}


def question() -> Example:
    """A question with the text that answers it, and the places of the answer's first and last token."""
    start, end = torch.randint(0, LENGTH, (2,)).sort().values
    return {"input_ids": tokens(), "start_positions": start, "end_positions": end}


def speech() -> Example:
    """Of random length, with up to four labels."""
    sound, labels = torch.randn(200, dtype=torch.float64), tokens()[:4]
    labels[int(torch.randint(1, 5, ())) :] = IGNORED
    heard = torch.arange(200) < torch.randint(150, 201, ())
    return {"input_values": sound * heard, "attention_mask": heard.long(), "labels": labels}


def choices() -> Example:
    return {"input_ids": torch.stack([tokens(), tokens()]), "labels": torch.randint(0, 2, ())}


# By name: model, and an example of its data.
TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example]]] = {
    "causal language model": (gpt2, text),
    "masked language model": (lambda: bert("MaskedLM"), masked_text),
    "token classification": (lambda: bert("TokenClassification"), labelled_tokens),
    "sequence classification": (lambda: bert("SequenceClassification"), labelled_text),
    "question answering": (lambda: bert("QuestionAnswering", num_labels=2), question),
    "multiple choice": (lambda: bert("MultipleChoice", initializer_range=0.3), choices),
    "speech recognition": (wav2vec2, speech),
    "image classification": (vit, image),
    "sequence to sequence": (t5, translation),
}


def data(example: Callable[[], Example] = text, count: int = EXAMPLES) -> list[Example]:
    return [example() for _ in range(count)]


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    """Silent training on the CPU, by default in logical batches of all EXAMPLES, in physical batches of 2."""
    return TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": EXAMPLES // 2, "max_steps": 3,
            "save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True,
            "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, **options,
        },
    )  # fmt: skip


def repeatable(**options: Any) -> PrivacyArguments:
    """Repeatable noise, which reports epsilon = inf."""
    return PrivacyArguments(**{"noise": "test", "seed": 3, "noise_multiplier": 1.0, "self_check": False, **options})


def trainer(
    folder: Any, model: Any = None, examples: Any = None, privacy: PrivacyArguments | None = None,
    compute_losses: Any = None, more: Any = None, **options: Any,
) -> PrivateTrainer:  # fmt: skip
    """A PrivateTrainer; ``options`` are those of TrainingArguments, ``more`` those of Trainer."""
    return PrivateTrainer(
        model=gpt2() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=data() if examples is None else examples,
        privacy=repeatable() if privacy is None else privacy,
        compute_losses=compute_losses,
        **(more or {}),
    )


def charged(ledger: Any) -> int:
    """How many steps a ledger's file counts, of all runs."""
    return sum(spent.total() for spent in Ledger(ledger).contents.totals.values())
