"""One loss for each conversation, and for each pair of completions, in the place of TRL's means over the batch.

A batch of pairs has the shape [B, 2, T] here: example i is the chosen and the rejected completion of pair i. TRL's own
data collators put all chosen completions first, [2B, T], so that no single dimension has the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostclip.integrations.huggingface_loop import Collated
from ghostclip.integrations.huggingface_losses import IGNORED, next_token_losses, token_log_probabilities

__all__ = ["OF_PAIRS", "PairScores", "Pairs", "conversation_losses", "pair_losses", "pair_scores"]

# What a collator of TRL makes of a list of B pairs.
FIRST_DIM_IS_ROWS = ("input_ids", "attention_mask", "completion_mask", "token_type_ids")


class Pairs(Collated):
    """TRL's collator of preferences, whose batches have one pair along the first dimension: [B, 2, T]."""

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        inputs = super().__call__(examples)
        return {name: _by_pair(value) if name in FIRST_DIM_IS_ROWS else value for name, value in inputs.items()}


@dataclass(frozen=True)
class PairScores:
    """What losses of pairs are made of, each [B]: of the chosen and the rejected completion.

    Attributes:
        chosen, rejected: log-probability of the completion over that by the reference model.
        chosen_length, rejected_length: tokens of the completion.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def margin(self) -> Tensor:
        """The chosen completion's score over the rejected one's."""
        return self.chosen - self.rejected

    @property
    def margin_of_means(self) -> Tensor:
        """The same of scores for a token."""
        return self.chosen / self.chosen_length.clamp(min=1) - self.rejected / self.rejected_length.clamp(min=1)


def conversation_losses(model: nn.Module, inputs: Mapping[str, Any], loss_type: str) -> Tensor:
    """[B]: the mean over a conversation's own label tokens of the loss of a token.

    Args:
        model: a causal language model.
        inputs: input_ids, labels and attention_mask, each [B, T].
        loss_type: "nll": -log p. "dft": -p log p with a constant p (Wu et al. 2025, "On the generalization of SFT").
    """
    inputs = {**inputs, "use_cache": False}
    if loss_type != "dft":
        return next_token_losses(model, inputs)
    log_probs, counted = token_log_probabilities(model, inputs)
    return -(log_probs * log_probs.exp().detach()).sum(1) / counted.sum(1).clamp(min=1)


def pair_scores(
    model: nn.Module, inputs: Mapping[str, Any], reference: nn.Module, without_adapter: AbstractContextManager[Any]
) -> PairScores:
    """The scores of a batch of pairs, by precomputed log-probabilities of the reference where the batch has them.

    Args:
        model: the trained one.
        inputs: as `Pairs` makes them.
        reference: the reference model; ``model`` where ``without_adapter`` makes it that.
        without_adapter: holds while the reference is asked.
    """
    rows: dict[str, Any] = {name: _by_row(value) for name, value in inputs.items() if name in FIRST_DIM_IS_ROWS}
    mask = rows.pop("completion_mask")
    rows |= {"labels": rows["input_ids"].masked_fill(mask == 0, IGNORED), "use_cache": False}
    if "ref_chosen_logps" in inputs:
        of_chosen, of_rejected = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
    else:
        # Before the trained model is called: after that a hook on the head might move rows, and each batch be measured.
        with torch.no_grad(), without_adapter:
            of_chosen, of_rejected = _log_probabilities(reference, rows)
    chosen, rejected = _log_probabilities(model, rows)
    lengths = mask.sum(1).chunk(2)
    return PairScores(chosen - of_chosen, rejected - of_rejected, *lengths)


def pair_losses(scores: PairScores, options: Any, loss_types: list[str], weights: list[float]) -> Tensor:
    """[B]: the weighted sum of the losses of that name.

    Args:
        scores: of the pairs.
        options: beta, label_smoothing and discopop_tau, as `DPOConfig` has them.
        loss_types: keys of `OF_PAIRS`.
        weights: one for each.
    """
    losses = [weight * OF_PAIRS[name](scores, options) for name, weight in zip(loss_types, weights, strict=True)]
    return torch.stack(losses).sum(0)


def _sigmoid(scores: PairScores, options: Any) -> Tensor:
    """Rafailov et al. 2023, "Direct preference optimization", equation 7."""
    return -F.logsigmoid(options.beta * scores.margin)


def _hinge(scores: PairScores, options: Any) -> Tensor:
    """Zhao et al. 2023, "SLiC-HF"."""
    return torch.relu(1 - options.beta * scores.margin)


def _ipo(scores: PairScores, options: Any) -> Tensor:
    """Azar et al. 2023, equation 17, of log-probabilities for a token, as TRL takes them."""
    return (scores.margin_of_means - 1 / (2 * options.beta)) ** 2


def _exo(scores: PairScores, options: Any) -> Tensor:
    """Ji et al. 2024, "Towards efficient exact optimization of language model alignment", equation 16."""
    logits, smoothing = options.beta * scores.margin, options.label_smoothing
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-smoothing))
    return chosen + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(smoothing))


def _nca(scores: PairScores, options: Any) -> Tensor:
    """Chen et al. 2024, "Noise contrastive alignment of language models with explicit rewards"."""
    chosen, rejected = options.beta * scores.chosen, options.beta * scores.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(scores: PairScores, options: Any) -> Tensor:
    """Chowdhury et al. 2024, "Provably robust DPO"."""
    logits, smoothing = options.beta * scores.margin, options.label_smoothing
    clean, flipped = (1 - smoothing) * F.logsigmoid(logits), smoothing * F.logsigmoid(-logits)
    return (flipped - clean) / (1 - 2 * smoothing)


def _bco(scores: PairScores, options: Any) -> Tensor:
    """Jung et al. 2024, "Binary classifier optimization", without the moving mean of rewards."""
    return -F.logsigmoid(options.beta * scores.chosen) - F.logsigmoid(-options.beta * scores.rejected)


def _sppo(scores: PairScores, options: Any) -> Tensor:
    """Wu et al. 2024, "Self-play preference optimization", with certain preferences."""
    return (scores.chosen - 0.5 / options.beta) ** 2 + (scores.rejected + 0.5 / options.beta) ** 2


def _apo_zero(scores: PairScores, options: Any) -> Tensor:
    """D'Oosterlinck et al. 2024, "Anchored preference optimization", equation 7."""
    return 1 - torch.sigmoid(options.beta * scores.chosen) + torch.sigmoid(options.beta * scores.rejected)


