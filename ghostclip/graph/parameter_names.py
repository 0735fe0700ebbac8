"""The model's names, looked up once: which Parameter and which module is called what; and numbers for objects."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.same_numbers import same_numbers
from ghostclip.nn.base import LayerCall

__all__ = ["ParameterNames", "serial_number"]

REQUIRES_GRAD = operator.attrgetter("requires_grad")
_numbers = itertools.count()
_known: dict[int, tuple[weakref.ref[object], int]] = {}


def serial_number(item: object) -> int:
    """A number for keys that outlive a module or tensor: the same as long as it lives, and never another object's.

    An ``id`` is given again when its object is gone.
    """
    known = _known.get(id(item))
    if known is None or known[0]() is not item:
        known = weakref.ref(item, functools.partial(_known.pop, id(item))), next(_numbers)
        _known[id(item)] = known
    return known[1]


class ParameterNames:
    """Names of parameters and modules by identity; walking a module tree costs more than a small model's layers.

    Attributes:
        layers: {id of module: name}, the class name for the model itself.
        names: {id of Parameter: its first name}, trained and frozen.
        version: a number for the modules and parameters that were read; others never have it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions: dict[tuple[int, ...], int] = {}
        self.refresh()

    def layer(self, call: LayerCall) -> str:
        """The name of the call's layer, or its class where a layer outside the model shares a parameter of it."""
        return self.layers.get(id(call.layer), type(call.layer).__name__)

    def refresh(self) -> None:
        """Reads the model again: modules or parameters were exchanged."""
        self._named = list(self._model.named_parameters())
        self._parameters = [parameter for _, parameter in self._named]
        modules = list(self._model.named_modules())
        # Held as the parameters are, so that nothing else gets their ids.
        self._modules = [module for _, module in modules]
        self._children = self._children_now()
        self.layers = {id(module): name or type(module).__name__ for name, module in modules}
        self.names = {id(parameter): name for name, parameter in self._named}
        serial_numbers = tuple(map(serial_number, [*self._modules, *self._parameters]))
        self.version = self._versions.setdefault(serial_numbers, len(self._versions))

    def _children_now(self) -> list[nn.Module | None]:
        return [child for module in self._modules for child in module._modules.values()]

    def watch(self) -> None:
        """Reads the model again if a module was exchanged, with or without parameters."""
        now = self._children_now()
        if len(now) != len(self._children) or not all(map(operator.is_, now, self._children)):
            self.refresh()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """(name, Parameter) of every parameter that requires a gradient now."""
        return [*itertools.compress(self._named, map(REQUIRES_GRAD, self._parameters))]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, trained and frozen."""
        return sum([parameter.nbytes for parameter in self._parameters])

    def own_calls(self, calls: Sequence[LayerCall]) -> list[LayerCall]:
        """Those calls that used parameters of this model, which are noted as `own`.

        Reads the model again for a layer or parameter it doesn't know. Calls of another model in the graph are left
        out.
        """
        found = []
        for call in calls:
            owners = [*map(id, map(call.owners.__getitem__, call.parameters))]
            if call.values and owners != [*map(id, call.values)]:
                raise UnsupportedModelError(
                    f"{self.layer(call)} was given other tensors in the place of its parameters (as by "
                    "torch.func.functional_call), or these were exchanged since; call the module that has them, or "
                    "compute a weight from others by torch.nn.utils.parametrize",
                    name=self.layer(call), place=call,
                )  # fmt: skip
            call.own = call.parameters
            if id(call.layer) not in self.layers or not self.names.keys() >= {*owners}:
                self.refresh()
                call.own = [name for name in call.parameters if id(call.owners[name]) in self.names]
            if call.own:
                found.append(call)
        return found

    def name_of(self, leaf: Tensor) -> str | None:
        """The name of a leaf that is a parameter of the model; reads the model again for an unknown Parameter."""
        if isinstance(leaf, nn.Parameter) and id(leaf) not in self.names:
            self.refresh()
        return self.names.get(id(leaf))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a buffer or parameter of the model is equal to ``tensor``; compares values."""
        mine = (*self._model.parameters(), *self._model.buffers())
        if not _has_values(tensor):
            return False
        return any(
            own.device == tensor.device and own.shape == tensor.shape and _has_values(own) and same_numbers(own, tensor)
            for own in mine
        )


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has memory; whole parameters under FSDP2 have it for layers in their turn only."""
    return tensor.layout != torch.strided or tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
