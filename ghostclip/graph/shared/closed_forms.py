"""The per-example gradients at a boundary: by formulas of known operations, else by each operation's own backward.

For x @ P with x [3, 2] and P [2, 4], and one row of x an example, example i's gradient at P is the outer product of
x[i] and row i of the gradient at the output. Operations have a formula here if models use them in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import shape_of
from ghostclip.graph.shared.boundary import BroadcastBoundary, Target, matrix_of, untransposed
from ghostclip.graph.shared.own_backward import OwnBackward
from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.ragged import RowIndex, regrouped
from ghostclip.norms.rows import LookupGrads
from ghostclip.norms.term import Dense, PerExampleGrads, split_examples, to_float32

__all__ = ["terms_at"]

LAYER_NORM, GROUP_NORM = "NativeLayerNormBackward0", "NativeGroupNormBackward0"
# Their backward gives a gradient of the output's shape to an input that was broadcast, and leaves summing to autograd.
ELEMENTWISE = [
    f"{name}Backward{variant}"
    for name in (
        "Add",
        "Addcmul",
        "Div",
        "Lerp",
        "Logaddexp",
        "Maximum",
        "Minimum",
        "Mul",
        "Pow",
        "Rsub",
        "Sub",
        "Where",
    )
    for variant in (0, 1)
]


def terms_at(boundary: BroadcastBoundary, grad: Tensor) -> Iterator[tuple[Target, PerExampleGrads]]:
    """The per-example gradients of what all examples share at a boundary, each at one of its `targets`.

    Args:
        boundary: with the graph there still.
        grad: of the summed losses at the output.
    """
    name = boundary.node.name()
    if boundary.number and name in (LAYER_NORM, GROUP_NORM):
        return  # mean and deviation, which second derivatives use, depend on no scale and no shift
    left, form = [], FORMS.get(name)
    for slot in boundary.shared:
        targets = boundary.targets(slot)
        found = None if form is None else form(boundary, grad, slot)
        if found is None:
            left.append(slot)
        else:
            yield from zip(targets, found if isinstance(found, list) else [found], strict=True)
    if left:
        own = OwnBackward(*boundary.edge, boundary.dim)
        for slot, each in own.per_example(grad, left, boundary.entries(grad)).items():
            yield (boundary.input(slot), None), Dense(each)


def _of_broadcast(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> Dense | None:
    """An input that was repeated for the examples."""
    shape = shape_of(boundary.input(slot))
    if not boundary.repeats(shape):
        return None
    each = OwnBackward(*boundary.edge, boundary.dim).gradients(grad)[slot]
    return boundary.summed((grad.new_zeros(()) if each is None else each).expand(grad.shape), shape)


def _of_expanded(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> Dense | None:
    shape = shape_of(boundary.input(slot))
    return boundary.summed(grad, shape) if boundary.repeats(shape) else None


def _of_product(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> PerExampleGrads | None:
    """The P of x @ P or P @ x.T, or the b of b + x @ P."""
    node = boundary.node
    if node.name() == "AddmmBackward0" and slot == 0:
        beta = node._saved_beta
        return _of_expanded(boundary, grad if beta == 1 else grad * beta, slot)
    if grad.is_complex() or not boundary.is_product(slot):
        return None
    x = node._saved_mat1 if node.name() == "AddmmBackward0" else node._saved_self
    factors = [each.flatten(0, -2) for each in ((x, grad) if slot else (grad.mT, node._saved_mat2.mT))]
    (edge, part), transposed = matrix_of(boundary.input(slot))
    left, right = factors[::-1] if transposed else factors
    shape = shape_of(edge) if part is None else torch.Size((1, *shape_of(edge)[1:]))
    return boundary.regrouped(OuterProduct(left.unsqueeze(1), right.unsqueeze(1), shape))


def _of_grouped_product(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> list[PerExampleGrads] | None:
    """The matrices [E, d, p] of experts, each of which multiplies some rows, one expert's after another's."""
    targets = boundary.targets(slot)
    if targets[0][1] is None:
        return None
    stops = boundary.node._saved_offs.tolist()
    if stops[-1:] != [len(grad)]:
        raise UnsupportedModelError(
            f"``offs`` of a grouped product gives only {stops[-1]} of its {len(grad)} rows to an expert; leave out the "
            "others, or, where experts are spread over devices, keep all of them on each"
        )
    x, (_, transposed) = boundary.node._saved_self, untransposed(boundary.input(slot))
    left, right = (grad, x) if transposed else (x, grad)
    term = OuterProduct(left.unsqueeze(1), right.unsqueeze(1), torch.Size((1, *shape_of(targets[0][0])[1:])))
    used = boundary.rows.order.used if isinstance(boundary.rows.order, RowIndex) else boundary.rows.used
    term = term if used is None else term.keep_only(used)
    index = boundary.rows.owners(len(grad), boundary.examples, grad.device)
    return [
        regrouped(term.pick(slice(start, stop)), 1, RowIndex(index[start:stop], boundary.examples))
        for start, stop in pairwise([0, *stops])
    ]


def _of_batched_product(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> PerExampleGrads | None:
    """A factor [G, d, p] of G products of two matrices, whose rows or columns are the examples'."""
    if boundary.is_product(slot):
        return _of_product(boundary, grad, slot)
    order = boundary.rows.order
    if boundary.dim != (2, 1)[slot] or isinstance(order, RowIndex) or boundary.rows.used is not None:
        return None
    if grad.is_complex():
        return None
    factors = (grad.mT, boundary.node._saved_mat2.mT) if slot == 0 else (boundary.node._saved_self, grad)
    own = [split_examples(to_float32(each).movedim(1, 0), boundary.count, order) for each in factors]
    return Dense(torch.einsum("btgd,btgp->bgdp", *own))


