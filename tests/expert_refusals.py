"""Rows picked by index that can't be followed to their examples; `ROWS` are as test_refusals.py has them."""

from collections.abc import Callable
from typing import Any

import torch
from expert_models import Experts
from torch import Tensor, nn

from ghostclip import GhostClipper

PUT_BACK = "by index_add or an inverse permutation"


PLACES = torch.tensor([0, 1, 5, 6])


def clip(rows: Callable[[Any, Tensor], Any], batches: int = 1, **shapes: tuple[int, ...]) -> None:
    """Clips a model that adds ``rows`` of its tokens [N, d] to two tokens of two examples each, and more to all."""

    def way(m: Any, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        found = rows(m, h)
        picked, *more = found if isinstance(found, tuple) else (found,)
        return sum(more, torch.zeros_like(h).index_add(0, PLACES, picked))

    model = Experts(way)
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    clipper = GhostClipper(model)
    for _ in range(batches):
        clipper.backward(model(torch.randn(4, 5, 4)).square().mean((1, 2)))


def layer(m: Any, h: Tensor) -> Tensor:
    """What an expert says of the picked rows."""
    return m.layers[0](h[PLACES])


def one_for_both(m: Any, h: Tensor) -> Tensor:
    inside = layer(m, h)
    return torch.cat([inside[:2], inside[:2]])


def grouped(m: Any, h: Tensor) -> Tensor:
    """Rows of three experts; in the last batch one row is of none."""
    m.last = getattr(m, "last", 5) - 1
    stops = torch.tensor([1, 2, m.last], dtype=torch.int32)
    return torch._grouped_mm(torch.cat([h[PLACES]] * 4, 1), m.wide, offs=stops)[:, :4]


def elsewhere(m: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, and a penalty on all of them."""
    inside = layer(m, h)
    return inside, inside.square().mean()


ROWS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "experts: beside other rows": (lambda: clip(lambda m, h: layer(m, h) * m.head(h).sum()), "head",
                                   "with a tensor of other rows", PUT_BACK),
    "experts: a row for two examples": (lambda: clip(lambda m, h: layer(m, h)[[0, 1, 0, 1]]), "layers.0",
                                        "of which several examples pick the same rows", PUT_BACK),
    "experts: rows for two examples": (lambda: clip(one_for_both), "layers.0",
                                       "of which several examples use the same rows", PUT_BACK),
    "experts: rows used elsewhere": (lambda: clip(elsewhere), "layers.0", "whose rows are used in another way, too",
                                     PUT_BACK),
    "experts: rows from outside": (lambda: clip(lambda m, h: m.layers[0](torch.randn(4, 4))), "layers.0",
                                   "whose rows come from outside of the graph", PUT_BACK),
    "experts: rows without one": (lambda: clip(grouped, batches=2, wide=(3, 16, 16)), "",
                                  "only 3 of 4 rows in a grouped product", "leave out the rows that meet no expert"),
}  # fmt: skip
