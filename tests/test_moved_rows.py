"""Operations that move entries by indices of their own batch: exact or refused in each, however many were in order."""

from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from case_models import Wired
from comparing import assert_dicts_close, gradients
from graphs import interpret
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph import row_layout

EXAMPLES, MAX_NORM = 4, 0.3
every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
every_length = pytest.mark.parametrize("length", [3, EXAMPLES, 2 * EXAMPLES])
IN_ORDER = torch.arange(EXAMPLES)
Move = Callable[[Tensor, Tensor, int], Tensor]


def _as(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """The order as an index of the shape of ``h``."""
    return order.view([-1 if each == dim else 1 for each in range(h.dim())]).expand_as(h)


def index(h: Tensor, order: Tensor, dim: int) -> Tensor:
    return h[(slice(None),) * dim + (order,)]


def put(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """Into a tensor that no gradient leads to."""
    return torch.zeros_like(h).transpose(0, dim).index_put((order,), h.transpose(0, dim)).transpose(0, dim)


def put_with_constants(h: Tensor, order: Tensor, dim: int) -> Tensor:
    """In the dimension where the examples are, beside indices of another one."""
    rows = h.movedim(dim, -2)  # [..., B, d]
    positions = torch.arange(rows.shape[0])[:, None]
    return (torch.zeros_like(rows).index_put((positions, order), rows)).movedim(-2, dim)


def roll(h: Tensor, order: Tensor, dim: int) -> Tensor:
    return h.roll(int(order[0]), dim)


MOVES: dict[str, Move] = {
    "index": index,
    "put": put,
    "put with constants": put_with_constants,
    "select": lambda h, order, dim: h.index_select(dim, order),
    "copy": lambda h, order, dim: torch.zeros_like(h).index_copy(dim, order, h),
    "add": lambda h, order, dim: torch.zeros_like(h).index_add(dim, order, h),
    "gather": lambda h, order, dim: h.gather(dim, _as(h, order, dim)),
    "scatter": lambda h, order, dim: torch.zeros_like(h).scatter(dim, _as(h, order, dim), h),
    "scatter_add": lambda h, order, dim: torch.zeros_like(h).scatter_add(dim, _as(h, order, dim), h),
    "roll": roll,
}
every_move = pytest.mark.parametrize("move", MOVES)


def proofs(monkeypatch: Any) -> list[int]:
    """How many uses of layers each proof was of, as they come."""
    found: list[int] = []
    original = row_layout.check_mixing
    monkeypatch.setattr(
        row_layout, "check_mixing", lambda losses, calls, of: (found.append(len(of)), original(losses, calls, of))[1]
    )
    return found


def layers(wiring: Any, **batch_dims: int) -> nn.Module:
    torch.manual_seed(1)
    parts = {"first": nn.Linear(3, 5), "second": nn.Linear(5, 4), "third": nn.Linear(4, 2)}
    return ghostclip.wrap(Wired(wiring, **parts).double(), batch_dim=batch_dims or 0)


def data(length: int, seed: int, examples: int = EXAMPLES) -> Tensor:
    return torch.randn(examples, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(model: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Per-example gradients from one backward for each loss of the whole batch."""
    losses, named = model(*inputs), dict(model.named_parameters())
    each = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    return {name: torch.stack(parts) for name, parts in zip(named, zip(*each, strict=True), strict=True)}


def assert_exact(model: nn.Module, clipper: GhostClipper, *inputs: Tensor) -> None:
    wanted = oracle.clipped_sum(whole(model, inputs), MAX_NORM)
    model.zero_grad()
    clipper.backward(model(*inputs))
    assert_dicts_close(gradients(model), wanted, 1e-10)


def assert_refused(model: nn.Module, clipper: GhostClipper, *inputs: Tensor) -> None:
    model.zero_grad()
    with pytest.raises(UnsupportedModelError, match="belong to others"):
        clipper.backward(model(*inputs))
    assert all(parameter.grad is None for parameter in model.parameters())


@every_pass
@every_length
@every_move
@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.one_in(12)
def test_an_order_that_changes_after_batches_in_order(
    move: str, length: int, time_first: bool, second_pass: str
) -> None:
    dim = int(time_first)

    def wiring(m: Any, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.first(x.transpose(0, dim)))
        h = torch.tanh(m.second(MOVES[move](h, order, dim)))
        back = order.argsort() if move != "roll" else -order
        return m.third(MOVES[move](h, back, dim)).transpose(0, dim).square().sum((1, 2))

    model = layers(wiring, **dict.fromkeys(("first", "second", "third"), dim))
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(4):
        assert_exact(model, clipper, data(length, seed), IN_ORDER)
    for order in ([1, 0, 2, 3], [3, 1, 2, 0]):
        assert_refused(model, clipper, data(length, 5), torch.tensor(order))
    assert_exact(model, clipper, data(length, 6), IN_ORDER)


@every_pass
@every_length
@pytest.mark.parametrize("move", sorted(MOVES.keys() - {"put with constants"}))
@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.one_in(9)
def test_an_order_of_positions_is_proved_once(
    move: str, length: int, time_first: bool, second_pass: str, monkeypatch: Any
) -> None:
    """The same along positions, of which there are as many as examples, or twice as many."""
    dim, found = int(time_first), proofs(monkeypatch)

    def wiring(m: Any, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.first(x.transpose(0, dim)))
        h = torch.tanh(m.second(MOVES[move](h, order[0], 1 - dim)))
        return m.third(h).transpose(0, dim).square().sum((1, 2))

    model = layers(wiring, **dict.fromkeys(("first", "second", "third"), dim))
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        assert_exact(
            model, clipper, data(length, seed), torch.randperm(length, generator=generator).expand(EXAMPLES, -1)
        )
    assert found == [3]


@every_length
def test_a_position_of_each_example_is_proved_once(length: int, monkeypatch: Any) -> None:
    """As CLIP reads the end of a text, and Longformer the tokens of global attention, in a tensor with time first."""

    def wiring(m: Any, x: Tensor, position: Tensor) -> Tensor:
        h = torch.tanh(m.second(torch.tanh(m.first(x)))).transpose(0, 1)
        one = h[position, torch.arange(len(x))]
        h = h.index_put((position, torch.arange(len(x))), torch.tanh(one))
        return m.third(h).square().sum((0, 2)) + one.sum(1)

    found = proofs(monkeypatch)
    model = layers(wiring, third=1)
    clipper = GhostClipper(model, MAX_NORM)
    for seed in range(5):
        position = torch.randint(length, (EXAMPLES,), generator=torch.Generator().manual_seed(seed))
        assert_exact(model, clipper, data(length, seed), position)
    assert found == [3]


@every_length
def test_positions_of_each_example_are_proved_once(length: int, monkeypatch: Any) -> None:
    """As Informer picks the queries that attend, of examples and heads folded together."""

    def wiring(m: Any, x: Tensor, places: Tensor) -> Tensor:
        h = torch.tanh(m.second(torch.tanh(m.first(x)))).unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1)
        rows, places = torch.arange(len(h))[:, None], places.repeat_interleave(2, 0)
        h = h.index_put((rows, places), torch.tanh(h[rows, places]))
        return m.third(h.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)).square().sum((1, 2))

    found = proofs(monkeypatch)
    model = layers(wiring)
    clipper = GhostClipper(model, MAX_NORM)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        places = torch.stack([torch.randperm(length, generator=generator)[:2] for _ in range(EXAMPLES)])
        assert_exact(model, clipper, data(length, seed), places)
    assert len(found) < 3


@every_pass
def test_positions_of_each_example_in_another_order(second_pass: str) -> None:
    def wiring(m: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        h = torch.tanh(m.second(torch.tanh(m.first(x))))
        return m.third(h[order[:, None], places]).square().sum((1, 2))

    model = layers(wiring)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    places = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]])
    for seed in range(3):
        assert_exact(model, clipper, data(3, seed), IN_ORDER, places)
    for order in ([1, 0, 2, 3], [3, 1, 2, 0]):
        assert_refused(model, clipper, data(3, 5), torch.tensor(order), places)


@every_pass
def test_an_order_beside_positions_in_order(second_pass: str) -> None:
    """As many positions as examples: the one index that moves examples, beside one that moves nothing."""

    def wiring(m: Any, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.second(torch.tanh(m.first(x))))
        return m.third(h[order, torch.arange(EXAMPLES)]).square().sum(1)

    model = layers(wiring)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(3):
        assert_exact(model, clipper, data(EXAMPLES, seed), IN_ORDER)
    for order in ([1, 0, 2, 3], [3, 1, 2, 0]) * 2:
        assert_refused(model, clipper, data(EXAMPLES, 5), torch.tensor(order))


@every_pass
@pytest.mark.parametrize("swapped", [False, True])
def test_two_operations_of_which_one_moves_nothing_at_first(swapped: bool, second_pass: str) -> None:
    """Neither is taken for the other: both move along dimension 1, where one has examples and the other positions."""

    def wiring(m: Any, x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        given = (positions[0], order) if swapped else (order, positions[0])
        h = torch.tanh(m.first(x.transpose(0, 1) if swapped else x))
        h = torch.tanh(m.second(h.transpose(0, 1)[:, given[0]]))
        h = m.third(h.transpose(0, 1)[:, given[1]])
        return h.square().sum((0, 2) if swapped else (1, 2))

    model = layers(wiring, **({"first": 1, "second": 0, "third": 1} if swapped else {"second": 1}))
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(4):
        positions = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed)).expand(EXAMPLES, -1)
        assert_exact(model, clipper, data(EXAMPLES, seed), IN_ORDER, positions)
    for order in ([1, 0, 2, 3], [3, 1, 2, 0]):
        assert_refused(model, clipper, data(EXAMPLES, 5), torch.tensor(order), positions)


@every_pass
def test_the_largest_of_all_examples_in_their_order(second_pass: str) -> None:
    def wiring(m: Any, x: Tensor) -> Tensor:
        h = m.first(x[:, 0])[:, :1]
        return m.third(m.second(torch.tanh(h.topk(len(h), 0).values).expand(-1, 5))).square().sum(1)

    model = layers(wiring)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(4):
        x = data(1, seed)
        with torch.no_grad():
            x = x[model.first(x[:, 0])[:, 0].argsort(descending=True)]
        assert_exact(model, clipper, x)
    assert_refused(model, clipper, x.flip(0))


@every_pass
def test_positions_that_no_gradient_reaches_at_first(second_pass: str, monkeypatch: Any) -> None:
    """Where the examples are isn't known then, and each batch is tested."""

    def wiring(m: Any, x: Tensor, share: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        late = h.transpose(0, 1)[order[0]].transpose(0, 1)
        return m.second(h).square().sum((1, 2)) + share * m.third(late[..., :4]).square().sum((1, 2))

    found = proofs(monkeypatch)
    model = layers(wiring)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for share in (0.0, 1.0):
        for seed in range(3):
            order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed)).expand(EXAMPLES, -1)
            shares = torch.full((EXAMPLES,), share, dtype=torch.float64)
            assert_exact(model, clipper, data(EXAMPLES, seed), shares, order)
    assert len(found) >= 4


@pytest.mark.parametrize("of_examples", [False, True])
def test_steps_are_compiled_where_examples_stay_in_place(of_examples: bool, monkeypatch: Any) -> None:
    interpret(monkeypatch)

    def wiring(m: Any, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.second(torch.tanh(m.first(x))))
        h = h.gather(1 - of_examples, order[..., None].expand_as(h))
        return m.third(h).square().sum((1, 2))

    model = layers(wiring)
    clipper = GhostClipper(model, MAX_NORM, compile=True)
    assert clipper.compiled is not None
    for seed in range(4):
        order = IN_ORDER[:, None].expand(-1, EXAMPLES) if of_examples else IN_ORDER.roll(seed).expand(EXAMPLES, -1)
        given = (data(EXAMPLES, seed), order.contiguous())
        wanted = oracle.clipped_sum(whole(model, given), MAX_NORM)
        model.zero_grad()
        clipper.clip(lambda m, given: m(*given), given)
        assert_dicts_close(gradients(model), wanted, 1e-10)
    assert clipper.compiled.graphs == (not of_examples)


@every_pass
def test_examples_put_into_a_parameter_in_another_order(second_pass: str) -> None:
    """What is written into is shared, and what is written isn't."""

    def wiring(m: Any, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.second(torch.tanh(m.first(x[:, 0]))))
        return m.third(m.table.index_copy(0, order, h)).square().sum(1)

    model = layers(wiring)
    model.register_parameter("table", nn.Parameter(torch.zeros(EXAMPLES, 4, dtype=torch.float64)))
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(3):
        assert_exact(model, clipper, data(1, seed), IN_ORDER)
    for _ in range(2):
        assert_refused(model, clipper, data(1, 5), torch.tensor([1, 0, 2, 3]))
