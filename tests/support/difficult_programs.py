"""Honest programs whose rows are hard to assign to examples: nothing but gradients says whose they are.

Each has ten batches, of several sizes; where positions are counted, there are as many as examples in some of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from case_fallback import with_parameters
from case_models import Wired
from law_programs import Program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

BATCHES = 10
EXAMPLES, POSITIONS = (4, 8, 2, 5, 4, 1, 12, 3, 6, 8), (4, 4, 6, 3, 8, 4, 6, 3, 4, 8)
WIDTH, INSIDE, STATES, WORDS = 5, 6, 3, 9


def vectors(number: int) -> tuple[Tensor]:
    return (torch.randn(EXAMPLES[number], WIDTH),)


def parameters_outside_of_layers(m: Any, x: Tensor) -> Tensor:
    """A matrix used twice, a temperature, a scale, a first token."""
    h = torch.einsum("btd,d->btd", x @ (m.matrix * m.temperature.exp()), m.scale)
    h = torch.cat([m.token.expand(len(x), 1, INSIDE), h], 1)
    return torch.softmax(h @ m.matrix.T, -1)[:, 0]


def bare_matrices() -> nn.Module:
    shapes = {"matrix": (WIDTH, INSIDE), "scale": (INSIDE,), "temperature": (), "token": (1, INSIDE)}
    return with_parameters(parameters_outside_of_layers, shapes)


def minus_log_probability(m: Any, ids: Tensor) -> Tensor:
    """Of each text by a hidden Markov model; emissions are read outside of the loop and in it."""
    emit, move = m.emit.log_softmax(1), m.move.log_softmax(1)
    outside = emit.T[ids]
    alpha = m.start.log_softmax(0) + outside[:, 0]
    for place in range(1, ids.shape[1]):
        alpha = (alpha[:, :, None] + move).logsumexp(1) + emit[:, ids[:, place]].T
    return -alpha.logsumexp(1)


def hidden_markov_model() -> nn.Module:
    shapes = {"emit": (STATES, WORDS), "move": (STATES, STATES), "start": (STATES,)}
    return with_parameters(minus_log_probability, shapes)


def with_positions(m: Any, ids: Tensor) -> Tensor:
    """A table of positions and a bare parameter of them, cut to the length of the text."""
    length = ids.shape[1]
    h = m.words(ids) + m.places(torch.arange(length)) + m.bare[:length]
    return m.head(torch.tanh(h).mean(1))


def positions(most: int) -> nn.Module:
    parts = {"words": nn.Embedding(WORDS, INSIDE), "places": nn.Embedding(most, INSIDE), "head": nn.Linear(INSIDE, 3)}
    return with_parameters(with_positions, {"bare": (most, INSIDE)}, **parts)


def on_packed_data(m: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    """Layers on ``packed.data``, whose rows are time first and leave padding out."""
    packed = pack_padded_sequence(ids, lengths, batch_first=True, enforce_sorted=False)
    rows = torch.tanh(m.layer(m.words(packed.data)))
    return m.head(m.rnn(PackedSequence(rows, *packed[1:]))[1][0][-1])


def packed_layers() -> nn.Module:
    parts = {"words": nn.Embedding(WORDS, WIDTH), "layer": nn.Linear(WIDTH, WIDTH), "rnn": nn.LSTM(WIDTH, 4)}
    return Wired(on_packed_data, **parts, head=nn.Linear(4, 2))


def sequences(number: int) -> tuple[Tensor]:
    return (torch.randn(EXAMPLES[number], POSITIONS[number], WIDTH),)


def words(number: int) -> tuple[Tensor]:
    return (torch.randint(WORDS, (EXAMPLES[number], POSITIONS[number])),)


def last_losses(model: nn.Module, *inputs: Any) -> Tensor:
    return model(*inputs)


def graphs(sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes [R, WIDTH], a weighted adjacency [R, R] with no edge between graphs, and membership [B, R]."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    adjacency = torch.rand(len(owner), len(owner)) * (owner[:, None] == owner)
    return torch.randn(len(owner), WIDTH), adjacency, (owner == torch.arange(len(sizes))[:, None]).float()


def stacked(pool: Callable[[Tensor, Tensor], Tensor], messages: bool = True) -> Callable[[], nn.Module]:
    """Graphs one after another: messages by a matrix, or none, pooled in a given way."""

    def wiring(m: Any, x: Tensor, adjacency: Tensor, members: Tensor) -> Tensor:
        for layer in (m.first, m.second):
            x = torch.tanh(adjacency @ layer(x) if messages else layer(x))
        return m.head(pool(members, x))

    return lambda: Wired(
        wiring, first=nn.Linear(WIDTH, INSIDE), second=nn.Linear(INSIDE, INSIDE), head=nn.Linear(INSIDE, 3)
    )


def pooled_by_mask(members: Tensor, x: Tensor) -> Tensor:
    return (members[:, :, None] * x[None]).sum(1)


def pooled_by_index(members: Tensor, x: Tensor) -> Tensor:
    return x.new_zeros(len(members), x.shape[1]).index_add(0, members.argmax(0), x) / members.sum(1)[:, None]


def layers(form: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    """Two layers and a normalization, put together by a function."""
    return lambda: Wired(form, first=nn.Linear(WIDTH, INSIDE), norm=nn.LayerNorm(INSIDE), second=nn.Linear(INSIDE, 2))


def flattened_time_first(m: Any, x: Tensor) -> Tensor:
    """Layers on rows [T * B, d]."""
    h = torch.tanh(m.first(x.transpose(0, 1).reshape(-1, WIDTH)))
    return m.second(h).view(x.shape[1], len(x), 2).mean(0)


def reordered(m: Any, x: Tensor, order: Tensor, permute: Callable[..., Tensor] = torch.Tensor.__getitem__) -> Tensor:
    """Layers on rows in another order, which is undone behind them."""
    return permute(m.second(torch.tanh(m.first(permute(x, order)))), order.argsort())


def masked(m: Any, x: Tensor) -> Tensor:
    """A head on some positions of all examples, picked by a mask and added up by example."""
    mask = x[..., 0] > -0.5
    rows = -m.second(m.first(x).tanh()[mask]).log_softmax(1)[:, 0]
    return rows.new_zeros(len(x)).index_add(0, mask.nonzero()[:, 0], rows)


def losses_flattened_time_first(model: nn.Module, ids: Tensor) -> Tensor:
    """The layers are example first; the loss of each word comes from [T * B] rows."""
    logits = model(ids).transpose(0, 1).reshape(-1, WORDS)
    return F.cross_entropy(logits, ids.T.reshape(-1), reduction="none").view(ids.shape[1], len(ids)).mean(0)


GRAPHS = ((3, 1, 4, 2), (4, 4, 4, 4), (1, 1, 1), (2, 6, 4), (5, 3), (1, 7, 4, 4), (3, 3, 3), (6, 2, 3, 5), (9,), (2, 2))
EQUAL = (4, 4, 4)
SAME_NUMBER = (EQUAL, EQUAL, (2, 6, 4), (1, 5, 6), (6, 3, 3), EQUAL, (8, 2, 2), (3, 4, 5), (5, 5, 2), EQUAL)
DIFFICULT = (
    Program("graphs pooled by an index", stacked(pooled_by_index), lambda number: graphs(GRAPHS[number])),
    Program("graphs pooled by a matrix", stacked(torch.matmul), lambda number: graphs(GRAPHS[number])),
    Program("graphs pooled by a mask", stacked(pooled_by_mask), lambda number: graphs(GRAPHS[number])),
    Program("graphs of as many nodes in all", stacked(torch.matmul), lambda number: graphs(SAME_NUMBER[number])),
    Program("four positions", lambda: positions(4), lambda number: (torch.randint(WORDS, (EXAMPLES[number], 4)),)),
    Program("positions of several lengths", lambda: positions(8), words),
    Program("time first layers", layers(lambda m, x: m.second(m.norm(m.first(x.transpose(0, 1))).tanh()).mean(0)),
            sequences),
    Program("flattened time first", layers(flattened_time_first), sequences),
    Program("a loss flattens time first",
            lambda: nn.Sequential(nn.Embedding(WORDS, INSIDE), nn.Tanh(), nn.Linear(INSIDE, WORDS)),
            words, losses_flattened_time_first),
    # A loop over single examples, which share layers and a parameter outside of them.
    Program("one by one", layers(lambda m, x: torch.stack([m.second(m.first(h).tanh() * m.norm.weight) for h in x])),
            vectors),
    Program("rows permuted at random", layers(reordered),
            lambda number: (*vectors(number), torch.randperm(EXAMPLES[number]))),
    Program("packed data", packed_layers,
            lambda number: (*words(number), torch.randint(1, POSITIONS[number] + 1, (EXAMPLES[number],)))),
    Program("bare matrices", bare_matrices, sequences),
    Program("hidden Markov model", hidden_markov_model, words, last_losses),
    Program("masked words", layers(masked), sequences, last_losses),
)  # fmt: skip
