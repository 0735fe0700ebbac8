"""What every wrapper layer is made of: capturing pre-activations, and the registry of layers that have a rule.

A wrapper's forward lets torch's own kernel do the arithmetic, then hands the result to `GhostLayer.capture`. That
puts an identity node into the autograd graph whose backward, during a clipper's first pass, is told the gradient at
the pre-activation and still has the inputs (Lee & Kifer 2020, algorithm 1, lines 5 to 12). Nothing is stored on the
module or its Parameters: what is remembered lives in the graph and dies with it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.term import Dense, PerExampleGrads

__all__ = [
    "CAPTURE",
    "LAYERS",
    "NOTHING",
    "PROBE",
    "GhostLayer",
    "LayerCall",
    "Part",
    "Sink",
    "built_of_wrappers",
    "has_saved_tensor_hooks",
    "is_capturing",
    "missing_batch_dimension",
    "place_of",
]

# What packs saved tensors now, or None.
# torch 2.6 and 2.7 don't tell whether there are hooks; they are assumed then, which costs time and nothing else.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

# A leaf that every captured pre-activation leads to: asking autograd for its gradient runs a backward that goes
# to the pre-activations and no further, and so forms no weight gradient. It never has a value and never changes.
PROBE = torch.zeros(0, device="cpu", requires_grad=True)

# The node that `GhostLayer.capture` makes; recurrent layers have nodes of their own, which tell of gates instead.
CAPTURE = "_CaptureBackward"

# The exact torch class -> its wrapper. Filled once, by the class statements of this package and of users' own layers.
LAYERS: dict[type, type[GhostLayer]] = {}

# What computed a tensor; None for leaves.
GRAD_FN = operator.attrgetter("grad_fn")
# What one term is about: the id of a trained parameter, and the (start, stop) of its rows or None for all of it.
Part = tuple[int, tuple[int, int] | None]
Sink = Callable[["LayerCall", tuple[Tensor, ...], Tensor], None]


def NOTHING(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
    """A sink that ignores every gradient: the pass only frees the graph."""


class LayerCall:
    """One call of one layer, as it stands in the autograd graph.

    Attributes:
        layer: the wrapper module.
        parameters: the names of the layer's own trained parameters that the call used.
        rows: {name: (start, stop)} along the first axis, for parameters that were used in part.
        batch_dim: the dimension of the pre-activation that holds examples.
        shape, dtype, device, nbytes: of the pre-activation.
        owners: {name: Parameter}.
        values: tensors that the forward used, one for each of ``parameters``; () where these are the Parameters.
        extra: what `GhostLayer.capture` was given for the rule beside the inputs.
        own: those of ``parameters`` that belong to the model whose graph is read; none for a layer of another model.
        lengths: arguments by which rows of the inputs belong to examples, as the batch sizes of a packed sequence.
        sources: (node, number of its output) of each input that has a gradient, or (input, 0) where it is a leaf; the
            graph continues there.
        registered: the number of hooks registered in the process when the layer was called.
        has_saved_tensor_hooks: whether hooks replace saved tensors, as those of activation checkpointing do.
        sink: called with (call, inputs, gradient at the pre-activation) in a first pass; None outside of it.
        ends: whether the current pass stops at this layer's pre-activation.
    """

    __slots__ = (
        "batch_dim", "device", "dtype", "ends", "extra", "has_saved_tensor_hooks", "layer", "lengths", "nbytes",
        "own", "owners", "parameters", "registered", "rows", "shape", "sink", "sources", "values",
    )  # fmt: skip

    def __init__(
        self,
        layer: GhostLayer,
        parameters: tuple[str, ...],
        rows: Mapping[str, tuple[int, int]],
        batch_dim: int,
        preactivation: Tensor,
        inputs: tuple[Tensor, ...],
        extra: Any,
    ) -> None:
        self.layer, self.parameters, self.rows, self.extra = layer, parameters, rows, extra
        self.batch_dim, self.shape = batch_dim, preactivation.shape
        self.dtype, self.device = preactivation.dtype, preactivation.device
        self.nbytes = preactivation.numel() * preactivation.element_size()  # of any size, as torch.compile traces it
        self.sources = [(t.grad_fn or t, t.output_nr) for t in inputs if t.requires_grad]
        self.has_saved_tensor_hooks = has_saved_tensor_hooks()
        self.registered = RemovableHandle.next_id
        self.sink: Sink | None = None
        self.ends = False
        self.own: Sequence[str] = parameters
        self.owners: Mapping[str, Any] = layer._parameters
        self.values: Sequence[Tensor] = ()
        self.lengths: Sequence[Tensor | None] = ()

    def linear_pair(self, inputs: tuple[Tensor, ...], grad: Tensor) -> LinearPair | None:
        """`GhostLayer.linear_pair` of this use."""
        return self.layer.linear_pair(self, inputs, grad)

    def term(self, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        """The per-example gradients of ``name`` by the layer's rule; a plain tensor [B, *shape] is taken as is."""
        found: Any = self.layer.per_example(name, self, inputs, grad)
        shape = self._shape_of(name) if name in self.rows else self.owners[name].shape
        # isinstance of an abstract class takes longer, so it comes last.
        if isinstance(found, Tensor):
            if found.shape == (self.shape[self.batch_dim], *shape):
                return Dense(found)
            wanted = f"a gradient for each example, of shape {[self.shape[self.batch_dim], *shape]}"
        elif getattr(found, "shape", None) == shape:
            return found
        else:
            wanted = f"a term of shape {list(shape)}, the parameter's, or the gradients as a tensor"
        got = list(found.shape) if isinstance(found, Tensor | PerExampleGrads) else type(found).__name__
        raise UnsupportedModelError(
            f"{place_of(self.layer)}: its rule, per_example({name!r}), must return {wanted}; got {got}"
        )

    def _shape_of(self, name: str) -> torch.Size:
        """The shape of the part of a parameter that was used."""
        start, stop = self.rows[name]
        return torch.Size((stop - start, *self.owners[name].shape[1:]))


