"""Rows of the table in cases.py: recurrent cells in loops over time; deep, projected and packed recurrent layers."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from case_models import Wired, freeze, recurrent
from case_types import Case, indices, normal
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS = 5
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "rnn tanh": ("RNNCell", {}),
    "rnn relu": ("RNNCell", {"nonlinearity": "relu"}),
    "lstm": ("LSTMCell", {}),
    "gru": ("GRUCell", {}),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rnn tanh": ("RNN", {}),
    "rnn relu": ("RNN", {"nonlinearity": "relu"}),
    "lstm": ("LSTM", {}),
    "lstm projected": ("LSTM", {"proj_size": 2}),
    "gru": ("GRU", {}),
}


def hidden(state: Any) -> Tensor:
    """The hidden state, of an LSTM's two the first."""
    return state[0] if isinstance(state, tuple) else state


def every_step(cell: Callable[..., Any], x: Tensor, *states: Tensor) -> list[Tensor]:
    state, found = (states if len(states) > 1 else states[0] if states else None), []
    for step in x.unbind(1):
        state = cell(step, state)
        found.append(hidden(state))
    return found


def some_steps(cell: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Every second step goes through the cell, the last one twice; the loss sees some of the states only."""
    state = None
    for step in x[:, ::2].unbind(1):
        state = cell(step, state)
    return [hidden(cell(x[:, 0], cell(x[:, 1], state)))]


def cell_loop(
    loop: Callable[..., Any], kind: str, nn: ModuleType, freezing: tuple[str, ...] = (), **options: Any
) -> torch.nn.Module:
    """A cell, 4 to 3, in a loop over time."""
    return freeze(Wired(lambda m, *x: loop(m.cell, *x), cell=getattr(nn, kind)(4, 3, **options)), *freezing)


def stacked_cells(kind: str, nn: ModuleType) -> torch.nn.Module:
    """Two cells on top of each other, the first state of the lower one made by a linear layer, a head on every step."""

    def wiring(m: torch.nn.Module, x: Tensor) -> Tensor:
        start, above, found = torch.tanh(m.start(x.mean(1))), None, []
        below: Any = (start, start) if kind == "LSTMCell" else start
        for step in x.unbind(1):
            below = m.below(step, below)
            above = m.above(hidden(below), above)
            found.append(m.head(hidden(above)))
        return torch.stack(found, 1)

    cell = getattr(nn, kind)
    return Wired(wiring, start=nn.Linear(4, 3), below=cell(4, 3), above=cell(3, 2), head=nn.Linear(2, 2))


def _cells() -> Iterator[Case]:
    x = normal(STEPS, 4)
    for name, (kind, options) in CELLS.items():
        states = (normal(3, requires_grad=True),) * (2 if kind == "LSTMCell" else 1)
        loop = partial(cell_loop, every_step, kind, **options)
        yield Case(f"cell {name}", loop, (x,))
        yield Case(f"cell {name} states no bias", partial(loop, bias=False), (x, *states))
        yield Case(f"cell {name} some steps", partial(cell_loop, some_steps, kind, **options), (x,))
        yield Case(f"cell {name} frozen parts", partial(loop, freezing=("cell.weight_hh", "cell.bias_ih")), (x,))
        if "nonlinearity" not in options:
            yield Case(f"cell {name} stacked", partial(stacked_cells, kind), (x,))
    yield Case("cell lstm root", lambda nn: nn.LSTMCell(4, 3), (normal(4),))


def packed(m: torch.nn.Module, x: Tensor, length: Tensor, *states: Tensor, in_order: bool = False) -> list[Tensor]:
    """Examples cut to lengths of 1 to STEPS; the output with zeros after the end, and the last states."""
    hx = states if len(states) > 1 else states[0] if states else None
    if not len(x):  # torch packs no empty batch
        output, last = m.rnn(x, hx)
    else:
        lengths = (length + 1).cpu()  # where torch wants them
        output, last = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order), hx)
        output = pad_packed_sequence(output, batch_first=True, total_length=STEPS)[0]
    return [output, *(part.movedim(1, 0) for part in (last if isinstance(last, tuple) else (last,)))]


def packed_layer(kind: str, nn: ModuleType, in_order: bool = False, **options: Any) -> torch.nn.Module:
    """A recurrent layer, 4 to 3, of packed sequences; in the order of their lengths, or in any."""
    return Wired(partial(packed, in_order=in_order), rnn=getattr(nn, kind)(4, 3, batch_first=True, **options))


def learned_start(nn: ModuleType) -> torch.nn.Module:
    """The initial state is a row of a table, looked up once for each example."""

    def wiring(m: torch.nn.Module, x: Tensor) -> Tensor:
        start = m.start(torch.zeros(len(x), 2, dtype=torch.int64)).transpose(0, 1).contiguous()
        return m.rnn(x, start)[0]

    return Wired(wiring, start=nn.Embedding(1, 3), rnn=nn.GRU(4, 3, batch_first=True, bidirectional=True))


def _layers() -> Iterator[Case]:
    x, falling = normal(STEPS, 4), indices(STEPS, lay_out=lambda lengths: lengths.sort(descending=True).values)
    for name, (kind, options) in KINDS.items():
        layer = partial(recurrent, kind, "both", batch_first=True, **options)
        width = options.get("proj_size", 3)
        states = [normal(4, size, batch_dim=1, requires_grad=True) for size in (width, 3)[: 1 + (kind == "LSTM")]]
        deep = {"num_layers": 2, "bidirectional": True}
        yield Case(f"{name} both ways", partial(layer, bidirectional=True, bias=False), (x,))
        yield Case(f"{name} two layers both ways states", partial(layer, **deep), (x, *states))
        yield Case(f"{name} packed", partial(packed_layer, kind, **options), (x, indices(STEPS)))
        build = partial(packed_layer, kind, in_order=True, bias=False, **deep, **options)
        yield Case(f"{name} packed in order two layers both ways states", build, (x, falling, *states))
    projected = partial(recurrent, "LSTM", "both", proj_size=1)
    yield Case("lstm projected time first", projected, (normal(STEPS, 4, batch_dim=1),))
    twice = partial(recurrent, "LSTM", "twice", batch_first=True, bias=False, proj_size=2)
    yield Case("lstm projected no bias twice", twice, (x,))
    frozen = partial(projected, batch_first=True, freezing=("rnn.weight_hr_l0", "rnn.weight_ih_l0"))
    yield Case("lstm projected frozen parts", frozen, (x,))
    yield Case("gru learned start", learned_start, (x,))
    lengths = (x, indices(STEPS))
    yield Case("gru packed three layers", partial(packed_layer, "GRU", num_layers=3), lengths)


RECURRENT = [*_cells(), *_layers()]
