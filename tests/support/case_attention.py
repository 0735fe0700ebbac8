"""Rows of the table in cases.py: what is left of attention's options, and torch's Transformer layers."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from case_models import Wired, attention, freeze, padded
from case_types import Case, normal
from torch import Tensor

causal = torch.nn.Transformer.generate_square_subsequent_mask
SIZES = {"d_model": 8, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0}


def both_masks(attend: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    """Some of the last positions are padding, and no position sees a later one."""
    return padded(attend, x, attn_mask=causal(x.shape[1], dtype=torch.bool), **options)


def hinted(attend: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    """A causal mask, said to be one."""
    return attend(x, attn_mask=causal(x.shape[1], dtype=x.dtype), is_causal=True, **options)


def _attention() -> Iterator[Case]:
    x, other = normal(5, 8), normal(6, 8)
    first = partial(attention, batch_first=True)
    added = partial(first, add_bias_kv=True, add_zero_attn=True)
    for name, call in {"both masks": both_masks, "hinted": hinted}.items():
        for where, build in {"": first, " bias_kv zero_attn": added, " no bias": partial(first, bias=False)}.items():
            for kind in ({"need_weights": False}, {"average_attn_weights": False}):
                if name == "hinted" and build is added and "need_weights" in kind:
                    continue  # torch then lets no position see the added ones; in test_transformer.py
                what = f"attention {name}{where}{' no weights' if 'need_weights' in kind else ' each head'}"
                yield Case(what, partial(build, call=partial(call, **kind)), (x,))
    yield Case("attention one key for two queries", partial(first, call=two_queries), (x, other))
    yield Case("attention query is key", partial(first, call=lambda attend, x, v: attend(x, x, v)), (x, normal(5, 8)))
    yield Case("attention query is value", partial(first, call=lambda attend, x, k: attend(x, k, x)), (x, normal(5, 8)))
    widths = partial(first, kdim=3, vdim=6, add_bias_kv=True, add_zero_attn=True, bias=False)
    yield Case("attention kdim vdim everything", widths, (x, normal(6, 3), normal(6, 6)))
    yield Case("attention kdim only time first", partial(attention, kdim=3), (x, normal(6, 3), normal(6, 8)))
    frozen = ("attention.bias_k", "attention.out_proj.weight")
    yield Case("attention frozen added key", lambda nn: freeze(added(nn), *frozen), (x,))


def two_queries(attend: Callable[..., Any], x: Tensor, memory: Tensor) -> Any:
    """One module on itself and on another input."""
    return attend(attend(x, x, x)[0], memory, memory, need_weights=False)[0]


def block(kind: str, call: Callable[..., Any], nn: ModuleType, **options: Any) -> torch.nn.Module:
    """A layer of that name, called by ``call(layer, *inputs)``."""
    with warnings.catch_warnings():  # torch says that it can't use nested tensors
        warnings.simplefilter("ignore")
        made = getattr(nn, f"Transformer{kind}")(**options)
    return Wired(lambda m, *inputs: call(m.block, *inputs), block=made)


def stack(kind: str, call: Callable[..., Any], nn: ModuleType, norm: bool = False, **options: Any) -> torch.nn.Module:
    """Two such layers, perhaps with a normalization after them."""
    one = getattr(nn, f"Transformer{kind}Layer")(**SIZES | options)
    extra = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    whole = getattr(nn, f"Transformer{kind}")(one, 2, norm=nn.LayerNorm(8) if norm else None, **extra)
    return Wired(lambda m, *inputs: call(m.stack, *inputs), stack=whole)


def plainly(layer: Callable[..., Any], *inputs: Tensor) -> Tensor:
    return layer(*inputs)


def causally(layer: Callable[..., Any], x: Tensor) -> Tensor:
    """No position sees a later one, and the layer is told that this is so."""
    return layer(x, causal(x.shape[1], dtype=x.dtype), is_causal=True)


def with_padding(layer: Callable[..., Any], x: Tensor) -> Tensor:
    """Some of the last two positions of each example are padding."""
    return padded(lambda x, key_padding_mask: layer(x, src_key_padding_mask=key_padding_mask), x)


def decoding(layer: Callable[..., Any], x: Tensor, memory: Tensor) -> Tensor:
    """No position sees a later one, which torch is not left to find out; some of the memory is padding."""
    mask = causal(x.shape[1], dtype=torch.bool)
    layer = partial(layer, tgt_is_causal=False)
    return padded(
        lambda memory, key_padding_mask: layer(x, memory, mask, memory_key_padding_mask=key_padding_mask), memory
    )


def smooth(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _transformers() -> Iterator[Case]:
    x, memory = normal(5, 8), normal(6, 8)
    times = normal(5, 8, batch_dim=1), normal(6, 8, batch_dim=1)
    first = SIZES | {"batch_first": True}
    encoder, decoder = partial(block, "EncoderLayer", **first), partial(block, "DecoderLayer", **first)
    yield Case("encoder layer causal", partial(encoder, causally), (x,))
    yield Case("encoder layer padding own activation", partial(encoder, with_padding, activation=smooth), (x,))
    yield Case("decoder layer", partial(decoder, plainly), (x, memory))
    yield Case("decoder layer masks norm_first", partial(decoder, decoding, norm_first=True), (x, memory))
    yield Case("decoder layer no bias gelu", partial(decoder, plainly, bias=False, activation="gelu"), (x, memory))
    yield Case("encoder", partial(stack, "Encoder", with_padding, norm=True, batch_first=True), (x,))
    yield Case("decoder", partial(stack, "Decoder", decoding, norm=True, batch_first=True), (x, memory))
    for kind, inputs in (("Encoder", times[:1]), ("Decoder", times)):
        yield Case(f"{kind.lower()} time first", partial(stack, kind, plainly, norm=True), inputs, output_dim=1)
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    whole = partial(block, "", plainly, **first, **layers)
    yield Case("whole transformer", whole, (x, memory))
    yield Case("whole transformer no bias norm_first", partial(whole, bias=False, norm_first=True), (x, memory))
    yield Case("whole transformer time first", partial(block, "", plainly, **SIZES, **layers), times, output_dim=1)


ATTENTION = [*_attention(), *_transformers()]
