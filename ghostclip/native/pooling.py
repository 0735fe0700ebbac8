"""The way back through pooling, as single operations of a compiled graph on the CPU.

Inductor asks, for each pixel, which windows it was in, one pixel at a time. Windows that lie side by side are filled
in place of that, and for others torch hands out each window's gradient (a CNN's whole step with max pooling: 0.95).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ghostclip.native.custom_ops import custom_op

__all__ = ["leave_pooling_alone"]


def _like_images(grad: Tensor, images: Tensor, *settings: object) -> Tensor:
    return grad.new_empty(images.shape)


@custom_op(
    "avg_pool2d_backward(Tensor grad, Tensor images, int[] kernel, int[] stride, int[] padding, bool ceil_mode, "
    "bool count_include_pad, int? divisor) -> Tensor",
    _like_images,
)
def _back_through_averages(
    grad: Tensor, images: Tensor, kernel: list[int], stride: list[int], padding: list[int], *settings: Any
) -> Tensor:
    down, along = kernel if len(kernel) == 2 else kernel * 2
    rows, columns = images.shape[-2:]
    side_by_side = list(stride or kernel) == list(kernel) and not any(padding)
    if side_by_side and rows == down * grad.shape[-2] and columns == along * grad.shape[-1]:
        *_, divisor = settings
        each = grad / (divisor or down * along)
        spread = grad.new_empty(*grad.shape[:-1], down, grad.shape[-1], along)
        for y, x in product(range(down), range(along)):
            spread[..., y, :, x] = each
        return spread.view(images.shape)
    return torch.ops.aten.avg_pool2d_backward(grad, images, kernel, stride, padding, *settings).contiguous()


@custom_op(
    "max_pool2d_with_indices_backward(Tensor grad, Tensor images, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool ceil_mode, Tensor indices) -> Tensor",
    _like_images,
)
def _back_to_maxima(*arguments: Any) -> Tensor:
    return torch.ops.aten.max_pool2d_with_indices_backward(*arguments).contiguous()


OWN = {
    getattr(torch.ops.aten, name).default: getattr(torch.ops.ghostclip, name).default
    for name in ("avg_pool2d_backward", "max_pool2d_with_indices_backward")
}


def leave_pooling_alone(graph: GraphModule) -> None:
    """Has inductor call the operations above for the way back through pooling, in place of writing its own."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = OWN.get(node.target, node.target)
    graph.recompile()
