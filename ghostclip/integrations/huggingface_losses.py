"""One loss for each example, for the tasks whose models compute a mean over the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from ghostclip.errors import UnsupportedModelError
from ghostclip.integrations.frozen_heads import IGNORED, frozen_head_losses
from ghostclip.integrations.huggingface_heads import base_model, head_input, head_of

__all__ = [
    "IGNORED",
    "ComputeLosses",
    "class_losses",
    "class_losses_of",
    "losses_for",
    "losses_of_task",
    "next_token_losses",
    "refuse_own_loss",
    "token_log_probabilities",
]

# (model, inputs of a physical batch) -> losses [B].
ComputeLosses = Callable[[nn.Module, dict[str, Any]], Tensor]

# Models listed for a task whose own loss is another one, as of other tokens than the next or the first of each word, or
# needs lengths that only their forward has.
OF_ANOTHER_LOSS = {
    "XLNetLMHeadModel", "XLMWithLMHeadModel", "ProphetNetForCausalLM", "XLMProphetNetForCausalLM",
    "ProphetNetForConditionalGeneration", "XLMProphetNetForConditionalGeneration", "BrosForTokenClassification",
    "LxmertForQuestionAnswering", "GraniteSpeech5ForCTC", "LasrForCTC", "ParakeetForCTC",
}  # fmt: skip
# Libraries whose forwards and losses are known.
LIBRARIES = ("transformers", "peft", "trl", "accelerate", "torch", "ghostclip")
# The labels of question answering: the places of an answer's first and last token.
SPAN = "start_positions", "end_positions"
# Those that take labels which were shifted before: each stands at the place of the token before it.
SHIFTED_BEFORE = {
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM",
    "PegasusForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
}  # fmt: skip


def losses_for(model: nn.Module) -> ComputeLosses:
    """The losses of single examples for a model of transformers, or one of peft around it, by the name of its class.

    Raises:
        UnsupportedModelError: the task isn't one of those below, or the model has a forward or loss of its own.
    """
    losses = losses_of_task(model)
    refuse_own_loss(model, losses)
    return losses


def refuse_own_loss(model: nn.Module, usual: ComputeLosses) -> None:
    """Raises UnsupportedModelError where the model's forward or ``loss_function`` comes from none of LIBRARIES.

    Args:
        model: as for `losses_for`.
        usual: the losses that the model would be trained by.
    """
    base = base_model(model)
    of_class = inspect.getattr_static(type(base), "loss_function", None)
    # The class's forward, too: TRL puts one of its own before it.
    found = [("forward", base.forward), ("forward", type(base).forward)]
    found += [("loss_function", each) for each in (getattr(base, "_loss_function", None), of_class) if each is not None]
    for name, own in found:
        module = str(getattr(inspect.unwrap(getattr(own, "fget", own)), "__module__", None))
        if module.partition(".")[0] not in LIBRARIES:
            raise UnsupportedModelError(
                f"{type(base).__name__} has a {name} of its own (from {module}), whose loss may be another than that "
                "of its task; give the trainer compute_losses=..., a function of (model, inputs) that returns one loss "
                f"for each example: {usual.__name__} of {usual.__module__} where it is the usual one"
            )


def losses_of_task(model: nn.Module) -> ComputeLosses:
    """`losses_for` whatever forward the model has."""
    base = base_model(model)
    names = [cls.__name__ for cls in type(base).__mro__]
    for models, losses in TASKS:
        if not OF_ANOTHER_LOSS & set(names) and set(names) & set(_flat(models)):
            if losses is next_token_losses and SHIFTED_BEFORE & set(names):
                return token_losses
            # Decoders that read speech are listed as sequence to sequence models, too.
            speech = losses is sequence_to_sequence_losses and not base.config.is_encoder_decoder
            return next_token_losses if speech else losses
    raise UnsupportedModelError(
        f"the loss of one example isn't known for {names[0]}: it is derived for causal and masked language models, "
        "sequence to sequence models, question answering, multiple choice, speech recognition by CTC, and "
        "classification of sequences, tokens, images, audio and video; give PrivateTrainer(compute_losses=...), a "
        "function of (model, inputs) that returns one loss for each example"
    )


def next_token_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B]: the mean over an example's own label tokens, each predicted from those before it."""
    log_probs, counted = token_log_probabilities(model, inputs)
    return -log_probs.sum(1) / counted.sum(1).clamp(min=1)


def token_log_probabilities(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T - 1] of each next token, zero where it has no label; and where it has one.

    Where the output layer isn't trained, as under adapters, no logits [B, T, words] are held.
    """
    head = head_of(model)
    hidden = None if head is None else head_input(head, lambda: _logits(model, inputs))
    if head is not None and hidden is not None:
        labels = _as_long_as(hidden, _labels_of_next(inputs))[:, 1:]
        return -frozen_head_losses(hidden[:, :-1], head, labels), labels != IGNORED
    logits, _ = _outputs(model, inputs)
    labels = _as_long_as(logits, _labels_of_next(inputs))[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(labels.shape), labels != IGNORED


def token_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B]: the mean over an example's own label tokens, each predicted at its own place."""
    logits, labels = _outputs(model, inputs)
    return _mean_over_tokens(logits, _as_long_as(logits, labels))


