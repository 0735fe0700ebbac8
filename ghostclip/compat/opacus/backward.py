"""Losses [B] from an ordinary ``loss.backward()`` on their mean or sum.

Where the loss is a mean of one loss for each example, the gradient that backward brings to the model's output has in
row i the gradient of loss i over B. So sum_j (B * gradient_ij * output_ij), gradients held constant, has the same
gradient in the parameters as loss i. The model's outputs are cut off from its graph: backward ends at them, and the
two passes of `ghostclip.clipper` run on these losses when the optimizer steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ghostclip.clipper.cutting import cut
from ghostclip.clipper.trial import is_trial, without_trace
from ghostclip.compat.opacus.core import CoreEngine
from ghostclip.compat.opacus.model_losses import loss_of_rows
from ghostclip.errors import LossShapeError, PrivacyError
from ghostclip.sampling import LogicalBatch

__all__ = ["ScalarLosses", "TrialHook", "ZeroGrad"]

OWN_LOSS = """loss.backward() came to a loss of shape [] that the model computed itself, which can't be divided by \
example. Compute the loss from the model's other outputs: criterion(outputs.logits, labels), or for any model of \
transformers losses_for(model)(model, batch).{reduction}(), with losses_for from \
ghostclip.integrations.huggingface_losses"""
# A logical batch, and the number of the physical one.
Turn: TypeAlias = tuple[LogicalBatch, int]


class _Forward:
    """One forward of the model: its outputs, and the gradients that backward brought to them, summed.

    Attributes:
        turn: the physical batch that it belongs to.
        fixed: which outputs have no row for each example, by their places among the outputs.
    """

    def __init__(
        self, owner: ScalarLosses, turn: Turn, outputs: list[Tensor], inputs: list[Tensor], fixed: Collection[int]
    ) -> None:
        self._owner, self.turn, self.outputs, self._inputs, self.fixed = owner, turn, outputs, inputs, fixed
        self.grads: list[Tensor | None] = [None] * len(outputs)

    def add(self, grads: tuple[Tensor | None, ...]) -> None:
        """Adds gradients at the outputs to those that came before."""
        for place, grad in enumerate(grads):
            old = self.grads[place]
            if grad is not None:
                self.grads[place] = grad if old is None else old + grad

    def receive(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Takes gradients at the outputs; returns those at the inputs, where a model in front of this one trains."""
        self._owner.came(self, grads)
        reached = [(output, grad) for output, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        if not self._inputs or not reached:
            return (None,) * len(self._inputs)
        outputs, seeds = zip(*reached, strict=True)
        return torch.autograd.grad(outputs, self._inputs, seeds, retain_graph=True, allow_unused=True)


class _Cut(torch.autograd.Function):
    """The outputs without the model's graph; backward gives their gradients to the `_Forward`."""

    @staticmethod
    def forward(ctx: Any, forward: _Forward, counter: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.forward = forward
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in forward.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise PrivacyError(
                "a backward with create_graph=True came through the private model; a loss made of its gradients can't "
                "be clipped here: use ghostclip.PrivacyEngine, with losses of shape [B]"
            )
        return None, torch.ones(()), *ctx.forward.receive(grads)


class TrialHook:
    """The model's hook before a forward, see `ScalarLosses.before`."""

    def __init__(self, losses: ScalarLosses) -> None:
        self._losses = losses

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._losses.before(module, args, kwargs)

    def __reduce__(self) -> Any:
        """A copy of the model isn't the engine's: its hook does nothing."""
        return _unwatched, ()


class ZeroGrad:
    """The model's ``zero_grad``, which also drops the gradients since the last step, as that of Opacus's wrapper does.

    That of a copy of the model is torch's.
    """

    def __init__(self, module: nn.Module, losses: Any) -> None:
        self._module, self._losses = module, losses
        vars(module)["zero_grad"] = self

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._module).zero_grad(self._module, set_to_none)
        if isinstance(self._losses, ScalarLosses):
            self._losses.drop()

    def remove(self) -> None:
        """Leaves the model with torch's own."""
        vars(self._module).pop("zero_grad", None)


class ScalarLosses:
    """The model's forward hook: cuts its outputs off, and makes losses [B] of the gradients that come to them.

    Args:
        engine: whose physical batches go through the model. Forwards outside of one are left alone.
        mean: whether the losses that are run backward are means over the physical batch; else they are sums.
        batch_dims: the dimensions of outputs that may hold the examples.
    """

    def __init__(self, engine: CoreEngine, mean: bool, batch_dims: tuple[int, ...]) -> None:
        self._engine, self._mean, self._batch_dims = engine, mean, batch_dims
        self._pending: list[_Forward] = []
        # What came since gradients were counted. ``loss.backward()`` accumulates one at the counter for each forward
        # that it came through; ``torch.autograd.grad``, as of an attack on the inputs, doesn't.
        self._came: list[tuple[_Forward, tuple[Tensor | None, ...]]] = []
        self._counter = torch.zeros((), device="cpu", requires_grad=True)
        self._counter.register_post_accumulate_grad_hook(self._count)
        # {(place among a forward's outputs, number of dimensions): which one holds examples}, from the first batch on.
        self._dims: dict[tuple[int, int], int] = {}
        # {kind of inputs: places of outputs without a row for each example}
        self._fixed: dict[Any, Collection[int]] = {}
        # Of the forward that runs, the shapes of its outputs for one example less; None where that isn't to be known.
        self._less: list[torch.Size | None] | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """The outputs, cut off from their graph where they belong to a batch."""
        if not torch.is_grad_enabled() or is_trial() or (turn := self._turn) is None:
            return outputs
        leaves, structure = tree_flatten(outputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return outputs
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        whole, own = leaves[:2], [leaves[place] for place in places]
        if self._less is not None:
            pairs = zip(leaves, self._less, strict=False)
            self._fixed[_kind(args, kwargs)] = [
                place
                for place, (leaf, less) in enumerate(pairs)
                if less and leaf.dim() == len(less) and len(leaf) == less[0]
            ]
            self._less = None
        fixed = self._fixed.get(_kind(args, kwargs), ())
        forward = _Forward(self, turn, own, inputs, [number for number, place in enumerate(places) if place in fixed])
        for place, output in zip(places, _Cut.apply(forward, self._counter, *inputs), strict=True):
            leaves[place] = output
        # Models of transformers return their loss first, and logits next.
        if self._mean and places[0] == 0 and leaves[0].dim() == 0 and len(leaves) > 1:
            found = loss_of_rows(module, kwargs.get("labels"), whole[0], whole[1], leaves[1])
            leaves[0] = leaves[0] if found is None else found
        return tree_unflatten(leaves, structure)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a forward: tries the first one of each kind of inputs with one example less.

        Not where the forward isn't given the batch's examples, as one of ``torch.zeros(1, 6)`` before the loop's. An
        output that is as large then has no row for each example. It comes before the forward, lest hooks of the user's
        see this one last.
        """
        if not torch.is_grad_enabled() or is_trial() or self._turn is None:
            return
        self._less, rows = None, self._engine.rows
        if rows < 2 or self._batch_dims != (0,) or (kind := _kind(args, kwargs)) in self._fixed:
            return
        try:
            less = cut(args, rows, range(rows - 1)), cut(kwargs, rows, range(rows - 1))
            given, left = tree_flatten((args, kwargs))[0], tree_flatten(less)[0]
            if len(given) == len(left) and all(map(operator.is_, given, left)):
                return
            with without_trace(module), torch.no_grad():
                outputs, _ = tree_flatten(module(*less[0], **less[1]))
        except Exception:  # whatever a model has against such a batch
            self._fixed[kind] = ()
        else:
            self._less = [each.shape if isinstance(each, Tensor) else None for each in outputs]

    def __reduce__(self) -> Any:
        """A copy of the model isn't this engine's: its hook does nothing."""
        return _unwatched, ()

    @property
    def _turn(self) -> Turn | None:
        """Which physical batch is the current one."""
        batch = self._engine.batch
        return None if batch is None else (batch, batch.handed)

    def came(self, forward: _Forward, grads: tuple[Tensor | None, ...]) -> None:
        """Notes gradients at a forward's outputs; they count if the counter is reached, too."""
        self._came.append((forward, grads))

    def _count(self, counter: Tensor) -> None:
        """Adds the gradients of the backward that is at its end, which came last."""
        assert counter.grad is not None
        count, counter.grad = int(counter.grad), None
        came, self._came = self._came[len(self._came) - count :], []
        for forward, grads in came:
            if self._wants(forward):
                forward.add(grads)

    def _wants(self, forward: _Forward) -> bool:
        """Whether gradients that come to a forward count, which those between two batches don't.

        Raises:
            PrivacyError: it belongs to an earlier batch.
        """
        if (turn := self._turn) is None:
            return False
        if forward.turn != turn:
            raise PrivacyError(
                "loss.backward() came to outputs of an earlier batch, whose examples would count in this one, too; "
                "compute the loss from this batch's outputs (detach what is carried over, such as a hidden state)"
            )
        # An earlier batch that was interrupted may have left some.
        self._pending = [each for each in self._pending if each.turn == turn and each is not forward] + [forward]
        return True

    def drop(self) -> None:
        """Forgets the gradients that came, as ``zero_grad`` does."""
        for forward in self._pending:
            forward.grads = [None] * len(forward.outputs)
        self._pending.clear()
        self._came.clear()

    def take(self) -> Tensor | None:
        """Losses [B] of the physical batch handed out last, by all that was run backward in it; None for nothing.

        Raises:
            LossShapeError: an output has no dimension with a row for each example.
        """
        rows = self._engine.rows
        found = [
            self._losses_of(place, output, grad, rows, place in forward.fixed)
            for forward in self._pending
            if forward.turn == self._turn
            for place, (output, grad) in enumerate(zip(forward.outputs, forward.grads, strict=True))
            if grad is not None
        ]
        self.drop()
        if not found:
            return None
        losses = found[0] if len(found) == 1 else torch.stack(found).sum(0)
        return losses * rows if self._mean else losses

    def _losses_of(self, place: int, output: Tensor, grad: Tensor, rows: int, fixed: bool) -> Tensor:
        """The rows' products with their gradients, summed, [B]."""
        if fixed:
            raise LossShapeError(
                f"an output of the model, through which loss.backward() came, has shape {list(output.shape)} for one "
                f"example less than {rows}, too: it has no row for each example (class prototypes, a table), and its "
                "gradient can't be divided by example; use it within the model, and return what is computed of it and "
                "the examples"
            )
        if rows == 1 and not output.dim():  # as of a model that ends in squeeze()
            output, grad = output.view(1), grad.view(1)
        dim = self._batch_dim(place, output, rows)
        wide = torch.promote_types(output.dtype, torch.float32)
        # Masked outputs may be infinite, and their gradients zero.
        product = torch.where(grad == 0, 0, output.to(wide) * grad.to(wide))
        return product.movedim(dim, 0).reshape(rows, -1).sum(1)

    def _batch_dim(self, place: int, output: Tensor, rows: int) -> int:
        """The dimension of an output that holds examples, the same in all batches; by its size in the first one."""
        if output.dim() == 0:
            raise LossShapeError(OWN_LOSS.format(reduction="mean" if self._mean else "sum"))
        known = self._dims.get((place, output.dim()))
        dims = self._batch_dims if known is None else (known,)
        fits = [dim for dim in dims if dim < output.dim() and output.shape[dim] == rows]
        if len(fits) > 1:
            raise LossShapeError(
                f"an output of the model has shape {list(output.shape)} for {rows} examples, so that it doesn't show "
                "which dimension holds them; begin with a batch of another size, or have the model take and return "
                "examples in dimension 0 and leave batch_first=False out"
            )
        if not fits:
            raise LossShapeError(
                f"an output of the model, through which loss.backward() came, has shape {list(output.shape)}, but the "
                f"physical batch has {rows} examples; the model must return a row for each example in dimension "
                f"{self._batch_dims[0]}, and the loss be computed outside of it (token outputs as [B, T, ...]; for "
                "pairs or views of each example call the model once for each of both; for parts of a batch that don't "
                "fit into memory together use BatchMemoryManager in place of slices)"
            )
        if rows:  # of none, every other dimension of none would do
            self._dims[place, output.dim()] = fits[0]
        return fits[0]


def _kind(args: Any, kwargs: Any) -> Any:
    """What tells forwards apart: the structure of their inputs, and the switches and names among these."""
    leaves, structure = tree_flatten((args, kwargs))
    return str(structure), tuple([leaf for leaf in leaves if isinstance(leaf, bool | str)])


def _unwatched() -> Callable[..., None]:
    return _leave


def _leave(*_: Any) -> None:
    """A forward hook that does nothing."""
