"""Packed sequences through recurrent layers: values, gradients, and what the first pass gets, in the user's order."""

import pytest
import torch
from case_models import Wired
from comparing import exact_or_refused
from recurrent_layers import (
    KINDS,
    OPTIONS,
    H,
    I,
    assert_all_close,
    first_pass,
    initial,
    pair,
    per_example,
)
from torch import nn as torch_nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from ghostclip.nn.rnn.trace import Order

every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = {"sorted": (6, 6, 4, 2, 1), "not sorted": (4, 6, 1, 6, 2), "all the same": (3, 3, 3), "one": (4,)}


pytestmark = pytest.mark.usefixtures("every_backward")


def sequences(lengths, dtype=torch.float64):
    """One sequence of normal numbers for each length."""
    return [torch.randn(length, I, dtype=dtype) for length in lengths]


def run(layer, given, states=(), in_order=False):
    """[output padded with zeros [B, T, ...], h_n, (c_n)] of packed sequences, dropout the same every time."""
    torch.random.default_generator.manual_seed(3)
    hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
    output, last = layer(pack_sequence(given, enforce_sorted=in_order), hx)
    assert isinstance(output, PackedSequence)
    padded = pad_packed_sequence(output, batch_first=True)[0]
    return [padded, *(part.transpose(0, 1) for part in (last if isinstance(last, tuple) else [last]))]


def losses(results):
    """[B] losses that depend on every entry of the results."""
    return sum(
        (torch.arange(1.0, 1.0 + r[0].numel()).sin().view_as(r[0]) * r + r**2).flatten(1).sum(1) for r in results
    )


@every_kind
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["sorted", "not sorted"])
@pytest.mark.one_in(4)
def test_values_and_ordinary_gradients_are_torchs(kind, option, name):
    for dtype in (torch.float32, torch.float64):
        layers, given, found = pair(kind, option, dtype), sequences(LENGTHS[name], dtype), []
        given[1].requires_grad_()
        states = initial(layers[0], len(given))
        outputs = [run(layer, given, states, name == "sorted") for layer in layers]
        for ours, theirs in zip(*reversed(outputs), strict=True):
            assert torch.equal(ours, theirs)
        for layer, results in zip(layers, outputs, strict=True):
            found.append(torch.autograd.grad(losses(results).sum(), [given[1], *layer.parameters(), *states]))
        assert_all_close(found[1], found[0], 1e-10 if dtype == torch.float64 else 1e-3)


@every_kind
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.one_in(3)
def test_the_first_pass_tells_each_examples_gradients_in_the_users_order(kind, lengths):
    plain, layer = pair(kind, "everything")
    layer.dropout = plain.dropout = 0.0
    given = sequences(lengths)
    results = run(layer, given)
    for _ in range(2):  # the second time with what the first kept
        found = per_example(first_pass(losses(results).sum(), results))
        for place, sequence in enumerate(given):
            padded = [torch.cat([part, part.new_zeros(1, max(lengths) - part.shape[1], part.shape[2])], 1) if not k
                      else part for k, part in enumerate(run(plain, [sequence]))]  # fmt: skip
            expected = torch.autograd.grad(losses(padded).sum(), list(plain.parameters()))
            assert_all_close([found[name][place] for name, _ in plain.named_parameters()], expected)


@every_kind
@pytest.mark.parametrize("place", [0, 1, 2], ids=["output", "h_n", "c_n"])
def test_gradients_that_come_to_some_results_only(kind, place):
    layers, given, found = pair(kind, "both ways"), sequences(LENGTHS["not sorted"]), []
    for layer in layers:
        results = run(layer, given)
        found.append(
            torch.autograd.grad(results[min(place, len(results) - 1)].square().sum(), list(layer.parameters()))
        )
    assert_all_close(found[1], found[0])


