"""Losses that contain gradients (of the output by the inputs, or by activations), for test_double_backward.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from case_models import Wired
from case_types import project
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

__all__ = ["LOSSES", "MODELS", "OnInputs", "Once", "on_slope", "sloped"]


class OnInputs(nn.Module):
    """A model whose outputs are losses [B]: a projection of its own outputs, and the squared slope by each input."""

    def __init__(self, model: nn.Module, batch_dims: Sequence[int | None], output_dim: int, linear: bool) -> None:
        super().__init__()
        self.model, self.batch_dims, self.output_dim, self.linear = model, batch_dims, output_dim, linear

    def forward(self, *inputs: Tensor) -> Tensor:
        inputs = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
        outputs = self.model(*inputs)
        losses = project(outputs, self.output_dim)
        own = {n: dim for n, dim in enumerate(self.batch_dims) if dim is not None and inputs[n].is_floating_point()}
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        total = sum(leaf.sum() for leaf in leaves) if self.linear else losses.sum()
        slopes = torch.autograd.grad(total, [inputs[n] for n in own], create_graph=True, allow_unused=True)
        for slope, dim in zip(slopes, own.values(), strict=True):
            losses = losses if slope is None else losses + squared(slope.movedim(dim, 0).unsqueeze(-1))
        return losses


def squared(rows: Tensor) -> Tensor:
    return rows.flatten(1).square().sum(1)


def _slope(model: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor] = torch.sin) -> tuple[Tensor, ...]:
    """The inputs, as a leaf, the outputs, and the gradient of their function's sum by the inputs."""
    x = x.clone().requires_grad_()
    y = model(x)
    return x, y, *torch.autograd.grad(function(y).sum(), x, create_graph=True)


def on_slope(model: nn.Module, x: Tensor) -> Tensor:
    _, y, slope = _slope(model, x, torch.Tensor.clone)
    return squared(y) + squared(slope)


def critic(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP: a critic's value, and the distance of its slope's norm from one (Gulrajani et al. 2017, equation 3)."""
    _, y, slope = _slope(model, x, lambda y: y.flatten(1).mean(1))
    return y.flatten(1).mean(1) + 10 * (slope.flatten(1).norm(dim=1) - 1) ** 2


def at_activations(model: nn.Module, x: Tensor) -> Tensor:
    """The slope by what the first layer gives, as penalties on embeddings take it."""
    kept: list[Tensor] = []
    hook = next(model.children()).register_forward_hook(lambda layer, args, output: kept.append(tree_leaves(output)[0]))
    y = model(x)
    hook.remove()
    (slope,) = torch.autograd.grad(y.sin().sum(), kept[0], create_graph=True)
    return squared(y) + squared(slope)


def curvature(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient of a gradient: the clipper's own is the third."""
    x, _, slope = _slope(model, x)
    return squared(*torch.autograd.grad(slope.square().sum(), x, create_graph=True))


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "slope": on_slope,
    "critic": critic,
    "activations": at_activations,
    "curvature": curvature,
}


def sloped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Losses of activations: the squared gradient of a function of them."""

    def losses(h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(function(h).sin().sum(), h, create_graph=True)
        return squared(slope)

    return losses


class Once(torch.autograd.Function):
    """A sine that can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


def _recurrent(layer: nn.Module, width: int) -> nn.Module:
    return Wired(lambda m, x: m.head(m.rnn(x)[0]), rnn=layer, head=nn.Linear(width, 2))


def _checkpointed(layer: nn.Module) -> nn.Module:
    return Wired(
        lambda m, x: m.head(checkpoint(lambda h: torch.tanh(m.inner(h)), x, use_reentrant=False)),
        inner=layer, head=nn.Linear(5, 3),
    )  # fmt: skip


def _encoder() -> nn.Module:
    def wiring(m: nn.Module, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the kernel with second derivatives
            return m.head(m.block(x))

    return Wired(wiring, block=nn.TransformerEncoderLayer(8, 2, 6, 0.0, batch_first=True), head=nn.Linear(8, 1))


weight_norm = parametrizations.weight_norm


def _batch_norm() -> nn.Module:
    """With the statistics of some data."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 1, 2))
    model(2 + 3 * torch.randn(8, 2, 5, 5))
    return model.eval()


# Each with the shape of one example; OnInputs has every layer.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Softplus()), (6,)),
    "batch norm in eval mode": (_batch_norm, (2, 5, 5)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 1, 2)), (2, 5, 5),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), nn.Conv1d(3, 2, 2)),
        (2, 5),
    ),
    "rnn": (lambda: _recurrent(nn.RNN(6, 5, batch_first=True), 5), (4, 6)),
    "lstm": (lambda: _recurrent(nn.LSTM(6, 5, 2, batch_first=True), 5), (4, 6)),
    "gru": (lambda: _recurrent(nn.GRU(6, 5, batch_first=True, bidirectional=True), 10), (4, 6)),
    "encoder": (_encoder, (4, 8)),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.Tanh(), weight_norm(nn.Linear(6, 2))), (6,)),
    "checkpointed": (lambda: _checkpointed(nn.Linear(6, 5)), (6,)),
    "tied": (lambda: Wired(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.t()), a=nn.Linear(6, 5)), (6,)),
}  # fmt: skip
