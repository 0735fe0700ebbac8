"""Programs whose weights are computed from parameters: by parametrizations, pruning, hooks, functions, other models.

Names begin with the kind of weight, by which tests choose them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from case_fallback import with_parameters
from case_models import By, Wired
from case_types import project
from law_programs import Program
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

# Examples in each batch; there are six positions.
SIZES = (6, 4, 1, 3, 8, 2, 5, 12, 6, 7)


def sized(*shapes: tuple[int, ...]) -> Callable[[int], list[Tensor]]:
    """Batches of normal numbers [B, *shape], of several sizes."""
    return lambda number: [torch.randn(SIZES[number], *shape) for shape in shapes]


def projected(model: nn.Module, *inputs: Any) -> Tensor:
    return project(model(*inputs))


# Of the weight: entry by entry, with the parameter used twice; a straight-through estimator; a mask of each column; a
# curve of it over its largest row's length.
CURVED = By(lambda weight: 0.3 * torch.exp(weight) - torch.tanh(weight))
ROUNDED = By(lambda weight: weight + (weight.round() - weight).detach())
MASKED = By(lambda weight: weight * torch.linspace(0, 1, 5).to(weight))
DIVIDED = By(lambda weight: torch.exp(weight) / weight.square().sum(1).sqrt().amax())


def parametrized(layer, parametrization, name="weight"):
    register_parametrization(layer, name, parametrization)
    return layer


def pruned(layer):
    return prune.random_unstructured(layer, "weight", 0.5)


def low_rank():
    """LoRA."""
    layer = nn.Linear(5, 8)
    layer.weight.requires_grad_(False)
    adapter = with_parameters(lambda m, weight: weight + m.up @ m.down, {"down": (2, 5), "up": (8, 2)})
    return parametrized(layer, adapter)


def convolution(change, **options):
    return nn.Sequential(change(nn.Conv1d(6, 4, 2, **options)), nn.Flatten(), nn.Linear(16, 8))


LINEAR = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 8)),
    "weight_norm of the whole": lambda: parametrizations.weight_norm(nn.Linear(5, 8), dim=None),
    "weight_norm of both": lambda: parametrizations.weight_norm(parametrizations.weight_norm(nn.Linear(5, 8)), "bias"),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 8)),
    "quotient of a curve": lambda: parametrized(nn.Linear(5, 8), DIVIDED),
    "masked columns": lambda: parametrized(nn.Linear(5, 8), MASKED),
    "masked after a curve": lambda: parametrized(parametrized(nn.Linear(5, 8), CURVED), MASKED),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 8)),
    "pruned": lambda: pruned(nn.Linear(5, 8)),
    "straight-through": lambda: parametrized(nn.Linear(5, 8), ROUNDED),
    "entry by entry": lambda: parametrized(nn.Linear(5, 8), CURVED),
    "low rank": low_rank,
    "called twice": lambda: (
        nn.Sequential(*[parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh()] * 2, nn.Linear(5, 8))),
    "checkpointed": lambda: Wired(lambda m, x: checkpoint(m.layer, x, use_reentrant=False),
                                  layer=parametrizations.weight_norm(nn.Linear(5, 8))),
}  # fmt: skip
POSITIONS = {
    "weight_norm of a convolution": lambda: convolution(parametrizations.weight_norm),
    "weight_norm in groups": lambda: convolution(parametrizations.weight_norm, groups=2),
    "spectral_norm of a convolution": lambda: convolution(parametrizations.spectral_norm),
    "pruned convolution": lambda: convolution(pruned),
    "straight-through convolution": lambda: convolution(lambda layer: parametrized(layer, ROUNDED)),
}


def built(layer: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(layer(), nn.Tanh(), nn.Linear(8, 2)).eval()


def folded(layer: Callable[[], nn.Module]) -> nn.Module:
    return Wired(lambda m, x: m.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2]), layers=built(layer))


def normalised(m):
    return torch._weight_norm(m.v, m.g, 0)


# name: a function of x and the parameters v [8, 5], g [8, 1], without any layer
FUNCTIONS = {
    "weight_norm": lambda m, x: F.linear(x, normalised(m)),
    "weight_norm's transpose": lambda m, x: F.linear(x, normalised(m)) @ normalised(m),
    "one weight, twice": lambda m, x: (lambda w: F.linear(torch.tanh(F.linear(x, w)), w.T))(normalised(m)),
    "weight_norm scaled": lambda m, x: torch.addmm(m.q, x.flatten(0, -2), normalised(m).T, beta=0.5, alpha=2.0),
    "direction used again": lambda m, x: F.linear(x, normalised(m)) + F.linear(x, m.v),
    "quotient": lambda m, x: F.linear(x, m.v / m.v.square().sum().sqrt()),
    "quotient by another": lambda m, x: F.linear(x, m.v / m.g.square().sum()),
    "quotient of a computed one": lambda m, x: F.linear(x, normalised(m) / m.v.square().sum().sqrt()),
    "masked by a parameter": lambda m, x: F.linear(x, m.v * m.g),
    "one entry by entry": lambda m, x: F.linear(x, m.v * m.v.detach().sign() + m.v.sin()),
    "cast": lambda m, x: F.linear(x.double(), torch.tanh(m.v).double()).to(x.dtype),
    "low rank": lambda m, x: F.linear(x, m.v + m.g @ m.q[None, :5]),
    "from the left": lambda m, x: (normalised(m) @ x.flatten(0, -2).T).T,
}


def function(name: str, frozen: str) -> nn.Module:
    def wiring(m, x):
        out = FUNCTIONS[name](m, x)
        return (out if out.shape[0] == len(x) else out.unflatten(0, (len(x), -1))) + m.q[: out.shape[-1]] * 0.1

    model = with_parameters(wiring, {"v": (8, 5), "g": (8, 1), "q": (8,)})
    if frozen:
        getattr(model, frozen).requires_grad_(False)
    return model


# name: a function of x [B, 6, 5] and filters p [6, 4, 3] or p [4, 6, 3]
FILTERS = {
    "plain": (lambda x, p: F.conv1d(x, p), (4, 6, 3)),
    "in groups": (lambda x, p: F.conv1d(x, p, groups=2, padding=1), (4, 3, 3)),
    "transposed": (lambda x, p: F.conv_transpose1d(x, p, stride=2), (6, 4, 3)),
    "transposed, with positions of its own": (
        lambda x, p: F.conv_transpose1d(x, p, stride=1, dilation=3, output_padding=2), (6, 4, 3)),
    "twice": (lambda x, p: F.conv1d(torch.tanh(F.conv1d(x, p, padding=1)), p), (6, 6, 3)),
}  # fmt: skip


def filters(name: str, change: Callable[[Tensor], Tensor], fold: bool) -> nn.Module:
    convolve, shape = FILTERS[name]

    def wiring(m, x):
        out = convolve(x.flatten(0, 1) if fold else x, change(m.p))
        return out.unflatten(0, (len(x), -1)) if fold else out

    return with_parameters(wiring, {"p": shape})


class Skeleton(nn.Module):
    """A layer, a skeleton that is run with other tensors in the place of its parameters, and what these are made of."""

    def __init__(self, form: Callable[[Skeleton, Tensor], Tensor]) -> None:
        super().__init__()
        self.low, self.skeleton, self.form = nn.Linear(3, 5), nn.Linear(5, 5), form
        self.weights, self.down, self.up = (nn.Parameter(torch.randn(shape)) for shape in ((2, 5, 5), (2, 5), (5, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.low(x).tanh())


def one_of_several(m: Skeleton, h: Tensor) -> Tensor:
    h = functional_call(m.skeleton, {"weight": m.weights[0]}, (h,)).tanh()
    return functional_call(m.skeleton, {"weight": m.weights[1], "bias": m.down[0]}, (h,))


def adapted(m: Skeleton, h: Tensor) -> Tensor:
    """One step on something public."""
    own = dict(m.skeleton.named_parameters())
    with torch.enable_grad():  # `ghostclip.check` runs forwards without
        loss = functional_call(m.skeleton, own, (torch.ones(1, 5, dtype=h.dtype),)).square().sum()
        steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    return functional_call(m.skeleton, {k: w - 0.1 * g for (k, w), g in zip(own.items(), steps, strict=True)}, (h,))


FORMS: dict[str, Callable[[Skeleton, Tensor], Tensor]] = {
    "scaled": lambda m, h: functional_call(m.skeleton, {"weight": m.skeleton.weight * 3}, (h,)),
    "one_of_several": one_of_several,
    "low_rank_added": lambda m, h: functional_call(m.skeleton, {"weight": m.skeleton.weight + m.up @ m.down}, (h,)),
    "adapted": adapted,
}


def called(name: str) -> nn.Module:
    model = Skeleton(FORMS[name])
    model.skeleton.requires_grad_(name != "low_rank_added")
    return model


# name: class, options
RECURRENT: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "projected lstm": (nn.LSTM, {"proj_size": 2}),
    "lstm of two layers": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "rnn of relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def recurrent(name: str, weight: str) -> nn.Module:
    kind, options = RECURRENT[name]
    return parametrizations.weight_norm(kind(5, 4, batch_first=True, **options), weight)


COMPUTED = [
    *(Program(f"linear: {name}{', one position' * (not shape[1:])}", partial(built, layer), sized(shape), projected)
      for name, layer in LINEAR.items() for shape in ((6, 5), (5,))),
    *(Program(f"linear: {name} folded", partial(folded, LINEAR[name]), sized((6, 5)), projected)
      for name in ("weight_norm", "spectral_norm", "pruned", "low rank")),
    *(Program(f"convolution: {name}", partial(built, layer), sized((6, 5)), projected)
      for name, layer in POSITIONS.items()),
    *(Program(f"function: {name}{', without ' * bool(frozen)}{frozen}{', one position' * (not shape[1:])}",
              partial(function, name, frozen), sized(shape), projected)
      for name in FUNCTIONS for frozen, shape in (("", (6, 5)), ("", (5,)), ("v", (6, 5)), ("g", (5,)))),
    *(Program(f"filters: {name}{how}{', folded' * fold}", partial(filters, name, change, fold),
              sized((3, 6, 5) if fold else (6, 5)), projected)
      for name in FILTERS for how, change in (("", lambda p: p), (", computed", torch.tanh)) for fold in (False, True)),
    *(Program(f"functional call: {name}", partial(called, name), sized((3,)), projected) for name in FORMS),
    *(Program(f"recurrent: weight_norm of {weight} of a {name}", partial(recurrent, name, weight), sized((6, 5)),
              lambda model, x: model(x)[0].square().sum((1, 2)))
      for name in RECURRENT for weight in ("weight_ih_l0", "weight_hh_l0")),
]  # fmt: skip
