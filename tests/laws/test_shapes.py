"""Shapes and options that nobody wrote down, drawn for every family of layers and held against the loop."""

from functools import partial

import case_models
import oracle
import pytest
from case_types import Case, indices, normal
from comparing import assert_close, gradients, ready, typical_norm
from hypothesis import given, settings
from hypothesis import strategies as st

small, few = st.integers(1, 4), st.integers(1, 3)
positions = st.lists(st.integers(1, 4), max_size=3)


def choice(*values):
    return st.sampled_from(values)


def layer(name, *sizes, **options):
    return lambda nn: getattr(nn, name)(*sizes, **options)


@st.composite
def linear(draw):
    width, bias = draw(small), draw(st.booleans())
    return layer("Linear", width, draw(small), bias=bias), normal(*draw(positions), width)


@st.composite
def convolution(draw):
    dims, groups = draw(few), draw(few)
    axes = range(dims)
    kernel, stride, dilation = ([draw(few) for _ in axes] for _ in range(3))
    mode = draw(choice("zeros", "zeros", "circular", "replicate", "reflect"))
    size = [dilation[axis] * (kernel[axis] - 1) + draw(few) for axis in axes]
    if draw(st.booleans()) and max(stride) == 1:
        padding = draw(choice("same", "valid"))
        size = [max(each, dilation[axis] * (kernel[axis] - 1) + 1) for axis, each in enumerate(size)]
    else:
        padding = [draw(st.integers(0, min(2, size[axis] - 1))) for axis in axes]
    options = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups, "padding_mode": mode}
    channels = groups * draw(few)
    build = layer(f"Conv{dims}d", channels, groups * draw(few), kernel, bias=draw(st.booleans()), **options)
    return build, normal(channels, *size)


@st.composite
def transposed(draw):
    dims, groups = draw(few), draw(few)
    axes = range(dims)
    kernel, stride, dilation, size = ([draw(few) for _ in axes] for _ in range(4))
    more = [draw(st.integers(0, max(stride[axis], dilation[axis]) - 1)) for axis in axes]
    # What padding takes away from both sides must leave something.
    whole = [stride[a] * (size[a] - 1) + dilation[a] * (kernel[a] - 1) + more[a] + 1 for a in axes]
    padding = [draw(st.integers(0, min(2, (whole[axis] - 1) // 2))) for axis in axes]
    options = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups, "output_padding": more}
    channels = groups * draw(few)
    build = layer(f"ConvTranspose{dims}d", channels, groups * draw(few), kernel, bias=draw(st.booleans()), **options)
    return build, normal(channels, *size)


@st.composite
def layer_norm(draw):
    normalized = draw(st.lists(st.integers(2, 4), min_size=1, max_size=2))
    name = draw(choice("LayerNorm", "RMSNorm"))
    options = {"bias": draw(st.booleans())} if name == "LayerNorm" else {}
    return layer(name, normalized, **options), normal(*draw(positions), *normalized)


@st.composite
def bag(draw):
    rows, mode = draw(st.integers(1, 6)), draw(choice("sum", "mean", "max"))
    padding = draw(st.none() | st.integers(-rows, rows - 1))
    build = layer("EmbeddingBag", rows, draw(small), padding_idx=padding, mode=mode)
    return build, indices(rows, draw(st.integers(1, 8)))


@st.composite
def recurrent(draw):
    name, width = draw(choice("RNN", "LSTM", "GRU")), draw(small)
    options = {"num_layers": draw(st.integers(1, 2)), "bidirectional": draw(st.booleans()), "bias": draw(st.booleans())}
    build = layer(name, width, draw(small), **options)
    return build, normal(draw(small), width, batch_dim=1), 1


@st.composite
def attention(draw):
    heads = draw(few)
    width = heads * draw(few)
    names = ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    options = {name: draw(st.booleans()) for name in names} | {"embed_dim": width, "num_heads": heads}
    query, key = (normal(draw(small), width) for _ in range(2))
    return partial(case_models.attention, **options), query, key, key


FAMILIES = [linear, convolution, transposed, layer_norm, bag, recurrent, attention]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(data=st.data(), batch=st.integers(1, 4))
@pytest.mark.one_in(3)
def test_drawn_shapes_equal_the_loop(family, data, batch):
    build, *specs = data.draw(family())
    dim = specs.pop() if isinstance(specs[-1], int) else 0
    case = Case("drawn", build, tuple(specs), output_dim=dim)
    expected = oracle.per_example_grads(case.model(), case.losses, case.inputs(batch), case.batch_dims)
    max_norm = typical_norm(expected)
    for second_pass, norm_strategy in (("reweight", "gram"), ("cached", "direct")):
        options = {"second_pass": second_pass, "norm_strategy": norm_strategy}
        model, clipper, losses = ready(case, batch=batch, clipping=max_norm, **options)
        result = clipper.backward(losses)
        assert_close(result.norms, oracle.norms(expected), 1e-9, 1e-6 * oracle.norms(expected).max())
        for name, total in oracle.clipped_sum(expected, max_norm).items():  # a single slope's may cancel to nothing
            assert_close(gradients(model)[name], total, 1e-9, max_norm, name)
