"""Transformer layers: torch's own classes and forwards, built of wrappers; they have no parameters of their own.

Without ``batch_first`` their inputs are [T, B, E], which the attention layers inside know and the linear and
normalization layers can't; so the forwards here tell these where the examples are, unless wrap(batch_dim=...) did.
torch's fast path for inference uses the weights of the parts without calling them; it is taken where no gradient is
recorded, and leaves nothing behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import GhostLayer, LayerCall, built_of_wrappers

__all__ = [
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]


class _BuiltOfWrappers(GhostLayer):
    """A layer whose parameters are all those of its parts: a layer of an encoder or decoder, or several of them."""

    has_parts = True

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """As torch's; before, says where the parts' examples are, if not in dimension 0 and nobody has said so."""
        first = next(iter(getattr(self, "layers", ())), self)
        if getattr(getattr(first, "self_attn", None), "batch_first", None) is False:
            for part in self.children():
                if isinstance(part, GhostLayer):
                    part.__dict__.setdefault("ghost_batch_dim", 1)
        return super().forward(*inputs, **options)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Never asked for."""
        raise AttributeError(f"{type(self).__name__} has no parameter {name!r} of its own")

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return ()


class TransformerEncoderLayer(
    _BuiltOfWrappers, torch.nn.TransformerEncoderLayer, wraps=torch.nn.TransformerEncoderLayer
):
    """`torch.nn.TransformerEncoderLayer`, its attention, linear and normalization layers wrappers."""

    __init__ = built_of_wrappers(torch.nn.TransformerEncoderLayer)


class TransformerDecoderLayer(
    _BuiltOfWrappers, torch.nn.TransformerDecoderLayer, wraps=torch.nn.TransformerDecoderLayer
):
    """`torch.nn.TransformerDecoderLayer`, its attention, linear and normalization layers wrappers."""

    __init__ = built_of_wrappers(torch.nn.TransformerDecoderLayer)


class TransformerEncoder(_BuiltOfWrappers, torch.nn.TransformerEncoder, wraps=torch.nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder`, its layers and normalization wrappers, whatever classes they were given as."""

    __init__ = built_of_wrappers(torch.nn.TransformerEncoder)


class TransformerDecoder(_BuiltOfWrappers, torch.nn.TransformerDecoder, wraps=torch.nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder`, its layers and normalization wrappers, whatever classes they were given as."""

    __init__ = built_of_wrappers(torch.nn.TransformerDecoder)


class Transformer(_BuiltOfWrappers, torch.nn.Transformer, wraps=torch.nn.Transformer):
    """`torch.nn.Transformer`, encoder and decoder built of wrappers."""

    __init__ = built_of_wrappers(torch.nn.Transformer)