def _apo_down(scores: PairScores, options: Any) -> Tensor:
    """The same, equation 8."""
    return torch.sigmoid(options.beta * scores.chosen) + 1 - torch.sigmoid(options.beta * scores.margin)


def _discopop(scores: PairScores, options: Any) -> Tensor:
    """Lu et al. 2024, "Discovering preference optimization algorithms", equation 5."""
    logits = options.beta * scores.margin
    share = torch.sigmoid(logits / options.discopop_tau)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _sigmoid_norm(scores: PairScores, options: Any) -> Tensor:
    """The sigmoid loss of log-probabilities for a token."""
    return -F.logsigmoid(options.beta * scores.margin_of_means)


# By the names of DPOConfig's loss_type; those that aren't here need other pairs of the batch.
OF_PAIRS: dict[str, Callable[[PairScores, Any], Tensor]] = {
    "sigmoid": _sigmoid, "hinge": _hinge, "ipo": _ipo, "exo_pair": _exo, "nca_pair": _nca, "robust": _robust,
    "bco_pair": _bco, "sppo_hard": _sppo, "apo_zero": _apo_zero, "apo_down": _apo_down, "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}  # fmt: skip


def _log_probabilities(model: nn.Module, rows: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of all chosen completions [B], and of all rejected ones [B]."""
    chosen, rejected = token_log_probabilities(model, rows)[0].sum(1).chunk(2)
    return chosen, rejected


def _by_pair(rows: Tensor) -> Tensor:
    """[2B, ...], chosen ones first -> [B, 2, ...]."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1)


def _by_row(pairs: Tensor) -> Tensor:
    """[B, 2, ...] -> [2B, ...], chosen ones first."""
    return pairs.transpose(0, 1).flatten(0, 1)
