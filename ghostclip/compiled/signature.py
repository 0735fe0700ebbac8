"""What a compiled graph holds for: shapes of the batch, modes of the modules, and which loss function."""

from __future__ import annotations

import dis
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ghostclip.clipper.forwards import CallHook
from ghostclip.clipping.choice import Clamped

__all__ = ["CompileRequest", "ModelState", "capacity_for", "function_key", "pad", "settings_of", "states_of"]

# Values that are told by their types and what they print as.
PLAIN = {bool, int, float, complex, str, bytes, type(None)}
# Containers of so many values, and so deep, are told by what is in them.
FEW, DEPTH = 32, 4
# Random generators of one's own, and what reads their states.
GENERATORS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (random.Random, random.Random.getstate),
    (np.random.Generator, lambda generator: generator.bit_generator.state),
    (np.random.RandomState, np.random.RandomState.get_state),
)
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
    return padded.resolve_conj().contiguous()


class ModelState:
    """Everything about a model that a graph has built in: modules, their attributes, modes and hooks, what is trained.

    Asked for at every step, so what is there is compared with the last step's by identity, and read only where it is
    something else. What a module keeps in a list or dict of more than 32 entries, or in an object of its own other than
    numbers that its forward reads, changed in place, isn't seen.

    Attributes:
        held: parameters and buffers.
        objects, kept: what the key was made of; while they are kept no id in it is used again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self.held: list[Tensor] = []
        self.objects: list[Any] = []
        self.kept = Kept()
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
            self.kept = Kept()
            self._key = (*[_described(module, self.kept) for module in self._modules], *self._settings)
        return self._key

    def now(self) -> tuple:
        """Another one as soon as a forward has changed something, be it in place."""
        return self.key(), [tensor._version for tensor in self.held]

    def _seen(self) -> tuple[list[Any], list[Any]]:
        """All objects that modules hold, and what a graph has built in besides."""
        objects, settings = list[Any](), list[Any]()
        for module in self._modules:
            own = vars(module)
            objects += (type(module), type(module).forward, *own.values())
            for name in CONTENTS:
                if inside := own.get(name):
                    objects += inside.values()
            read, named = _names_read_by_forward(module)
            settings += _plain(getattr(type(module).forward, "__globals__", {}), named)
            for name in read:
                inside = own.get(name)
                if type(inside) is dict and len(inside) <= FEW:
                    objects += inside.values()
                    settings.append((*inside,))
                elif type(inside) is list and len(inside) <= FEW:
                    objects += inside
                    settings.append(len(inside))
                elif name not in own and type(value := getattr(type(module), name, None)) in PLAIN:
                    settings.append(_part(value, self.kept, 0))
                elif type(inside) not in PLAIN:
                    settings += _numbers(inside, named)
        settings += (_has_global_hooks(), torch.are_deterministic_algorithms_enabled())
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


def _described(module: nn.Module, kept: Kept) -> tuple:
    """Plain attributes by their values, short containers that the forward reads by what is in them, others by ids."""
    own, read = vars(module), _names_read_by_forward(module)[0]
    parts = [(name, _part(value, kept, int(name in read))) for name, value in own.items()]
    inside = [(kind, name, id(value)) for kind in CONTENTS for name, value in own.get(kind, {}).items()]
    return (id(module), type(module), id(type(module).forward), *parts, *inside)


class Kept(list[Any]):
    """What a key was made of, so that no id in it is used again.

    Attributes:
        model: whose state has a key of its own; None where there is none.
        modules: ids of those that are in the key.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.modules = set[int]()


def function_key(function: Callable[..., Any], model: nn.Module | None = None) -> tuple[tuple, list[Any]]:
    """A key equal for functions that do the same, and what must be kept alive while it is in use.

    A lambda written in a loop is a new object each time round; its code and what it closes over tell it.

    Args:
        function: (model, batch) -> losses.
        model: that it gets. What the function reads of it by its methods is in the key; its modules are not.
    """
    kept = Kept(model)
    key = _called(function, kept, DEPTH)
    own, place = getattr(function, "__func__", function), int(isinstance(function, MethodType))
    if model is not None and isinstance(own, FunctionType):
        key = (*key, *_read_by(own, model, kept, DEPTH, place))
    return key, kept


def _called(function: Any, kept: Kept, depth: int) -> tuple:
    """What a callable does: by its code and all that is bound to it, or by its identity and its plain attributes."""
    if isinstance(function, functools.partial):
        bound = [function.func, function.args, function.keywords]
        return (functools.partial, *[_part(each, kept, depth) for each in bound])
    if isinstance(function, MethodType):
        owner = function.__self__
        whole = _module(owner, kept) if isinstance(owner, nn.Module) else ()
        return (_called(function.__func__, kept, depth), whole, *_read_by(function.__func__, owner, kept, depth))
    if isinstance(function, FunctionType):
        code, names = function.__code__, function.__globals__
        kept += (code, names)
        bound = [cell.cell_contents if cell != CellType() else cell for cell in function.__closure__ or ()]
        bound += [function.__defaults__, function.__kwdefaults__, vars(function)]
        bound += [names[name] for name in _reads(code)[1] if name in names and _is_own(names[name], names)]
        parts = [(_part(each, kept, depth), *_numbers(each, code.co_names)) for each in bound]
        return (id(code), id(names), *parts)
    if isinstance(function, nn.Module):
        return _module(function, kept)
    own = getattr(function, "__dict__", {}).items() if depth == DEPTH and not isinstance(function, type) else ()
    plain = [(name, _part(value, kept, 0)) for name, value in own if type(value) in PLAIN]
    return (*plain, *_read_by(type(function).__call__, function, kept, depth))


