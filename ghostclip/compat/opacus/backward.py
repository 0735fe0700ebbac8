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
from ghostclip.nn.base import PROBE
from ghostclip.sampling import LogicalBatch

__all__ = ["ScalarLosses"]

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

    def receive(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Takes gradients at the outputs; returns those at the inputs, where a model in front of this one trains."""
        if self._owner.wants(self):
            for place, grad in enumerate(grads):
                old = self.grads[place]
                if grad is not None:
                    self.grads[place] = grad if old is None else old + grad
        reached = [(output, grad) for output, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        if not self._inputs or not reached:
            return (None,) * len(self._inputs)
        outputs, seeds = zip(*reached, strict=True)
        return torch.autograd.grad(outputs, self._inputs, seeds, retain_graph=True, allow_unused=True)


class _Cut(torch.autograd.Function):
    """The outputs without the model's graph; backward gives their gradients to the `_Forward`."""

    @staticmethod
    def forward(ctx: Any, forward: _Forward, probe: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
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
        return None, None, *ctx.forward.receive(grads)


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
        # {(place among a forward's outputs, number of dimensions): which one holds examples}, from the first batch on.
        self._dims: dict[tuple[int, int], int] = {}
        # {places of outputs that require a gradient: `_Forward.fixed`}
        self._fixed: dict[tuple[int, ...], Collection[int]] = {}

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """The outputs, cut off from their graph where they belong to a batch."""
        if not torch.is_grad_enabled() or is_trial() or (turn := self._turn) is None:
            return outputs
        leaves, structure = tree_flatten(outputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return outputs
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        own = [leaves[place] for place in places]
        if (key := tuple(places)) not in self._fixed and self._engine.rows > 1 and self._batch_dims == (0,):
            fixed = self._fixed_in(module, args, kwargs, places, own)
            if fixed is not None:
                self._fixed[key] = fixed
        forward = _Forward(self, turn, own, inputs, self._fixed.get(key, ()))
        for place, output in zip(places, _Cut.apply(forward, PROBE, *inputs), strict=True):
            leaves[place] = output
        # Models of transformers return their loss first, and logits next.
        if self._mean and places[0] == 0 and leaves[0].dim() == 0 and len(leaves) > 1:
            found = loss_of_rows(module, kwargs.get("labels"), leaves[0], leaves[1])
            leaves[0] = leaves[0] if found is None else found
        return tree_unflatten(leaves, structure)

    def _fixed_in(
        self, module: nn.Module, args: Any, kwargs: Any, places: list[int], outputs: list[Tensor]
    ) -> Collection[int] | None:
        """Which outputs are as large for one example less; none where the model can't be tried with what is left.

        None where the forward isn't given the batch's examples, as one of ``torch.zeros(1, 6)`` before the loop's.
        """
        rows, left = self._engine.rows, range(self._engine.rows - 1)
        try:
            less = cut(args, rows, left), cut(kwargs, rows, left)
            before, after = tree_flatten((args, kwargs))[0], tree_flatten(less)[0]
            if len(before) == len(after) and all(map(operator.is_, before, after)):
                return None
            with without_trace(module), torch.no_grad():
                fewer, _ = tree_flatten(module(*less[0], **less[1]))
        except Exception:  # whatever a model has against such a batch
            return ()
        sizes = [each.shape if isinstance(each, Tensor) else None for each in fewer]
        pairs = enumerate(zip(places, outputs, strict=True))
        return [number for number, (place, own) in pairs if own.dim() and sizes[place : place + 1] == [own.shape]]

    def __reduce__(self) -> Any:
        """A copy of the model isn't this engine's: its hook does nothing."""
        return _unwatched, ()

    @property
    def _turn(self) -> Turn | None:
        """Which physical batch is the current one."""
        batch = self._engine.batch
        return None if batch is None else (batch, batch.handed)

    def wants(self, forward: _Forward) -> bool:
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
        dim = self._batch_dim(place, output, rows)
        wide = torch.promote_types(output.dtype, torch.float32)
        product = output.to(wide) * grad.to(wide)
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
                "pairs or views of each example call the model once for each of both)"
            )
        if rows:  # of none, every other dimension of none would do
            self._dims[place, output.dim()] = fits[0]
        return fits[0]


def _unwatched() -> Callable[..., None]:
    return _leave


def _leave(*_: Any) -> None:
    """A forward hook that does nothing."""
