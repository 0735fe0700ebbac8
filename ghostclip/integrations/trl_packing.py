"""Documents in one row without padding: sampled first, packed after, each an example all the same.

Three documents of 2, 1 and 3 tokens are the row [a a b c c c] with positions [0 1 0 0 1 2]. Models of transformers keep
attention within a document by such positions. A document's loss is the mean over its own tokens; its first token has no
loss, as nothing of its own is before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.integrations.huggingface_loop import Collated
from ghostclip.integrations.huggingface_losses import IGNORED, token_log_probabilities

__all__ = ["Packed", "documents_of", "packed_losses"]


class Packed(Collated):
    """A collator that puts documents one after the other: input_ids, labels and position_ids, each [1, all tokens].

    Args:
        collate: TRL's collator, which makes the labels of each document; it pads on the right.
    """

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        documents = [self._alone(example) for example in examples]
        tokens, labels = (torch.cat(parts, 1) for parts in zip(*documents, strict=True))
        positions = torch.cat([torch.arange(each.shape[1]) for each, _ in documents])[None]
        return {
            "input_ids": tokens,
            "labels": labels.masked_fill(positions == 0, IGNORED),
            "position_ids": positions,
        }

    def _alone(self, example: Any) -> tuple[Tensor, Tensor]:
        """A document's tokens and labels, [1, its length]. An empty one gets a token, which has no loss."""
        inputs = super().__call__([example])
        length = int(inputs["attention_mask"].sum())
        found = inputs["input_ids"][:, :length], inputs["labels"][:, :length]
        return found if length else (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))


def documents_of(inputs: Mapping[str, Any]) -> Tensor:
    """The number of each token's document, [all tokens], of what `Packed` makes."""
    return (inputs["position_ids"][0] == 0).cumsum(0) - 1


def packed_losses(model: nn.Module, inputs: Mapping[str, Any], loss_type: str) -> Tensor:
    """[documents]: the mean over each document's own label tokens of the loss of a token.

    Args:
        model: a causal language model whose attention stays within documents.
        inputs: as `Packed` makes them.
        loss_type: as for `conversation_losses`.
    """
    log_probs, counted = token_log_probabilities(model, {**inputs, "use_cache": False})
    document = documents_of(inputs)
    losses = -log_probs[0] if loss_type != "dft" else -log_probs[0] * log_probs[0].exp().detach()
    sums, document = losses.new_zeros(int(document[-1]) + 1), document[1:]
    return sums.index_add(0, document, losses) / sums.index_add(0, document, counted[0].to(sums)).clamp(min=1)
