"""Models and batches in which almost all digits of an example's gradient cancel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_NORM = 1.0


# One example's share of the bound beyond which the promise of API.md is broken.
SHARE = 1 + 1e-5


class TiedHead(nn.Module):
    """An embedding, a frozen antisymmetric map and a head tied to the embedding: both uses cancel for equal tokens."""

    def __init__(self, tokens: int = 50, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(tokens, width)
        self.turn = nn.Linear(width, width, bias=False)
        half = torch.randn(width, width)
        self.turn.weight = nn.Parameter(half - half.T, requires_grad=False)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.turn(self.words(words)))


def tied_losses(model: nn.Module, words: Tensor, targets: Tensor) -> Tensor:
    return (model(words) * targets).sum((1, 2))


def tied_batches(positions: int, examples: int = 3):
    for seed in range(3):
        torch.manual_seed(seed)
        words = torch.randint(50, (examples, 1)).expand(-1, positions).contiguous()
        yield words, 1e4 * (F.one_hot(words, 50) + 1e-4 * torch.randn(examples, positions, 50))


def positions_batches(model: nn.Module, width: int, positions: int):
    for seed in range(3):
        for left_over in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
            for size in (1e-3, 1.0, 1e3):
                torch.manual_seed(seed)
                inputs = size * torch.randn(3, 1, width).expand(-1, positions, -1).contiguous()
                with torch.no_grad():
                    yield inputs, with_errors(model(inputs), left_over)


def squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), targets, reduction="none").sum((1, 2))


class FanOut(nn.Module):
    """Losses of z - a z with a near 1: the gradients of both branches cancel."""

    def __init__(self, factor: float, kind: str = "linear") -> None:
        super().__init__()
        self.layer = {"linear": nn.Linear(16, 16), "lstm": nn.LSTM(16, 16, batch_first=True)}[kind]
        self.factor = factor
        self.register_buffer("scale", torch.rand(16))

    def forward(self, inputs: Tensor) -> Tensor:
        z = self.layer(inputs)
        z = z[0] if isinstance(z, tuple) else z
        # The factors are copies, lest the branches share a node.
        return (z * self.scale.clone() - self.factor * z * self.scale.clone()).flatten(1).sum(1)


def fan_out_batches(examples: int, positions: tuple[int, ...] = (1, 5)):
    for size in (1e3, 1e8, 1e10, 1e12):
        for count in positions:
            yield (size * torch.randn(examples, count, 16),)


class Twice(nn.Module):
    """One linear layer used twice, its second use on the first one's negative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.layer(-inputs * (1 - 1e-6)).neg()


def with_errors(outputs: Tensor, left_over: float) -> Tensor:
    """Targets for which an example's errors add up, over dimension 1, to a share ``left_over`` of their size."""
    errors = torch.randn_like(outputs)
    errors -= errors.mean(1, keepdim=True)
    return outputs - errors - left_over * torch.randn_like(outputs)
