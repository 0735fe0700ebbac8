"""The first operation of a forward at which other data of one example changes what another one gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.graph.marks import numbers
from ghostclip.graph.source_lines import current_line

__all__ = ["OperationLog", "first_moved"]

# Of the largest value beside it: other rows of a product are not touched at all, so this is far above what rounds.
TOLERANCE = 1e-5


def first_moved(before: Tensor, after: Tensor, changed: int) -> int | None:
    """The first row, other than the changed one, that is not what it was; None where all are."""
    if not before.is_floating_point():
        return None
    before, after = before.detach(), after.detach()
    before, after = before.flatten(1) if before.dim() > 1 else before.unsqueeze(1), after.reshape(len(after), -1)
    scale = TOLERANCE * float(before.nan_to_num(posinf=0, neginf=0).abs().max()) if before.numel() else 0.0
    same = torch.isclose(before, after, rtol=0, atol=scale, equal_nan=True).all(1)
    same[changed] = True
    return None if bool(same.all()) else int((~same).nonzero()[0])


class OperationLog(TorchDispatchMode):
    """What the operations of a forward give, held against an earlier forward with other data of one example.

    Only dimensions as long as the batch are looked at: an operation has mixed examples if rows of others moved along
    each that its result has. Rows are kept as two numbers each.

    Args:
        model: that runs.
        examples: of the batch.
        before: of the same forward with the example's own data; None for that one itself.
        changed: the example.

    Attributes:
        example: whose row moved first, without the changed one; None where none did.
        path: of the module that was running; None outside of the model.
        line: of the code; "" where it isn't known.
    """

    def __init__(self, model: nn.Module, examples: int, before: OperationLog | None = None, changed: int = 0) -> None:
        super().__init__()
        self._model, self._examples, self._before, self._changed = model, examples, before, changed
        self._running: list[str] = []
        self._sketches: list[tuple[Any, list[Tensor]]] = []
        self._follows = before is not None
        self.example: int | None = None
        self.path: str | None = None
        self.line = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Memory that nothing was written to holds anything.
        for leaf in () if "empty" in func.__name__ else tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                dims = [dim for dim, size in enumerate(leaf.shape) if size == self._examples]
                self._sketches.append((func, [numbers(leaf, dim).T for dim in dims]))
                if self._follows:
                    self._compare()
        return found

    def _compare(self) -> None:
        """Holds the last operation against the one before; stops where another was done, or one that mixes."""
        assert self._before is not None
        number, (func, sketches) = len(self._sketches) - 1, self._sketches[-1]
        earlier = self._before._sketches[number : number + 1]
        if not earlier or earlier[0][0] is not func or len(earlier[0][1]) != len(sketches):
            self._follows = False
            return
        moved = [first_moved(old, new, self._changed) for old, new in zip(earlier[0][1], sketches, strict=True)]
        if moved and None not in moved:
            self._follows, self.example, self.line = False, moved[0], current_line()
            self.path = self._running[-1] if self._running else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, operations are noted, and which module does them."""

        def enter(path: str) -> Callable[..., None]:
            return lambda module, inputs: self._running.append(path)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._running.pop()

        handles: list[Any] = []
        for path, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
