"""When "reweight" forms its sums by rules though a backward of reweighted losses would do: where that is slower."""

import oracle
import pytest
import torch
from comparing import assert_dicts_close, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ghostclip

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
    # Nothing set aside, so that the second pass has to form all sums.
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM, memory_budget=1)
    clipper.backward(model(words()))
    model.zero_grad()
    losses = model(words())
    with Names() as names:
        clipper.backward(losses)
    assert clipper._passes.steady
    assert_dicts_close(gradients(model), oracle.clipped_sum(grads, MAX_NORM), 1e-10)
    return names.seen


def test_an_embedding_is_summed_by_its_rule():
    assert "embedding_dense_backward" not in step(Bag().double())


@pytest.mark.parametrize("options", [{"convolution": True}, {"padding_idx": 3, "convolution": True}])
def test_beside_convolutions_it_is_not(options):
    assert "embedding_dense_backward" in step(Bag(**options).double())


def test_where_hooks_wait_for_a_backward_it_is_not():
    model, seen = Bag().double(), []
    model.linear.weight.register_hook(seen.append)
    assert "embedding_dense_backward" in step(model)
    assert len(seen) == 2
