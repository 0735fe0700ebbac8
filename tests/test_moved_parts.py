"""Examples that a forward puts into another order by parts of tensors, in some batches only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError

EXAMPLES = 6


def joined(parts: Sequence[Tensor], by: int, dim: int = 0) -> Tensor:
    return torch.cat([parts[(place + by) % len(parts)] for place in range(len(parts))], dim)


def turned(h: Tensor) -> Tensor:
    return torch.cat([h[1:], h[:1]])


# Each moves rows by one place for a ``by`` of one.
ORDERS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "slices": lambda m, h, by: torch.cat([h[by:], h[:by]]),
    "selected": lambda m, h, by: torch.stack([h[(place + by) % len(h)] for place in range(len(h))]),
    "split": lambda m, h, by: joined(h.split(1), by),
    "unbound": lambda m, h, by: torch.stack([h.unbind()[(place + by) % len(h)] for place in range(len(h))]),
    "with an operation between": lambda m, h, by: joined([part.tanh() for part in h.split(1)], by),
    "one of two, into a layer": lambda m, h, by: m.between(torch.stack([h, turned(h)]).unbind()[by]),
    "time first": lambda m, h, by: joined(h.unsqueeze(0).split(1, 1), by, 1).squeeze(0),
}


class Ordering(nn.Module):
    """A layer that sees examples in an order, and losses in their own, by as many operations in every batch."""

    def __init__(self, order: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.order, self.by = order, 0

    def forward(self, x: Tensor) -> Tensor:
        rows = self.last(self.order(self, self.first(x), self.by))
        back = len(rows) - self.by
        return torch.cat([rows[back:], rows[:back]])


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def by_the_loop(model: nn.Module, x: Tensor) -> Tensor:
    return oracle.norms_by_single_losses(model, losses(model, x))


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_a_later_batch_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Ordering(ORDERS[name]).double()
    clipper = GhostClipper(model)
    for by in (0, 0, 0, 0):
        model.by, x = by, torch.randn(EXAMPLES, 4).double()
        torch.testing.assert_close(clipper.norms(losses(model, x)), by_the_loop(model, x), rtol=1e-10, atol=0)
    model.by = 1
    with pytest.raises(UnsupportedModelError, match="depends on rows of this output that belong to others"):
        clipper.norms(losses(model, torch.randn(EXAMPLES, 4).double()))
    model.by, x = 0, torch.randn(EXAMPLES, 4).double()
    torch.testing.assert_close(clipper.norms(losses(model, x)), by_the_loop(model, x), rtol=1e-10, atol=0)


class Scaling(Ordering):
    """A bare parameter where examples are in an order."""

    def __init__(self, order: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__(order)
        self.last = nn.Identity()  # type: ignore[assignment]
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.order(self, self.first(x), self.by) * self.scale
        back = len(rows) - self.by
        return torch.cat([rows[back:], rows[:back]])


@pytest.mark.parametrize("name", ["slices", "selected", "split"])
def test_an_order_at_a_bare_parameter_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Scaling(ORDERS[name]).double()
    clipper = GhostClipper(model)
    for by in (0, 0, 0):
        model.by, x = by, torch.randn(EXAMPLES, 4).double()
        torch.testing.assert_close(clipper.norms(losses(model, x)), by_the_loop(model, x), rtol=1e-10, atol=0)
    model.by = 1
    with pytest.raises(UnsupportedModelError, match="scale"):
        clipper.norms(losses(model, torch.randn(EXAMPLES, 4).double()))


class Choosing(nn.Module):
    """Layers read one of two tensors, of which one has the rows moved, and one has them back in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.by = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        rows = self.between(torch.stack([h, turned(h)]).unbind()[self.by])
        return self.last(torch.stack([rows, torch.cat([rows[-1:], rows[:-1]])]).unbind()[self.by])


def test_another_output_of_an_operation_that_a_layer_reads_is_another_order() -> None:
    torch.manual_seed(0)
    model = Choosing().double()
    clipper = GhostClipper(model)
    for _ in range(3):
        clipper.norms(losses(model, torch.randn(EXAMPLES, 4).double()))
    model.by = 1
    with pytest.raises(UnsupportedModelError, match=r"between: .*depends on rows of this output that belong to others"):
        clipper.norms(losses(model, torch.randn(EXAMPLES, 4).double()))


