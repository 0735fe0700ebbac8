"""Programs that a stored layout, or marks read carelessly, get wrong.

Each function makes one trap: its docstring says which rule it is about, its letters what must come of each batch.
After a refusal the next batch is judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from case_models import Wired
from difficult_programs import Layers, StackedGraphs, graphs, last_losses, pooled_by_mask, pooled_by_matrix, reordered
from free_programs import Free
from law_programs import Program, squares
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TRAPS"]

IN, WIDTH, OUT, EXAMPLES = 5, 6, 3, 6
TRAPS: list[Program] = []


def trap(expect: str, **options: Any) -> Callable[[Callable[[], tuple[Any, ...]]], None]:
    """Adds the program that a function describes: its model, a batch by number, and losses other than `squares`."""

    def add(describe: Callable[[], tuple[Any, ...]]) -> None:
        build, batch, *losses = describe()
        name = describe.__name__.replace("_", " ")
        TRAPS.append(Program(name, build, batch, *losses, expect=expect, **options))

    return add


def vectors(examples: int = EXAMPLES) -> Tensor:
    return torch.randn(examples, IN)


def alike(examples: int = EXAMPLES) -> Callable[[int], tuple[Tensor]]:
    """Batches of vectors, one like the other."""
    return lambda number: (vectors(examples),)


def with_numbers(*numbers: float) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda number: (vectors(), torch.tensor(numbers[number]))


def with_orders(*orders: Sequence[int]) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of vectors, and an order of the examples for each batch."""
    return lambda number: (vectors(), torch.tensor(orders[number]))


def of_sizes(*sizes: Sequence[int]) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda number: graphs(sizes[number])


class Two(nn.Module):
    """Two layers and something between them, which gets the model."""

    def __init__(self, between: Callable[..., Tensor], bare: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT), between
        self.bare = None if bare is None else nn.Parameter(bare)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.second(self.between(self, torch.tanh(self.first(x)), *more))


# Rows moved by the values of a matrix, an index or a function of one's own ------------------------------------------

SQUARE, OTHERS = (4, 4, 4, 4), ((2, 6, 3, 5), (1, 7, 4, 4), (5, 5, 3, 3))
IN_ORDER, PERMUTED, REVERSED = (0, 1, 2, 3, 4, 5), (3, 1, 5, 0, 2, 4), (5, 4, 3, 2, 1, 0)


class MaskedPooling(StackedGraphs):
    """No messages, lest the graph be measured for them."""

    def forward(self, x: Tensor, adjacency: Tensor, members: Tensor) -> Tensor:
        return self.head(self.pool(members, torch.tanh(self.second(torch.tanh(self.first(x))))))


# A contraction over the examples' dimension with data is measured in every batch. In the first, all have 16 nodes.
BY_MATRIX: dict[str, Sequence[Sequence[int]]] = {
    "graphs of one size then of others": (SQUARE, SQUARE, *OTHERS),
    "graphs then another number of nodes": ((3, 3), (3, 3), (2, 8, 3, 7), (1, 5, 3, 3), (2, 2)),
    "irregular then regular by chance": (*[OTHERS[0]] * 4, SQUARE, OTHERS[0], OTHERS[1], OTHERS[0]),
}
for _name, _sizes in BY_MATRIX.items():
    TRAPS.append(Program(_name, lambda: StackedGraphs(pooled_by_matrix), of_sizes(*_sizes), expect="E" * len(_sizes)))


@trap("EEEEEEE")
def pooling_by_a_mask_then_other_sizes() -> tuple[Any, ...]:
    """A broadcasting that moves the examples' dimension is measured in every batch."""
    return lambda: MaskedPooling(pooled_by_mask), of_sizes(*[SQUARE] * 4, *OTHERS)


