"""The one table of layer cases: how to build a model, what it reads, and where its examples are.

Sizes and options of a layer by itself laws/test_shapes.py draws; here are those that differ in kind.

A new layer adds its rows here and nothing else; test_layers.py compares every row with the slow obvious loop.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from case_attention import ATTENTION
from case_fallback import fallback_cases
from case_layers import LAYER_CASES
from case_models import (
    Wired,
    attention,
    cnn,
    convolution,
    decoder,
    freeze,
    index_assignment,
    inplace_residual,
    masked_each,
    padded,
    recurrent,
    tie,
    tied_head,
    tied_linears,
    transformer,
)
from case_recurrent import KINDS, RECURRENT
from case_types import TIME_FIRST, Case, indices, normal


def _linear() -> Iterator[Case]:
    yield Case("linear", lambda nn: nn.Linear(5, 4), (normal(5),))
    yield Case("linear no bias", lambda nn: nn.Linear(5, 4, bias=False), (normal(5),))
    yield Case("linear 3-D", lambda nn: nn.Linear(5, 4), (normal(6, 5),))
    yield Case("linear 4-D", lambda nn: nn.Linear(5, 4), (normal(2, 3, 5),))
    yield Case("linear strided", lambda nn: nn.Linear(5, 4), (normal(6, 10, lay_out=lambda x: x[..., ::2]),))
    yield Case("linear transposed", lambda nn: nn.Linear(5, 4), (normal(5, 6, lay_out=lambda x: x.mT),))
    yield Case("linear expanded", lambda nn: nn.Linear(5, 4), (normal(1, 5, lay_out=lambda x: x.expand(-1, 3, -1)),))
    yield Case("linear leaf input", lambda nn: nn.Linear(5, 4), (normal(5, requires_grad=True),))


CONVOLUTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (6, {}),
    "1x1 stride": (6, {"kernel_size": 1, "stride": 2}),
    "stride": (6, {"stride": 2}),
    "dilation": (6, {"dilation": 2, "padding": 1}),
    "same dilation": (5, {"padding": "same", "dilation": 2}),
    "groups": (5, {"groups": 2, "padding": 1}),
    "depthwise stride no bias": (6, {"groups": 4, "stride": 2, "bias": False}),
    "reflect": (5, {"padding": 2, "padding_mode": "reflect"}),
    "circular": (5, {"padding": 2, "padding_mode": "circular", "groups": 2}),
    "circular same": (5, {"padding": "same", "padding_mode": "circular"}),
}


def _conv() -> Iterator[Case]:
    for dims in (1, 2, 3):
        for name, (size, options) in CONVOLUTIONS.items():
            yield Case(f"conv{dims}d {name}", partial(convolution, dims, 4, **options), (normal(4, *[size] * dims),))
    padded_conv = partial(convolution, 2, 4, padding=1)
    last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
    yield Case("conv2d channels_last", padded_conv, (normal(4, 6, 6, lay_out=last),))
    yield Case("conv2d transposed", padded_conv, (normal(4, 5, 7, lay_out=lambda x: x.mT),))
    yield Case("conv2d leaf input", padded_conv, (normal(4, 6, 6, requires_grad=True),))


def _embedding() -> Iterator[Case]:
    """Embedding: repeated indices (more positions than rows), padding, index tensors of one to three dimensions."""
    yield Case("embedding 1-D", lambda nn: nn.Embedding(6, 3), (indices(6),))
    yield Case("embedding repeated", lambda nn: nn.Embedding(3, 4), (indices(3, 8),))
    yield Case("embedding 3-D", lambda nn: nn.Embedding(6, 3), (indices(6, 2, 5),))
    yield Case("embedding padding_idx", lambda nn: nn.Embedding(4, 3, padding_idx=1), (indices(4, 6),))
    yield Case("embedding padding_idx -1", lambda nn: nn.Embedding(4, 3, padding_idx=-1), (indices(4, 6),))
    yield Case("embedding only padding", lambda nn: nn.Embedding(1, 3, padding_idx=0), (indices(1, 6),))
    yield Case("embedding large", lambda nn: nn.Embedding(1000, 3), (indices(1000, 6),))
    yield Case("embedding transposed", lambda nn: nn.Embedding(5, 3), (indices(5, 2, 6, lay_out=lambda x: x.mT),))


def _normalization() -> Iterator[Case]:
    yield Case("layernorm 2-D", lambda nn: nn.LayerNorm(5), (normal(5),))
    yield Case("layernorm 3-D", lambda nn: nn.LayerNorm(5), (normal(6, 5),))
    yield Case("layernorm whole example", lambda nn: nn.LayerNorm((3, 5)), (normal(3, 5),))
    plain = lambda nn: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, elementwise_affine=False))  # noqa: E731
    yield Case("layernorm no affine", plain, (normal(6, 4),))
    yield Case("groupnorm 2-D", lambda nn: nn.GroupNorm(2, 6), (normal(6),))
    yield Case("groupnorm 3-D", lambda nn: nn.GroupNorm(3, 6), (normal(6, 4),))
    yield Case("groupnorm 4-D", lambda nn: nn.GroupNorm(2, 4), (normal(4, 3, 5),))
    yield Case("groupnorm one group", lambda nn: nn.GroupNorm(1, 4), (normal(4, 3, 5),))
    yield Case("groupnorm per channel", lambda nn: nn.GroupNorm(4, 4), (normal(4, 3, 5),))
    images = lambda nn: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4, affine=False))  # noqa: E731
    yield Case("groupnorm no affine", images, (normal(3, 5, 5),))


def _recurrent() -> Iterator[Case]:
    """RNN, LSTM and GRU of one layer and one direction."""
    x, time_first = normal(6, 4), normal(6, 4, batch_dim=1)
    for name in ("rnn tanh", "rnn relu", "lstm", "gru"):
        kind, options = KINDS[name]
        states = (normal(1, 3, batch_dim=1),) * (2 if kind == "LSTM" else 1)
        rnn = partial(recurrent, kind, **options)
        first = partial(rnn, batch_first=True)
        yield Case(f"{name} root", lambda nn, k=kind, o=options: getattr(nn, k)(4, 3, **o), (time_first,), output_dim=1)
        yield Case(f"{name} time first", partial(rnn, "both"), (time_first,))
        yield Case(f"{name} time first states", partial(rnn, "both"), (time_first, *states))
        yield Case(f"{name} output", partial(first, "output"), (x,))
        yield Case(f"{name} last state", partial(first, "state"), (x,))
        yield Case(f"{name} output and state", partial(first, "both"), (x,))
        yield Case(f"{name} states", partial(first, "output"), (x, *states))
        yield Case(f"{name} twice", partial(first, "twice"), (x,))
        yield Case(f"{name} leaf input", partial(first, "both"), (normal(6, 4, requires_grad=True),))
        yield Case(f"{name} frozen weight_hh", partial(first, "both", freezing=("rnn.weight_hh_l0",)), (x,))
        yield Case(f"{name} frozen biases", partial(first, "both", freezing=("rnn.bias_ih_l0", "rnn.bias_hh_l0")), (x,))
        yield Case(f"{name} decoder", partial(decoder, kind), (indices(5, 6), normal(2)))
    yield Case("lstm last cell", partial(recurrent, "LSTM", "cell"), (time_first,))


ATTENTIONS: dict[str, dict[str, Any]] = {
    "": {},
    " one head": {"num_heads": 1},
    " no bias": {"bias": False},
    " bias_kv": {"add_bias_kv": True},
    " zero_attn": {"add_zero_attn": True},
    " bias_kv zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
}


def causal(attend: Callable[..., Any], x: torch.Tensor, **options: Any) -> Any:
    """No position sees a later one."""
    return attend(x, attn_mask=x.new_ones(5, 5, dtype=torch.bool).triu(1), **options)


def _attention() -> Iterator[Case]:
    """MultiheadAttention with its options and masks, and TransformerEncoderLayer."""
    x, other = normal(5, 8), normal(6, 8)
    calls = {
        "no weights": (lambda attend, x: attend(x, need_weights=False), (x,)),
        "weights of each head": (lambda attend, x: attend(x, average_attn_weights=False), (x,)),
        "causal": (causal, (x,)),
        "float mask": (lambda attend, x, mask: attend(x, attn_mask=mask), (x, normal(5, 5, batch_dim=None))),
        "key_padding_mask": (padded, (x,)),
        "mask of each example": (masked_each, (x,)),
        "causal no weights": (partial(causal, need_weights=False), (x,)),
        "key_padding_mask no weights": (partial(padded, need_weights=False), (x,)),
        "mask of each example no weights": (partial(masked_each, need_weights=False), (x,)),
        "twice": (lambda attend, x: attend(attend(x)[0], x, x)[0], (x,)),
    }
    for first in (True, False):
        where = "" if first else " time first"
        build = partial(attention, batch_first=first)
        for name, options in ATTENTIONS.items():
            yield Case(f"attention self{name}{where}", partial(build, **options), (x,))
            yield Case(f"attention cross{name}{where}", partial(build, **options), (x, other, other))
        for name, (call, specs) in calls.items():
            yield Case(f"attention {name}{where}", partial(build, call=call), specs)
    widths = partial(attention, batch_first=True, kdim=3, vdim=6)
    for name in ("", " no bias", " bias_kv"):
        build = partial(widths, **ATTENTIONS[name])
        yield Case(f"attention kdim vdim{name}", build, (x, normal(6, 3), normal(6, 6)))
    yield Case("attention root", lambda nn: nn.MultiheadAttention(8, 2, batch_first=True), (x,) * 3)
    for frozen in ("in_proj_weight", "in_proj_bias", "out_proj"):
        yield Case(f"attention frozen {frozen}", lambda nn, f=frozen: freeze(attention(nn), f"attention.{f}"), (x,))
    encoder = {"d_model": 8, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
    options = {"": {}, " norm_first": {"norm_first": True, "activation": "gelu"}, " no bias": {"bias": False}}
    for name, more in options.items():
        yield Case(f"encoder layer{name}", lambda nn, o=encoder | more: nn.TransformerEncoderLayer(**o), (x,))
    time_first = lambda nn: nn.TransformerEncoderLayer(**encoder | {"batch_first": False})  # noqa: E731
    yield Case("encoder layer time first", time_first, (normal(5, 8, batch_dim=1),), **TIME_FIRST)


TWO_LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "residual in place": (inplace_residual, (5,)),
    "residual in place 3-D": (inplace_residual, (3, 5)),
    "index assignment": (index_assignment, (3, 5)),
    "two branches": (lambda m, x: m.first(x) * m.second(x), (5,)),
    "branches of the loss": (lambda m, x: (m.first(x), m.second(torch.tanh(m.first(x)))), (5,)),
    "unused layer": (lambda m, x: m.second(x), (5,)),
    "unused output": (lambda m, x: (m.first(x), m.second(x))[1], (5,)),
    "detached branch": (lambda m, x: m.second(x) + m.first(x).detach(), (5,)),
    "same layer twice": (lambda m, x: m.first(torch.tanh(m.first(x))), (5,)),
    "same layer twice on one input": (lambda m, x: m.first(x) * m.second(m.first(x)), (5,)),
    "same layer on siblings": (lambda m, x: m.first(x[:, :2]).sum(1) - m.first(x[:, 2]) ** 2, (3, 5)),
    "same layer on lengths": (lambda m, x: (m.first(x), m.second(m.first(x[:, 1:3]))), (4, 5)),
    "chunked output": (lambda m, x: [part.tanh() for part in m.second(m.first(x)).chunk(2, -1)], (5,)),
    "split output": (lambda m, x: m.first(x).split(2, -1)[1] * m.second(x).unbind(-1)[0][..., None], (3, 5)),
}


def _two_layers(wiring: Callable[..., Any], nn: ModuleType) -> torch.nn.Module:
    return Wired(wiring, first=nn.Linear(5, 5), second=nn.Linear(5, 5))


def _models() -> Iterator[Case]:
    """Whole models: in-place operations, branches, sharing, freezing, layers that nothing calls."""
    x, image, tokens = (normal(5),), (normal(1, 18, 18),), (indices(11, 9),)
    for name, (wiring, shape) in TWO_LAYERS.items():
        yield Case(name, partial(_two_layers, wiring), (normal(*shape),))
    chain = partial(_two_layers, lambda m, x: m.second(torch.tanh(m.first(x))))
    for frozen in ("first", "second", "first.weight", "second.bias"):
        yield Case(f"frozen {frozen}", lambda nn, f=frozen: freeze(chain(nn), f), x)
    yield Case("mlp in place", lambda nn: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), x)
    yield Case("linear 3-D in place", lambda nn: nn.Sequential(nn.Linear(5, 4), nn.ReLU(True)), (normal(6, 5),))
    yield Case("nested sequential", lambda nn: nn.Sequential(nn.Sequential(chain(nn)), nn.Tanh(), chain(nn)), x)
    yield Case("dropout in eval mode", lambda nn: nn.Sequential(chain(nn), nn.Dropout(0.5), chain(nn)).eval(), x)
    yield Case("one module in two places", lambda nn: nn.Sequential(*[chain(nn)] * 2), x)
    yield Case("same conv twice", lambda nn: nn.Sequential(*[nn.Conv2d(2, 2, 3, padding=1)] * 2), (normal(2, 4, 4),))
    shared = lambda nn: Wired(lambda m, i, j: m.e(i).sum(1) * m.e(j), e=nn.Embedding(4, 3))  # noqa: E731
    yield Case("same embedding twice", shared, (indices(4, 3), indices(4)))
    convs = lambda nn: nn.Sequential(nn.Conv1d(2, 2, 3), nn.Tanh(), nn.Conv1d(2, 2, 3, stride=2))  # noqa: E731
    yield Case("tied convs", lambda nn: tie(convs(nn), "0", "2"), (normal(2, 8),))
    yield Case("tied linears", tied_linears, (normal(6, 5),))
    yield Case("tied head", tied_head, (indices(7, 6),))
    yield Case("tied head padding_idx", partial(tied_head, padding_idx=2), (indices(7, 6),))
    yield Case("cnn", cnn, image)
    yield Case("cnn frozen parts", lambda nn: freeze(cnn(nn), "0.weight", "3.bias"), image)
    yield Case("transformer", transformer, tokens)
    yield Case("transformer frozen parts", lambda nn: freeze(transformer(nn), "embedding", "norm1.weight"), tokens)


CASES = [*_linear(), *_conv(), *_embedding(), *_normalization(), *_recurrent(), *_attention(), *_models(), *LAYER_CASES]
CASES += [*RECURRENT, *ATTENTION, *fallback_cases()]


def case(name: str) -> Case:
    return next(row for row in CASES if row.name == name)


def _cases_and_dtypes() -> Iterator[Any]:
    """Every case in float64; in float32 one in six, and the others among the long checks."""
    for number, row in enumerate(CASES):
        yield pytest.param(row, torch.float64, id=f"{row}-float64")
        yield pytest.param(row, torch.float32, id=f"{row}-float32", marks=pytest.mark.slow if number % 6 else ())


CASES_AND_DTYPES = list(_cases_and_dtypes())
