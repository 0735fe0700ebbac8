"""Whether two forwards of one module compute the same: outputs bit for bit, gradients up to rounding, nothing besides.

Both run on copies of the same inputs and draw the same random numbers of torch. The module is as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["Comparison", "compare", "run_apart"]

Forward = Callable[..., Any]


@dataclass(frozen=True)
class ForwardRun:
    """What one forward did.

    Attributes:
        outputs, structure: what it returned, flattened.
        gradients: of its inputs and the module's trained parameters, zeros where there is none.
        effects: names of what it changed: attributes, parameters, buffers, "its input".
    """

    outputs: list[Any]
    structure: Any
    gradients: list[Tensor]
    effects: list[str]


@dataclass(frozen=True)
class Comparison:
    """How two forwards compare.

    Attributes:
        difference: what differs, in words without any value; None when nothing does.
        conclusive: whether there was anything to compare: an empty output, or one that isn't finite, shows nothing.
    """

    difference: str | None
    conclusive: bool


class _State:
    """A module's attributes, parameters and buffers (its submodules' too) as they are, to be put back."""

    def __init__(self, module: torch.nn.Module) -> None:
        own = [vars(each) for each in module.modules()]
        values = [(name, value) for place in own for name, value in place.items()]
        # Attributes by name, and those that are containers: parameters and buffers among them, and the user's own.
        self._places = [(place, dict(place)) for place in own]
        self._inner = [(name, value, dict(value)) for name, value in values if isinstance(value, dict)]
        self._lists = [(name, value, list(value)) for name, value in values if isinstance(value, list)]
        self._sets = [(name, value, set(value)) for name, value in values if isinstance(value, set)]
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # (name, tensor, an alias of its memory, its values)
        self._tensors = [(name, each, each.detach(), each.detach().clone()) for name, each in held.items()]

    def changes(self) -> list[str]:
        """The names of what is no longer as it was."""
        names = [name for now, before in self._places for name in _unlike(now, before)]
        for holder, now, before in self._inner:
            found = _unlike(now, before)
            names += found if holder in ("_parameters", "_buffers") else [holder] * bool(found)
        names += [name for name, now, before in self._lists if list(map(id, now)) != list(map(id, before))]
        names += [name for name, now, before in self._sets if set(map(id, now)) != set(map(id, before))]
        return names + [name for name, *parts in self._tensors if not _is_as_before(*parts)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undoes all changes: at no moment is something missing that was there."""
        for now, before in (*self._places, *((now, before) for _, now, before in self._inner)):
            if _unlike(now, before):
                now.update(before)
                for name in now.keys() - before.keys():
                    del now[name]
        for _, items, before_items in self._lists:
            items[:] = before_items
        for _, members, before_members in self._sets:
            members |= before_members
            members &= before_members
        for _, tensor, alias, values in self._tensors:
            if not _is_as_before(tensor, alias, values):
                tensor.data = alias.copy_(values)


def _unlike(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """The names under which there is another object now, or none where there was one, or one where there was none."""
    if len(now) == len(before) and all(now.get(name) is value for name, value in before.items()):
        return []
    return [
        name for name in {**before, **now} if name not in now or name not in before or now[name] is not before[name]
    ]


def _is_as_before(tensor: Tensor, alias: Tensor, values: Tensor) -> bool:
    return tensor.data_ptr() == alias.data_ptr() and _same(tensor, values)


def run_apart(module: torch.nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardRun:
    """Runs a forward of ``module`` on copies of its inputs, and goes back through it, without leaving a trace."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Forwards may change a copy in place, which they may not a leaf; and no hook of the user's model runs.
    sources = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
    copies = [each.clone() for each in sources]
    given = iter(copies)
    inputs, options = tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], structure)
    before = _State(module)
    devices = {each.device for each in (*tensors, *module.parameters()) if each.device.type == "cuda"}
    try:
        # Under activation checkpointing what is saved here must not be counted.
        with saved_tensors_hooks(lambda x: x, lambda x: x), torch.random.fork_rng(sorted(devices, key=str)):
            output = tree_map(_opened, forward(*inputs, **options))
            outputs, shape = tree_flatten(output)
            wanted = [each for each in (*sources, *module.parameters()) if each.requires_grad]
            gradients = _gradients(outputs, [each for each in wanted if not each._backward_hooks])
        effects = before.changes()
        if not all(_same(copy, source) for copy, source in zip(copies, sources, strict=True)):
            effects.append("its input")
    finally:
        before.put_back()
    values = [each.detach() if isinstance(each, Tensor) else each for each in outputs]
    return ForwardRun(values, shape, gradients, effects)


def compare(own: ForwardRun, other: ForwardRun) -> Comparison:
    """How ``own`` compares with ``other``, which is what it should be."""
    numbers = [leaf for leaf in other.outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    there = any(bool(each.isfinite().any()) for each in numbers)
    finite = all(bool(each.isfinite().all()) for each in other.gradients)
    return Comparison(_difference(own, other, numbers, finite), there and finite)


def _difference(own: ForwardRun, other: ForwardRun, numbers: list[Tensor], finite: bool) -> str | None:
    if own.effects:
        return f"it changes {', '.join(own.effects)}"
    if own.structure != other.structure:
        return "what it returns is nested differently"
    for mine, theirs in zip(own.outputs, other.outputs, strict=True):
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            if (mine.shape, mine.dtype, mine.device) != (theirs.shape, theirs.dtype, theirs.device):
                return f"its output is {_kind(mine)}, not {_kind(theirs)}"
            if not _same(mine, theirs):
                return "its output has other values"
        elif type(mine) is not type(theirs) or mine != theirs:
            return f"it returns {type(mine).__name__} in place of {type(theirs).__name__}"
    eps = max((torch.finfo(each.dtype).eps for each in (*numbers, *other.gradients)), default=0.0)
    pairs = zip(own.gradients, other.gradients, strict=True)
    if finite and not all(_close(mine, theirs, eps**0.5) for mine, theirs in pairs):
        return "its output is the same, but not its gradient"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in every entry; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether the norm of the difference is at most ``tolerance`` of the norm of ``other``, which is finite."""
    return bool((one.double() - other.double()).norm() <= tolerance * other.double().norm())


def _gradients(outputs: list[Any], wanted: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all outputs, one for each of ``wanted``."""
    found = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found or not wanted:
        return [torch.zeros_like(each) for each in wanted]
    weights = [torch.arange(each.numel(), device=each.device).cos().view(each.shape).to(each.dtype) for each in found]
    # A parametrized weight's graph is that of both forwards.
    grads = torch.autograd.grad(found, wanted, weights, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(each) if g is None else g.to_dense() for each, g in zip(wanted, grads, strict=True)]


def _opened(value: Any) -> Any:
    """A packed sequence as the tuple of tensors it is."""
    return tuple(value) if isinstance(value, PackedSequence) else value


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
