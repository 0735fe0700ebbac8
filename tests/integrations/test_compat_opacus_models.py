"""Models of transformers under Opacus's interface: losses of their own, and losses from their logits."""

import itertools
from typing import Any

import pytest
import torch
from opacus_programs import assert_by_hand, small, train
from torch import Tensor, nn

pytest.importorskip("transformers")

import tiny_trainers as tt
from transformers import (
    BatchEncoding,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from ghostclip import LossShapeError
from ghostclip.integrations.huggingface_losses import losses_for


def bert(**changes: Any) -> nn.Module:
    return tt.bert("SequenceClassification", **changes)


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(
        GPT2Config(**tt.gpt2().config.to_dict() | {"num_labels": 3, "pad_token_id": 0})
    )


def labelled(draw: Any) -> Any:
    return lambda: {"input_ids": tt.tokens(), "labels": draw()}


# By name: model, and an example.
CLASSIFIERS: dict[str, tuple[Any, Any]] = {
    "one of three": (bert, tt.labelled_text),
    "several of three": (bert, labelled(lambda: torch.randint(2, (3,)).double())),
    "a number": (lambda: bert(num_labels=1), labelled(lambda: torch.rand(()).double())),
    "a tuple": (lambda: bert(return_dict=False), tt.labelled_text),
    "GPT-2": (gpt2, tt.labelled_text),
    "images": (tt.vit, tt.image),
}


def private(model: nn.Module, example: Any, **options: Any) -> Any:
    """Model, optimizer and loader of 20 examples, without noise; batches are drawn by a seed, so that none is empty."""
    options.setdefault("noise_generator", torch.Generator().manual_seed(1))
    collate = lambda rows: BatchEncoding(default_data_collator(rows))  # noqa: E731
    return small(model, tt.data(example, 20), 5, collate_fn=collate, **options)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(**batch)
    return outputs[0] if isinstance(outputs, tuple) else outputs.loss


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.one_in(2)
def test_the_loss_of_a_classifier_is_clipped_example_by_example(name: str) -> None:
    build, example = CLASSIFIERS[name]
    model, optimizer, loader = private(build(), example)
    for step in train(loader, model, optimizer, own_loss):
        assert_by_hand(step, own_loss, 5)


@pytest.mark.parametrize("name", ["causal language model", "masked language model", "token classification"])
def test_a_mean_over_the_tokens_of_a_batch_is_refused_and_its_remedy_is_exact(name: str) -> None:
    build, example = tt.TASKS[name]
    model, optimizer, loader = private(build(), example)
    own_loss(model, next(iter(loader))).backward()
    with pytest.raises(LossShapeError, match=r"model computed itself.*losses_for\(model\)\(model, batch\)\.mean"):
        optimizer.step()
    optimizer.zero_grad()

    def remedy(model: nn.Module, batch: Any) -> Tensor:
        return losses_for(model)(model, batch).mean()

    for step in train(loader, model, optimizer, remedy):
        assert_by_hand(step, remedy, 5)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "labels that are left out": ([1, -100], {}, "label"),
    "a sum": ([1], {"loss_reduction": "sum"}, r"batch\)\.sum"),
}


class Own(BertForSequenceClassification):
    """A loss of its own in its forward, whose value is nearly the usual one's before the model has learned anything."""

    def __init__(self, loss: Any) -> None:
        super().__init__(bert().config)
        self.loss = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        outputs = super().forward(input_ids=input_ids, output_hidden_states=True)
        return SequenceClassifierOutput(self.loss(outputs, labels), outputs.logits)


def entropy(**options: Any) -> Any:
    return lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels, **options)


OWN = {
    "smoothed": entropy(label_smoothing=0.5),
    "weighted": entropy(weight=torch.tensor([0.9, 1.0, 1.1]).double()),
    "and another": lambda outputs, labels: (
        entropy()(outputs, labels) + 1e-3 * outputs.hidden_states[-1].square().mean()
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_the_model_s_own_is_not_replaced_by_the_usual_one(name: str) -> None:
    model, optimizer, loader = private(Own(OWN[name]), tt.labelled_text)
    own_loss(model, next(iter(loader))).backward()
    with pytest.raises(LossShapeError, match="that the model computed itself"):
        optimizer.step()


def test_the_usual_loss_in_a_forward_of_the_model_s_own_is_clipped() -> None:
    model, optimizer, loader = private(Own(entropy()), tt.labelled_text)
    for step in train(loader, model, optimizer, own_loss):
        assert_by_hand(step, own_loss, 5)


@pytest.mark.parametrize("why", REFUSED)
def test_other_losses_of_classifiers_are_refused(why: str) -> None:
    labels, options, says = REFUSED[why]
    drawn = itertools.cycle(labels)
    model, optimizer, loader = private(bert(), labelled(lambda: torch.tensor(next(drawn))), **options)
    own_loss(model, next(iter(loader))).backward()
    with pytest.raises(LossShapeError, match=f"that the model computed itself.*{says}"):
        optimizer.step()
