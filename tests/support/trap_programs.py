"""Programs that a stored layout, or marks read carelessly, get wrong.

Each is one trap: what is said above it is the rule that it is about, its letters what must come of each batch. After a
refusal the next batch is judged anew.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from case_models import Wired
from difficult_programs import graphs, last_losses, layers, pooled_by_mask, reordered, stacked
from free_programs import Free
from law_programs import Program, squares
from torch import Tensor, nn
from torch.nn import functional as F

IN, WIDTH, OUT, EXAMPLES = 5, 6, 3, 6
TRAPS: list[Program] = []


def trap(name: str, expect: str, build: Any, batch: Any, losses: Any = squares, alone: bool = False) -> None:
    TRAPS.append(Program(name, build, batch, losses, expect, alone=alone))


def vectors(examples: int = EXAMPLES) -> Tensor:
    return torch.randn(examples, IN)


def alike(examples: int = EXAMPLES) -> Callable[[int], tuple[Tensor]]:
    """Batches of vectors, one like the other."""
    return lambda number: (vectors(examples),)


def beside(*values: Any) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of vectors, and a number or an order of the examples for each batch."""
    return lambda number: (vectors(), torch.tensor(values[number]))


def two(between: Callable[..., Tensor], bare: Tensor | None = None) -> Callable[[], nn.Module]:
    """Two layers, perhaps a parameter, and something between them, which gets the model."""

    def build() -> nn.Module:
        def wiring(m: Any, x: Tensor, *more: Any) -> Tensor:
            return m.second(between(m, torch.tanh(m.first(x)), *more))

        model = Wired(wiring, first=nn.Linear(IN, WIDTH), second=nn.Linear(WIDTH, OUT))
        model.bare = None if bare is None else nn.Parameter(bare.clone())
        return model

    return build


# Rows moved by the values of a matrix, an index or a function of one's own ------------------------------------------

SQUARE, OTHERS = (4, 4, 4, 4), ((2, 6, 3, 5), (1, 7, 4, 4), (5, 5, 3, 3))
IN_ORDER, PERMUTED, REVERSED = (0, 1, 2, 3, 4, 5), (3, 1, 5, 0, 2, 4), (5, 4, 3, 2, 1, 0)

# A contraction over the examples' dimension with data is measured in every batch. In the first, all have 16 nodes.
BY_MATRIX: dict[str, Sequence[Sequence[int]]] = {
    "graphs of one size then of others": (SQUARE, SQUARE, *OTHERS),
    "graphs then another number of nodes": ((3, 3), (3, 3), (2, 8, 3, 7), (1, 5, 3, 3), (2, 2)),
    "irregular then regular by chance": (*[OTHERS[0]] * 4, SQUARE, OTHERS[0], OTHERS[1], OTHERS[0]),
}
for _name, _sizes in BY_MATRIX.items():
    trap(_name, "E" * len(_sizes), stacked(torch.matmul),
         lambda number, sizes=_sizes: graphs(sizes[number]))  # fmt: skip
# A broadcasting that moves the examples' dimension is measured in every batch; no messages, lest these be measured.
trap("pooling by a mask then other sizes", "EEEEEEE", stacked(pooled_by_mask, False),
     lambda number: graphs((*[SQUARE] * 4, *OTHERS)[number]))  # fmt: skip


