"""Small models as users write them, for the table in cases.py; the namespace ``nn`` gives them their layers."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Wired(torch.nn.Module):
    """Named parts and a forward given as a function: ``wiring(model, *inputs)``."""

    def __init__(self, wiring: Callable[..., Any], **parts: torch.nn.Module) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.wiring(self, *inputs)


def freeze(model: torch.nn.Module, *names: str) -> torch.nn.Module:
    """The model, with the named parameters (or all parameters of the named modules) frozen."""
    for name in names:
        found = [p for n, p in model.named_parameters() if n == name or n.startswith(name + ".")]
        assert found, f"{name!r} names no parameter"
        for parameter in found:
            parameter.requires_grad_(False)
    return model


def tie(model: torch.nn.Module, first: str, second: str, parameter: str = "weight") -> torch.nn.Module:
    """The model, whose module ``second`` now holds the very Parameter of ``first``."""
    setattr(model.get_submodule(second), parameter, getattr(model.get_submodule(first), parameter))
    return model


def tied_linears(nn: ModuleType) -> torch.nn.Module:
    """Two Linear modules, one weight, two biases, on inputs of different length."""
    model = Wired(lambda m, x: m.second(torch.tanh(m.first(x))[:, :4]), first=nn.Linear(5, 5), second=nn.Linear(5, 5))
    return tie(model, "first", "second")


def tied_head(nn: ModuleType, padding_idx: int | None = None) -> torch.nn.Module:
    model = Wired(
        lambda m, tokens: m.head(torch.tanh(m.body(m.embedding(tokens)))),
        embedding=nn.Embedding(7, 5, padding_idx=padding_idx),
        body=nn.Linear(5, 5),
        head=nn.Linear(5, 7, bias=False),
    )
    return tie(model, "embedding", "head")


def inplace_residual(m: torch.nn.Module, x: Tensor) -> Tensor:
    """``y += x`` on the output of a layer, twice, then an in-place activation."""
    y = m.first(x)
    y += x
    y = m.second(y)
    y += x
    return y.relu_()


def index_assignment(m: torch.nn.Module, x: Tensor) -> Tensor:
    """Part of a layer's output overwritten by part of another's, and doubled in place."""
    y = m.first(x)
    y[:, 0] = m.second(x[:, 0])
    y[..., 1] *= 2
    return y


def convolution(dims: int, channels: int, nn: ModuleType, **options: Any) -> torch.nn.Module:
    """A convolution of ``dims`` dimensions to twice the channels, 3 wide by default."""
    return getattr(nn, f"Conv{dims}d")(channels, 2 * channels, **{"kernel_size": 3} | options)


def recurrent(kind: str, use: str, nn: ModuleType, freezing: tuple[str, ...] = (), **options: Any) -> torch.nn.Module:
    """A recurrent layer, 4 to 3, of which the loss sees what ``use`` says; initial states may follow the input."""

    def wiring(m: torch.nn.Module, x: Tensor, *states: Tensor) -> Any:
        initial = states if len(states) > 1 else states[0] if states else None
        output, state = m.rnn(x, initial)
        if use == "twice":
            return m.rnn(x.flip(1)[:, :4], state)[0]
        last = [part.movedim(1, 0) for part in (state if isinstance(state, tuple) else (state,))]
        output = output if m.rnn.batch_first else output.movedim(1, 0)
        return {"output": output, "state": last, "both": [output, last], "cell": last[-1]}[use]

    return freeze(Wired(wiring, rnn=getattr(nn, kind)(4, 3, **options)), *freezing)


def decoder(kind: str, nn: ModuleType) -> torch.nn.Module:
    """Embedded tokens read from a state that a Linear layer made; two recurrent layers, a head on every step."""

    def wiring(m: torch.nn.Module, tokens: Tensor, x: Tensor) -> Tensor:
        state = m.start(x).unsqueeze(0)
        steps, _ = m.first(m.embedding(tokens), (state, state) if kind == "LSTM" else state)
        return m.head(m.second(steps)[0])

    return Wired(
        wiring, start=nn.Linear(2, 3), embedding=nn.Embedding(5, 4), first=getattr(nn, kind)(4, 3, batch_first=True),
        second=getattr(nn, kind)(3, 2, batch_first=True), head=nn.Linear(2, 5),
    )  # fmt: skip


def attention(nn: ModuleType, call: Callable[..., Any] | None = None, **options: Any) -> torch.nn.Module:
    """MultiheadAttention of batch-first inputs, in whichever layout the layer wants them; of one input, self-attention.

    ``call(attend, *inputs)`` may say how it is called; by default it is ``attend(*inputs)``.
    """

    def attend(m: torch.nn.Module, query: Tensor, *others: Tensor, **more: Any) -> Any:
        inputs = [query, *(others or (query, query))]
        if m.attention.batch_first:
            return m.attention(*inputs, **more)
        output, weights = m.attention(*(value.transpose(0, 1) for value in inputs), **more)
        return output.transpose(0, 1), weights

    def wiring(m: torch.nn.Module, *inputs: Tensor) -> Any:
        return call(partial(attend, m), *inputs) if call else attend(m, *inputs)

    return Wired(wiring, attention=nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2} | options))


def padded(attend: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    """Some of the last two positions of each example are padding."""
    padding = x.new_zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -2:] = x[:, -2:, 0] > 0
    return attend(x, key_padding_mask=padding, **options)


def masked_each(attend: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    """A float mask of its own for each example and head, [B * heads, T, T]."""
    mask = (x[:, None, :, None, 0] + x[:, None, None, :, 1]).expand(-1, 2, -1, -1)
    return attend(x, attn_mask=mask.reshape(-1, *mask.shape[2:]).detach(), **options)


def cnn(nn: ModuleType) -> torch.nn.Module:
    """The paper's CNN, narrow: two convolutions with max pooling, two fully connected layers."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 6), nn.ReLU(inplace=True), nn.Linear(6, 3),
    )  # fmt: skip


def transformer(nn: ModuleType) -> torch.nn.Module:
    """The paper's Transformer, narrow: embedding, one block with self-attention, mean over positions, head."""

    def wiring(m: torch.nn.Module, tokens: Tensor) -> Tensor:
        x = m.embedding(tokens) + m.position(torch.arange(tokens.shape[1]).expand_as(tokens))
        x = m.norm1(x + m.attention(x, x, x, need_weights=False)[0])
        x = m.norm2(x + m.contract(torch.relu(m.expand(x))))
        return m.head(x.mean(dim=1))

    return Wired(
        wiring, embedding=nn.Embedding(11, 8), position=nn.Embedding(9, 8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True), norm1=nn.LayerNorm(8),
        expand=nn.Linear(8, 12), contract=nn.Linear(12, 8), norm2=nn.LayerNorm(8), head=nn.Linear(8, 2),
    )  # fmt: skip


def two_linears(nn: ModuleType = torch.nn) -> torch.nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class By(torch.nn.Module):
    """An operation without parameters, of one node in the graph."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, x):
        return self.operation(x)