class Permute(torch.autograd.Function):
    """A function of one's own: rows in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found = torch.empty_like(grad)
        found[ctx.order] = grad
        return found, None


@trap("EEEEE")
def a_function_of_ones_own_permutes_after_two_identities() -> tuple[Any, ...]:
    """Nodes of unknown types are measured in every batch."""
    order = with_orders(IN_ORDER, IN_ORDER, PERMUTED, PERMUTED, REVERSED)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, own = order(number)
        return x.requires_grad_(), own

    return lambda: Layers(partial(reordered, permute=Permute.apply)), batch


@trap("EEEEEEE")
def an_index_permutes_after_four_identities() -> tuple[Any, ...]:
    """Index operations are looked at in every batch."""
    orders = [IN_ORDER] * 4 + [PERMUTED] * 2 + [REVERSED]
    return lambda: Layers(reordered), with_orders(*orders)


# Paths that carry nothing when they are measured --------------------------------------------------------------------


@trap("EERR")
def a_cap_on_the_norm_becomes_active() -> tuple[Any, ...]:
    """Silent edges are watched: the norm of the whole batch matters from the third batch on."""
    return lambda: Two(lambda m, h, cap: h * (cap / h.norm()).clamp(max=1)), with_numbers(100.0, 100.0, 0.5, 0.5)


@trap("EEEEE")
def a_bare_parameter_that_starts_late() -> tuple[Any, ...]:
    """Silent edges are watched: the parameter has no gradient before the third batch."""
    return (
        lambda: Two(lambda m, h, gate: h + gate * (h * m.bare.exp()), torch.ones(WIDTH)),
        with_numbers(0.0, 0.0, 1.0, 1.0, 1.0),
    )


# Layouts that rows of zeros leave open ------------------------------------------------------------------------------


def one_step(m: Layers, x: Tensor, last: Tensor) -> Tensor:
    """Layers on rows [T * B], of which each loss reads one."""
    examples, steps, _ = x.shape
    rows = m.second(torch.tanh(m.first(x.transpose(0, 1).reshape(-1, IN))))
    return (rows * F.one_hot(last, steps).T.reshape(-1, 1)).view(steps, examples, 2).sum(0)


@trap("EEEEE")
def time_first_with_lengths_on_the_diagonal() -> tuple[Any, ...]:
    """Zeros that leave an owner open are watched: as many steps as examples, lengths 1 to B, then all full."""
    return lambda: Layers(one_step), lambda number: (
        torch.randn(4, 4, IN),
        torch.arange(4) if number < 2 else torch.full((4,), 3),
    )


@trap("EERERE")
def a_shift_that_is_refused_then_gone() -> tuple[Any, ...]:
    """A refusal deletes the layout, and the structure is always measured."""
    return lambda: Two(lambda m, h, gate: h + gate * h.roll(1, 0)), with_numbers(0.0, 0.0, 1.0, 0.0, 1.0, 0.0)


# Reading marks ------------------------------------------------------------------------------------------------------


class Unit(torch.autograd.Function):
    """A backward that normalizes each row of what it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm(dim=1, keepdim=True) + 1e-30)


@trap("RR")
def a_backward_that_normalizes() -> tuple[Any, ...]:
    """No mark is 1: a row that comes back as it was has no owner."""
    return lambda: Two(lambda m, h: Unit.apply(h)), alike(40)


@trap("EEE", alone=True)
def an_example_that_is_not_finite() -> tuple[Any, ...]:
    """Rows that aren't finite have no owner."""

    def batch(number: int) -> tuple[Tensor]:
        x = vectors(8)
        if number != 1:
            x[2] = float("nan")
        return (x,)

    return lambda: nn.Sequential(nn.Linear(IN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT)), batch


def last_of_steps(m: Free, x: Tensor) -> Tensor:
    rows = m.first(x.flatten(0, 1)).view(x.shape)
    return m.last(m.lstm(rows.transpose(0, 1))[0][-1]).square().sum(1)


@trap("EE")
def five_hundred_steps() -> tuple[Any, ...]:
    """Tiny rows, here gradients of 1e-38, have no owner."""
    return lambda: Free(last_of_steps), lambda number: (torch.randn(8, 500, IN),), last_losses


