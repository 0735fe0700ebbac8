"""Whether one example's data moves another's loss, or stays in the model, tried on a batch that is left as it was.

The graph shows where examples meet in what is differentiated. What is not differentiated (a loss weighted by the
batch's own statistics, a detached mean) shows only when data is exchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from ghostclip.errors import VerificationError
from ghostclip.replay import Replay
from ghostclip.separation import mixed_examples

__all__ = ["holds_still", "refuse_mixing", "refuse_remembering", "square_dims"]

# Share of the largest loss by which another example's must move to be noticed: well above rounding.
MOVED = {torch.float64: 1e-9, torch.float32: 1e-5}
MOVED_OF_HALVES = 2e-2

LossFunction = Callable[[nn.Module, Any], Tensor]


def refuse_mixing(loss_fn: LossFunction, batch: Any, losses: Tensor, replay: Replay, *, squares: bool = False) -> None:
    """Raises VerificationError when losses move with other examples' data; the first and last are exchanged.

    Args:
        loss_fn: (model, batch) -> losses [B].
        batch: whatever it takes; the data exchanged is in tensors with B rows (and B nowhere else), in any nesting.
        losses: of the batch, B of them, at least two.
        replay: from before they were computed.
        squares: exchange in tensors with several dimensions of length B too, along each of them in turn; one along
            which other losses stay is taken for that of the examples.
    """
    drew = replay.drew()

    def losses_of(batch: Any, training: bool = True) -> Tensor:
        with replay.again(training=training):
            return loss_fn(replay.model, batch).detach()

    tolerance = _tolerance(losses, replay.model)
    count = len(losses)
    others = [_exchanged(batch, count, dim) for dim in (square_dims(batch, count) if squares else ()) or (None,)]

    def stays(before: Tensor, training: bool = True) -> bool:
        return any(not _moved(before, losses_of(other, training), tolerance) for other in others)

    if stays(losses.detach()):
        return
    # Not a fault yet: kernels differ without a graph, functions may not repeat themselves, and random numbers fall
    # elsewhere when lengths change; with random layers, what moves must move in eval mode, too.
    for training in (True, False) if drew else (True,):
        before = losses_of(batch, training)
        repeats = not _moved(before, losses_of(batch, training), 0.0)
        if not repeats or stays(before, training):
            return
    with replay.again(training=not drew):
        raise VerificationError(_message(mixed_examples(replay.model, loss_fn, batch)))


def holds_still(model: nn.Module) -> Callable[[], bool]:
    """A function that says whether no buffer was written to or exchanged since."""
    before = [(buffer, buffer._version) for buffer in model.buffers()]

    def unchanged() -> bool:
        now = list(model.buffers())
        same = (one is other and one._version == version for one, (other, version) in zip(now, before, strict=False))
        return len(now) == len(before) and all(same)

    return unchanged


def refuse_remembering(loss_fn: LossFunction, batch: Any, examples: int, replay: Replay) -> None:
    """Raises VerificationError when a forward leaves other values in the model's buffers for other examples' data.

    Buffers go into checkpoints and into what is published, and no noise is on them.

    Args:
        loss_fn, batch, replay: as for `refuse_mixing`.
        examples: B.
    """

    def buffers_after(batch: Any) -> dict[str, Tensor]:
        with replay.again():
            loss_fn(replay.model, batch)
            return {name: buffer.clone() for name, buffer in replay.model.named_buffers()}

    before, again, other = buffers_after(batch), buffers_after(batch), buffers_after(_exchanged(batch, examples))
    if _unlike(before, again):
        return
    if changed := _unlike(before, other):
        raise VerificationError(
            f"the first batch's self-check found that the forward keeps something of the examples in the buffer "
            f"{changed[0]!r}, which would be saved and published with the model without noise; don't update it in "
            "training (put its module into eval mode, or take the update out). Nothing was released or charged. (If it "
            "tells nothing of the examples' data, switch this off by self_check=False)"
        )


def _unlike(these: dict[str, Tensor], those: dict[str, Tensor]) -> list[str]:
    """Names of buffers that differ."""
    names = dict.fromkeys([*these, *those])
    return [n for n in names if n not in these or n not in those or not _same_values(these[n], those[n])]


def _same_values(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def square_dims(batch: Any, examples: int) -> list[int]:
    """The dimensions in which tensors are as long as there are examples, where some have several such; else []."""
    plain = batch if isinstance(batch, dict) or not isinstance(batch, Mapping) else dict(batch)
    shapes = [[*leaf.shape] for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]
    squares = [shape for shape in shapes if shape[:1] == [examples] and shape.count(examples) > 1]
    return sorted({dim for shape in squares for dim, length in enumerate(shape) if length == examples})


def _message(found: list[tuple[str, str, str]]) -> str:
    path, problem, remedy = found[0] if found else ("", "an example's loss depends on the data of another", "")
    where = f"{path}: " if path else ""
    return (
        f"the first batch's self-check found examples that mix, so that none of them can be bounded: {where}{problem}"
        f"{'; ' + remedy if remedy else ''}. Nothing was released or charged. (If the batch holds a tensor with as "
        "many rows as examples that is shared by all of them, like a table of class weights, give it to the loss "
        "function another way, or switch this off by self_check=False)"
    )


def _tolerance(losses: Tensor, model: nn.Module) -> float:
    dtypes = {losses.dtype, *(parameter.dtype for parameter in model.parameters())}
    return max(MOVED.get(dtype, MOVED_OF_HALVES) for dtype in dtypes if dtype.is_floating_point)


def _exchanged(batch: Any, examples: int, square: int | None = None) -> Any:
    """The batch with the first and the last example's data exchanged for their neighbours'; of two, the first's.

    Tensors that have several dimensions of that length stay as they are, or have theirs in dimension ``square``.
    """
    if isinstance(batch, MutableMapping) and not isinstance(batch, dict):
        changed = copy.copy(batch)
        changed.update({name: _exchanged(value, examples, square) for name, value in batch.items()})
        return changed

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or [*leaf.shape[:1]] != [examples]:
            return leaf
        dim = 0 if [*leaf.shape].count(examples) == 1 else square
        if dim is None or dim >= leaf.dim() or leaf.shape[dim] != examples:
            return leaf
        leaf = leaf.detach().clone()
        rows = leaf.movedim(dim, 0)
        rows[0] = rows[1]
        if examples > 2:
            rows[-1] = rows[-2]
        return leaf

    return tree_map(one, batch, is_leaf=lambda node: isinstance(node, PackedSequence))


def _moved(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Whether the losses of examples that kept their data differ, by more than that share of the largest."""
    if before.shape != after.shape:
        return True
    others = slice(1, 2 if len(before) == 2 else -1)
    scale = tolerance * float(before.nan_to_num(posinf=0, neginf=0).abs().max())
    return not bool(torch.isclose(before[others], after[others], rtol=0, atol=scale, equal_nan=True).all())