class Halves(nn.Module):
    """Parts along features and positions, as rotary positions and gates take them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 2 * EXAMPLES), nn.Linear(EXAMPLES, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).chunk(2, -1)
        half = EXAMPLES // 2
        turned = torch.cat([-value[..., half:], value[..., :half]], -1)
        return self.last(turned * gate.sigmoid())[:, -1]


def test_parts_that_are_the_same_in_each_batch_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ghostclip.graph import row_layout

    tested, check = [], row_layout.check_mixing

    def counted(*arguments: Any, **options: Any) -> Any:
        tested.append(arguments)
        return check(*arguments, **options)

    monkeypatch.setattr(row_layout, "check_mixing", counted)
    torch.manual_seed(0)
    model = Halves().double()
    clipper = GhostClipper(model)
    for _ in range(5):
        x = torch.randn(EXAMPLES, 7, 4).double()
        torch.testing.assert_close(clipper.norms(losses(model, x)), by_the_loop(model, x), rtol=1e-10, atol=0)
    assert len(tested) == 1


class Pictures(nn.Module):
    """Puts rows of pictures into the places of a text that a mask says, as LLaVA does."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.picture, self.head = nn.Embedding(9, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, words: Tensor, pictures: Tensor) -> Tensor:
        h, mask = self.text(words), (words == 0)[:, :, None]
        return self.head(h.masked_scatter(mask.expand_as(h), self.picture(pictures))).tanh().mean(1)


def of_pictures(model: nn.Module, words: Tensor, pictures: Tensor) -> Tensor:
    return model(words, pictures).square().sum(1)


def words_with(counts: Sequence[int]) -> Tensor:
    words = torch.randint(1, 9, (len(counts), 5))
    for row, count in zip(words, counts, strict=True):
        row[1 : 1 + count] = 0
    return words


def test_pictures_of_as_many_places_in_each_text_are_exact() -> None:
    torch.manual_seed(0)
    model = Pictures().double()
    clipper = GhostClipper(model)
    for _ in range(4):
        words, pictures = words_with([1, 1, 1, 1]), torch.randn(4, 4).double()
        found = clipper.norms(of_pictures(model, words, pictures))
        expected = []
        for n in range(4):
            one = of_pictures(model, words[n : n + 1], pictures[n : n + 1])
            grads = torch.autograd.grad(one.sum(), list(model.parameters()))
            expected.append(torch.cat([grad.flatten() for grad in grads]).norm())
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=0)


def test_two_pictures_of_one_text_and_none_of_the_next_are_refused() -> None:
    torch.manual_seed(0)
    model = Pictures().double()
    clipper = GhostClipper(model)
    for _ in range(3):
        clipper.norms(of_pictures(model, words_with([1, 1, 1, 1]), torch.randn(4, 4).double()))
    with pytest.raises(UnsupportedModelError, match="picture"):
        clipper.norms(of_pictures(model, words_with([2, 0, 1, 1]), torch.randn(4, 4).double()))


