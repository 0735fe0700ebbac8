"""What a compiled graph holds for: shapes of the batch, modes of the modules, and which loss function."""

from __future__ import annotations

import dis
import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ghostclip.clipper.forwards import CallHook

__all__ = ["CompileRequest", "ModelState", "capacity_for", "function_key", "pad", "settings_of"]

# Values that are told by their types and what they print as.
PLAIN = {bool, int, float, complex, str, bytes, type(None)}
# Containers of so many values, and so deep, are told by what is in them.
FEW, DEPTH = 32, 4
# What a module calls besides its forward, and what else it has in dictionaries.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTENTS = ("_parameters", "_buffers", "_modules", *HOOKS)
# Poisson samples vary in size. Graphs are made for sizes that lie this share of the expected one apart, so that a tenth
# of it is padding in the mean.
SPACING = 0.19


@dataclass(frozen=True)
class CompileRequest:
    """One batch and what is to be done with it.

    Attributes:
        key: of the graph that can do it.
        leaves: the batch's tensors, padded.
        structure: how they are nested.
        examples: how many of the rows are examples.
        kept: what the loss function's part of the key was made of, so that no id in it is used again.
    """

    key: tuple
    leaves: list[Tensor]
    structure: Any
    examples: int
    kept: list[Any]


def capacity_for(examples: int, expected: int | None, largest: int | None = None) -> int:
    """How many rows a batch of ``examples`` is padded to: few different numbers, so that few graphs are needed.

    Where 128 are expected, these are 162, which one sample in a thousand exceeds, 138, 114 and so on.

    Args:
        examples: of this batch.
        expected: about how many come as a rule; None when all batches have one size.
        largest: the most that ever come.
    """
    if expected is None:
        return examples
    usual = expected if largest is None else min(expected, largest)
    # Of the binomial number of examples in a Poisson sample, one in a thousand lies above three standard deviations.
    top = math.ceil(expected + 3.0 * math.sqrt(expected))
    top = top if largest is None else min(top, max(largest, examples))
    step = max(1, round(SPACING * usual))
    return top - (top - examples) // step * step


def pad(leaf: Tensor, size: int) -> Tensor:
    """``leaf`` [n, ...] with its first row repeated to [size, ...]; rows of zeros might not be valid inputs.

    It is contiguous: a graph reads its inputs as the ones that it was made with lay in memory.
    """
    missing = size - leaf.shape[0]
    padded = leaf if missing == 0 else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])
    return padded.contiguous()


class ModelState:
    """Everything about a model that a graph has built in: modules, their attributes, modes and hooks, what is trained.

    Asked for at every step, so what is there is compared with the last step's by identity, and read only where it is
    something else. What a module keeps in a list or dict of more than 32 entries, or in another object of its own,
    changed in place, isn't seen.

    Attributes:
        held: parameters and buffers.
        objects, kept: what the key was made of; while they are kept no id in it is used again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self.held: list[Tensor] = []
        self.objects: list[Any] = []
        self.kept: list[Any] = []
        self._settings: list[Any] = []
        self._key: tuple = ()
        self.key()

    def key(self) -> tuple:
        """Equal as long as a graph holds."""
        objects, settings = self._seen()
        same = len(objects) == len(self.objects) and all(map(operator.is_, objects, self.objects))
        if not same or settings != self._settings:
            self._modules = list(self._model.modules())
            self.held = [*self._model.parameters(), *self._model.buffers()]
            self.objects, self._settings = self._seen()
            self.kept = []
            self._key = (*[_described(module, self.kept) for module in self._modules], *self._settings)
        return self._key

    def now(self) -> tuple:
        """Another one as soon as a forward has changed something, be it in place."""
        return self.key(), [tensor._version for tensor in self.held]

    def _seen(self) -> tuple[list[Any], list[Any]]:
        """All objects that modules hold, and what a graph has built in besides."""
        objects: list[Any] = []
        for module in self._modules:
            own = vars(module)
            objects += own.values()
            for name in CONTENTS:
                if inside := own.get(name):
                    objects += inside.values()
            for name in _names_read_by_forward(module):
                inside = own.get(name)
                if type(inside) is dict and len(inside) <= FEW:
                    objects += inside.values()
                elif type(inside) is list and len(inside) <= FEW:
                    objects += inside
        settings: list[Any] = [_has_global_hooks(), torch.are_deterministic_algorithms_enabled()]
        for kind in ("cpu", "cuda"):
            settings += (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for tensor in self.held:
            settings += (tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape, tensor.stride())
            settings += (not tensor._backward_hooks, not tensor._post_accumulate_grad_hooks)
        return objects, settings

    def hooked(self) -> str | None:
        """The name of a module with hooks, which want to be called at each step; None where there is none."""
        for name, module in self._model.named_modules():
            hooks = [hook for kind in HOOKS for hook in (vars(module).get(kind) or {}).values()]
            if not all(isinstance(hook, CallHook) or _collects(hook) for hook in hooks) or _has_global_hooks():
                return name or "the model"
        return None


def _collects(hook: Any) -> bool:
    """Whether a hook is one of transformers', by which a forward that is asked for hidden states collects them."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _has_global_hooks() -> bool:
    """Whether hooks are called for every module of the process."""
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return any(getattr(torch_module, f"_global_{name}") for name in names)


