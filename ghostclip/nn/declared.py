"""Classes of which their author says that they compute what a torch class computes (`same_as`).

A declared module keeps its class's methods; its forward becomes that of the torch class, with the torch class's rule.
The claim is checked on the first forward of each module, and again when its mode, types, devices or the way it is
called change. Whatever the claim is worth, clipping is exact: rule and forward are those of one class.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError, is_out_of_memory
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.term import PerExampleGrads

from .base import LAYERS, GhostLayer, LayerCall, place_of
from .comparing import compare, run_apart

__all__ = ["DECLARED", "Declared", "same_as"]

# The declared class -> its wrapper. Filled by `same_as`, for the process.
DECLARED: dict[type, type[Declared]] = {}

# Under which conditions a module was found to compute what its class's target does. Beside the modules, so that copies
# of one are verified anew, and that forwards whose traces in the module are undone count, too.
_verified: WeakKeyDictionary[torch.nn.Module, set[tuple]] = WeakKeyDictionary()


def same_as(kind: type[torch.nn.Module], torch_class: type[torch.nn.Module]) -> None:
    """Declares that modules of class ``kind`` compute what those of ``torch_class`` compute.

    `ghostclip.wrap` then gives them the rule of ``torch_class``. Without a declaration their parameters are followed
    through the autograd graph, which is exact as well, but slower.

    The declaration is verified. The first forward of each module runs both forwards on the same inputs with the same
    random numbers. It compares outputs bit for bit and gradients up to rounding, and tests that no state changes. The
    test is repeated in a new mode (train or eval, gradients on or off, autocast) and for new types, devices, numbers
    of dimensions and arguments. Otherwise the module runs the forward of ``torch_class`` only: if ``kind.forward``
    would behave differently later, that has no effect.

    A declaration holds in this process, for exactly this class and not for its subclasses. It must come before the
    model is wrapped, and before a wrapped model is unpickled.

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
    rule = _rule_of(torch_class)
    if kind.__module__.partition(".")[0] == "torch":
        raise ValueError(f"kind must be a class of your own; {kind.__name__} is torch's, which wrap knows")
    if issubclass(kind, GhostLayer) or kind in LAYERS:
        raise ValueError(f"kind must be a class without a rule; {kind.__name__} has one already")
    if taken := sorted(_OF_WRAPPERS.intersection(*[dir(kind)]) - frozenset(dir(rule.wrapped))):
        raise ValueError(f"{kind.__name__} has {', '.join(taken)}, which its wrapper needs for itself; rename it there")
    known = DECLARED.get(kind)
    if known is None:
        DECLARED[kind] = _wrapper(kind, rule)
    elif known.target is not rule.wrapped:
        raise ValueError(f"{kind.__name__} was declared to be the same as {known.target.__name__}; it can't be two")


def _rule_of(torch_class: type[torch.nn.Module]) -> type[GhostLayer]:
    """The wrapper of a torch class, or of one of `ghostclip.nn` under the same name; raises ValueError without one."""
    rule = LAYERS.get(getattr(torch_class, "wrapped", torch_class))
    if issubclass(torch_class, GhostLayer) and torch_class is not rule:
        rule = None
    if rule is None or rule.has_parts:
        known = ", ".join(sorted(each.__name__ for each, rule in LAYERS.items() if not rule.has_parts))
        problem = "is built of layers that have rules, which wrap gives them" if rule else "has no rule"
        raise ValueError(f"torch_class must be one of {known}; {torch_class.__name__} {problem}")
    return rule


