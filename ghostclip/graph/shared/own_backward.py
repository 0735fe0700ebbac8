"""An operation's own backward, once for every example: exact whatever the operation is.

Three examples with gradients [4, 5, 6] at an output: the backward runs on [4, 0, 0], on [0, 5, 0] and on [0, 0, 6].
It multiplies what the operation kept of the others with zeros. Kept numbers of theirs that are not finite would spoil
the gradient of an example (0 * NaN is NaN), and are replaced. Its own are not, so that its gradient isn't finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import shape_of
from ghostclip.native.custom_ops import is_traced

__all__ = ["OwnBackward", "not_finite"]


@dataclass(frozen=True)
class OwnBackward:
    """The backward of one output.

    Attributes:
        node: of the graph.
        number: of the output among the node's.
        dim: the output's dimension that holds examples.
    """

    node: Any
    number: int
    dim: int

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """What it gives to each of the node's inputs, for a gradient of the output alone."""
        outputs = list(enumerate(self.node._input_metadata))
        if not isinstance(self.node, BackwardCFunction):
            found = self.node(*[grad if number == self.number else None for number, _ in outputs])
            return found if isinstance(found, tuple) else (found,)
        # A Function written in Python answers for all its arguments, the graph knows of those that need gradients.
        whole = [
            grad if number == self.number else torch.zeros(tuple(of.shape), dtype=of.dtype, device=of.device)
            for number, of in outputs
        ]
        answers = self.node.apply(*whole)
        answers = answers if isinstance(answers, tuple) else (answers,)
        needed = iter([each for each, needs in zip(answers, self.node.needs_input_grad, strict=True) if needs])
        return tuple(None if below is None else next(needed) for below, _ in self.node.next_functions)

    def per_example(self, grad: Tensor, slots: Sequence[int], examples: Sequence[Tensor]) -> dict[int, Tensor]:
        """{slot: gradients [B, *shape]} of some inputs; {} where there are no examples.

        Args:
            grad: of the output.
            slots: of the inputs.
            examples: for each, which entries along ``dim`` are its own.
        """
        each = [self._parts(self._alone(entries, grad), slots) for entries in examples]
        found = [torch.stack(parts) for parts in zip(*each, strict=True)]
        # A compiled graph has no values yet; where one isn't finite, the eager passes clip its batch.
        if not is_traced() and not _all_finite(found):
            self._spare(found, grad, slots, examples)
        return dict(zip(slots, found, strict=False))

    def _spare(self, found: list[Tensor], grad: Tensor, slots: Sequence[int], examples: Sequence[Tensor]) -> None:
        """Replaces the gradients of each example that others' numbers, which aren't finite, changed."""
        wrong = not_finite(self.node)
        with _replaced(wrong, 0.0):
            self._refuse_spoilt(grad, slots)
        for example, entries in enumerate(examples):
            if _all_finite([each[example] for each in found]) or self._reads(wrong, entries, grad, slots):
                continue
            with _replaced(wrong, 0.0):
                for each, part in zip(found, self._parts(self._alone(entries, grad), slots), strict=True):
                    each[example] = part

    def _alone(self, entries: Tensor, grad: Tensor) -> Tensor:
        """A gradient of the output that is zero but for the given entries along ``dim``."""
        if not grad.dim():
            return grad if len(entries) else torch.zeros_like(grad)
        alone = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        alone.movedim(self.dim, 0)[entries] = grad.movedim(self.dim, 0)[entries]
        return alone

    def _parts(self, grad: Tensor, slots: Sequence[int]) -> list[Tensor]:
        """The gradients of some inputs for one of the output."""
        below, found = self.gradients(grad), list[Tensor]()
        for slot in slots:
            shape = shape_of(self.node.next_functions[slot])
            part = grad.new_zeros(shape) if (given := below[slot]) is None else given
            found.append((part if part.layout == torch.strided else part.to_dense()).sum_to_size(shape))
        return found

    def _reads(self, wrong: list[Tensor], entries: Tensor, grad: Tensor, slots: Sequence[int]) -> bool:
        """Whether the gradients of the example with these entries depend on numbers kept that are not finite.

        They do if 0.25 in their place gives other gradients than 0.75. (The gradient at the output may be zero.)
        """
        seed = self._alone(entries, torch.ones_like(grad))
        with _replaced(wrong, 0.25):
            once = self._parts(seed, slots)
        with _replaced(wrong, 0.75):
            again = self._parts(seed, slots)
        return not all(map(torch.equal, once, again))

    def _refuse_spoilt(self, grad: Tensor, slots: Sequence[int]) -> None:
        """Raises UnsupportedModelError where a gradient of zero doesn't give zeros.

        An operation in place on a part of a tensor keeps what it was given where nobody can replace it. Where one
        example's numbers aren't finite there, 0 * NaN would leave out all examples.
        """
        if _all_finite(self._parts(torch.zeros_like(grad), slots)):
            return
        raise UnsupportedModelError(
            f"a parameter is used in an operation in place ({self.node.name()}) that kept numbers that are not finite, "
            "which can't be left out for their example alone; write it out of place (torch.cat or torch.where instead "
            "of h[:, 0] *= p)",
            place=self.node,
        )


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def not_finite(node: Any) -> list[Tensor]:
    """The tensors a node kept that are not finite throughout."""
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    kept += getattr(node, "saved_tensors", ())
    return [_in_memory(tensor.data) for tensor in kept if isinstance(tensor, Tensor) and not _all_finite([tensor])]


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor without the dimensions along which it was expanded: nobody can write there."""
    return tensor[tuple([slice(None) if stride else slice(0, 1) for stride in tensor.stride()])]


@contextmanager
def _replaced(wrong: Sequence[Tensor], value: float) -> Iterator[None]:
    """Inside, the numbers of these tensors that are not finite are another one."""
    before = [tensor.clone() for tensor in wrong]
    try:
        for tensor in wrong:
            tensor.masked_fill_(~tensor.isfinite(), value)
        yield
    finally:
        for tensor, own in zip(wrong, before, strict=True):
            tensor.copy_(own)