def test_an_engine_refuses_an_order_of_a_later_batch() -> None:
    torch.manual_seed(0)
    model = Ordering(ORDERS["slices"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    engine = ghostclip.PrivacyEngine(
        model, optimizer, data, batch_size=24, noise_multiplier=1.0, sampling="without_replacement", self_check=False
    )
    batches = iter(engine.batches())
    engine.step(next(batches), lambda model, batch: losses(model, batch[0]))
    model.by = 1
    batch = next(iter(engine.batches()))
    with pytest.raises(UnsupportedModelError, match="belong to others"):
        engine.step(batch, lambda model, batch: losses(model, batch[0]))


B = 4


class Free(nn.Module):
    """Two layers and a bare parameter, used as a function says."""

    def __init__(self, wiring: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(5, 5), nn.Linear(5, 5), nn.Parameter(torch.randn(7, 5))
        self.wiring = wiring

    def forward(self, *inputs: Any) -> Tensor:
        return self.wiring(self, *inputs)


def squares(h: Tensor) -> Tensor:
    return h.square().flatten(1).sum(1)


def chunks(m: Free, x: Tensor, other: bool) -> Tensor:
    first, second = (part.tanh() for part in m.a(x).chunk(2))
    return squares(m.b(torch.cat([second, first] if other else [first, second])))


def reduced(m: Free, x: Tensor, index: Tensor) -> Tensor:
    rows = index[:, None].expand(B, 5)
    return squares(m.b(x.new_zeros(B, 5).scatter_reduce(0, rows, m.a(x).tanh(), "sum")))


def bags(m: Free, x: Tensor, index: Tensor) -> Tensor:
    return squares(m.b(nn.functional.embedding_bag(index[:, None], m.a(x).tanh(), mode="sum")))


def doubled(m: Free, x: Tensor, index: Tensor) -> Tensor:
    return squares(m.b(m.a(x).tanh().unsqueeze(1).expand(B, 2, 5).reshape(2 * B, 5)[index]))


def crossed(m: Free, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return squares(
        m.b(
            m.a(x.unsqueeze(1).expand(B, B, 5) * torch.arange(1.0, 5.0)[:, None]).tanh()[rows, columns].cumsum(1)[:, -1]
        )
    )


def picked(m: Free, x: Tensor, index: Tensor) -> Tensor:
    return squares(m.b(nn.functional.embedding(torch.tensor([1, 6, 3, 4]), m.p)[index] + 0 * x))


def pictured(m: Free, x: Tensor, places: int) -> Tensor:
    mask = (torch.arange(6) < places).view(1, 6, 1).expand(B, 6, 5)
    text, pictures = x.unsqueeze(1).expand(B, 6, 5), x.unsqueeze(1).expand(B, 4, 5) * torch.arange(1.0, 5.0)[:, None]
    return squares(m.b(m.a(text).masked_scatter(mask, m.a(pictures).tanh())).tanh())


ORDER = torch.arange(B)
LATER: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], tuple[Any, ...]]] = {
    "chunks with an operation after each": (chunks, (False,), (True,)),
    "scatter_reduce": (reduced, (ORDER,), (ORDER.roll(1),)),
    "embedding_bag of activations": (bags, (ORDER,), (ORDER.roll(1),)),
    "an index of a longer dimension": (doubled, (2 * ORDER,), (ORDER,)),
    "an index that is broadcast the other way": (crossed, (ORDER[:, None], ORDER[None]), (ORDER[None], ORDER[:, None])),
    "rows of a parameter, picked twice": (picked, (ORDER,), (ORDER.roll(1),)),
    "more pictures than places": (pictured, (4,), (2,)),
}


@pytest.mark.parametrize("name", LATER)
def test_what_moves_examples_in_a_later_batch_is_refused_or_exact(name: str) -> None:
    torch.manual_seed(0)
    wiring, good, bad = LATER[name]
    model = Free(wiring).double()
    clipper = GhostClipper(model)
    for _ in range(3):
        x = torch.randn(B, 5).double()
        torch.testing.assert_close(
            clipper.norms(model(x, *good)), oracle.norms_by_single_losses(model, model(x, *good)), rtol=1e-9, atol=0
        )
    x = torch.randn(B, 5).double()
    try:
        found = clipper.norms(model(x, *bad))
    except UnsupportedModelError:
        return
    torch.testing.assert_close(found, oracle.norms_by_single_losses(model, model(x, *bad)), rtol=1e-9, atol=0)


def test_two_uses_of_a_layer_whose_rows_are_grouped_in_two_ways() -> None:
    torch.manual_seed(0)

    def both_ways(m: Free, x: Tensor) -> Tensor:
        a = m.a(x.reshape(-1, 5)).view(B, 3, 5)
        b = m.a(x.transpose(0, 1).reshape(-1, 5)).view(3, B, 5).transpose(0, 1)
        return squares(a) + b.sum((1, 2)).square()

    model = Free(both_ways).double()
    clipper = GhostClipper(model)
    for _ in range(3):
        x = torch.randn(B, 3, 5).double()
        torch.testing.assert_close(
            clipper.norms(model(x)), oracle.norms_by_single_losses(model, model(x)), rtol=1e-9, atol=0
        )
