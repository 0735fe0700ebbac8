"""Batches whose graph has the operations of earlier ones, along other dimensions or joined in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph

EXAMPLES, WIDTH = 4, 5


class Model(nn.Module):
    """Two layers and a parameter, for a forward that is given."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bare = nn.Parameter(torch.randn(7, WIDTH))
        self.form = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.form(self, *inputs)


def squared(h: Tensor) -> Tensor:
    return h.square().flatten(1).sum(1)


def seen_before(m: Any, x: Tensor, turn: bool) -> Tensor:
    """Slices are met first in another term, and then in an order of the batch's own."""
    h = m.first(x).tanh()
    halves = [h[:2], h[2:]]
    return squared(m.last(torch.cat(halves[::-1] if turn else halves))) + 0 * (halves[0] + halves[1]).mean()


def permuted(m: Any, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh().view(2, 2, WIDTH).permute(*((1, 0, 2) if turn else (0, 1, 2)))
    return squared(m.last(h.clone(memory_format=torch.contiguous_format).view(EXAMPLES, WIDTH)))


def transposed(m: Any, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh().transpose(*((0, 1) if turn else (1, 1)))
    return squared(m.last(h.contiguous()))


def summed(m: Any, x: Tensor, turn: bool) -> Tensor:
    return m.last(m.first(x).tanh()).tanh().square().sum((0 if turn else 1, 2))


def strided(m: Any, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh()
    h = h.as_strided((2, 2, WIDTH), (WIDTH, 2 * WIDTH, 1) if turn else (2 * WIDTH, WIDTH, 1))
    return squared(m.last(h.reshape(EXAMPLES, WIDTH)))


def padded(m: Any, x: Tensor, turn: bool) -> Tensor:
    """The first example is moved to the second's place, or each position is."""
    h = F.pad(m.first(x).tanh(), (0, 0, 0, 0, 1, -1) if turn else (0, 0, 1, -1, 0, 0))
    return squared(m.last(h))


def split_unequally(m: Any, x: Tensor, turn: bool) -> Tensor:
    first, second = m.first(x).tanh().split([1, 3] if turn else [3, 1])
    return squared(m.last(torch.cat([first.roll(0, 0), second]) if not turn else torch.cat([second, first])))


def unbound(m: Any, x: Tensor, turn: bool) -> Tensor:
    parts = m.first(x).tanh().unbind(0 if turn else 1)
    return squared(m.last(torch.stack(parts, 1)))


def parts_exchanged(m: Any, x: Tensor, turn: bool) -> Tensor:
    """The second and the third part: hashes of -1 and -2 are the same in Python."""
    parts = m.first(x).tanh().unbind(0)
    return squared(m.last(torch.stack([parts[0], parts[2], parts[1], parts[3]] if turn else parts)))


def pooled(m: Any, x: Tensor, turn: bool) -> Tensor:
    """Over windows of one example, or of three."""
    h = F.avg_pool1d(m.first(x).tanh().T[None], 1 + 2 * turn, 1, int(turn))
    return squared(m.last(h[0].T))


def cut_beside_a_multiple(m: Any, x: Tensor, turn: bool) -> Tensor:
    """Along a dimension with one entry more than there are examples."""
    h = m.first(x).tanh()
    h = torch.cat([h, h[:, :1]], 1)
    return m.last(h[:, 1:] if turn else h[:, :-1]).square().sum((0, 2))


def indexed_beside_a_multiple(m: Any, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh()
    index = torch.arange(EXAMPLES).roll(int(turn))
    return m.last(torch.cat([h, torch.zeros(3, 1, WIDTH).to(h)], 1)[:, index]).square().sum((0, 2))


def copied_into(m: Any, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh()
    out = torch.zeros_like(h)
    for place in range(EXAMPLES):
        out[(place + turn) % EXAMPLES] = h[place]
    return squared(m.last(out))


def copied_by_positions(m: Any, x: Tensor, turn: bool) -> Tensor:
    h = m.first(x).tanh()
    out = torch.zeros_like(h)
    for place in range(EXAMPLES):
        out[place if turn else (slice(None), place)] = h[:, place]
    return squared(m.last(out))


X = (EXAMPLES, WIDTH)
SQUARE = (EXAMPLES, EXAMPLES, WIDTH)
TIME_FIRST = (3, EXAMPLES, WIDTH)
FORWARDS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "slices seen before": (seen_before, X),
    "permute": (permuted, X),
    "transpose": (transposed, SQUARE),
    "sum": (summed, SQUARE),
    "as_strided": (strided, X),
    "pad": (padded, SQUARE),
    "split_with_sizes": (split_unequally, X),
    "unbind": (unbound, SQUARE),
    "parts in another order": (parts_exchanged, X),
    "pooling": (pooled, X),
    "slices beside a multiple of the batch": (cut_beside_a_multiple, TIME_FIRST),
    "index beside a multiple of the batch": (indexed_beside_a_multiple, TIME_FIRST),
    "copies into slices": (copied_into, X),
    "copies of positions": (copied_by_positions, SQUARE),
}


def assert_exact(clipper: GhostClipper, model: nn.Module, losses: Tensor) -> None:
    expected = oracle.norms_by_single_losses(model, losses)
    torch.testing.assert_close(clipper.norms(losses), expected, rtol=1e-10, atol=0)


def clipper_of(form: Callable[..., Tensor], shape: tuple[int, ...]) -> tuple[nn.Module, GhostClipper]:
    model = Model(form).double()
    dims = {"first": 1, "last": 1} if shape == TIME_FIRST else {}
    return model, GhostClipper(ghostclip.wrap(model, batch_dim=dims) if dims else model)


@pytest.mark.parametrize("name", FORWARDS)
def test_examples_that_are_moved_in_a_later_batch_are_seen(name: str) -> None:
    torch.manual_seed(0)
    form, shape = FORWARDS[name]
    model, clipper = clipper_of(form, shape)
    for _ in range(3):
        losses = model(torch.randn(shape).double(), False)
        assert_exact(clipper, model, losses)
    with pytest.raises(UnsupportedModelError, match="depends on rows of this output that belong to others"):
        clipper.norms(model(torch.randn(shape).double(), True))
    losses = model(torch.randn(shape).double(), False)
    assert_exact(clipper, model, losses)


def test_what_is_known_of_a_parameter_holds_along_the_same_dimensions() -> None:
    """p * x [B, B], summed along one dimension, or along the other in a later batch."""
    torch.manual_seed(0)
    model = Model(lambda m, x, dim: (x * m.bare[0, 0]).tanh().sum(dim).square()).double()
    clipper = GhostClipper(model)
    for dim in (1, 1, 0, 1, 0):
        losses = model(torch.randn(EXAMPLES, EXAMPLES).double(), dim)
        assert_exact(clipper, model, losses)


def added(h: Tensor, bare: Tensor) -> Tensor:
    return h + bare[0]


def added_to_rows(h: Tensor, bare: Tensor) -> Tensor:
    return (h.reshape(-1, WIDTH) + bare[0]).view(h.shape)


def multiplied(h: Tensor, bare: Tensor) -> Tensor:
    return h @ bare[:WIDTH]


@pytest.mark.parametrize("use", [added, added_to_rows, multiplied])
@pytest.mark.parametrize("positions", [3, EXAMPLES, 2 * EXAMPLES])
def test_a_parameter_that_meets_the_examples_in_two_layouts_is_known_in_each(
    use: Callable[[Tensor, Tensor], Tensor], positions: int
) -> None:
    """Examples first, and positions first: what is remembered of one use isn't taken for what the other does."""

    def form(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        first, second = use(h, m.bare), use(h.transpose(0, 1), m.bare).transpose(0, 1)
        return squared(first.tanh()) + squared(second.tanh().square())

    torch.manual_seed(0)
    model, clipper = clipper_of(form, X)
    for _ in range(4):
        assert_exact(clipper, model, model(torch.randn(EXAMPLES, positions, WIDTH).double()))


# One change to a forward each; the graph has as many operations as before.
CHANGES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "permute": lambda h, other: h.permute(*((1, 0, 2) if other else (0, 1, 2))),
    "transpose": lambda h, other: h.transpose(0, int(other)),
    "sum": lambda h, other: h.sum(int(other)),
    "mean": lambda h, other: h.mean(int(other)),
    "keepdim": lambda h, other: h.amax(0, keepdim=other),
    "softmax": lambda h, other: h.softmax(int(other)),
    "cumsum": lambda h, other: h.cumsum(int(other)),
    "cat": lambda h, other: torch.cat([h, h], int(other)),
    "stack": lambda h, other: torch.stack([h, h], int(other)),
    "slice": lambda h, other: h[int(other) :],
    "end": lambda h, other: h[: 2 + other],
    "end of a whole": lambda h, other: h[: 3 + other],
    "step": lambda h, other: h[:, :: 1 + other],
    "select": lambda h, other: h[int(other)],
    "split": lambda h, other: h.split(2, int(other))[0],
    "number of parts": lambda h, other: h.split(1 + other)[0],
    "sizes of parts": lambda h, other: h.split([1, 3] if other else [3, 1])[0],
    "which part": lambda h, other: h.chunk(2)[int(other)],
    "unbind": lambda h, other: h.unbind(int(other))[0],
    "unfold": lambda h, other: h.unfold(int(other), 2, 2),
    "size of windows": lambda h, other: F.avg_pool1d(h, 2 + other),
    "groups": lambda h, other: F.channel_shuffle(h[..., None], 4 if other else 2),
    "diagonal": lambda h, other: h.diagonal(int(other)),
    "pad": lambda h, other: F.pad(h, (0, 0, int(other), 1)),
    "as_strided": lambda h, other: h.as_strided((2, 2), (1, 2) if other else (2, 1)),
    "repeat": lambda h, other: h.repeat(1 + other, 2 - other, 1),
    "unsqueeze": lambda h, other: h.unsqueeze(int(other)),
    "squeeze": lambda h, other: h[:1, :1].squeeze(int(other)),
    "view": lambda h, other: h[0].reshape((1, -1) if other else (-1, 1)),
    "expand": lambda h, other: (h[:1] if other else h[:, :1]).expand(SQUARE),
    "order of inputs": lambda h, other: torch.cat([h.tanh(), h.exp()] if other else [h.exp(), h.tanh()]),
    "which input": lambda h, other: (lambda a, b: a * b + (a if other else b))(h.tanh(), h.tanh()),
    "roll": lambda h, other: h.roll(1, int(other)),
    "normalized": lambda h, other: F.layer_norm(h, h.shape[1 + other :]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_structure_of_a_graph_tells_a_change_and_no_size(name: str) -> None:
    model = Model(lambda m, x, other: CHANGES[name](m.first(x), other).flatten().square())
    ghostclip.wrap(model)
    names = ParameterNames(model)

    def structure(other: bool) -> int:
        return read_graph(model(torch.randn(SQUARE), other), names).structure

    assert structure(False) == structure(False)
    assert structure(True) == structure(True)
    assert structure(False) != structure(True)


def test_the_structure_is_that_of_batches_of_other_sizes() -> None:
    def form(m: Any, x: Tensor) -> Tensor:
        h = m.first(x.flatten(0, 1)).view(x.shape)
        h = torch.cat([h[:, :-1], m.bare[:1].expand(len(x), 1, WIDTH)], 1)
        return m.last(torch.cat(h.chunk(2, -1), -1)).square().mean((1, 2))

    model = ghostclip.wrap(Model(form))
    names = ParameterNames(model)
    found = {read_graph(model(torch.randn(size, 6, WIDTH)), names).structure for size in (2, 3, 6, 12)}
    assert len(found) == 1


def test_the_structure_is_that_of_texts_of_other_lengths() -> None:
    def form(m: Any, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = (m.first(x) + m.bare[:length]).tanh()[:, :length]
        return m.last(h[:, 1:] - h[:, :-1])[:, :100].square().mean((1, 2))

    model = ghostclip.wrap(Model(form))
    names = ParameterNames(model)
    found = {read_graph(model(torch.randn(4, length, WIDTH)), names).structure for length in (3, 4, 6, 7)}
    assert len(found) == 1


def test_two_layers_of_one_kind_are_told_apart() -> None:
    def form(m: Any, x: Tensor, other: bool) -> Tensor:
        layers = (m.first, m.last) if other else (m.last, m.first)
        return squared(layers[1](layers[0](x)))

    model = ghostclip.wrap(Model(form))
    names = ParameterNames(model)
    found = [read_graph(model(torch.randn(X), other), names).structure for other in (False, True, False)]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(("begins", "seen"), [(1, 64), (63, 64), (64, 256)])
def test_what_was_multiplied_with_zero_at_first_is_seen_later(begins: int, seen: int) -> None:
    """Proofs are repeated on the batches 64, 256, 1,024, ... of a kind."""

    def form(m: Any, x: Tensor, gate: float) -> Tensor:
        h = m.first(x).tanh()
        return squared(m.last(h + gate * h.mean(0)))

    torch.manual_seed(0)
    model, clipper = clipper_of(form, X)
    for batch in range(1, seen):
        clipper.norms(model(torch.randn(X).double(), float(batch > begins)))
    with pytest.raises(UnsupportedModelError, match=r"so examples mix; .* An earlier batch didn't show this"):
        clipper.norms(model(torch.randn(X).double(), 1.0))


class Constant(nn.Module):
    """Multiplies with a matrix of constants, which is neither parameter nor buffer."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, h: Tensor) -> Tensor:
        return self.matrix @ h


def test_a_module_without_parameters_that_was_exchanged_is_tested_anew() -> None:
    torch.manual_seed(0)
    model, clipper = clipper_of(lambda m, x: squared(m.last(m.between(m.first(x).tanh()))), X)
    identity = torch.eye(EXAMPLES).double()
    model.between = Constant(identity)
    for _ in range(3):
        assert_exact(clipper, model, model(torch.randn(X).double()))
    model.between = Constant(identity.roll(1, 0))
    with pytest.raises(UnsupportedModelError, match="so examples mix"):
        clipper.norms(model(torch.randn(X).double()))


class Steps(nn.Module):
    """Writes the positions of examples one after another, each from a layer, as a recurrence does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, by: int = 0, turned: bool = False) -> Tensor:
        out = torch.zeros_like(x)
        for position in range(x.shape[1]):
            h = self.first(x[:, position]).tanh()
            if turned:
                out[position] = h
            elif by:
                out[by:, position] = h[:-by]
                out[:by, position] = h[-by:]
            else:
                out[:2, position] = h[:2]
                out[2:, position] = h[2:]
        return self.last(out).square().sum((1, 2))


def test_positions_that_are_written_one_by_one_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for position in range(x.shape[1]):
            out[:, position] = m.first(x[:, position]).tanh()
        return m.last(out).square().sum((1, 2))

    torch.manual_seed(0)
    model, clipper = clipper_of(whole, SQUARE)
    tests = []
    found = ghostclip.graph.mixing_test.verdicts

    def counted(*given: Any, **more: Any) -> Any:
        tests.append(given)
        return found(*given, **more)

    for module in ("mixing_test", "moved_rows"):
        monkeypatch.setattr(f"ghostclip.graph.{module}.verdicts", counted)
    for batch, examples in enumerate((4, 4, 4, 5, 7)):
        before = len(tests)
        assert_exact(clipper, model, model(torch.randn(examples, EXAMPLES, WIDTH).double()))
        assert (len(tests) > before) == (batch == 0)


@pytest.mark.parametrize(("by", "turned"), [(1, False), (2, False), (0, True)])
def test_copies_of_whole_examples_to_others_are_seen_after_a_proof(by: int, turned: bool) -> None:
    torch.manual_seed(0)
    model = Steps().double()
    clipper = GhostClipper(model)
    for _ in range(3):
        assert_exact(clipper, model, model(torch.randn(SQUARE).double()))
    with pytest.raises(UnsupportedModelError, match="belong to others"):
        clipper.norms(model(torch.randn(SQUARE).double(), by, turned))


@pytest.mark.parametrize("turned", [False, True])
def test_a_copy_that_no_gradient_reached_is_tested_when_one_does(turned: bool) -> None:
    """The last position has no weight in the losses of the first batches."""

    def form(m: Any, x: Tensor, weight: float, turn: bool) -> Tensor:
        h, out, last = m.first(x).tanh(), torch.zeros_like(x), x.shape[1] - 1
        for position in range(last):
            out[:, position] = h[:, position]
        out[last if turn else (slice(None), last)] = h[:, last]
        weights = torch.ones(last + 1).to(x)
        weights[last] = weight
        return (m.last(out) * weights[:, None]).square().sum((1, 2))

    torch.manual_seed(0)
    model, clipper = clipper_of(form, SQUARE)
    for _ in range(3):
        assert_exact(clipper, model, model(torch.randn(SQUARE).double(), 0.0, False))
    if turned:
        with pytest.raises(UnsupportedModelError, match="belong to others"):
            clipper.norms(model(torch.randn(SQUARE).double(), 1.0, True))
    for weight in (1.0, 1.0, 0.0, 1.0):
        assert_exact(clipper, model, model(torch.randn(SQUARE).double(), weight, False))


class Shifted(torch.autograd.Function):
    """Rows moved by so many places, which no graph tells."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, by: int) -> Tensor:
        ctx.by = by
        return h.roll(by, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.roll(-ctx.by, 0), None


def test_what_an_own_function_is_given_is_seen_later() -> None:
    torch.manual_seed(0)
    model, clipper = clipper_of(lambda m, x, by: squared(m.last(Shifted.apply(m.first(x).tanh(), by))), X)
    for batch in range(1, 64):
        clipper.norms(model(torch.randn(X).double(), int(batch > 20)))
    with pytest.raises(UnsupportedModelError, match="An earlier batch didn't show this"):
        clipper.norms(model(torch.randn(X).double(), 1))


def test_no_more_is_remembered_than_graphs_of_the_last_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that cuts at random makes a new graph in most steps; what was forgotten is proved anew."""
    monkeypatch.setattr("ghostclip.graph.row_layout.REMEMBERED", 12)
    torch.manual_seed(0)

    def form(m: Any, x: Tensor, cut: int, turn: bool = False) -> Tensor:
        h = m.first(x).tanh()
        h = torch.cat([h[:, :cut].exp(), h[:, cut:] * m.bare[0]], 1)
        return squared(m.last(h.roll(int(turn), 0)))

    model = Model(form).double()
    clipper = GhostClipper(model)
    layouts = clipper.passes._grouping
    for cut in [*range(9), *range(9)]:
        assert_exact(clipper, model, model(torch.randn(EXAMPLES, 9, WIDTH).double(), cut))
        assert len(layouts._tried) <= 12 + 4
        assert len(layouts._batches) <= 8
    with pytest.raises(UnsupportedModelError, match="depends on what belongs to others"):
        clipper.norms(model(torch.randn(EXAMPLES, 9, WIDTH).double(), 3, True))


def test_a_matrix_made_of_parameters_as_long_as_the_batch_is_refused_with_the_way_out() -> None:
    """Skew-symmetric matrices, as orthogonal adapters make them: whether the first 4 are the examples, nobody knows."""
    torch.manual_seed(0)

    def form(m: Any, x: Tensor) -> Tensor:
        above = torch.triu_indices(EXAMPLES, EXAMPLES, 1)
        skew = torch.zeros(EXAMPLES, EXAMPLES).double().index_put((above[0], above[1]), m.bare.flatten()[:6])
        return squared(m.first(x)[:, :EXAMPLES] @ (skew - skew.mT))

    model, clipper = clipper_of(form, X)
    x = torch.randn(X).double()
    with pytest.raises(UnsupportedModelError, match="no example has a part in it, begin with a batch of another"):
        clipper.norms(model(x))
    expected = oracle.norms_by_single_losses(model, model(x))
    found = GhostClipper(model).clip(lambda model, batch: model(batch), x).norms
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