class _Capture(torch.autograd.Function):
    """Identity on a pre-activation, in place; its backward tells the sink, while there is one."""

    @staticmethod
    def forward(ctx: Any, preactivation: Tensor, probe: Tensor, call: LayerCall, inputs: tuple[Tensor, ...]) -> Tensor:
        ctx.mark_dirty(preactivation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.call = call
        return preactivation

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        call = ctx.call
        if call.sink is not None and call.sink is not NOTHING:
            if grad is None:
                grad = torch.zeros(call.shape, dtype=call.dtype, device=call.device)
            call.sink(call, ctx.saved_tensors, grad if grad.shape == call.shape else grad.reshape(call.shape))
        return None if call.ends else grad, None, None, None


# Function.apply looks for torch.func's transforms first, which `is_capturing` has done.
_apply_capture = super(torch.autograd.Function, _Capture).apply


def has_saved_tensor_hooks() -> bool:
    """Whether hooks pack what operations save now, as under activation checkpointing."""
    return _top_hooks is None or _top_hooks(False) is not None


def is_capturing() -> bool:
    """Whether a forward now should leave anything behind: gradients are being recorded, and by autograd itself."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


class GhostLayer(torch.nn.Module):
    """Base class of wrappers: ``class Linear(GhostLayer, torch.nn.Linear, wraps=torch.nn.Linear)``.

    A wrapper defines two methods: ``forward``, which ends in `capture`, and ``per_example``, the layer's gradient rule.
    It has no ``__init__`` and no state, since `wrap` changes the class of a module and nothing else.
    """

    rule: ClassVar[str] = ""
    # Whether `obstacles` are in the way of a frozen layer too, as statistics of private data are.
    checked_when_frozen: ClassVar[bool] = False
    # Whether it looks up rows by indices, which may be those of positions, the same for all examples. Its rule takes
    # indices and gradients row by row along the batch dimension.
    reads_indices: ClassVar[bool] = False
    # Whether some of its parameters belong to layers inside of it.
    has_parts: ClassVar[bool] = False
    wrapped: ClassVar[type[torch.nn.Module]]
    # The dimension of inputs and outputs that holds examples; `wrap(model, batch_dim=...)` sets it on the instance.
    ghost_batch_dim: int = 0
    # The module's name in the model that was wrapped, for messages; `wrap` sets it on the instance.
    ghost_path: str = ""

    def __init_subclass__(cls, wraps: type[torch.nn.Module] | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if wraps is not None:
            cls.wrapped = wraps
            cls.rule = cls.rule or cls.__name__
            LAYERS[wraps] = cls

    def per_example(
        self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor
    ) -> PerExampleGrads | Tensor:
        """The per-example gradients of the layer's parameter ``name`` for one call.

        Args:
            name: one of ``call.parameters``.
            call: the layer call; ``call.batch_dim`` is the dimension of ``inputs`` and ``grad`` that holds examples.
            inputs: the tensors that forward gave to `capture`.
            grad: gradient of the summed losses with respect to the pre-activation, of the same shape.

        Returns:
            A term, or the gradients themselves as a tensor [B, *parameter shape].
        """
        raise NotImplementedError(f"{type(self).__name__} defines no per_example, its gradient rule")

    def linear_pair(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> LinearPair | None:
        """A term for all parameters of the call at once, for a linear layer on one position; None: use `per_example`.

        Whether it is None may depend on ``call`` only.
        """
        return None

    @property
    def adds_beside(self) -> bool:
        """Whether some parameter's gradient needn't be zero where that at the pre-activation is."""
        return False

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        """The names of the module's own parameters that the rule knows."""
        return ("weight", "bias")

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        """The dimensions of a use's output along which the rule can take the examples."""
        return (call.batch_dim,)

    def has_computed_weights(self) -> bool:
        """Whether what the rule knows as a parameter is computed from others."""
        return any(name not in self._parameters and _is_computed(self, name) for name in self.parameter_names(self))

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        """(problem, remedy) for settings of ``module`` this rule can't be exact for; [] when there are none."""
        return []

    def capture(
        self,
        preactivation: Tensor,
        *inputs: Tensor,
        parameters: tuple[str, ...] | None = None,
        rows: Mapping[str, tuple[int, int]] | None = None,
        batch_dim: int | None = None,
        extra: Any = None,
    ) -> Tensor:
        """Saves ``inputs`` for the gradient rule, in the autograd graph at ``preactivation``, which it returns.

        Args:
            preactivation: the output of the operation that uses the parameters. Use the returned tensor in its place.
                If that operation saves its output for backward, as exp and tanh do, pass a clone.
            inputs: the tensors that the rule needs, and what the operation read: layers below are found through it.
            parameters: names of the layer's own parameters that the operation used; None for all of `parameter_names`.
            rows: {name: (start, stop)}: the rows used, for parameters that were used in part.
            batch_dim: the dimension that holds examples; None: the layer's ``ghost_batch_dim``.
            extra: other objects that the rule needs; they may not hold tensors of the graph.

        Raises:
            UnsupportedModelError: the output has no dimension for the examples.
        """
        if not preactivation.requires_grad or not is_capturing():
            return preactivation
        if parameters is None:
            parameters = self.parameter_names(self)
        call = self.new_call(preactivation, inputs, parameters, rows, batch_dim, extra)
        if call is None:
            return preactivation
        base = preactivation if preactivation._base is None else _whole_base(preactivation)
        captured = _apply_capture(base, PROBE, call, inputs)
        return captured if base is preactivation else captured.view(preactivation.shape)

    def new_call(
        self,
        preactivation: Tensor,
        inputs: tuple[Tensor, ...],
        parameters: tuple[str, ...],
        rows: Mapping[str, tuple[int, int]] | None = None,
        batch_dim: int | None = None,
        extra: Any = None,
    ) -> LayerCall | None:
        """The `LayerCall` of this use; None when none of the parameters is trained, or one is computed from others."""
        own = self._parameters
        used = {name: p for name in parameters if (p := own.get(name)) is not None and p.requires_grad}
        # A weight made from other parameters is no leaf: what made it is in the graph, and dealt with there.
        if len(used) < len(parameters) and any(name not in own and _is_computed(self, name) for name in parameters):
            return None
        # In the place of a parameter, as torch.func.functional_call puts it, such a weight is none either.
        if not used or any(map(GRAD_FN, used.values())):
            return None
        dim = self._examples_in(preactivation, batch_dim)
        call = LayerCall(self, tuple(used), rows or {}, dim, preactivation, inputs, extra)
        call.values = list(used.values())
        return call

    def _examples_in(self, preactivation: Tensor, batch_dim: int | None) -> int:
        """The dimension that holds examples; raises UnsupportedModelError where there is none."""
        dim = self.ghost_batch_dim if batch_dim is None else batch_dim
        if preactivation.is_nested:
            raise UnsupportedModelError(
                f"{place_of(self)} got a nested tensor, whose rows no rule tells apart; give it nested.values() and "
                "say which example each row is of (batch_index=)"
            )
        if preactivation.dim() < 2:
            raise UnsupportedModelError(
                f"{place_of(self)} got an input without a batch dimension (its output has shape "
                f"{list(preactivation.shape)}); give it examples in a dimension of their own"
            )
        if dim >= preactivation.dim():
            raise UnsupportedModelError(
                f"{place_of(self)}: examples are said to be in dimension {dim}, but the output has shape "
                f"{list(preactivation.shape)}; set wrap(model, batch_dim=...) to where they are"
            )
        return dim


def built_of_wrappers(wrapped: type[torch.nn.Module]) -> Callable[..., None]:
    """An ``__init__`` that does what that of ``wrapped`` does, then turns the new module's parts into wrappers.

    It takes the same arguments and draws the same random numbers. A part is turned by its class, in place; one with a
    setting that its rule can't be exact for stays as it is, for `ghostclip.check` to find.
    """

    @functools.wraps(wrapped.__init__)
    def __init__(self: torch.nn.Module, *args: Any, **options: Any) -> None:
        wrapped.__init__(self, *args, **options)
        for part in self.modules():
            wrapper = LAYERS.get(type(part))
            if wrapper is not None and not wrapper.obstacles(part):
                part.__class__ = wrapper

    return __init__


def place_of(layer: torch.nn.Module) -> str:
    """How messages call a layer: by its name in the model and its class."""
    kind, path = type(layer).__name__, getattr(layer, "ghost_path", "")
    return f"{path} ({kind})" if path else kind


def missing_batch_dimension(layer: torch.nn.Module, input: Tensor, dims: int) -> UnsupportedModelError:
    """The error of a layer that needs ``dims`` dimensions and got one example by itself."""
    return UnsupportedModelError(
        f"{place_of(layer)} got an input of shape {list(input.shape)} without a batch dimension; "
        f"add one: {dims} dimensions, examples first"
    )


def _whole_base(view: Tensor) -> Tensor:
    """The base of a view where that is as large, else a copy. Autograd would copy views in backward."""
    base: Any = view._base
    same = base.is_contiguous() and view.is_contiguous() and base.numel() == view.numel()
    return base if same and base._base is None else view.clone()


def _is_computed(layer: torch.nn.Module, name: str) -> bool:
    """Whether a parametrization or a hook makes what stands under the name of a parameter, to be trained through it."""
    if name in getattr(layer, "parametrizations", ()):
        return True
    value = vars(layer).get(name)
    return isinstance(value, Tensor) and value.requires_grad