@every_kind
def test_a_bad_example_does_not_touch_the_others(kind):
    _, layer = pair(kind, "both ways")
    given, found = sequences(LENGTHS["not sorted"]), []
    for value in (0.0, float("nan")):
        given[3][5] = value
        results = run(layer, given)
        found.append(per_example(first_pass(losses(results).sum(), results)))
    others = torch.tensor([0, 1, 2, 4])
    assert not all(gradients[3].isfinite().all() for gradients in found[1].values())
    assert_all_close([g[others] for g in found[1].values()], [g[others] for g in found[0].values()], 0.0)


@every_kind
def test_the_output_may_be_changed_in_place_and_a_changed_input_is_noticed(kind):
    _, layer = pair(kind, "two layers")
    layer.dropout, found = 0.0, []
    given = pack_sequence(sequences(LENGTHS["sorted"]))
    for change in (lambda y: y.mul_(2.0).relu_(), lambda y: (2.0 * y).relu()):
        output, _ = layer(given)
        found.append(torch.autograd.grad(change(output.data).square().sum(), list(layer.parameters())))
    assert_all_close(*found, 0.0)
    output, _ = layer(given)
    given.data.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.data.sum().backward()


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_are_padded_and_packed_again(reverse):
    sequences = [torch.tensor(numbers).unsqueeze(1) for numbers in ([0.0, 3.0, 5.0], [1.0, 4.0, 6.0, 7.0], [2.0])]
    packed = pack_sequence(sequences, enforce_sorted=False)
    order = Order(packed, reverse)
    expected = [[0, 3, 5, 0], [1, 4, 6, 7], [2, 0, 0, 0]]
    if reverse:
        expected = [[5, 3, 0, 0], [7, 6, 4, 1], [2, 0, 0, 0]]
    padded = order.padded(packed.data)
    assert padded[..., 0].T.tolist() == expected
    assert torch.equal(order.packed(padded), packed.data)
    assert order.padding.T.tolist() == [[False] * length + [True] * (4 - length) for length in (3, 4, 1)]
    assert padded.flatten()[order.ends].tolist() == ([0, 1, 2] if reverse else [5, 7, 2])


def tagger(m, tokens, length):
    """Embedded tokens, packed, through two layers of which the second takes the first one's packed output."""
    embedded = m.embedding(tokens)
    packed = pack_padded_sequence(embedded, length + 1, batch_first=True, enforce_sorted=False)
    output, _ = m.second(m.first(packed)[0])
    return m.head(pad_packed_sequence(output, batch_first=True, total_length=tokens.shape[1])[0])


def test_a_packed_output_goes_into_another_layer():
    parts = {"first": torch_nn.GRU(3, 2, bidirectional=True), "second": torch_nn.LSTM(4, 3, proj_size=2)}
    model = Wired(tagger, embedding=torch_nn.Embedding(7, 3), head=torch_nn.Linear(2, 7), **parts).double()
    assert exact_or_refused(model, (torch.randint(7, (5, 6)), torch.tensor([3, 5, 0, 2, 5]))) is None


def test_a_layer_on_packed_rows():
    def wiring(m, x, length):
        packed = pack_padded_sequence(x, length + 1, batch_first=True, enforce_sorted=False)
        rows = m.rnn(PackedSequence(m.linear(packed.data), *packed[1:]))[0]
        return pad_packed_sequence(rows, batch_first=True, total_length=x.shape[1])[0]

    model = Wired(wiring, linear=torch_nn.Linear(I, I), rnn=torch_nn.GRU(I, H)).double()
    assert exact_or_refused(model, (torch.randn(3, 4, I, dtype=torch.float64), torch.tensor([3, 1, 0]))) is None


def test_a_first_state_that_all_examples_share_is_exact():
    def wiring(m, x):
        return m.rnn(x, m.start.expand(-1, x.shape[0], -1).contiguous())[0]

    model = Wired(wiring, rnn=torch_nn.GRU(I, H, batch_first=True))
    model.register_parameter("start", torch_nn.Parameter(torch.randn(1, 1, H)))
    assert exact_or_refused(model.double(), (torch.randn(3, 4, I, dtype=torch.float64),)) is None
