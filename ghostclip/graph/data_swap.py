"""Whether the losses of a batch keep to their own examples: one's data is exchanged, and the others' losses stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["mixed_examples"]

# Of the largest value beside it: other rows of a product are not touched at all, so this is far above what rounds.
TOLERANCE = 1e-5
LOSS_REMEDY = 'compute each loss from its own example only (reduction="none"), one number for each'

LossFunction = Callable[[nn.Module, Any], Tensor]
Outputs = list[tuple[str, Tensor]]


def mixed_examples(model: nn.Module, loss_fn: LossFunction, batch: Any) -> list[tuple[str, str, str]]:
    """(path, problem, remedy) of the first module in which examples of ``batch`` meet; [] where they stay apart.

    Runs the model in the mode it is in, without gradients, with the same random numbers each time; buffers and random
    state are left as they were. The first, the middle and the last example are exchanged for their neighbours.

    Args:
        model: wrapped or not.
        loss_fn: (model, batch) -> losses [B].
        batch: at least two examples, tensors with the examples in dimension 0, in any nesting.

    Raises:
        ValueError: the batch has fewer than two examples.
    """
    losses, outputs = _observed(model, loss_fn, batch)
    if losses.dim() != 1:
        return [("", f"the losses have shape {list(losses.shape)}, not [B]", LOSS_REMEDY)]
    examples = len(losses)
    if examples < 2:
        raise ValueError(f"batch must have at least two examples, to see whether they mix; got {examples}")
    for changed in sorted({0, examples // 2, examples - 1}):
        other = tree_map(lambda leaf, i=changed: _exchanged(leaf, i, examples), batch)
        again, there = _observed(model, loss_fn, other)
        moved = _moved(losses, again, changed)
        if moved is not None:
            return [_first_place(model, outputs, there, changed, examples, moved)]
    return []


def _first_place(
    model: nn.Module, before: Outputs, after: Outputs, changed: int, examples: int, moved: int
) -> tuple[str, str, str]:
    """Where it begins: the first module whose output for another example is another one now."""
    for (path, old), (again, new) in zip(before, after, strict=False):
        if path != again or old.shape != new.shape or old.dim() < 2 or len(old) != examples:
            continue
        found = _moved(old, new, changed)
        if found is not None:
            kind = type(model.get_submodule(path)).__name__
            problem = f"{kind}: what it gives for example {found} depends on the data of example {changed}"
            remedy = (
                "use a layer that treats each example by itself (GroupNorm for BatchNorm), and compare no examples of "
                "one batch; if this module's examples are in another dimension, what mixes them comes later"
            )
            return path, problem, remedy
    return "", f"the loss of example {moved} depends on the data of example {changed}", LOSS_REMEDY


def _exchanged(leaf: Any, example: int, examples: int) -> Any:
    """The leaf with the neighbour's row in place of the example's own."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != examples:
        return leaf
    leaf = leaf.clone()
    leaf[example] = leaf[(example + 1) % examples]
    return leaf


def _moved(before: Tensor, after: Tensor, changed: int) -> int | None:
    """The first row, other than the changed one, that is not what it was; None where all are."""
    if not before.is_floating_point():
        return None
    before, after = before.flatten(1) if before.dim() > 1 else before.unsqueeze(1), after.reshape(len(after), -1)
    scale = TOLERANCE * float(before.nan_to_num(posinf=0, neginf=0).abs().max()) if before.numel() else 0.0
    same = torch.isclose(before, after, rtol=0, atol=scale, equal_nan=True).all(1)
    same[changed] = True
    return None if bool(same.all()) else int((~same).nonzero()[0])


def _observed(model: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[Tensor, Outputs]:
    """The losses, and what each module gave, in the order in which they were done."""
    outputs: Outputs = []

    def note(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((path, output.clone()))

    handles = [module.register_forward_hook(partial(note, path)) for path, module in model.named_modules() if path]
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return loss_fn(model, batch), outputs
        finally:
            for handle in handles:
                handle.remove()
            for buffer, value in before:
                buffer.copy_(value)