class Permute(torch.autograd.Function):
    """A function of one's own: rows in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.order.argsort()], None


# Nodes of unknown types are measured in every batch.
trap("a function of ones own permutes after two identities", "EEEEE",
     layers(lambda m, x, order: reordered(m, x.requires_grad_(), order, Permute.apply)),
     beside(IN_ORDER, IN_ORDER, PERMUTED, PERMUTED, REVERSED))  # fmt: skip
# Index operations are looked at in every batch.
trap("an index permutes after four identities", "EEEEEEE", layers(reordered),
     beside(*[IN_ORDER] * 4, *[PERMUTED] * 2, REVERSED))  # fmt: skip

# Paths that carry nothing when they are measured --------------------------------------------------------------------

# Silent edges are watched: the norm of the whole batch matters from the third batch on.
trap("a cap on the norm becomes active", "EERR", two(lambda m, h, cap: h * (cap / h.norm()).clamp(max=1)),
     beside(100.0, 100.0, 0.5, 0.5))  # fmt: skip
# Silent edges are watched: the parameter has no gradient before the third batch.
trap("a bare parameter that starts late", "EEEEE",
     two(lambda m, h, gate: h + gate * (h * m.bare.exp()), torch.ones(WIDTH)),
     beside(0.0, 0.0, 1.0, 1.0, 1.0))  # fmt: skip


def one_step(m: Any, x: Tensor, last: Tensor) -> Tensor:
    """Layers on rows [T * B], of which each loss reads one."""
    examples, steps, _ = x.shape
    rows = m.second(torch.tanh(m.first(x.transpose(0, 1).reshape(-1, IN))))
    return (rows * F.one_hot(last, steps).T.reshape(-1, 1)).view(steps, examples, 2).sum(0)


# Zeros that leave an owner open are watched: as many steps as examples, lengths 1 to B, then all full.
trap("time first with lengths on the diagonal", "EEEEE", layers(one_step),
     lambda number: (torch.randn(4, 4, IN), torch.arange(4) if number < 2 else torch.full((4,), 3)))  # fmt: skip

# Reading marks ------------------------------------------------------------------------------------------------------


def one_nan(number: int) -> tuple[Tensor]:
    x = vectors(8)
    if number != 1:
        x[2] = float("nan")
    return (x,)


# Rows that aren't finite have no owner.
trap("an example that is not finite", "EEE", two(lambda m, h: h), one_nan, alone=True)


def last_of_steps(m: Free, x: Tensor) -> Tensor:
    rows = m.first(x.flatten(0, 1)).view(x.shape)
    return m.last(m.lstm(rows.transpose(0, 1))[0][-1]).square().sum(1)


# Tiny rows, here gradients of 1e-38, have no owner.
trap("five hundred steps", "EE", lambda: Free(last_of_steps), lambda number: (torch.randn(8, 500, IN),), last_losses)


def clamped(m: nn.Module, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-1e6, 1e6))
    return h * 1.0


# No mark is above 1, so that a clamp at 1e6 doesn't act because of marks.
trap("a hook that clamps", "EE", two(clamped), alike(64))
# The tolerance is 2^-12: the gradient scales with marks to 2e-5 only.
trap("logcumsumexp in an example", "EE", two(lambda m, h: h.logcumsumexp(1)), alike(8))
# Two numbers are taken of a row: the largest entry alone doesn't show that the others are mixed.
trap("the largest entry is the examples own", "RR",
     two(lambda m, h: torch.cat([50 * h[:, :1], h[:, 1:].flip(0).cumsum(0).flip(0)], 1)), alike(8))  # fmt: skip
FACTORS = ((2.0, 0.0, 1.0), (2.0, 0.0, 1.0), (2.0, 1.0, 1.0), (4.0, 2.0, 1.0))
# A boundary has rows of two owners, or is shown under other marks.
trap("two owners that add up to a power of two", "EEEE", two(lambda m, h: h, torch.tensor(0.1)),
     lambda number: (torch.cat([torch.full((3, 1), 3.0), vectors(3)[:, 1:]], 1), torch.tensor(FACTORS[number])),
     lambda model, x, factor: (x[:, 0] - model.bare).abs() * factor + model(x)[:, 0].square())  # fmt: skip
# Marks are drawn anew and shuffled, so no two examples share one for long.
trap("losses of pairs sixty four apart", "RRR", two(lambda m, h: h), alike(128),
     lambda model, x: (lambda outputs: outputs - outputs.roll(64, 0))(model(x)).square().sum(1))  # fmt: skip

# What a shared layer or parameter reads -----------------------------------------------------------------------------

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: x.amax(0, keepdim=True),
    "median": lambda x: x.median(0, keepdim=True)[0],
    "counts": lambda x: (x > 0).to(x.dtype).sum(0, keepdim=True),
    "mean": lambda x: x.mean(0, keepdim=True),
    "deviation": lambda x: x.std(0, keepdim=True),
    "first example": lambda x: x[:1],
}


def layer_on(statistic: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A layer reads a statistic of the batch, and all examples read what it gives."""
    return lambda m, x: m.last(torch.tanh(m.first(x) + m.between(statistic(x)))).square().sum(1)


