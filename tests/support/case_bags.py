"""Rows of the table in cases.py: EmbeddingBag in all its modes, and Embedding with other types of index."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from case_models import Wired, freeze, tie
from case_types import TIME_FIRST, Case, indices, normal
from torch import Tensor


def _ragged(tokens: Tensor, last: bool, empty: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Flat indices, offsets and a mask [B, T] of bags of all lengths, which the tokens [B, T] themselves decide."""
    lengths = (tokens.sum(1) % (tokens.shape[1] + empty)) + (1 - int(empty))
    present = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    ends = lengths.cumsum(0)
    return tokens[present], torch.cat([ends.new_zeros(1), ends])[: len(ends) + last], present


BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum padding_idx": {"mode": "sum", "padding_idx": 1},
    "mean padding_idx": {"mode": "mean", "padding_idx": 1},
    "max padding_idx": {"mode": "max", "padding_idx": -1},
}


def _bags() -> Iterator[Case]:
    """EmbeddingBag: all modes, repeated indices, offsets, weights, padding; Embedding with other index types."""
    for name, options in BAGS.items():
        bag = lambda nn, rows=4, o=options: nn.EmbeddingBag(rows, 3, **o)  # noqa: E731
        yield Case(f"bag_{name}", bag, (indices(4, 6),))
        yield Case(f"bag_{name} large", partial(bag, rows=500), (indices(500, 5),))
        yield Case(f"bag_{name} one index", bag, (indices(4, 1),))
        yield Case(f"bag_{name} int32", bag, (indices(4, 6, lay_out=Tensor.int),))
        for last in (False, True):
            for empty in (False, True):
                yield Case(
                    f"bag_{name} offsets{' last' * last}{' empty' * empty}",
                    partial(_bag_of_offsets, last=last, empty=empty, **options),
                    (indices(4, 6),),
                )
        twice = partial(_wired_bag, lambda m, x: m.bag(x[:, :4]) * m.bag(x[:, 2:]), **options)
        yield Case(f"bag_{name} twice", twice, (indices(4, 6),))
        folded = partial(_wired_bag, lambda m, x: m.bag(x.flatten(0, 1)).unflatten(0, x.shape[:2]), **options)
        yield Case(f"bag_{name} folded", folded, (indices(4, 3, 5),))
    tokens, weights = indices(4, 6), normal(6)
    weighted = lambda m, x, w: m.bag(x, per_sample_weights=w)  # noqa: E731
    for name in ("sum", "sum padding_idx"):
        build = partial(_wired_bag, weighted, **BAGS[name])
        yield Case(f"bag_{name} weights", build, (tokens, weights))
        yield Case(f"bag_{name} weights leaf", build, (tokens, normal(6, requires_grad=True)))
        attended = partial(_wired_bag, lambda m, x, w: weighted(m, x, m.score(w)), score=("Linear", 6, 6), **BAGS[name])
        yield Case(f"bag_{name} weights learned", attended, (tokens, weights))
        yield Case(f"bag_{name} weights offsets", partial(_bag_of_offsets, **BAGS[name]), (tokens, weights))
    yield Case("bag_sum strided", lambda nn: nn.EmbeddingBag(4, 3, mode="sum"), (indices(4, 8, lay_out=_every_other),))
    yield Case("bag in place", lambda nn: nn.Sequential(nn.EmbeddingBag(4, 3), nn.ReLU(inplace=True)), (tokens,))
    frozen = lambda nn: nn.Sequential(freeze(nn.EmbeddingBag(4, 3, mode="max"), "weight"), nn.Linear(3, 2))  # noqa: E731
    yield Case("bag frozen", frozen, (tokens,))
    classifier = lambda nn: nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, 4), nn.ReLU(True), nn.Linear(4, 2))  # noqa: E731
    yield Case("bag classifier", classifier, (indices(9, 7),))
    for mode in ("sum", "max"):
        yield Case(f"bag_{mode} tied with embedding and head", partial(_tied_bag, mode), (indices(5, 4),))
    yield Case("embedding int32", lambda nn: nn.Embedding(4, 3, padding_idx=2), (indices(4, 6, lay_out=Tensor.int),))
    table = lambda nn: nn.Embedding(4, 3, padding_idx=0)  # noqa: E731
    yield Case("embedding time first", table, (indices(4, 6, batch_dim=1),), **TIME_FIRST)
    frozen = lambda nn: nn.Sequential(freeze(nn.Embedding(4, 3), "weight"), nn.Linear(3, 2))  # noqa: E731
    yield Case("embedding frozen", frozen, (tokens,))


def _every_other(x: Tensor) -> Tensor:
    return x[..., ::2]


def _wired_bag(
    wiring: Callable[..., Any], nn: ModuleType, score: tuple[Any, ...] | None = None, **options: Any
) -> torch.nn.Module:
    parts = {} if score is None else {"score": getattr(nn, score[0])(*score[1:])}
    return Wired(wiring, bag=nn.EmbeddingBag(4, 3, **options), **parts)


def _bag_of_offsets(nn: ModuleType, last: bool = False, empty: bool = True, **options: Any) -> torch.nn.Module:
    """Bags between offsets; weights [B, T] may follow the tokens."""

    def wiring(m: torch.nn.Module, tokens: Tensor, *weights: Tensor) -> Tensor:
        flat, offsets, present = _ragged(tokens, last, empty)
        return m.bag(flat, offsets, *(each[present] for each in weights))

    return Wired(wiring, bag=nn.EmbeddingBag(4, 3, include_last_offset=last, **options))


def _tied_bag(mode: str, nn: ModuleType) -> torch.nn.Module:
    """One table as a bag, as an embedding and as the head of a classifier."""
    model = Wired(
        lambda m, x: m.head(torch.tanh(m.bag(x) + m.embedding(x[:, 0]))),
        bag=nn.EmbeddingBag(5, 3, mode=mode),
        embedding=nn.Embedding(5, 3),
        head=nn.Linear(3, 5, bias=False),
    )
    return tie(tie(model, "bag", "embedding"), "bag", "head")


BAG_CASES = [*_bags()]
