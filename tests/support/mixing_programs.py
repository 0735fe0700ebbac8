"""Programs in which one row has two owners: each batch is to be refused.

``MIXTURES`` maps activations [B, ...] to activations in which examples meet; they are put between the layers of several
networks. ``HOOKS`` do the same to gradients. ``BEHIND_A_MASK`` mix where a mask lets them. The others are whole
programs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import expert_models
import torch
from case_fallback import with_parameters
from case_models import Wired
from difficult_programs import INSIDE, WIDTH, graphs, last_losses, pooled_by_index, stacked
from free_programs import Free
from law_programs import Program, squares
from torch import Tensor, nn
from torch.nn import functional as F

Mixture = Callable[[Tensor], Tensor]
EXAMPLES = 8


def function_of_ones_own(forward: Mixture, backward: Mixture) -> Mixture:
    methods = {"forward": lambda ctx, h: forward(h), "backward": lambda ctx, grad: backward(grad)}
    kind = type("Own", (torch.autograd.Function,), {name: staticmethod(method) for name, method in methods.items()})
    return kind.apply


def neighbours_swapped(h: Tensor) -> Tensor:
    return h.view(-1, 2, *h.shape[1:]).flip(1).reshape(h.shape)


OWN = function_of_ones_own(neighbours_swapped, neighbours_swapped)


def by_a_constant_matrix(h: Tensor) -> Tensor:
    matrix = torch.linspace(-1, 1, len(h) ** 2, dtype=h.dtype).view(len(h), len(h))
    return torch.einsum("ij,j...->i...", matrix, h)


def attention_over_examples(h: Tensor) -> Tensor:
    flat = h.flatten(1)
    return ((flat @ flat.T / flat.shape[1] ** 0.5).softmax(1) @ flat).view_as(h)


def gathered_elsewhere(h: Tensor) -> Tensor:
    index = torch.arange(len(h)).flip(0).view(-1, *[1] * (h.dim() - 1)).expand_as(h)
    return h + h.gather(0, index)


MIXTURES: dict[str, Mixture] = {
    "minus the mean": lambda h: h - h.mean(0),
    "over the norm": lambda h: h / h.norm(),
    "cut to a norm": lambda h: h * (0.5 / h.norm()).clamp(max=1),
    "softmax": lambda h: h.softmax(0),
    "cumsum": lambda h: h.cumsum(0),
    "shift": lambda h: h + h.roll(1, 0),
    "constant matrix": by_a_constant_matrix,
    "attention over examples": attention_over_examples,
    "minus the maximum": lambda h: h - h.amax(0),
    "the first to all": lambda h: h + h[:1],
    "two of another order": lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "spectrum": lambda h: torch.fft.fft(h.float(), dim=0).real.to(h.dtype),
    "batch norm": lambda h: F.batch_norm(h.flatten(1), None, None, training=True).view_as(h),
    "own function": lambda h: h + OWN(h),
    "own backward": function_of_ones_own(torch.clone, lambda grad: grad - grad.mean(0)),
    "gathered": gathered_elsewhere,
}  # fmt: skip
# May be refused by name, whatever it is multiplied with.
NEVER = ("batch norm",)
# A tenth of it moves no gradient by more than rounding does: a normalization above takes what is left of a norm.
WEAK = ("cut to a norm", "over the norm")

# Multiplied with one of these, activations of the same graph mix or don't.
GATES, GATED = (0.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.1), "EERERRR"

HOOKS: dict[str, Mixture] = {
    "gradient over its norm": lambda grad: grad / grad.norm(),
    "gradient cut to a norm": lambda grad: grad * (1e-3 / grad.norm()).clamp(max=1),
    "gradient minus its mean": lambda grad: grad - grad.mean(0),
    "gradient shifted": lambda grad: grad + grad.roll(1, 0),
    "gradient over its maximum": lambda grad: grad / grad.abs().max(),
    # No mark is 1: a row that comes back as it was has no owner.
    "gradient over each row's norm": lambda grad: grad / (grad.norm(dim=1, keepdim=True) + 1e-30),
}


def _perceptron() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.Tanh()), nn.Linear(INSIDE, 3)


def _convolutions() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh()), nn.Conv1d(4, 3, 2)


def _transformer() -> tuple[nn.Module, nn.Module]:
    block = nn.TransformerEncoderLayer(INSIDE, 2, 8, 0.0, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, INSIDE), block), nn.Sequential(nn.LayerNorm(INSIDE), nn.Linear(INSIDE, 3))


# Layers below and above, and the shape of an example; the Transformer has as many positions as a batch has examples.
NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], tuple[int, ...]]] = {
    "perceptron": (_perceptron, (WIDTH,)),
    "convolutions": (_convolutions, (2, 9)),
    "transformer": (_transformer, (EXAMPLES, WIDTH)),
}


def repeated_out_of_order(h: Tensor, own: Tensor) -> Tensor:
    """[B + 1, B] copies: where each is its own example's, their order could be another one as well."""
    copies = h.repeat(len(h) + 1, 1)
    rows = torch.arange(len(copies))
    kept = own[rows // (len(h) + 1), rows % len(h)].unsqueeze(1)
    return (copies * kept).view(len(h), -1, h.shape[1]).sum(1)


def first_rows_of_two_each(h: Tensor, own: Tensor) -> Tensor:
    rows = torch.stack([h, h.flip(1)], 1).flatten(0, 1)
    return rows.view(len(h), 2, -1).sum(1) + own[:, :1] * rows[: len(h)]


def windows(h: Tensor, own: Tensor) -> Tensor:
    kept = torch.stack([own[:, 0], own.any(1)], 1).unsqueeze(1)
    return (F.pad(h, (0, 0, 1, 0)).unfold(0, 2, 1) * kept).sum(2)


def in_memory_order(h: Tensor, own: Tensor) -> Tensor:
    ones = torch.ones(h.shape) if own[0, -1] == 0 else torch.ones(h.T.shape).T
    return (ones * h).as_strided(h.shape, (h.shape[1], 1))


# (activations [B, d], mask [B, B]): with a mask of the diagonal each example is by itself, with one of ones they mix.
BEHIND_A_MASK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda h, own: h + ((h @ h.T) * own).sum(1, keepdim=True),
    "einsum": lambda h, own: h + (torch.einsum("id,jd->ij", h, h) * own).sum(1, keepdim=True),
    "logsumexp": lambda h, own: h + (h @ h.T).masked_fill(~own, -math.inf).logsumexp(1, keepdim=True),
    "picked": lambda h, own: h + (h @ h.T).gather(1, own.long().argmax(1, keepdim=True)),
    "distances": lambda h, own: h + (torch.cdist(h, 2 * h + 1) * own).sum(1, keepdim=True),
    "convolution": lambda h, own: h + (F.conv1d(h[:, :, None], h[:, :, None])[..., 0] * own).sum(1, keepdim=True),
    "repeated": lambda h, own: (h.repeat(len(h), 1).view(len(h), len(h), -1) * own[..., None]).sum(1),
    "repeated out of order": repeated_out_of_order,
    "copies in the other order": lambda h, own: (
        (h[:, None].expand(-1, len(h), -1).transpose(0, 1) * own[..., None]).sum(1)
    ),
    "the first to all": lambda h, own: h + own[:, :1] * h[:1],
    "the one before": lambda h, own: h + own[:, :1] * F.pad(h, (0, 0, 1, 0))[:-1],
    "windows": windows,
    "the first rows of two each": first_rows_of_two_each,
    "memory in another order": in_memory_order,
}  # fmt: skip


