"""What operations do with the rows of a tensor: by the names that autograd has for them, and the indices they saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.nodes import shape_of, signed
from ghostclip.graph.shared.boundary import ELEMENTWISE, EXPAND, GROUP_NORM, LAYER_NORM

__all__ = [
    "ALONG",
    "ATTENTION",
    "DIRECTED",
    "FIRST",
    "FUNCTIONS",
    "LOSS_FUNCTIONS",
    "NOBODY",
    "OTHERS_ALONG",
    "PERMUTATIONS",
    "PICKS",
    "POINTWISE",
    "PRODUCTS",
    "PUTS",
    "RELAYING",
    "ROW_BY_ROW",
    "SCATTERS",
    "SPLITS",
    "VIEWS",
    "WITH_A_TABLE",
    "NotFollowed",
    "in_view",
    "narrowed",
    "saved_places",
]

RELAYING = {f"{name}Backward0" for name in ("Alias", "Clone", "ToCopy")}
FUNCTIONS = (
    "Abs Celu Clamp ClampMax ClampMin Elu Erf Exp Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu Log LogSigmoidForward "
    "MaskedFill Mish NativeDropout Neg Reciprocal Relu Rsqrt Sigmoid Silu Softplus Sqrt Tanh"
)
POINTWISE = ELEMENTWISE | RELAYING | {EXPAND, "ClampBackward1"} | {f"{name}Backward0" for name in FUNCTIONS.split()}
# All numbers in their order, in another shape.
VIEWS = {f"{name}Backward0" for name in ("ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View")}
VIEWS |= {"SqueezeBackward1", "SqueezeBackward2"}
SPLITS = {"SplitBackward0", "SplitWithSizesBackward0"}
# Along dimensions that they keep, of what they were given.
DIRECTED = "Amax Cat Gather Glu LogSoftmax Logsumexp Max Select Slice Softmax Topk Unbind"
ALONG = SPLITS | {"MeanBackward1", "SumBackward1"} | {f"{name}Backward0" for name in DIRECTED.split()}
# In the place of a row's example: nothing uses it.
NOBODY = -1
# The place of the input that has the rows; all others are shared.
PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1, "GroupedMmBackward0": 0, "NllLossBackward0": 0}
ROW_BY_ROW = {"BmmBackward0"}
PICKS = {"IndexBackward0", "IndexSelectBackward0"}
PUTS = {"IndexAddBackward0", "IndexPutBackward0"}
LOSS_FUNCTIONS = {
    f"{name}Backward0"
    for name in ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "MseLoss", "PreluKernel",
                 "SmoothL1Loss", "SoftMarginLoss")
}  # fmt: skip
POOLS = {
    f"{name}Backward0"
    for name in ("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AvgPool2D", "AvgPool3D", "MaxPool2DWithIndices",
                 "MaxPool3DWithIndices")
}  # fmt: skip
# Along their first dimension: what they are given has it, too.
FIRST = ROW_BY_ROW | POOLS
# Operations of rows with a matrix, a filter or a scale.
WITH_A_TABLE = {*PRODUCTS, "ConvolutionBackward0", GROUP_NORM, LAYER_NORM}
OTHERS_ALONG = ALONG - SPLITS | {f"{name}Backward0" for name in ("Cumsum", "LinalgVectorNorm", "SafeSoftmax")}
SCATTERS = {"ScatterAddBackward0", "ScatterReduceBackward0"}
PERMUTATIONS = {f"{name}Backward0" for name in ("Permute", "T", "Transpose")}
# Its mask is added to the scores.
ATTENTION = "ScaledDotProductFlashAttentionForCpuBackward0"


class NotFollowed(Exception):
    """Rows get into an operation that isn't known to keep them apart."""


def in_view(shape: torch.Size, dim: int, other: torch.Size) -> int | None:
    """Where a dimension is in the same numbers, in their order, of another shape; None where it isn't one there."""
    before = shape[:dim].numel()
    for place, size in enumerate(other):
        if size == shape[dim] and other[:place].numel() == before:
            return place
    return None


def narrowed(index: Tensor) -> Tensor:
    """An index [n, ...] without the dimensions along which it is repeated."""
    while index.dim() > 1 and (index.shape[-1] == 1 or (index.shape[-1] > 1 and index.stride(-1) == 0)):
        index = index.select(-1, 0)
    return index


def saved_places(node: Any) -> tuple[int, Tensor, int]:
    """(dimension, [n, ...], how many dimensions the index is of) of the places that rows are picked from or put to."""
    if hasattr(node, "_saved_dim"):
        index = node._saved_index
        if not index.dim():
            raise NotFollowed(node.name())
        return signed(node._saved_dim) % len(shape_of((node, 0))), index, 1
    places = [place for place, index in enumerate(node._saved_indices) if index is not None]
    indices = [node._saved_indices[place] for place in places]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if places != list(range(places[0], places[0] + len(places))) or (masks and len(indices) > 1):
        raise NotFollowed(node.name())
    if masks:
        return places[0], masks[0].nonzero()[:, 0], masks[0].dim()
    return places[0], torch.broadcast_tensors(*indices)[0], len(places)
