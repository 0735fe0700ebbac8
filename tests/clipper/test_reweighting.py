"""When "reweight" forms its sums by rules though a backward of reweighted losses would do: where that is slower."""

import oracle
import pytest
import torch
from comparing import assert_dicts_close, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ghostclip
from ghostclip.clipper.collector import Keep

MAX_NORM = 0.05


class Names(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Bag(nn.Module):
    """Losses [B] of texts: the mean of their words, and where asked a convolution over them, then a linear layer."""

    def __init__(self, convolution: bool = False, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, 6, **options)
        self.over = nn.Conv1d(6, 6, 3) if convolution else nn.Identity()
        self.linear = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.over(self.words(words).transpose(1, 2)).mean(2)
        return self.linear(hidden.tanh()).abs().sum(1)


def words() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(40, (5, 7))


def step(model: nn.Module) -> set[str]:
    """Names of the operations in the passes of a step, whose sum is the loop's."""
    grads = oracle.per_example_grads(model, lambda losses: losses, (words(),))
    # Nothing kept, so that the second pass has to form all sums.
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM, memory_budget=1)
    clipper.backward(model(words()))
    model.zero_grad()
    losses = model(words())
    with Names() as names:
        clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(grads, MAX_NORM), 1e-10)
    return names.seen


@pytest.mark.parametrize("options", [{}, {"convolution": True}, {"padding_idx": 3, "convolution": True}])
def test_sums_are_formed_by_rules(options):
    assert "embedding_dense_backward" not in step(Bag(**options).double())


def test_hooks_get_the_finished_sum():
    model, seen = Bag().double(), []
    model.linear.weight.register_hook(seen.append)
    assert "embedding_dense_backward" not in step(model)
    assert len(seen) == 2


class Residual(nn.Module):
    """Losses [B] of a network with branches that meet again, so that its lowest layer is hard to find."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.over_time = nn.LSTM(6, 6, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, beside, last = self.layers
        hidden = torch.tanh(first(inputs))
        hidden = hidden + torch.tanh(second(hidden))
        ahead, _ = self.over_time(hidden)
        hidden = third(ahead) * torch.sigmoid(beside(inputs)) + hidden
        return last(hidden).square().mean((1, 2))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(3)
def test_the_second_backward_ends_at_the_lowest_layer_that_has_to_be_summed(seed):
    """Whichever parameters are kept, the sums of the others are exact."""
    model, inputs = Residual().double(), torch.randn(5, 4, 6, dtype=torch.float64)
    grads = oracle.per_example_grads(model, lambda losses: losses, (inputs,))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM)
    kept = torch.rand(100, generator=torch.Generator().manual_seed(seed)) < (seed % 4 + 1) / 5
    parameters = {id(p): bool(kept[number]) for number, p in enumerate(model.parameters())}
    passes = clipper.passes
    original = passes.first_pass

    def keeps_some(losses: Tensor, keep: Keep, **options: object) -> object:
        """A first pass that kept those parameters, and no others."""
        run = original(losses, retain_graph=True)
        run.holds_graph = True
        other = original(losses, Keep.MATERIALISED, retain_graph=True)
        run.kept = {parts: term for parts, term in other.kept.items() if parameters[parts[0][0]]}
        return run

    passes.first_pass = keeps_some
    losses = model(inputs)
    clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(grads, MAX_NORM), 1e-10)
    with pytest.raises(ghostclip.StaleInputError, match="freed"):
        original(losses, retain_graph=False)
