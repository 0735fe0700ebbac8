"""Running a step's forward again on other examples, for `ghostclip.graph.overwritten`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ghostclip.clipper.cutting import cut
from ghostclip.clipper.replay import Replay, is_trial
from ghostclip.graph.overwritten import Forward, overwriting

__all__ = ["ModelCalls", "forward_of", "without_ranks"]

LossFunction = Callable[[nn.Module, Any], Tensor]


def without_ranks(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, whose forward waits for other ranks."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def forward_of(model: nn.Module, loss_fn: LossFunction, batch: Any, rows: int | None = None) -> Forward:
    """Runs ``loss_fn(model, batch)`` again.

    Args:
        model: as ``loss_fn`` takes it.
        loss_fn, batch: of the step.
        rows: of the batch's tensors; None: one for each loss.
    """

    def forward(part: int, examples: int) -> Sequence[Tensor]:
        count = examples if rows is None else rows
        other = cut(batch, count, overwriting(part, count))
        with Replay(model).again(gradients=True):
            return [loss_fn(without_ranks(model), other)]

    return forward


class ModelCalls:
    """Notes the calls of a model since its last backward, to run them again where no loss function is known.

    It is a hook of the model. A copy of the model, or one that was stored, has one without a clipper, which does
    nothing.

    Args:
        model: whose calls are noted.
    """

    # Who calls its model more often without a backward doesn't clip.
    MOST = 64

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._used = False
        if model is not None:
            model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._model is not None and torch.is_grad_enabled() and not is_trial() and not torch.compiler.is_compiling():
            if self._used:
                self._calls, self._used = [], False
            self._calls.append((args, kwargs))
            del self._calls[: -self.MOST]

    def __deepcopy__(self, memo: Any) -> ModelCalls:
        return ModelCalls(None)

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return ModelCalls, (None,)

    def used(self) -> None:
        """A backward went through their graphs: the next call is one of the next step."""
        self._used = True

    @property
    def forward(self) -> Forward | None:
        """Runs them again; None where there were none."""
        return self._run if self._calls else None

    def _run(self, part: int, examples: int) -> Sequence[Tensor]:
        model = self._model
        assert model is not None
        with Replay(model).again(gradients=True):
            found = []
            for args, kwargs in self._calls:
                rows = overwriting(part, examples)
                args = tuple([cut(each, examples, rows) for each in args])
                kwargs = {name: cut(each, examples, rows) for name, each in kwargs.items()}
                # What has no examples may have been computed from them.
                args, kwargs = tree_map(lambda leaf: _other(leaf, part, examples), (args, kwargs))
                found += [each for each in tree_leaves(model(*args, **kwargs)) if isinstance(each, Tensor)]
            return [each for each in found if each.requires_grad]


def _other(leaf: Any, part: int, examples: int) -> Any:
    """Another value of a tensor that has no examples, in the second of both forwards."""
    if not isinstance(leaf, Tensor) or not part or not leaf.is_floating_point() or leaf.is_nested:
        return leaf
    return leaf if leaf.dim() and len(leaf) == examples else leaf.detach() * 2 + 1
