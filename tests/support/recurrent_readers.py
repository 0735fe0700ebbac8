"""Models that read a sequence through one recurrent layer."""

import torch
from case_models import Wired

LAYERS = {
    "rnn": lambda: torch.nn.RNN(3, 4, batch_first=True),
    "relu": lambda: torch.nn.RNN(3, 4, batch_first=True, nonlinearity="relu", bias=False),
    "lstm": lambda: torch.nn.LSTM(3, 4, batch_first=True),
    "gru": lambda: torch.nn.GRU(3, 4, batch_first=True),
    "deep lstm": lambda: torch.nn.LSTM(3, 4, 2, batch_first=True),
    "deep gru": lambda: torch.nn.GRU(3, 4, 3, batch_first=True, bias=False),
}


def reading(m, x):
    states, last = m.layer(x)
    lasts = last if isinstance(last, tuple) else (last,)
    return m.output(states).sum((1, 2)) + sum(part.square().sum((0, 2)) for part in lasts)


def model_of(name):
    torch.manual_seed(0)
    return Wired(reading, layer=LAYERS[name](), output=torch.nn.Linear(4, 2)).double()


def losses_of(model, batch):
    return model(batch[0])