def bare_times(statistic: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A bare parameter times a statistic of the batch: what enters at boundaries is compared too."""
    return lambda m, x: m.last(torch.tanh(m.first(x)) + m.bare[0] * statistic(x).mean()).square().sum(1)


# Half of the rows are overwritten by one row, not reversed; one of two rows by the other, not exchanged with it.
for _name, _statistic in STATISTICS.items():
    trap(f"a layer reads the {_name}", "RR", partial(Free, layer_on(_statistic)), alike(), last_losses)
    trap(f"a bare parameter times the {_name}", "RR", partial(Free, bare_times(_statistic)), alike(), last_losses)
trap("a layer reads the mean of two", "RR", partial(Free, layer_on(STATISTICS["mean"])), alike(2), last_losses)
# What enters at boundaries is compared too, where an argument of the model brings it.
trap("a bare parameter times the mean given by the loss", "RR",
     two(lambda m, h, mean: h + m.bare * mean, torch.ones(WIDTH)), alike(),
     lambda model, x: squares(model, x, x.mean()))  # fmt: skip


def packed_texts(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(m.words(ids) + m.places(torch.arange(7)), lengths, batch_first=True)
    return m.head(m.rnn(packed)[1][0][-1])


def texts_with_positions() -> nn.Module:
    tables = {"words": nn.Embedding(9, WIDTH), "places": nn.Embedding(7, WIDTH)}
    return Wired(packed_texts, **tables, rnn=nn.LSTM(WIDTH, 4), head=nn.Linear(4, 2))


# Half of the rows are overwritten such that sorted lengths stay sorted.
trap("packed sorted texts with positions", "EE", texts_with_positions,
     lambda number: (torch.randint(9, (4, 7)), torch.tensor([7, 5, 4, 2])))  # fmt: skip
# A layer that reads a table of parameters, with as many rows as the batch, is refused.
trap("a layer is given what all examples share", "RR", two(lambda m, h: h, torch.ones(6, WIDTH)), alike(),
     lambda model, x: (model(x) + model.second(model.bare)).tanh().square().sum(1))  # fmt: skip

# What the first batch, or a forward on other examples, doesn't show --------------------------------------------------


def two_ways(different: Callable[..., Tensor], same: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    """Reads a statistic of the batch if all examples are different, as they aren't in a forward on others."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        way = different if len(x.unique(dim=0)) == len(x) else same
        return m.outside.second(way(m, torch.tanh(m.outside.first(x)), x))

    return lambda: Wired(wiring, outside=two(different, torch.ones(WIDTH))(), context=nn.Linear(IN, WIDTH))


# It says nothing about what the batch's own forward read.
trap("a forward on others takes another way around a layer", "RR",
     two_ways(lambda m, h, x: h + m.context(x.mean(0, keepdim=True)), lambda m, h, x: h), alike())  # fmt: skip
# Its operations are of other kinds.
trap("a forward on others takes another way around a parameter", "RR",
     two_ways(lambda m, h, x: h + m.outside.bare * x.mean(), lambda m, h, x: h + (m.outside.bare + 1)),
     alike())  # fmt: skip


# Reshapes of another size are looked at.
trap("flat rows are summed in the quarters of a batch", "EERER",
     two(lambda m, h: h.reshape(-1, WIDTH).view(4, -1, WIDTH).cumsum(1).view(h.shape)),
     lambda number: (torch.randn((4, 4, 6, 4, 6)[number], 2, IN),))  # fmt: skip
# Sums within quarters of the batch, each an example's own as long as there are four.
trap("a batch twice as large shows what a small one hides", "EERER",
     two(lambda m, h: h.view(4, -1, WIDTH).cumsum(1).view(h.shape)),
     lambda number: (torch.randn((4, 4, 8, 4, 8)[number], 2, IN),))  # fmt: skip
APART = torch.tensor([[5.0, 0.0, 0.0], [0.0, -5.0, 5.0], [10.0, 0.0, 0.0]])


def close_ones_meet(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    gaps = (outputs.unsqueeze(1) - outputs.unsqueeze(0)).square().sum(2)
    return outputs.square().sum(1) + (1e-2 - gaps).clamp_min(0).sum(1)


# They aren't close in the first batches, of two and three.
trap("examples that meet only where they are close", "EER", lambda: nn.Linear(3, 2),
     lambda number: (APART[: 2 + number] if number < 2 else torch.randn(1, 3) + 1e-4 * torch.randn(8, 3),),
     close_ones_meet)  # fmt: skip
