"""Per-example gradients of convolution weights, in one to three dimensions.

A convolution is a linear layer over patches (im2col), so its gradient is the sum of outer products of `outer`
(Lee & Kifer 2020, section 5.2, algorithm 3). Which way is cheapest depends on the shape, so several are offered:

    patches   im2col and bmm, a chunk of examples at a time
    gram      im2col and Gram matrices
    grouped   the native weight gradient, the batch folded into groups
    native    the native weight gradient, one call an example
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dense import Dense, squared_norms
from .outer import Outer, chunks
from .term import Answer, Candidate, Term, wide, zero_examples

__all__ = ["Geometry", "Patches", "patches", "weight_gradient"]


@dataclass(frozen=True)
class Geometry:
    """What a convolution does besides multiplying: all tuples have one entry a spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def patches(images: Tensor, kernel: tuple[int, ...], output: tuple[int, ...], geometry: Geometry) -> Tensor:
    """im2col: images [B, C, *S] to [B, C * prod(kernel), prod(output)], by one strided view and one copy."""
    if any(geometry.padding):
        amounts = [side for amount in reversed(geometry.padding) for side in (amount, amount)]
        images = torch.nn.functional.pad(images, amounts)
    images = images.contiguous()
    batch, channels = images.stride()[:2]
    spatial = images.stride()[2:]
    view = images.as_strided(
        (*images.shape[:2], *kernel, *output),
        (
            batch,
            channels,
            *(step * dilation for step, dilation in zip(spatial, geometry.dilation, strict=True)),
            *(step * stride for step, stride in zip(spatial, geometry.stride, strict=True)),
        ),
    )
    return view.reshape(images.shape[0], images.shape[1] * math.prod(kernel), math.prod(output))


def weight_gradient(images: Tensor, grads: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The batch's weight gradient [*shape] by torch's own kernel, for images [B, C, *S] and grads [B, P, *O]."""
    zeros = [0] * len(geometry.stride)
    # Only the shape of the weight is read; no memory stands behind it.
    weight = images.new_empty(()).expand(shape)
    return torch.ops.aten.convolution_backward(
        grads, images, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, zeros,
        geometry.groups, [False, True, False],
    )[1]  # fmt: skip


@dataclass(eq=False)
class Patches(Term):
    """The weight of a convolution.

    Attributes:
        images: [B, C, *S], padded already where the padding is not symmetric zeros.
        grads: [B, P, *O], gradients at the pre-activation.
        shape: of the weight, [P, C / groups, *kernel].
        geometry: stride, padding, dilation, groups.
    """

    images: Tensor
    grads: Tensor
    shape: torch.Size
    geometry: Geometry

    @property
    def key(self) -> tuple:
        batch = 1 << (self.images.shape[0] - 1).bit_length()
        sizes = (*self.images.shape[1:], *self.grads.shape[1:], *self.shape)
        return ("convolution", batch, sizes, self.geometry, self.images.dtype, self.images.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grads, self.images)

    def outer(self, part: slice = slice(None)) -> Outer:
        """The examples of ``part`` as outer products over positions; groups folded into the batch."""
        images, grads = wide(self.images[part]), wide(self.grads[part])
        groups = self.geometry.groups
        columns = patches(images, self.shape[2:], self.grads.shape[2:], self.geometry)
        right = columns.unflatten(1, (groups, -1)).flatten(0, 1)
        left = grads.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1)
        return Outer(left.mT, right.mT, self.shape, groups)

    def candidates(self) -> dict[str, Candidate]:
        batch, positions = self.grads.shape[0], math.prod(self.grads.shape[2:])
        outputs, inputs = self.shape[0], math.prod(self.shape[1:])
        product = 2.0 * batch * positions * outputs * inputs
        pairs = 2.0 * batch * positions**2 * (outputs + inputs * self.geometry.groups)
        return {
            "patches": Candidate("direct", lambda keep: self._chunked("direct", keep), product, keeps=True),
            "gram": Candidate("gram", lambda keep: self._chunked("gram", keep), pairs),
            "grouped": Candidate("direct", self._grouped, 1.5 * product, keeps=True),
            "native": Candidate("direct", self._native, 2.0 * product, keeps=True),
        }

    def _keep(self, keep: bool) -> Tensor | None:
        return wide(self.grads).new_empty(self.grads.shape[0], *self.shape) if keep else None

    def _chunked(self, way: str, keep: bool) -> Answer:
        bytes_per_example = 4 * math.prod(self.shape[1:]) * self.geometry.groups * math.prod(self.grads.shape[2:])
        squared = wide(self.grads).new_empty(self.grads.shape[0])
        kept = self._keep(keep and way == "direct")
        for part in chunks(self.grads.shape[0], bytes_per_example):
            answer = self.outer(part).by(way, kept is not None)
            squared[part] = answer.squared_norms
            if kept is not None and answer.kept is not None:
                kept[part] = answer.kept
        return Answer(squared, kept)

    def _grouped(self, keep: bool) -> Answer:
        images, grads = wide(self.images), wide(self.grads)
        squared, kept = grads.new_empty(grads.shape[0]), self._keep(keep)
        for part in chunks(grads.shape[0], 4 * math.prod(self.shape)):
            count = images[part].shape[0]
            gradients = weight_gradient(
                images[part].flatten(0, 1).unsqueeze(0),
                grads[part].flatten(0, 1).unsqueeze(0),
                torch.Size((count * self.shape[0], *self.shape[1:])),
                replace(self.geometry, groups=count * self.geometry.groups),
            ).unflatten(0, (count, -1))
            squared[part] = squared_norms(gradients)
            if kept is not None:
                kept[part] = gradients
        return Answer(squared, kept)

    def _native(self, keep: bool) -> Answer:
        images, grads = wide(self.images), wide(self.grads)
        squared, kept = grads.new_empty(grads.shape[0]), self._keep(keep)
        for example in range(grads.shape[0]):
            part = slice(example, example + 1)
            gradient = weight_gradient(images[part], grads[part], self.shape, self.geometry)
            squared[part] = squared_norms(gradient.unsqueeze(0))
            if kept is not None:
                kept[example] = gradient
        return Answer(squared, kept)

    def per_example(self) -> Tensor:
        return self.outer().per_example()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        images, grads = wide(self.images), wide(self.grads)
        if grads.shape[0] == 0:
            return grads.new_zeros(self.shape)
        scale = weights.to(grads.dtype).view(-1, *[1] * (grads.dim() - 1))
        return weight_gradient(images, grads * scale, self.shape, self.geometry)

    def keep_only(self, keep: Tensor) -> Patches:
        return replace(self, images=zero_examples(self.images, keep), grads=zero_examples(self.grads, keep))

    def regroup(self, count: int, major: str) -> Term:
        if self.geometry.groups > 1:
            return Dense(self.per_example()).regroup(count, major)
        return self.outer().regroup(count, major)
