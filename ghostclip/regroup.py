"""Whose row is whose: a first-batch proof that examples do not mix, and where a layer sees them.

The gradient of one example's loss at a layer's pre-activation is zero on every row that belongs to another example. So
one backward from a single loss shows, layer by layer, that the batch dimension is where it is said to be; that rows
folded into the batch (positions, windows, heads) are grouped by example or by row; or that examples mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph import first_pass
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call

__all__ = ["Grouping", "row_count"]


def row_count(call: Call, examples: int, name: str) -> int:
    """Rows of each of ``examples`` examples in the batch dimension of ``call``; raises where that isn't whole."""
    rows = call.shape[call.batch_dim]
    if examples == 0:
        return 1
    if 1 < rows < examples and examples % rows == 0:
        raise LossShapeError(
            f"losses must have shape exactly [B]; got [{examples}], but {name} saw {rows} (its output has shape "
            f"{list(call.shape)}). Reshape losses of several tokens or positions to [B, T] and average them by .mean(1)"
        )
    if rows % examples or rows == 0:
        raise UnsupportedModelError(
            f"{name}: its output has shape {list(call.shape)} with {rows} rows in dimension {call.batch_dim}, for "
            f"{examples} losses; {_remedy(call)}"
        )
    return rows // examples


def _remedy(call: Call) -> str:
    return (
        "if the examples are in another dimension, say so by wrap(model, batch_dim={...}) or batch_first; if an input "
        "is shared by all examples (position ids of shape [1, T]), expand it to one row per example"
    )


class Grouping:
    """Remembers which uses of which layers have been proved to keep examples apart, and how their rows are grouped."""

    def __init__(self) -> None:
        self._proved: dict[tuple, str] = {}
        self._seen: dict[tuple, int] = {}

    def prove(self, losses: Tensor, calls: list[Call], index: ModelIndex) -> dict[int, str]:
        """How each call's rows are grouped ("example" or "row" major), by id(call).

        Runs extra backwards on first meeting a layer with so many rows an example; none afterwards.

        Raises:
            UnsupportedModelError: rows of other examples move with one example's loss, or the grouping can't be told.
        """
        examples = losses.shape[0]
        keys = {id(call): self._key(call, examples, index.layer(call)) for call in calls}
        if examples > 1 and not all(key in self._proved for key in keys.values()):
            for example in (examples - 1, 0):
                open_calls = [call for call in calls if self._is_open(keys[id(call)])]
                if open_calls:
                    self._probe(losses, open_calls, example, keys, index)
            for key in set(keys.values()):
                self._seen[key] = self._seen.get(key, 0) + 1
        return {id(call): self._major(call, keys[id(call)], examples, index) for call in calls}

    def _key(self, call: Call, examples: int, name: str) -> tuple:
        return (id(call.layer), call.parameters, call.batch_dim, len(call.shape), row_count(call, examples, name))

    def _is_open(self, key: tuple) -> bool:
        """Not proved; where nothing has reached the layer so far, tried at the 1st, 2nd, 4th, 8th ... batch."""
        met = self._seen.get(key, 0) + 1
        return key not in self._proved and met & (met - 1) == 0

    def _major(self, call: Call, key: tuple, examples: int, index: ModelIndex) -> str:
        if key[-1] == 1 or examples <= 1:
            return "example"
        if key not in self._proved:
            raise UnsupportedModelError(
                f"{index.layer(call)}: {key[-1]} rows an example are folded into its batch dimension, and this batch "
                f"doesn't show how; give it inputs [B, positions, features] instead"
            )
        return self._proved[key]

    def _probe(
        self, losses: Tensor, calls: list[Call], example: int, keys: dict[int, tuple], index: ModelIndex
    ) -> None:
        touched: list[tuple[Call, Tensor]] = []

        def look(call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            rows = grad.movedim(call.batch_dim, 0).flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)
            # 0 * inf is NaN: a row that isn't finite says nothing of whose it is.
            touched.append((call, ((rows != 0) & torch.isfinite(rows)).any(1)))

        seed = torch.zeros_like(losses)
        seed[example] = 1.0
        first_pass(losses, calls, look, seed, retain_graph=True)
        for call, rows in touched:
            key = keys[id(call)]
            if key in self._proved or not bool(rows.any()):
                continue
            major = _grouping_of(rows, example, losses.shape[0])
            if major is None:
                raise UnsupportedModelError(
                    f"{index.layer(call)}: the loss of one example depends on rows of its output (shape "
                    f"{list(call.shape)}, dimension {call.batch_dim}) that belong to others, so examples mix before or "
                    f"after it, or are not where they are said to be; {_remedy(call)}"
                )
            if major:
                self._proved[key] = major


def _grouping_of(rows: Tensor, example: int, examples: int) -> str | None:
    """ "example", "row", "" when both would fit, or None when neither does, from the rows one loss reached."""
    count = rows.shape[0] // examples
    by_example, by_row = rows.clone(), rows.clone()
    by_example[example * count : (example + 1) * count] = False
    by_row[example::examples] = False
    fits_example, fits_row = not bool(by_example.any()), not bool(by_row.any())
    if count == 1 or (fits_example and not fits_row):
        return "example" if fits_example else None
    if fits_row:
        return "" if fits_example else "row"
    return None
