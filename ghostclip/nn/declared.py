"""Classes of which their author says that they compute what a torch class computes (`same_as`).

The first forward of each module runs its class's forward and torch's on copies and compares what they do. From then on
torch's runs, with the torch class's rule. So clipping is exact whatever the claim is worth.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten, tree_leaves, tree_leaves_with_path, tree_map, tree_map_only

from ghostclip.errors import UnsupportedModelError, is_out_of_memory
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.term import PerExampleGrads

from .base import LAYERS, GhostLayer, LayerCall, place_of

__all__ = ["DECLARED", "Declared", "same_as"]

REMEDY = "remove ghostclip.same_as({0}, ...): without it {0} is followed through the graph, as exact"
# The declared class -> its wrapper. Filled by `same_as`, for the process.
DECLARED: dict[type, type[Declared]] = {}
# Under which conditions a module was verified. Copies of a module are verified anew.
_verified: WeakKeyDictionary[torch.nn.Module, set[tuple]] = WeakKeyDictionary()


def same_as(kind: type[torch.nn.Module], torch_class: type[torch.nn.Module]) -> None:
    """Declares that modules of class ``kind`` compute what those of ``torch_class`` compute, in this process.

    `ghostclip.wrap` then gives them the rule of ``torch_class``. Without a declaration their parameters are followed
    through the autograd graph, which is exact as well, but slower. Subclasses of ``kind`` need declarations of their
    own. Call it before the model is wrapped, and before a wrapped model is unpickled.

    The first forward of each module runs both forwards on the same inputs with the same random numbers. It compares
    outputs bit for bit and gradients up to rounding, and tests that no state changes. This is repeated in a new mode
    (train or eval, gradients on or off, autocast) and for new types, devices, numbers of dimensions and arguments.
    Otherwise only the forward of ``torch_class`` runs, whatever ``kind.forward`` would do later.

    Args:
        kind: a subclass of ``torch_class``, or a module class with the same parameters and attributes and no others.
        torch_class: a class of torch.nn that has a rule of its own, such as Linear, Conv2d, LayerNorm or Embedding.

    Raises:
        TypeError: an argument is not a class of modules.
        ValueError: ``torch_class`` has no rule, or is built of layers that have; ``kind`` is torch's own, has a rule,
            or was declared to be the same as another class.

    `ghostclip.wrap` raises UnsupportedModelError for a declared module with other parameters than ``torch_class`` has,
    and the first forward does where the two differ.
    """
    for name, given in (("kind", kind), ("torch_class", torch_class)):
        if not (isinstance(given, type) and issubclass(given, torch.nn.Module)):
            raise TypeError(
                f"{name} must be a class of modules, as in same_as(MyLinear, torch.nn.Linear); got {given!r}"
            )
    rule = LAYERS.get(getattr(torch_class, "wrapped", torch_class))
    if rule is None or rule.has_parts or (issubclass(torch_class, GhostLayer) and torch_class is not rule):
        names = ", ".join(sorted(each.__name__ for each, rule in LAYERS.items() if not rule.has_parts))
        parts = rule is not None and rule.has_parts
        problem = "is built of layers that have rules, which wrap gives them" if parts else "has no rule"
        raise ValueError(f"torch_class must be one of {names}; {torch_class.__name__} {problem}")
    if kind.__module__.partition(".")[0] == "torch":
        raise ValueError(f"kind must be a class of your own; {kind.__name__} is torch's, which wrap knows")
    if issubclass(kind, GhostLayer) or kind in LAYERS:
        raise ValueError(f"kind must be a class without a rule; {kind.__name__} has one already")
    if taken := sorted(_OF_WRAPPERS.intersection(dir(kind)) - set(dir(rule.wrapped))):
        raise ValueError(f"{kind.__name__} has {', '.join(taken)}, which its wrapper needs for itself; rename it there")
    known = DECLARED.get(kind)
    if known is None:
        DECLARED[kind] = _wrapper(kind, rule)
    elif known.target is not rule.wrapped:
        raise ValueError(f"{kind.__name__} was declared to be the same as {known.target.__name__}; it can't be two")


class _StandIn(GhostLayer):
    """The declared module as a module of the torch class: the same ``__dict__``, and no method of its own class."""

    __slots__ = ("declared_module",)

    declared_module: Declared

    def new_call(self, *args: Any, **kwargs: Any) -> LayerCall | None:
        """As ever, by the module that the model holds."""
        call = super().new_call(*args, **kwargs)
        if call is not None:
            call.layer = self.declared_module
        return call


class Declared(GhostLayer):
    """What the wrappers of declared classes share; each is also a subclass of the class it wraps."""

    checked_when_frozen = True
    target: ClassVar[type[torch.nn.Module]]
    stand_in: ClassVar[type[GhostLayer]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the torch class's; raises UnsupportedModelError where the declared class does something else."""
        if "stand_in" not in vars(type(self)):
            raise self._refusal("its class was changed after it was wrapped, as a parametrization does")
        layer: Any = _seen_as(self, self.stand_in)
        conditions = self._conditions(args, kwargs)
        if conditions not in _verified.get(self, ()):
            if torch._C._are_functorch_transforms_active():  # no value can be compared, and nothing is captured
                return self.wrapped.forward(_seen_as(self, self.wrapped), *args, **kwargs)
            self._verify(args, kwargs, conditions)
        object.__setattr__(layer, "declared_module", self)  # torch's own would make it a part of the module
        return self.stand_in.forward(layer, *args, **kwargs)

    def per_example(
        self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor
    ) -> PerExampleGrads | Tensor:
        return _seen_as(self, self.stand_in).per_example(name, call, inputs, grad)

    def linear_pair(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> LinearPair | None:
        return _seen_as(self, self.stand_in).linear_pair(call, inputs, grad)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        if (misfit := cls._misfit(module)) is None:
            return cls.stand_in.obstacles(module)
        return [
            (
                f"it is declared to be the same as {cls.target.__name__}, but {misfit}",
                REMEDY.format(cls.wrapped.__name__),
            )
        ]

    @classmethod
    def _misfit(cls, module: torch.nn.Module) -> str | None:
        """What keeps the target's forward and rule from working on the module's ``__dict__``."""
        seen, target = _seen_as(module, cls.stand_in), cls.target
        if missing := [name for name in getattr(target, "__constants__", ()) if not hasattr(seen, name)]:
            return f"has no attribute {', '.join(missing)}"
        names, own = cls.stand_in.parameter_names(seen), vars(module)
        if missing := [name for name in names if not hasattr(seen, name)]:
            return f"lacks the parameter {', '.join(missing)}"
        if others := [name for name, _ in module.named_parameters() if name not in names]:
            return f"has another parameter {', '.join(others)}"
        taken = _OF_WRAPPERS | {name for name in own if callable(getattr(target, name, None))}
        hiding = [name for name in own if name in module._parameters or name in taken]
        return f"has an attribute in the place of {', '.join(hiding)}" if hiding else None

    def _conditions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
        """What a verification holds for."""
        values = (*args, *kwargs.values(), *self._parameters.values())
        kinds = [(t.dtype, t.device, t.dim(), t.requires_grad) for t in values if isinstance(t, Tensor)]
        autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        return (self.wrapped.forward, self.training, torch.is_grad_enabled(), *autocast, len(args), *kwargs, *kinds)

    def _verify(self, args: tuple[Any, ...], kwargs: dict[str, Any], conditions: tuple) -> None:
        """Notes that both forwards do the same on these inputs; raises UnsupportedModelError if they don't."""
        own = _trial(self, self.wrapped, args, kwargs)
        try:
            theirs = _trial(self, self.target, args, kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise self._refusal(f"{self.target.__name__} can't be called so ({error})") from error
        if (difference := _difference(own, theirs)) is not None:
            raise self._refusal(difference)
        # An output that is empty or nowhere finite shows nothing, and neither does a gradient that isn't finite.
        if any(each.isfinite().any() for each in theirs.outputs) and _are_finite(theirs.gradients):
            _verified.setdefault(self, set()).add(conditions)

    def _refusal(self, problem: str) -> UnsupportedModelError:
        claim = f"{place_of(self)} is declared to compute what {self.target.__name__} computes"
        return UnsupportedModelError(f"{claim}, but {problem}; {REMEDY.format(self.wrapped.__name__)}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By its own class, which is found by name."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_restored, (self.wrapped, self.target), *reduced[2:])


# What a wrapper has and other modules don't.
_OF_WRAPPERS = frozenset(name for name in dir(Declared) if name not in dir(torch.nn.Module) and name[:6] != "ghost_")


def _wrapper(kind: type[torch.nn.Module], rule: type[GhostLayer]) -> type[Declared]:
    """The wrapper of a declared class; ``rule`` is that of the class it is the same as."""
    content = {"wrapped": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: Any = type(kind.__name__, (_StandIn, rule), {**content, "__slots__": ()})
    content |= {"target": rule.wrapped, "stand_in": stand_in, "rule": f"{rule.rule} (declared)"}
    content |= {"parameter_names": stand_in.parameter_names, "reads_indices": rule.reads_indices}
    content |= {"__doc__": kind.__doc__}
    return type(kind.__name__, (Declared, kind), content)


def _restored(kind: type[torch.nn.Module], target: type[torch.nn.Module]) -> Declared:
    """An empty module for `copy` and `pickle`; raises UnsupportedModelError where the class isn't declared."""
    wrapper = DECLARED.get(kind)
    if wrapper is None or wrapper.target is not target:
        raise UnsupportedModelError(
            f"a wrapped {kind.__name__} is loaded, which was declared to be the same as {target.__name__}; call "
            f"ghostclip.same_as({kind.__name__}, {target.__name__}) before, or unwrap the model before it is saved"
        )
    return object.__new__(wrapper)


def _seen_as(module: torch.nn.Module, kind: type[torch.nn.Module]) -> Any:
    """The module as an object of another class: all it has, and that class's methods only."""
    found = object.__new__(kind)
    object.__setattr__(found, "__dict__", vars(module))
    return found


class _Trial(NamedTuple):
    """What one forward did: the tensors it returned, what else it returned, gradients, names of what it changed."""

    outputs: list[Tensor]
    structure: Any
    gradients: list[Tensor]
    effects: list[str]


def _trial(
    module: torch.nn.Module, kind: type[torch.nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Trial:
    """Runs the forward of ``kind`` and a backward on copies of the module and its inputs, and no hook of either."""
    copies: dict[int, Any] = {}
    twin = _twin(module, kind, copies)
    leaves = tree_map(lambda leaf: _copied(leaf, copies), (args, kwargs))
    inputs = tree_map_only(Tensor, torch.clone, leaves)  # which a forward may change in place, as no leaf
    tensors = [each for each in copies.values() if isinstance(each, Tensor)]
    devices = {each.device for each in tensors if each.device.type == "cuda"}
    # Under activation checkpointing what is saved here must not be counted.
    with saved_tensors_hooks(lambda x: x, lambda x: x), torch.random.fork_rng(sorted(devices, key=str)):
        returned = tree_map_only(PackedSequence, tuple, kind.forward(twin, *inputs[0], **inputs[1]))
        found, structure = tree_flatten(returned)
        outputs = [each for each in found if isinstance(each, Tensor)]
        gradients = _gradients(outputs, [each for each in tensors if each.requires_grad])
    effects = [*_changes(module, twin, copies)]
    pairs = zip(tree_leaves(leaves), tree_leaves(inputs), strict=True)
    effects += ["its input"] * any(isinstance(before, Tensor) and not _same(before, now) for before, now in pairs)
    others = [None if isinstance(each, Tensor) else each for each in found]
    return _Trial([each.detach() for each in outputs], (structure, others), gradients, effects)


def _twin(module: torch.nn.Module, kind: type[torch.nn.Module], copies: dict[int, Any]) -> torch.nn.Module:
    """The module as one of ``kind``, with tensors, containers and submodules of its own; ``copies``: {id: copy}."""
    for child in module.children():
        copies[id(child)] = _twin(child, type(child), copies)
    twin = object.__new__(kind)
    vars(twin).update(tree_map(lambda leaf: _copied(leaf, copies), vars(module)))
    return twin


def _copied(leaf: Any, copies: dict[int, Any]) -> Any:
    """The copy of a tensor, or of a container of a type that `tree_map` doesn't look into; anything else as it is."""
    if id(leaf) not in copies:
        if isinstance(leaf, torch.nn.Parameter):
            copies[id(leaf)] = copy.deepcopy(leaf)
        elif isinstance(leaf, Tensor):
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, dict | list | set):
            copies[id(leaf)] = copy.copy(leaf)
    return copies.get(id(leaf), leaf)


def _changes(module: torch.nn.Module, twin: torch.nn.Module, copies: dict[int, Any]) -> Iterator[str]:
    """The names of what a forward replaced or changed in ``twin``."""
    before, now = _state(module), _state(twin)
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        same = copies.get(id(old), old) is new
        if same and isinstance(old, Tensor):
            same = _same(old, new)
        if not same or (isinstance(old, dict | list | set) and old != new):
            yield name


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """{name: value} of all attributes, parameters and buffers, of submodules too, and of what their containers hold."""
    found = {}
    for path, part in module.named_modules():
        for keys, leaf in tree_leaves_with_path(vars(part)):
            words = re.findall(r"\w+", path + keystr(keys))
            found[".".join(word for word in words if word not in ("_parameters", "_buffers", "_modules"))] = leaf
    return found


def _gradients(outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all outputs, one for each of ``wanted``."""
    found = [each for each in outputs if each.requires_grad]
    if not found or not wanted:
        return [torch.zeros_like(each) for each in wanted]
    weights = [torch.arange(each.numel(), device=each.device).cos().view(each.shape).to(each.dtype) for each in found]
    grads = torch.autograd.grad(found, wanted, weights, allow_unused=True)
    return [torch.zeros_like(each) if g is None else g.to_dense() for each, g in zip(wanted, grads, strict=True)]


def _difference(own: _Trial, theirs: _Trial) -> str | None:
    """What differs, in words without any value; None when nothing does."""
    if effects := [name for name in own.effects if name not in theirs.effects]:
        return f"it changes {', '.join(effects)}"
    if own.structure != theirs.structure:
        return "what it returns is nested differently, or differs beside its tensors"
    for mine, other in zip(own.outputs, theirs.outputs, strict=True):
        kind, wanted = (f"{each.dtype} {list(each.shape)} on {each.device}" for each in (mine, other))
        if kind != wanted:
            return f"its output is {kind}, not {wanted}"
        if not _same(mine, other):
            return "its output has other values"
    if not _are_finite(theirs.gradients):
        return None
    numbers = [each for each in (*theirs.outputs, *theirs.gradients) if each.is_floating_point()]
    tolerance = max((torch.finfo(each.dtype).eps for each in numbers), default=0.0) ** 0.5
    pairs = [(mine.double(), other.double()) for mine, other in zip(own.gradients, theirs.gradients, strict=True)]
    close = all((mine - other).norm() <= tolerance * other.norm() for mine, other in pairs)
    return None if close else "its output is the same, but not its gradient"


def _same(one: Tensor, other: Any) -> bool:
    """Whether two tensors are equal in every entry; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one != one) & (other != other)).all())


def _are_finite(tensors: list[Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)