def sequence_to_sequence_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B]: the mean over an example's own label tokens; the decoder's inputs are made from the labels, if missing."""
    if "labels" in inputs and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        base = base_model(model)
        prepare = getattr(base, "prepare_decoder_input_ids_from_labels", partial(_shifted_right, base.config))
        inputs = {**inputs, "decoder_input_ids": prepare(labels=inputs["labels"])}
    return token_losses(model, inputs)


def _shifted_right(config: Any, labels: Tensor) -> Tensor:
    """The decoder's inputs, as M2M100 (NLLB) and Blenderbot make them within their forward."""
    start = labels.new_full((len(labels), 1), config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id)


def class_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B]: cross-entropy for one label of several, else the mean over labels of the squared or binary error."""
    return class_losses_of(model, *_outputs(model, inputs))


def class_losses_of(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """`class_losses` of logits [B, classes] that the model returned."""
    kind = getattr(base_model(model).config, "problem_type", None)
    if kind is None and logits.shape[1] == 1:
        kind = "regression"
    if kind == "regression":
        return (logits - labels.reshape(logits.shape)).square().mean(1)
    if kind == "single_label_classification" or (kind is None and not labels.is_floating_point()):
        return F.cross_entropy(logits, labels.reshape(-1), reduction="none")
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)


def span_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B]: the mean of the cross-entropies of an answer's first and last token; zero for one beyond the text."""
    places = [_labels(inputs, name).reshape(-1) for name in SPAN]
    outputs = model(**{name: value for name, value in inputs.items() if name not in SPAN})
    names = "start_logits", "end_logits"
    found = [outputs[name] for name in names] if isinstance(outputs, Mapping) else outputs[: len(names)]
    losses = [
        F.cross_entropy(logits, place.clamp(0, logits.shape[1]), ignore_index=logits.shape[1], reduction="none")
        for logits, place in zip(map(_widened, found), places, strict=True)
    ]
    return torch.stack(losses).mean(0)


def ctc_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """[B]: connectionist temporal classification; over the number of an example's labels if the model takes a mean."""
    base, labels = base_model(model), _labels(inputs)
    logits, counted = _widened(_logits(model, inputs)), labels >= 0
    mask = inputs.get("attention_mask")
    if mask is None:
        speech = inputs[base.main_input_name]
        mask = torch.ones(speech.shape[:2], dtype=torch.long, device=speech.device)
    lengths, targets = base._get_feat_extract_output_lengths(mask.sum(1)).long(), counted.sum(1)
    losses = F.ctc_loss(
        logits.log_softmax(2).transpose(0, 1), labels[counted], lengths, targets, base.config.pad_token_id, "none",
        base.config.ctc_zero_infinity,
    )  # fmt: skip
    return losses / targets.clamp(min=1) if base.config.ctc_loss_reduction == "mean" else losses


# The first one that lists a model's class; some sequence to sequence models are listed as masked language models, too.
TASKS: list[tuple[Mapping[str, Any], ComputeLosses]] = [
    (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, sequence_to_sequence_losses),
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, next_token_losses),
    (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, token_losses),
    (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, token_losses),
    (auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, span_losses),
    (auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES, class_losses),
    (auto.MODEL_FOR_CTC_MAPPING_NAMES, ctc_losses),
    (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, class_losses),
    (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, class_losses),
    (auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, class_losses),
    (auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES, class_losses),
]


def _outputs(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits, in float32 or wider, and labels."""
    labels = _labels(inputs)
    return _widened(_logits(model, inputs)), labels


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _labels(inputs: Mapping[str, Any], name: str = "labels") -> Tensor:
    if name not in inputs:
        raise ValueError(
            f"the inputs have no entry named {name} (label_names isn't read), only {', '.join(inputs)}; use a data "
            "collator that makes it, or give PrivateTrainer(compute_losses=...)"
        )
    return inputs[name]


def _labels_of_next(inputs: Mapping[str, Any]) -> Tensor:
    """Labels without that of a text's first token, which padding on the left would have predicted from padding."""
    labels, mask = _labels(inputs), inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return labels
    return labels.masked_fill((mask != 0) & ((mask != 0).cumsum(1) == 1), IGNORED)


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """What the model returns; it never gets the labels, of which it would make a mean."""
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]


def _as_long_as(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels for every place that has logits: prompts that peft puts before the tokens have none."""
    return F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORED)


def _mean_over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """[B]: the mean cross-entropy over each row's own labels; zero where it has none."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _flat(models: Mapping[str, Any]) -> Iterator[str]:
    """The names of classes; some entries are several."""
    for names in models.values():
        yield from [names] if isinstance(names, str) else _strings(names)


def _strings(names: Iterable[Any]) -> list[str]:
    return [name for name in names if isinstance(name, str)]