class _StandIn(GhostLayer):
    """The declared module as a module of the torch class: the same ``__dict__``, and calls that are its own."""

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
        conditions = self._conditions(args, kwargs)
        if conditions not in _verified.get(self, ()):
            if torch._C._are_functorch_transforms_active():  # no value can be looked at, nothing is captured
                return _call(_seen_as(self, self.wrapped), args, kwargs)
            self._verify(args, kwargs, conditions)
        layer = _seen_as(self, self.stand_in)
        object.__setattr__(layer, "declared_module", self)  # torch's own would make it a part of the module
        return _call(layer, args, kwargs)

    def per_example(
        self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor
    ) -> PerExampleGrads | Tensor:
        return _seen_as(self, self.stand_in).per_example(name, call, inputs, grad)

    def linear_pair(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> LinearPair | None:
        return _seen_as(self, self.stand_in).linear_pair(call, inputs, grad)

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return cls.stand_in.parameter_names(module)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        problems = list(cls._misfits(module))
        return [(problem, cls._remedy()) for problem in problems] or cls.stand_in.obstacles(module)

    @classmethod
    def _misfits(cls, module: torch.nn.Module) -> list[str]:
        """What keeps the target's forward and rule from working on the module's ``__dict__``."""
        own, target = vars(module), cls.target.__name__
        seen = _seen_as(module, cls.stand_in)
        missing = [name for name in getattr(cls.target, "__constants__", ()) if not hasattr(seen, name)]
        if missing:
            return [f"it is declared to be the same as {target}, but has no attribute {', '.join(missing)}"]
        names = cls.stand_in.parameter_names(seen)
        found = {
            "lacks the parameter": [name for name in names if not hasattr(seen, name)],
            "has another parameter": [name for name, _ in module.named_parameters() if name not in names],
            "has an attribute in the place of": [
                name
                for name in own
                if name in module._parameters or name in _OF_WRAPPERS or callable(getattr(cls.target, name, None))
            ],
        }
        return [
            f"it is declared to be the same as {target}, but {what} {', '.join(which)}"
            for what, which in found.items()
            if which
        ]

    @classmethod
    def _remedy(cls) -> str:
        name = cls.wrapped.__name__
        return f"remove ghostclip.same_as({name}, ...): without it {name} is followed through the graph, as exact"

    def _conditions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
        """What a verification holds for."""
        values = (*args, *kwargs.values(), *self._parameters.values())
        kinds = [(t.dtype, t.device, t.dim(), t.requires_grad) for t in values if isinstance(t, Tensor)]
        autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        return (self.wrapped.forward, self.training, torch.is_grad_enabled(), *autocast, len(args), *kwargs, *kinds)

    def _verify(self, args: tuple[Any, ...], kwargs: dict[str, Any], conditions: tuple) -> None:
        """Notes that both forwards do the same on these inputs; raises UnsupportedModelError if they don't."""
        own = run_apart(self, self.wrapped.forward.__get__(_seen_as(self, self.wrapped)), args, kwargs)
        try:
            theirs = run_apart(self, self.target.forward.__get__(_seen_as(self, self.target)), args, kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise self._refusal(f"{self.target.__name__} can't be called so ({error})") from error
        found = compare(own, theirs)
        if found.difference is not None:
            raise self._refusal(found.difference)
        if found.conclusive:
            _verified.setdefault(self, set()).add(conditions)

    def _refusal(self, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{place_of(self)} is declared to compute what {self.target.__name__} computes, but {problem}; "
            f"{self._remedy()}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By its own class, which is found by name."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_restored, (self.wrapped, self.target), *reduced[2:])


# What a wrapper has and other modules don't.
_OF_WRAPPERS = frozenset(name for name in dir(Declared) if name not in dir(torch.nn.Module) and name[:6] != "ghost_")


def _wrapper(kind: type[torch.nn.Module], rule: type[GhostLayer]) -> type[Declared]:
    """The wrapper of a declared class; ``rule`` is that of the class it is the same as."""
    content = {"wrapped": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in = type(kind.__name__, (_StandIn, rule), {**content, "__slots__": ()})
    content |= {"target": rule.wrapped, "stand_in": stand_in, "rule": f"{rule.rule} (declared)"}
    content |= {"reads_indices": rule.reads_indices, "__doc__": kind.__doc__}
    return type(kind.__name__, (Declared, kind), content)


def _seen_as(module: torch.nn.Module, kind: type[torch.nn.Module]) -> Any:
    """The module as an object of another class: all it has, and that class's methods only."""
    found = object.__new__(kind)
    object.__setattr__(found, "__dict__", vars(module))
    return found


def _call(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its class's forward."""
    return type(layer).forward(layer, *args, **kwargs)


def _restored(kind: type[torch.nn.Module], target: type[torch.nn.Module]) -> Declared:
    """An empty module for `copy` and `pickle`; raises UnsupportedModelError where the class isn't declared."""
    wrapper = DECLARED.get(kind)
    if wrapper is None or wrapper.target is not target:
        raise UnsupportedModelError(
            f"a wrapped {kind.__name__} is loaded, which was declared to be the same as {target.__name__}; call "
            f"ghostclip.same_as({kind.__name__}, {target.__name__}) before, or unwrap the model before it is saved"
        )
    return object.__new__(wrapper)
