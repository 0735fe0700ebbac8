"""Models of transformers under Opacus's interface: losses of their own, and losses from their logits."""

from typing import Any

import pytest
import torch
from opacus_programs import MAX_NORM, assert_by_hand, train
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

from ghostclip import LossShapeError
from ghostclip.compat.opacus import PrivacyEngine
from ghostclip.integrations.huggingface_losses import losses_for

SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
BERT: dict[str, Any] = {"vocab_size": 30, "max_position_embeddings": 8, "hidden_dropout_prob": 0.0,
                        "attention_probs_dropout_prob": 0.0, **SMALL}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 30, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "pad_token_id": 0,
                       "bos_token_id": 1, "eos_token_id": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                       }  # fmt: skip
VIT: dict[str, Any] = {"image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_dropout_prob": 0.0, **SMALL}


def bert(labels: int, **options: Any) -> nn.Module:
    return BertForSequenceClassification(BertConfig(num_labels=labels, **options, **BERT))


def one_of_three() -> Tensor:
    return torch.randint(3, ())


# By name: model, and the labels of an example.
CLASSIFIERS: dict[str, tuple[Any, Any]] = {
    "one of three": (lambda: bert(3), one_of_three),
    "several of three": (lambda: bert(3), lambda: torch.randint(2, (3,)).double()),
    "a number": (lambda: bert(1), lambda: torch.rand(()).double()),
    "a tuple": (lambda: bert(3, return_dict=False), one_of_three),
    "GPT-2": (lambda: GPT2ForSequenceClassification(GPT2Config(num_labels=3, **GPT)), one_of_three),
    "images": (lambda: ViTForImageClassification(ViTConfig(num_labels=3, **VIT)), one_of_three),
}
TOKENS: dict[str, Any] = {
    "causal": lambda: GPT2LMHeadModel(GPT2Config(**GPT)),
    "masked": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "tags": lambda: BertForTokenClassification(BertConfig(num_labels=30, **BERT)),
}


def private(model: nn.Module, labels: Any, **options: Any) -> Any:
    """Model, optimizer and loader of 20 examples, without noise; batches are drawn by a seed, so that none is empty."""
    options.setdefault("noise_generator", torch.Generator().manual_seed(1))
    images = isinstance(model, ViTForImageClassification)
    data = [
        {"labels": labels(), **({"pixel_values": torch.randn(1, 4, 4).double()} if images else
                                {"input_ids": torch.randint(3, 30, (5,))})}
        for _ in range(20)
    ]  # fmt: skip
    return PrivacyEngine().make_private(
        module=model.double(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=MAX_NORM,
        data_loader=DataLoader(data, batch_size=5, collate_fn=lambda rows: BatchEncoding(default_data_collator(rows))),
        noise_multiplier=0.0, **options,
    )  # type: ignore[arg-type]  # fmt: skip


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(**batch)
    return outputs[0] if isinstance(outputs, tuple) else outputs.loss


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.one_in(2)
def test_the_loss_of_a_classifier_is_clipped_example_by_example(name: str) -> None:
    torch.manual_seed(0)
    build, labels = CLASSIFIERS[name]
    model, optimizer, loader = private(build(), labels)
    for step in train(loader, model, optimizer, own_loss):
        assert_by_hand(step, own_loss, 5)


@pytest.mark.parametrize("name", TOKENS)
def test_a_mean_over_the_tokens_of_a_batch_is_refused_and_its_remedy_is_exact(name: str) -> None:
    torch.manual_seed(0)
    labels = lambda: torch.randint(3, 30, (5,)).where(torch.rand(5) < 0.7, -100)  # noqa: E731
    model, optimizer, loader = private(TOKENS[name](), labels)
    own_loss(model, next(iter(loader))).backward()
    with pytest.raises(LossShapeError, match=r"model computed itself.*losses_for\(model\)\(model, batch\)\.mean"):
        optimizer.step()
    optimizer.zero_grad()

    def remedy(model: nn.Module, batch: Any) -> Tensor:
        return losses_for(model)(model, batch).mean()

    for step in train(loader, model, optimizer, remedy):
        assert_by_hand(step, remedy, 5)


REFUSED = {
    "labels that are left out": ("one of three", lambda: torch.tensor(-100), {}, "label"),
    "a sum": ("one of three", one_of_three, {"loss_reduction": "sum"}, r"batch\)\.sum"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_other_losses_of_classifiers_are_refused(why: str) -> None:
    torch.manual_seed(0)
    name, labels, options, says = REFUSED[why]
    kept = iter([torch.tensor(1)] * 10)
    model, optimizer, loader = private(CLASSIFIERS[name][0](), lambda: next(kept, labels()), **options)
    for batch in loader:
        own_loss(model, batch).backward()
        if "loss_reduction" in options or len(set(batch["labels"].tolist())) > 1:
            break
        optimizer.step()
    with pytest.raises(LossShapeError, match=f"that the model computed itself.*{says}"):
        optimizer.step()
