"""Models of transformers that read images and texts together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .growing import grown
from .language import LLAMA
from .subject import CLASSES, LENGTH, LONG, TOKENS, Batch, Subject, Timed, class_losses, texts

__all__ = ["SUBJECTS"]

TEXT = {"vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 16, "eos_token_id": 2}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip
JOINT = TEXT | VISION | {"num_labels": CLASSES, "num_hidden_layers": 2}
IMAGE_TOKEN, IMAGE_TOKENS = TOKENS - 1, 4


def captions(examples: int, side: int = 16, length: int = LENGTH) -> Batch:
    """Images and texts that belong together."""
    generator = torch.Generator().manual_seed(examples)
    pixels = torch.randn(examples, 3, side, side, generator=generator, dtype=torch.float64)
    return {"input_ids": texts(examples, length)["input_ids"], "pixel_values": pixels}


def questions(examples: int, side: int = 16, length: int = LENGTH) -> Batch:
    """The same with a class for each."""
    return captions(examples, side, length) | {"target": torch.arange(examples) % CLASSES}


def with_places(examples: int, side: int = 16, length: int = LENGTH) -> Batch:
    """Texts that begin with places for the patches of an image of 16 by 16, or 32 by 32."""
    found = captions(examples, side, length)
    tokens, places = found["input_ids"].clamp(max=IMAGE_TOKEN - 1), IMAGE_TOKENS * (side // 16) ** 2
    return found | {"input_ids": torch.cat([torch.full((examples, places), IMAGE_TOKEN), tokens], 1)}


def contrastive_losses(model: nn.Module, batch: Batch) -> Tensor:
    """How well each image is told from the other texts of the batch: a loss of all examples."""
    logits = model(**batch).logits_per_image
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def pair_losses(model: nn.Module, batch: Batch) -> Tensor:
    """How near each image is to its own text."""
    return -model(**batch).logits_per_image.diagonal()


def next_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the text's last tokens, averaged over the example."""
    logits = model(**batch).logits[:, -5:-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, -4:], reduction="none").mean(1)


def towers(model: str, config: str, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> nn.Module:
    """A model whose configuration has two parts."""
    import transformers

    made = getattr(transformers, config)(text_config=text, vision_config=vision, **options)
    return getattr(transformers, model)(made)


def llava(text: dict[str, Any], vision: dict[str, Any]) -> nn.Module:
    """A language model that reads a vision tower's patches."""
    import transformers

    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text), vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_id=IMAGE_TOKEN, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def vilt(options: dict[str, Any]) -> nn.Module:
    """One transformer over patches and words."""
    import transformers

    return transformers.ViltForQuestionAnswering(transformers.ViltConfig(**options))


CLIP = ("CLIPModel", "CLIPConfig", TEXT, VISION)
SIGLIP = ("SiglipModel", "SiglipConfig", TEXT, VISION)
ALTERED = TEXT | {"project_dim": 8}
Losses = Callable[[nn.Module, Batch], Tensor]
# name: (what is particular, what builds it of its options, options, options in large, batch, losses, refusal)
ROWS: dict[str, tuple[str, Callable[..., nn.Module], tuple[Any, ...], Callable[..., Batch], Losses, str]] = {
    "CLIP": ("two towers, a loss for each pair alone", partial(towers, projection_dim=8), CLIP, captions, pair_losses,
             ""),
    "SigLIP": ("two towers, attention pooling", towers, SIGLIP, captions, pair_losses, ""),
    "LLaVA": ("patches put among the words", llava, (LLAMA, VISION), with_places, next_losses, ""),
    "ViLT": ("one transformer over both", vilt, (JOINT,), questions, class_losses, ""),
    "CLIP, contrastive": ("a loss that compares the examples of a batch", partial(towers, projection_dim=8), CLIP,
                          captions, contrastive_losses, "depends on"),
}  # fmt: skip


def _subjects() -> Iterator[Subject]:
    for name, (about, make, options, batch, losses, refused) in ROWS.items():
        wide = [grown(each) if isinstance(each, dict) else each for each in options]
        timed = Timed(partial(make, *wide), partial(batch, side=32, length=LONG))
        yield Subject(
            name, "transformers", about, partial(make, *options), batch, losses, kind="multimodal", timed=timed,
            refused=refused,
        )  # fmt: skip


SUBJECTS = tuple(_subjects())