def _of_table(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> PerExampleGrads | None:
    """A table of which each example looked up rows of its own."""
    node, shape = boundary.node, shape_of(boundary.input(slot))
    several = node.name() == "IndexBackward0" and len(node._saved_indices) != 1
    indices = node._saved_indices[0] if node.name() == "IndexBackward0" else node._saved_indices
    if slot or several or indices.dtype in (torch.bool, torch.uint8) or boundary.dim >= indices.dim():
        return None
    rows = indices.movedim(boundary.dim, 0).unsqueeze(1).flatten(1)
    values = to_float32(grad).movedim(boundary.dim, 0).reshape(*rows.shape, shape[1:].numel())
    if 0 <= (padding := getattr(node, "_saved_padding_idx", -1)) < shape[0]:
        values = values.masked_fill((rows == padding).unsqueeze(2), 0)
    return boundary.regrouped(LookupGrads(rows % shape[0], values, shape))


def _of_convolution(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> PerExampleGrads | None:
    """A filter (slot 1) or a bias (2); None where a transposed convolution made positions of its own."""
    node = boundary.node
    if slot == 0 or boundary.dim or grad.is_complex():
        return None
    if slot == 2:
        return Dense(boundary.sums(grad).flatten(2).sum(2))
    images, grads = node._saved_input, grad
    if node._saved_transposed:
        # The backward of a convolution, which takes the gradient as images.
        images, grads = grads, images
        if any(more >= step for more, step in zip(node._saved_output_padding, node._saved_stride, strict=True)):
            return None
    geometry = Geometry(node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_groups)
    return boundary.regrouped(ConvGrads(images, grads, shape_of(boundary.input(slot)), geometry))


def _of_norm(boundary: BroadcastBoundary, grad: Tensor, slot: int) -> Dense | None:
    """A normalization's scale (slot 1) or shift (2)."""
    node, grad, shape = boundary.node, to_float32(grad), shape_of(boundary.input(slot))
    groups = node.name() == GROUP_NORM
    first_normalized = 1 if groups else grad.dim() - len(node._saved_normalized_shape)
    if slot == 0 or boundary.dim >= first_normalized:
        return None
    if slot == 1:
        x, mean, rstd = (to_float32(t) for t in (node._saved_input, node._saved_result1, node._saved_result2))
        if groups:
            x = x.unflatten(1, (node._saved_group, -1)).flatten(2)
            mean, rstd = mean.unsqueeze(2), rstd.unsqueeze(2)
        grad = grad * ((x - mean) * rstd).view_as(grad)
    found = boundary.summed(grad, torch.Size((*shape, *(1,) * (grad.dim() - 2))) if groups else shape)
    return Dense(found.gradients.reshape(-1, *shape))


Form = Callable[[BroadcastBoundary, Tensor, int], PerExampleGrads | list[PerExampleGrads] | None]
FORMS: dict[str, Form] = {
    **dict.fromkeys(ELEMENTWISE, _of_broadcast),
    "ExpandBackward0": _of_expanded,
    "AddmmBackward0": _of_product,
    "MmBackward0": _of_product,
    "GroupedMmBackward0": _of_grouped_product,
    "BmmBackward0": _of_batched_product,
    "EmbeddingBackward0": _of_table,
    "IndexBackward0": _of_table,
    "ConvolutionBackward0": _of_convolution,
    LAYER_NORM: _of_norm,
    GROUP_NORM: _of_norm,
}
