"""Whether one example's data moves another example's loss, tried on a batch in training, which is left as it was.

The graph shows where examples meet in what is differentiated. What is not differentiated (a loss weighted by the
batch's own statistics, a detached mean) shows only when data is exchanged.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from ghostclip.errors import VerificationError
from ghostclip.separation import mixed_examples

__all__ = ["Replay", "refuse_mixing"]

# Share of the largest loss by which another example's must move to be noticed: well above rounding.
MOVED = {torch.float64: 1e-9, torch.float32: 1e-5}
MOVED_OF_HALVES = 2e-2

LossFunction = Callable[[nn.Module, Any], Tensor]


class Replay:
    """Remembers random states and a model's buffers, so that a forward can be tried again without a trace.

    Args:
        model: in the state from which its forward will be repeated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._states = self._now()

    def _now(self) -> tuple[Any, ...]:
        cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()

    def _set(self, states: tuple[Any, ...]) -> None:
        cpu, cuda, numpy_state, python_state = states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)

    def drew(self) -> bool:
        """Whether torch has drawn random numbers since."""
        cpu, cuda, *_ = self._now()
        known = [self._states[0], *self._states[1]]
        return any(not torch.equal(now, before) for now, before in zip([cpu, *cuda], known, strict=True))

    @contextmanager
    def again(self, gradients: bool = False, training: bool = True) -> Iterator[None]:
        """With the random numbers that were to come then; afterwards all is as before, buffers too.

        Args:
            gradients: whether a graph is recorded.
            training: False for eval mode.
        """
        now = self._now()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        modes = [(module, module.training) for module in self.model.modules()]
        with ExitStack() as stack:
            stack.callback(self._set, now)
            stack.callback(_put_back, buffers, modes)
            stack.enter_context(torch.set_grad_enabled(gradients))
            self._set(self._states)
            if not training:
                self.model.eval()
            yield


@torch.no_grad()
def _put_back(buffers: list[tuple[Tensor, Tensor]], modes: list[tuple[nn.Module, bool]]) -> None:
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
    for module, training in modes:
        module.training = training


def refuse_mixing(loss_fn: LossFunction, batch: Any, losses: Tensor, replay: Replay) -> None:
    """Raises VerificationError when losses move with other examples' data; the first and last are exchanged.

    Args:
        loss_fn: (model, batch) -> losses [B].
        batch: whatever it takes; the data exchanged is in tensors with B rows (and B nowhere else), in any nesting.
        losses: of the batch, B of them, at least two.
        replay: from before they were computed.
    """
    drew = replay.drew()

    def losses_of(batch: Any, training: bool = True) -> Tensor:
        with replay.again(training=training):
            return loss_fn(replay.model, batch).detach()

    tolerance = _tolerance(losses, replay.model)
    other = _exchanged(batch, len(losses))
    if not _moved(losses.detach(), losses_of(other), tolerance):
        return
    # Not a fault yet: kernels differ without a graph, functions may not repeat themselves, and random numbers fall
    # elsewhere when lengths change; with random layers, what moves must move in eval mode, too.
    for training in (True, False) if drew else (True,):
        before = losses_of(batch, training)
        repeats = not _moved(before, losses_of(batch, training), 0.0)
        if not repeats or not _moved(before, losses_of(other, training), tolerance):
            return
    with replay.again(training=not drew):
        raise VerificationError(_message(mixed_examples(replay.model, loss_fn, batch)))


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


def _exchanged(batch: Any, examples: int) -> Any:
    """The batch with the first and the last example's data exchanged for their neighbours'; of two, the first's."""
    if isinstance(batch, MutableMapping) and not isinstance(batch, dict):
        changed = copy.copy(batch)
        changed.update({name: _exchanged(value, examples) for name, value in batch.items()})
        return changed

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or [*leaf.shape].count(examples) != 1:
            return leaf
        if leaf.shape[0] != examples or leaf.layout != torch.strided:
            return leaf
        leaf = leaf.detach().clone()
        leaf[0] = leaf[1]
        if examples > 2:
            leaf[-1] = leaf[-2]
        return leaf

    return tree_map(one, batch, is_leaf=lambda node: isinstance(node, PackedSequence))


def _moved(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Whether the losses of examples that kept their data differ, by more than that share of the largest."""
    if before.shape != after.shape:
        return True
    others = slice(1, 2 if len(before) == 2 else -1)
    scale = tolerance * float(before.nan_to_num(posinf=0, neginf=0).abs().max())
    return not bool(torch.isclose(before[others], after[others], rtol=0, atol=scale, equal_nan=True).all())
