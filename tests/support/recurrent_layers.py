"""Recurrent layers in every kind and setting, and what the tests of test_recurrent.py do with one by itself."""

import torch

from ghostclip.nn import rnn

T, B, I, H = 5, 3, 4, 6
KINDS = {
    "lstm": (rnn.LSTM, {}),
    "projected lstm": (rnn.LSTM, {"proj_size": 2}),
    "gru": (rnn.GRU, {}),
    "rnn tanh": (rnn.RNN, {"nonlinearity": "tanh"}),
    "rnn relu": (rnn.RNN, {"nonlinearity": "relu"}),
}
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "both ways": {"bidirectional": True, "batch_first": True},
    "two layers": {"num_layers": 2, "dropout": 0.4},
    "everything": {"num_layers": 3, "bidirectional": True, "bias": False, "dropout": 0.4, "batch_first": True},
}


def pair(kind, option="plain", dtype=torch.float64, sizes=(I, H)):
    """A plain torch layer and its wrapper with the same parameters."""
    wrapper, own = KINDS[kind]
    plain = wrapper.wrapped(*sizes, **own, **OPTIONS[option]).to(dtype)
    wrapped = wrapper(*sizes, **own, **OPTIONS[option]).to(dtype)
    wrapped.load_state_dict(plain.state_dict())
    return plain, wrapped


def sequences(layer, steps=T, batch=B):
    """An input of normal numbers in the layer's layout and dtype."""
    shape = (batch, steps) if layer.batch_first else (steps, batch)
    return torch.randn(*shape, layer.input_size, dtype=layer.weight_ih_l0.dtype)


def initial(layer, batch=B):
    """Initial states that need gradients, as a list."""
    rows, dtype = layer.num_layers * (1 + layer.bidirectional), layer.weight_ih_l0.dtype
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 1 + (layer.mode == "LSTM")]
    return [torch.randn(rows, batch, width, dtype=dtype, requires_grad=True) for width in widths]


def run(layer, x, states=()):
    """[output, h_n, (c_n)], dropout the same every time."""
    torch.random.default_generator.manual_seed(3)
    output, last = layer(x, (tuple(states) if len(states) > 1 else states[0]) if states else None)
    return [output, *last] if isinstance(last, tuple) else [output, last]


def losses(layer, results):
    """[B] losses that depend on every entry of every result, with the same weights for all examples."""
    generator = torch.Generator().manual_seed(5)
    total = 0.0
    for place, result in enumerate(results):
        rows = result.movedim(0 if place == 0 and layer.batch_first else 1, 0)
        weights = torch.randn(rows.shape[1:], generator=generator).to(rows)
        total = total + (weights * rows + 0.1 * rows**2).flatten(1).sum(1)
    return total


def assert_all_close(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm()
