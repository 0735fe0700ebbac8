"""Mistakes in ragged batches: rows given to the wrong example, and what connects two examples.

Each changes a good batch, so that it can be planted in any of a training; `ROWS` are as test_refusals.py has them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from case_models import Wired
from ragged_models import CASES, FEATURES, PackedText, gathered, graphs, losses
from torch import nn

from ghostclip import GhostClipper

SIZES = (3, 5, 1, 0, 7, 4)


def connected(batch: dict[str, Any]) -> Any:
    """An edge from the first graph to the last."""
    batch["edges"] = torch.cat([batch["edges"], torch.tensor([[0], [len(batch["rows"]) - 1]])], 1)
    return batch["rows"]


def shifted(batch: dict[str, Any]) -> Any:
    """Each graph begins one node late."""
    return torch.cat([batch["rows"][:1], batch["rows"][:-1]])


def exchanged(batch: dict[str, Any]) -> Any:
    """The index counts examples from the last."""
    return len(batch["y"]) - 1 - batch["rows"]


def one_row(batch: dict[str, Any]) -> Any:
    """A single row is another example's."""
    index = batch["rows"].clone()
    index[0] = 1
    return index


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an index off by one": shifted,
    "an index in another order": exchanged,
    "one row of another example": one_row,
}
# Mistakes that only the gradients show.
CONNECTED = {"an edge between graphs": connected, **WRONG}


def shared_token(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Losses in which a token counts for two texts."""
    own = losses(model, batch)
    return own + 0.1 * model.out(model.words(batch["words"]))[0].sum() * (torch.arange(len(own)) == 1)


def clip(
    build: Callable[[], nn.Module] = CASES["gcn"].build,
    index: Callable[[dict[str, Any]], Any] = lambda batch: batch["rows"],
    loss: Callable[[nn.Module, Any], torch.Tensor] = losses,
) -> None:
    batch, model = graphs(SIZES, torch.float32), build()
    rows = index(batch)
    GhostClipper(model).backward(loss(model, batch), batch_index=rows)


def clip_later(index: Callable[[dict[str, Any]], Any]) -> None:
    """In a batch after the first, which has no mistake."""
    clipper = GhostClipper(plain())
    for change in (lambda batch: batch["rows"], index):
        batch = graphs(SIZES, torch.float32)
        rows = change(batch)
        clipper.norms(losses(clipper.model, batch), batch_index=rows)


FOLLOW = "compute each loss from its own example"


def plain() -> nn.Module:
    """Linear layers with a rule alone."""

    def spread(m: Any, batch: Any) -> torch.Tensor:
        h, (source, target) = m.first(batch["x"]).tanh(), batch["edges"]
        h = m.second(h + gathered(h[source], target, len(h))).tanh()
        return m.head(gathered(h, batch["rows"], len(batch["y"])))

    return Wired(spread, first=nn.Linear(FEATURES, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 3))


def run_with_others() -> None:
    """A layer that runs with other tensors in the place of its parameters."""
    model, others = nn.Sequential(nn.Linear(3, 3)), dict(nn.Sequential(nn.Linear(3, 3)).named_parameters())
    clipper = GhostClipper(model)
    clipper.norms(torch.func.functional_call(model, others, (torch.ones(2, 3),)).square().sum(1))


def on_nested() -> None:
    model = GhostClipper(nn.Sequential(nn.Linear(3, 3))).model
    model(torch.nested.nested_tensor_from_jagged(torch.ones(4, 3), torch.tensor([0, 1, 4])))


ROWS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "ragged: a nested tensor": (on_nested, "0 (Linear)", "got a nested tensor", "give it nested.values()"),
    "other tensors for parameters": (run_with_others, "0", "was given other tensors in the place of its parameters",
                                     "call the module"),
    **{f"ragged: {name}": (partial(clip, index=change), "", "do not belong to the examples that batch_index says",
                           "correct it, or leave it out") for name, change in WRONG.items()},
    "ragged: an edge between graphs": (partial(clip, plain, connected), "first", "examples mix", FOLLOW),
    "ragged: an edge in a later batch": (lambda: clip_later(connected), "first", "examples mix", FOLLOW),
    "ragged: a token in two texts": (lambda: clip(PackedText, loss=shared_token), "out", "do not belong", "correct it"),
    "ragged: a function": (lambda: clip(index=lambda batch: len), "batch_index", "got builtin_function", "list of"),
    "ragged: int32": (lambda: clip(index=lambda batch: batch["rows"].int()), "batch_index", "got torch.int32",
                      "batch_index.long()"),
    "ragged: one in two dimensions": (lambda: clip(index=lambda batch: batch["rows"][:, None]), "batch_index",
                                      "got [20, 1]", "torch.repeat_interleave(torch.arange(B), lengths)"),
    "ragged: on another device": (lambda: clip(index=lambda batch: batch["rows"].to("meta")), "batch_index",
                                  "is on meta, and the losses are on cpu", "batch_index.to(losses.device)"),
    "ragged: past the last example": (lambda: clip(index=lambda batch: batch["rows"] + 1), "batch_index",
                                      "from 0 to 5, for 6 losses; got numbers from 1 to 6", "give each example a loss"),
}  # fmt: skip