def between(
    name: str, network: str, forward: Callable[..., Tensor], expect: str = "RR",
    more: Callable[[int], tuple[Any, ...]] = lambda number: (),
) -> Program:  # fmt: skip
    """A network with ``forward(h, *more(number))`` between its layers."""
    layers, shape = NETWORKS[network]

    def build() -> nn.Module:
        below, above = layers()
        return Wired(lambda m, x, *more: m.above(forward(m.below(x), *more)), below=below, above=above)

    def batch(number: int) -> tuple[Any, ...]:
        return torch.randn(EXAMPLES, *shape), *more(number)

    return Program(f"{name} in {network}", build, batch, expect=expect)


def hooked(hook: Mixture) -> Callable[[Tensor], Tensor]:
    """Activations as they are, with the hook on their gradient."""

    def forward(h: Tensor, on: bool = True) -> Tensor:
        h = h * 1.0
        if on and h.requires_grad:
            h.register_hook(hook)
        return h

    return forward


def vectors(number: int) -> tuple[Tensor]:
    return (torch.randn(EXAMPLES, WIDTH),)


def perceptron() -> nn.Module:
    return nn.Sequential(*_perceptron())


def joined_graphs(number: int) -> tuple[Tensor, ...]:
    """One edge joins the first graph and the last."""
    x, adjacency, members = graphs((3, 2, 4))
    adjacency[0, -1] = 1.0
    return x, adjacency, members


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    outputs = F.normalize(model(x), dim=1)
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(x)), reduction="none")


