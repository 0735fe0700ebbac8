"""Inputs all examples share, and examples that are not in dimension 0, are exact; what only looks alike is refused."""

import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from case_types import project
from comparing import exact_or_refused
from einops import rearrange
from torch import nn

import ghostclip
from ghostclip import LossShapeError, UnsupportedModelError


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def language_model(positions):
    """Token and position embeddings, one layer, a head; ``positions(T)`` are the position ids."""
    return Wired(
        lambda m, tokens: m.head(torch.tanh(m.body(m.token(tokens) + m.place(positions(tokens.shape[1]))))),
        token=nn.Embedding(7, 5),
        place=nn.Embedding(16, 5),
        body=nn.Linear(5, 5),
        head=nn.Linear(5, 7),
    ).double()


IDS = {"[1, T]": lambda length: torch.arange(length)[None], "[T]": torch.arange}


def towers(between):
    """Two layers of which the second's outputs for all examples are compared with the first's for each."""
    parts = {"first": nn.Linear(5, 3), "second": nn.Embedding(7, 3)}
    return Wired(lambda m, x, labels: between(m.first(x), m.second(labels)), **parts).double()


PAIRS = {
    "distances": lambda h, z: (h[:, None] - z[None]).square().sum(-1),
    "products": lambda h, z: h @ z.T,
    "mean": lambda h, z: h + z.mean(0),
    "first": lambda h, z: h + z[:1],
    "flattened": lambda h, z: torch.cat([h, z.view(1, -1).expand(len(h), -1)], dim=1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_looks_like_a_table_of_positions_but_holds_examples_is_refused(name):
    model = ghostclip.wrap(towers(PAIRS[name]))
    losses = project(model(numbers(4, 5), torch.randint(7, (4,))))
    with pytest.raises(UnsupportedModelError, match="second"):
        ghostclip.GhostClipper(model).backward(losses)
    assert model.second.weight.grad is None


def test_losses_of_tokens_are_refused_with_position_ids_too():
    model = ghostclip.wrap(language_model(IDS["[1, T]"]))
    losses = model(torch.randint(7, (3, 6))).square().sum(-1).flatten()
    with pytest.raises((LossShapeError, UnsupportedModelError)):
        ghostclip.GhostClipper(model).backward(losses)


WINDOWS = {
    "windows, example first": "b (w t) d -> (b w) t d",
    "windows, window first": "b (w t) d -> (w b) t d",
    "windows beside": "b (w t) d -> b w t d",
    "heads": "b t (w d) -> (b w) t d",
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("examples", [2, 4, 5])
def test_a_bias_inside_windows_folded_into_the_batch(name, examples):
    fold = WINDOWS[name]
    whole, folded = fold.split(" -> ")

    def wiring(m, x):
        inside = rearrange(m.layer(x), fold, w=2)
        return rearrange(inside + m.p * inside.tanh(), f"{folded} -> {whole}", w=2, b=len(x))

    width = 2 if name == "heads" else 4
    length = 8 if name == "heads" else 4
    model = with_parameters(wiring, {"p": (length, width)}, layer=nn.Linear(4, 4)).double()
    assert exact_or_refused(model, (numbers(examples, 8, 4),)) is None


@pytest.mark.parametrize("steps", [1, 3, 5, 10])
def test_position_parameters_of_a_time_first_model(steps):
    model = with_parameters(lambda m, x: m.rnn(x + m.p)[0], {"p": (steps, 1, 4)}, rnn=nn.LSTM(4, 3)).double()
    assert exact_or_refused(model, (numbers(steps, 5, 4),), [1], lambda out: project(out, 1)) is None


def test_a_learned_first_state_of_a_recurrent_layer():
    def wiring(m, x):
        state = m.p.expand(-1, len(x), -1).contiguous()
        return m.rnn(x, (state, torch.tanh(state)))[0]

    rnn = nn.LSTM(4, 3, batch_first=True)
    model = with_parameters(wiring, {"p": (1, 1, 3)}, rnn=rnn).double()
    assert exact_or_refused(model, (numbers(4, 6, 4),)) is None


def test_attention_over_positions_that_all_examples_share():
    def wiring(m, x):
        place = m.place(torch.arange(x.shape[1])[None])
        place = place + m.attention(place, place, place, need_weights=False)[0]
        return m.head(x + place)

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Wired(wiring, place=nn.Embedding(9, 4), attention=attention, head=nn.Linear(4, 2)).double()
    assert exact_or_refused(model, (numbers(4, 6, 4),)) is None


def test_recurrent_positions_that_all_examples_share():
    rnn = nn.GRU(4, 4, batch_first=True)
    model = Wired(
        lambda m, x: m.head(x + m.rnn(m.place(torch.arange(x.shape[1])[None]))[0]),
        place=nn.Embedding(9, 4), rnn=rnn, head=nn.Linear(4, 2),
    ).double()  # fmt: skip
    assert exact_or_refused(model, (numbers(4, 6, 4),)) is None