def _described(module: nn.Module, kept: list[Any]) -> tuple:
    """Plain attributes by their values, short containers that the forward reads by what is in them, others by ids."""
    own, read = vars(module), _names_read_by_forward(module)
    parts = [(name, _part(value, kept, int(name in read))) for name, value in own.items()]
    inside = [(kind, name, id(value)) for kind in CONTENTS for name, value in own.get(kind, {}).items()]
    return (id(module), type(module), *parts, *inside)


def function_key(function: Callable[..., Any]) -> tuple[tuple, list[Any]]:
    """A key equal for functions that do the same, and what must be kept alive while it is in use.

    A lambda written in a loop is a new object each time round; its code and what it closes over tell it.
    """
    kept: list[Any] = []
    return _called(function, kept, DEPTH), kept


def _called(function: Any, kept: list[Any], depth: int) -> tuple:
    """What a callable does: by its code and all that is bound to it, or by its identity and its plain attributes."""
    if isinstance(function, functools.partial):
        bound = [function.func, function.args, function.keywords]
        return (functools.partial, *[_part(each, kept, depth) for each in bound])
    if isinstance(function, MethodType):
        return (_called(function.__func__, kept, depth), *_read_by(function.__func__, function.__self__, kept, depth))
    if isinstance(function, FunctionType):
        code, names = function.__code__, function.__globals__
        kept += (code, names)
        bound = [cell.cell_contents if cell != CellType() else cell for cell in function.__closure__ or ()]
        bound += [function.__defaults__, function.__kwdefaults__, vars(function)]
        bound += [names[name] for name in _reads(code)[1] if name in names and type(names[name]) in PLAIN]
        return (id(code), id(names), *[_part(each, kept, depth) for each in bound])
    own = getattr(function, "__dict__", {}).items() if depth == DEPTH and not isinstance(function, type) else ()
    plain = [(name, _part(value, kept, 0)) for name, value in own if type(value) in PLAIN]
    return (*plain, *_read_by(_method_of(type(function)), function, kept, depth))


def _method_of(kind: type) -> Any:
    """The method that runs where an object of this class is called."""
    return getattr(kind, "forward" if issubclass(kind, nn.Module) else "__call__", None)


def _read_by(method: Any, owner: Any, kept: list[Any], depth: int) -> list[Any]:
    """An object by its identity, and by those of its attributes that the code of one of its methods reads.

    Others, as a counter of steps, may change without another graph.
    """
    kept.append(owner)
    parts: list[Any] = [id(owner)]
    own = {} if isinstance(owner, type) else dict(getattr(owner, "__dict__", {}))
    for inside in ("_parameters", "_buffers", "_modules") if isinstance(owner, nn.Module) else ():
        own |= own[inside]
    kind: Any = type(owner)
    for name in _names_read(method, kind):
        value = own.get(name, getattr(kind, name, None))
        if name in own or type(value) in PLAIN:
            # Of a module no more than what its own forward reads: deep ones would take long at every step.
            inner = max(depth - 1, 0) if not isinstance(value, nn.Module) else min(depth, 1)
            parts.append((name, _part(value, kept, inner)))
    return parts


def _names_read_by_forward(module: nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    return _names_read(kind.forward, kind)


@functools.lru_cache(maxsize=1024)
def _names_read(method: Any, kind: Any) -> tuple[str, ...]:
    """The attributes of an object of a class that a method of it, and methods that it calls, read of it."""
    found, left, seen = list[str](), [method], list[Any]()
    while left:
        one = left.pop()
        if not isinstance(one, FunctionType) or one in seen:
            continue
        seen.append(one)
        found += _reads(one.__code__)[0]
        left += [getattr(kind, name, None) for name in _reads(one.__code__)[0]]
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=4096)
def _reads(code: CodeType) -> tuple[list[str], list[str]]:
    """Names of attributes that code reads of its first argument, and of globals, also in lambdas and generators."""
    attributes, names, before = list[str](), list[str](), None
    own = code.co_varnames[0] if code.co_argcount else None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            names.append(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and own is not None and before == own:
            attributes.append(step.argval)
        before = step.argval if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
        before = before[-1] if isinstance(before, tuple) else before  # of two loads in one
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _reads(inner)[1]
            attributes += _read_of(inner, own) if own is not None and own in inner.co_freevars else ()
    return attributes, names


def _read_of(code: CodeType, name: str) -> list[str]:
    """Names of attributes that code reads of a variable from around it."""
    steps = list(dis.get_instructions(code))
    pairs = itertools.pairwise(steps)
    return [
        after.argval for step, after in pairs
        if step.opname == "LOAD_DEREF" and step.argval == name and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
    ]  # fmt: skip


def _part(value: Any, kept: list[Any], depth: int) -> Any:
    """A plain value with its type (True isn't 1, nor 0.0 what -0.0 is), what a container holds, or an object's id."""
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value)
    if depth and kind in (tuple, list) and len(value) <= FEW:
        return (kind, *(_part(each, kept, depth - 1) for each in value))
    if depth and kind is dict and len(value) <= FEW:
        return (kind, *((_part(key, kept, 0), _part(each, kept, depth - 1)) for key, each in value.items()))
    if depth and callable(value):
        return _called(value, kept, depth - 1)
    kept.append(value)
    return id(value)


def settings_of(policy: Any, kept: list[Any]) -> tuple:
    """The numbers of a clipping policy, which a graph has built in; objects among them are added to ``kept``."""
    return (type(policy), *[_part(each, kept, DEPTH) for each in getattr(policy, "__dict__", {}).items()])