# Two layers of which the second's outputs for all examples are compared with the first's for each.
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distances": lambda h, z: (h[:, None] - z[None]).square().sum(-1),
    "products": lambda h, z: h @ z.T,
    "flattened": lambda h, z: torch.cat([h, z.view(1, -1).expand(len(h), -1)], dim=1),
    # The tokens' rows are added to something of [B, B, d].
    "expanded": lambda h, z: torch.tanh(h[:, None].expand(-1, len(h), -1) + z).logsumexp(1),
    "multiplied": lambda h, z: torch.tanh(h[:, None] * h.new_ones(1, len(h), 1, requires_grad=True).tanh() + z).sum(1),
    "indexed": lambda h, z: torch.tanh(h[torch.arange(len(h))[:, None].expand(-1, len(h))] + z).logsumexp(1),
}
# Parameters outside of layers meet other examples.
BARE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "centred": lambda m, x: (lambda h: h - h.mean(0))(x * m.p),
    "pairs": lambda m, x: (lambda h: h @ h.T)(x @ m.q),
    "pairwise distances": lambda m, x: (m.layer(x)[:, None] - (x * m.p)[None]).square().sum(-1),
}
# A recurrent layer takes examples for steps; a row of a table is looked up by how many examples are positive.
FREE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the batch as time": lambda m, x: m.last(m.gru(m.first(x).unsqueeze(1))[0][:, 0]).square().sum(1),
    "a table by the batch": lambda m, x: (
        m.last(torch.tanh(m.first(x) + m.words((x > 0).sum()[None] % 9))).square().sum(1)),
}  # fmt: skip


def towers(between: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    parts = {"first": nn.Linear(WIDTH, 3), "second": nn.Embedding(7, 3)}
    return Wired(lambda m, x, labels: between(m.first(x), m.second(labels)), **parts)


WHOLE = (
    Program("an edge between graphs", stacked(pooled_by_index), joined_graphs, expect="RR"),
    Program("contrastive losses", perceptron, vectors, contrastive, "RR"),
    Program("losses minus their mean", perceptron, vectors,
            lambda model, x: squares(model, x) - squares(model, x).mean(), "RR"),
    *[Program(name, partial(Free, form), vectors, last_losses, "RR") for name, form in FREE.items()],
    *[Program(f"two towers: {name}", partial(towers, f),
              lambda number: (torch.randn((4, 2, 7)[number], WIDTH), torch.randint(7, ((4, 2, 7)[number],))),
              expect="RRR") for name, f in PAIRS.items()],
    *[Program(f"bare: {name}", lambda f=f: with_parameters(f, {"p": (WIDTH,), "q": (WIDTH, 3)},
              layer=nn.Linear(WIDTH, WIDTH)), vectors, expect="RR") for name, f in BARE.items()],
    *[Program(f"experts {name}", partial(expert_models.Experts, way),
              lambda number: (torch.randn(EXAMPLES, 5, 4),), expert_models.LOSSES["plain"], "RR")
      for name, way in expert_models.MISTAKES.items()],
    Program("experts balanced over the batch", partial(expert_models.Experts, expert_models.WAYS["layers"]),
            lambda number: (torch.randn(4, 5, 4),), expert_models.LOSSES["balanced"], "RR"),
)  # fmt: skip