def clamped(m: nn.Module, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-1e6, 1e6))
    return h * 1.0


@trap("EE")
def a_hook_that_clamps() -> tuple[Any, ...]:
    """No mark is above 1, so that a clamp at 1e6 doesn't act because of marks."""
    return lambda: Two(clamped), alike(64)


@trap("EE")
def logcumsumexp_in_an_example() -> tuple[Any, ...]:
    """The tolerance is 2^-12: the gradient scales with marks to 2e-5 only."""
    return lambda: Two(lambda m, h: h.logcumsumexp(1)), alike(8)


@trap("EEEE")
def two_owners_that_add_up_to_a_power_of_two() -> tuple[Any, ...]:
    """A boundary has rows of two owners, or is shown under other marks."""
    factors = ((2.0, 0.0, 1.0), (2.0, 0.0, 1.0), (2.0, 1.0, 1.0), (4.0, 2.0, 1.0))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        x = vectors(3)
        x[:, 0] = 3.0
        return x, torch.tensor(factors[number])

    def losses(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
        return (x[:, 0] - model.bare).abs() * factor + model(x)[:, 0].square()

    return lambda: Two(lambda m, h: h, torch.tensor(0.1)), batch, losses


@trap("RRR")
def losses_of_pairs_sixty_four_apart() -> tuple[Any, ...]:
    """Marks are drawn anew and shuffled, so no two examples share one for long."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        outputs = model(x)
        return (outputs - outputs.roll(64, 0)).square().sum(1)

    return lambda: Two(lambda m, h: h), alike(128), losses


@trap("RR")
def the_largest_entry_is_the_examples_own() -> tuple[Any, ...]:
    """Two numbers are taken of a row: the largest entry alone doesn't show that the others are mixed."""

    def between(m: nn.Module, h: Tensor) -> Tensor:
        return torch.cat([50 * h[:, :1], h[:, 1:].flip(0).cumsum(0).flip(0)], 1)

    return lambda: Two(between), alike(8)


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
READ: dict[str, tuple[Callable[..., Tensor], int]] = {
    **{f"a layer reads the {name}": (layer_on(f), EXAMPLES) for name, f in STATISTICS.items()},
    "a layer reads the mean of two": (layer_on(STATISTICS["mean"]), 2),
    **{f"a bare parameter times the {name}": (bare_times(f), EXAMPLES) for name, f in STATISTICS.items()},
}
TRAPS += [
    Program(name, lambda form=form: Free(form), alike(examples), last_losses, "RR")
    for name, (form, examples) in READ.items()
]


@trap("RR")
def a_bare_parameter_times_the_mean_given_by_the_loss() -> tuple[Any, ...]:
    """What enters at boundaries is compared too, where an argument of the model brings it."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x, x.mean())

    return lambda: Two(lambda m, h, mean: h + m.bare * mean, torch.ones(WIDTH)), alike(), losses


def packed_texts(m: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(m.words(ids) + m.places(torch.arange(7)), lengths, batch_first=True)
    return m.head(m.rnn(packed)[1][0][-1])


def texts_with_positions() -> nn.Module:
    tables = {"words": nn.Embedding(9, WIDTH), "places": nn.Embedding(7, WIDTH)}
    return Wired(packed_texts, **tables, rnn=nn.LSTM(WIDTH, 4), head=nn.Linear(4, 2))


@trap("EE")
def packed_sorted_texts_with_positions() -> tuple[Any, ...]:
    """Half of the rows are overwritten such that sorted lengths stay sorted."""
    return texts_with_positions, lambda number: (torch.randint(9, (4, 7)), torch.tensor([7, 5, 4, 2]))


# What the first batch, or a forward on other examples, doesn't show --------------------------------------------------


FAINT = {torch.float32: 1e-30, torch.float64: 1e-295}


def faint(h: Tensor, opened: bool) -> Tensor:
    """The mean of the batch, along a path that is too faint to be seen until it is opened."""
    gate = 1.0 if opened else FAINT[h.dtype]
    return h + gate * (h - 2 * h.mean(0, keepdim=True))


@trap("EERER")
def a_faint_path_between_layers() -> tuple[Any, ...]:
    """A graph that reduces over examples is measured in every batch; test_moved_rows.py has what sees it elsewhere."""
    return lambda: Two(lambda m, h, opened: faint(h, opened)), lambda number: (vectors(64), number in (2, 4))


class TwoWays(nn.Module):
    """Reads a statistic of the batch if all examples are different, as they aren't in a forward on others."""

    def __init__(self, different: Callable[..., Tensor], alike: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.context, self.second = nn.Linear(IN, WIDTH), nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.bare, self.different, self.alike = nn.Parameter(torch.ones(WIDTH)), different, alike

    def forward(self, x: Tensor) -> Tensor:
        way = self.different if len(x.unique(dim=0)) == len(x) else self.alike
        return self.second(way(self, torch.tanh(self.first(x)), x))


@trap("RR")
def a_forward_on_others_takes_another_way_around_a_layer() -> tuple[Any, ...]:
    """It says nothing about what the batch's own forward read."""
    return lambda: TwoWays(lambda m, h, x: h + m.context(x.mean(0, keepdim=True)), lambda m, h, x: h), alike()


@trap("RR")
def a_forward_on_others_takes_another_way_around_a_parameter() -> tuple[Any, ...]:
    """Its operations are of other kinds."""
    return lambda: TwoWays(lambda m, h, x: h + m.bare * x.mean(), lambda m, h, x: h + (m.bare + 1)), alike()


@trap("RR")
def a_layer_is_given_what_all_examples_share() -> tuple[Any, ...]:
    """A layer that reads a table of parameters, with as many rows as the batch, is refused."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        given = model.second(model.bare)
        return (model(x) + given).tanh().square().sum(1)

    return lambda: Two(lambda m, h: h, torch.ones(6, WIDTH)), alike(), losses


def in_three(m: Layers, x: Tensor) -> Tensor:
    """A layer on rows [T * B] that are taken for those of three steps."""
    rows = m.first(x).transpose(0, 1).reshape(-1, WIDTH)
    h = m.second(rows.tanh().view(3, -1, WIDTH)).reshape(-1, 2)
    return h.view(x.shape[1], len(x), 2).transpose(0, 1)


@trap("EEEEE")
def a_reshape_takes_other_rows_together_at_another_size() -> tuple[Any, ...]:
    """Reshapes of another size are looked at."""
    return lambda: Layers(in_three), lambda number: (torch.randn(4, (3, 3, 6, 3, 6)[number], IN),)


@trap("EERER")
def a_batch_twice_as_large_shows_what_a_small_one_hides() -> tuple[Any, ...]:
    """Sums within quarters of the batch, each an example's own as long as there are four."""

    def quarters(m: nn.Module, h: Tensor) -> Tensor:
        return h.view(4, -1, WIDTH).cumsum(1).view(h.shape)

    return lambda: Two(quarters), lambda number: (torch.randn((4, 4, 8, 4, 8)[number], 2, IN),)


@trap("EER")
def examples_that_meet_only_where_they_are_close() -> tuple[Any, ...]:
    """Which they aren't in the first batches, of two and three."""
    apart = torch.tensor([[5.0, 0.0, 0.0], [0.0, -5.0, 5.0], [10.0, 0.0, 0.0]])

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        outputs = model(x)
        gaps = (outputs.unsqueeze(1) - outputs.unsqueeze(0)).square().sum(2)
        return outputs.square().sum(1) + (1e-2 - gaps).clamp_min(0).sum(1)

    def batch(number: int) -> tuple[Tensor]:
        return (apart[: 2 + number] if number < 2 else torch.randn(1, 3) + 1e-4 * torch.randn(8, 3),)

    return lambda: nn.Linear(3, 2), batch, losses
