"""The way back through pooling, as single operations of a compiled graph on the CPU.

Inductor asks, for each pixel, which windows it was in, one pixel at a time. Windows that lie side by side are filled
in place of that, and for others torch hands out each window's gradient (a CNN's whole step with max pooling: 0.95).
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["leave_pooling_alone"]


@torch.library.custom_op("ghostclip::avg_pool2d_backward", mutates_args=())
def _back_through_averages(
    grad: Tensor,
    images: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    down, along = kernel if len(kernel) == 2 else kernel * 2
    rows, columns = images.shape[-2:]
    side_by_side = list(stride or kernel) == list(kernel) and not any(padding)
    if side_by_side and rows == down * grad.shape[-2] and columns == along * grad.shape[-1]:
        each = grad / (divisor or down * along)
        spread = grad.new_empty(*grad.shape[:-1], down, grad.shape[-1], along)
        for y, x in product(range(down), range(along)):
            spread[..., y, :, x] = each
        return spread.view(images.shape)
    found = torch.ops.aten.avg_pool2d_backward(
        grad, images, kernel, stride, padding, ceil_mode, count_include_pad, divisor
    )
    return found.contiguous()


@torch.library.custom_op("ghostclip::max_pool2d_with_indices_backward", mutates_args=())
def _back_to_maxima(
    grad: Tensor,
    images: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    found = torch.ops.aten.max_pool2d_with_indices_backward(
        grad, images, kernel, stride, padding, dilation, ceil_mode, indices
    )
    return found.contiguous()


@_back_through_averages.register_fake
@_back_to_maxima.register_fake
def _(grad: Tensor, images: Tensor, *settings: object) -> Tensor:
    return grad.new_empty(images.shape)


OWN = {
    torch.ops.aten.avg_pool2d_backward.default: torch.ops.ghostclip.avg_pool2d_backward.default,
    torch.ops.aten.max_pool2d_with_indices_backward.default: (
        torch.ops.ghostclip.max_pool2d_with_indices_backward.default
    ),
}


def leave_pooling_alone(graph: GraphModule) -> None:
    """Has inductor call the operations above for the way back through pooling, in place of writing its own."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = OWN.get(node.target, node.target)
    graph.recompile()