def _is_own(value: Any, names: dict[str, Any]) -> bool:
    """Whether a global value is no module, class or function from elsewhere, which don't change as a rule."""
    return not isinstance(value, type | ModuleType) and getattr(value, "__globals__", names) is names


def _module(module: nn.Module, kept: Kept) -> tuple:
    """All modules in a module: classes, tensors and hooks, and what their forwards read besides."""
    kept.append(module)
    if module is kept.model or id(module) in kept.modules:
        return (id(module),)
    kept.modules.add(id(module))
    parts: list[Any] = []
    for each in module.modules():
        held = [value for kind in CONTENTS for value in (vars(each).get(kind) or {}).values()]
        kept += (*held, type(each).forward)
        parts += (type(each), id(type(each).forward), *map(id, held), *_read_by(type(each).forward, each, kept, DEPTH))
    return tuple(parts)


def _read_by(method: Any, owner: Any, kept: Kept, depth: int, place: int = 0) -> list[Any]:
    """An object by its identity, and by those of its attributes that the code of one of its methods reads.

    Others, as a counter of steps, may change without another graph. Of a module's modules `_module` knows all.

    Args:
        method, owner: the method and its object.
        kept, depth: see `_part`.
        place: of the object among the method's arguments.
    """
    kept.append(owner)
    parts: list[Any] = [id(owner)]
    kind: Any = owner if isinstance(owner, type) else type(owner)
    own = {} if isinstance(owner, type) else dict(getattr(owner, "__dict__", {}))
    for inside in ("_parameters", "_buffers", "_modules") if isinstance(owner, nn.Module) else ():
        own |= own[inside]
    read, named = _names_read(getattr(method, "__code__", None), kind, place)
    for name in read:
        value = own[name] if name in own else _of_class(owner, kind, name)
        if name in own or type(value) in PLAIN:
            inner = 0 if isinstance(owner, nn.Module) and isinstance(value, nn.Module) else max(depth - 1, 0)
            parts.append((name, _part(value, kept, inner), *_numbers(value, named)))
    return parts


def _numbers(value: Any, names: Iterable[str]) -> list[Any]:
    """Plain attributes of an object of some other class that code reads of anything, as ``args.beta``."""
    own = None if isinstance(value, type | nn.Module) else getattr(value, "__dict__", None)
    return _plain(own, names) if type(own) is dict else []


def _plain(own: dict[str, Any], names: Iterable[str]) -> list[Any]:
    return [(name, _part(own[name], Kept(), 0)) for name in names if name in own and type(own[name]) in PLAIN]


def _of_class(owner: Any, kind: Any, name: str) -> Any:
    """An attribute that an object has by its class; a property's value, as Lightning's ``self.current_epoch``."""
    value = getattr(kind, name, None)
    if not isinstance(value, property) or isinstance(owner, type):
        return value
    try:
        return getattr(owner, name)
    except Exception:  # of any kind: it isn't there yet
        return None


def _names_read_by_forward(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    kind: Any = type(module)
    return _names_read(getattr(kind.forward, "__code__", None), kind)


@functools.lru_cache(maxsize=1024)
def _names_read(code: CodeType | None, kind: Any, place: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a method of a class, and methods that it calls, read of its object; and all names in their code.

    Args:
        code: the method's, which functions that are made anew share; None where it has none.
        kind: the class.
        place: of the object among the method's arguments.
    """
    found, left, seen = list[str](), [code], list[Any]()
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        names = _reads(one, 0 if seen else place)[0]
        seen.append(one)
        found += names
        left += [_code(vars(base)[name]) for name in names for base in kind.__mro__ if name in vars(base)]
    return tuple(dict.fromkeys(found)), tuple({name for one in seen for name in one.co_names})


def _code(value: Any) -> CodeType | None:
    """The code of a property or of a method of the class; None of any other value."""
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return function.__code__ if isinstance(function, FunctionType) else None


@functools.lru_cache(maxsize=4096)
def _reads(code: CodeType, place: int = 0) -> tuple[list[str], list[str]]:
    """Names of attributes that code reads of an argument, and of globals, also in lambdas and generators.

    Where there is ``super()``, names of attributes are all that the code reads of anything.
    """
    attributes, names, before = list[str](), list[str](), None
    own = code.co_varnames[place] if code.co_argcount > place else None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            names.append(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and own is not None and before == own:
            attributes.append(step.argval)
        before = step.argval if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
        before = before[-1] if isinstance(before, tuple) else before  # of two loads in one
    attributes += code.co_names if "super" in names else ()
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


def _part(value: Any, kept: Kept, depth: int) -> Any:
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


def settings_of(policy: Any) -> tuple[tuple, list[Any]]:
    """The numbers of a clipping policy, which a graph has built in, and what must be kept alive for them."""
    kept = Kept()
    policies = [policy, policy.policy] if isinstance(policy, Clamped) else [policy]
    own = [(type(each), *getattr(each, "__dict__", {}).items()) for each in policies]
    return tuple(_part(each, kept, DEPTH) for each in itertools.chain(*own)), kept


def states_of(objects: Iterable[Any]) -> list[str]:
    """The states of random generators among some objects, of NumPy or Python."""
    return [repr(read(each)) for each in objects for kind, read in GENERATORS if isinstance(each, kind)]
