"""torch's fused recurrent kernels: the forwards of recurrent layers, one direction of one layer a call.

On CUDA cuDNN wants a call's weights in one piece of memory, laid out its own way. torch lays out all layers and
directions of a module together, so that a part of them is no such piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import _VF, Tensor
from torch.nn.utils.rnn import PackedSequence

from ghostclip.native.custom_ops import custom_op, is_traced
from ghostclip.nn.grad_mode import keeping_grad_mode

__all__ = ["KERNELS", "in_one_chunk", "native", "native_packed", "on_cudnn"]

# By the mode of torch's recurrent layers.
KERNELS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": _VF.lstm,
    "GRU": _VF.gru,
    "RNN_TANH": _VF.rnn_tanh,
    "RNN_RELU": _VF.rnn_relu,
}


@keeping_grad_mode
def native(
    mode: str, x: Tensor, initial: tuple[Tensor, ...], weights: list[Tensor], bias: bool, training: bool
) -> tuple[Tensor, ...]:
    """torch's output and last states of one direction, detached, with the values of a training forward."""
    if is_traced() and len(weights) in (2, 4):
        with torch.no_grad():
            states, weights = ([each.detach() for each in tensors] for tensors in (initial, weights))
            return tuple(_operation(mode, x.detach(), states, weights, bias, training))
    return _by_kernel(mode, x, initial, weights, bias, training)


def _by_kernel(
    mode: str, x: Tensor, initial: tuple[Tensor, ...], weights: list[Tensor], bias: bool, training: bool
) -> tuple[Tensor, ...]:
    """`native` by torch's own kernel."""
    # oneDNN's LSTM has one kernel for training and one for inference, told apart by grad mode; they differ in the last
    # bit. The other kernels are told apart by the weights' requires_grad (matmul folds time into the batch).
    fused = mode == "LSTM" and x.device.type == "cpu" and x.dtype != torch.float64 and len(weights) in (2, 4)
    with torch.set_grad_enabled(fused):
        if fused:
            x, weights = x.detach(), [weight.detach() for weight in weights]
            initial = tuple(state.detach() for state in initial)
        hidden, weights = initial if len(initial) > 1 else initial[0], in_one_chunk(mode, weights, bias)
        return KERNELS[mode](x, hidden, weights, bias, 1, 0.0, training, False, False)


@custom_op(
    "recurrence(str mode, Tensor x, Tensor[] initial, Tensor[] weights, bool bias, bool training) -> Tensor[]",
    lambda mode, x, initial, *rest: [x.new_empty(x.shape[0], *initial[0].shape[1:]), *map(torch.empty_like, initial)],
)
def _operation(
    mode: str, x: Tensor, initial: list[Tensor], weights: list[Tensor], bias: bool, training: bool
) -> list[Tensor]:
    """`native` as one operation of a graph: results in memory of their own."""
    output, *lasts = _by_kernel(mode, x, tuple(initial), weights, bias, training)
    return [output.contiguous(), *(last.clone() for last in lasts)]


@keeping_grad_mode
def native_packed(
    mode: str, rows: PackedSequence, initial: tuple[Tensor, ...], weights: list[Tensor], bias: bool, training: bool
) -> list[tuple[Tensor, ...]]:
    """The same of each direction for a packed sequence; only the last states are in the user's order of examples."""
    directions = initial[0].shape[0]
    with torch.no_grad():
        hidden, weights = initial if len(initial) > 1 else initial[0], in_one_chunk(mode, weights, bias, directions)
        output, *lasts = KERNELS[mode](
            rows.data, rows.batch_sizes, hidden, weights, bias, 1, 0.0, training, directions > 1
        )
        if rows.unsorted_indices is not None:
            lasts = [last.index_select(1, rows.unsorted_indices) for last in lasts]
        if directions == 1:
            return [(output, *lasts)]
        return [
            (part.contiguous(), *(last[way : way + 1].clone() for last in lasts))
            for way, part in enumerate(output.chunk(directions, dim=1))
        ]


def on_cudnn(tensor: Tensor) -> bool:
    """Whether torch's recurrences of such tensors are cuDNN's."""
    return tensor.is_cuda and torch.cudnn_is_acceptable(tensor)


def in_one_chunk(mode: str, weights: list[Tensor], bias: bool, directions: int = 1) -> list[Tensor]:
    """The weights of one layer as they are or, where torch would give them to cuDNN, in a chunk of memory of their own.

    cuDNN always adds biases. Of a layer without, torch has zeros for them behind all weights; a part's weights at the
    start of a larger chunk would be taken for a chunk of their own, and what follows them for biases.
    """
    first, each = weights[0], len(weights) // directions
    if not on_cudnn(first) or is_traced() or _are_a_chunk(weights, bias, each):
        return weights
    projected = weights[each - 1].shape[0] if each % 2 else 0
    hidden = weights[each - 1].shape[1] if projected else weights[1].shape[1]
    copies = [weight.detach().clone() for weight in weights]
    number = torch.backends.cudnn.rnn.get_cudnn_mode(mode)
    with torch.no_grad():
        # Gives each of the copies its place in the chunk.
        torch._cudnn_rnn_flatten_weight(
            copies, each, first.shape[1], number, hidden, projected, 1, False, directions > 1
        )
    return copies


def _are_a_chunk(weights: list[Tensor], bias: bool, each: int) -> bool:
    """Whether the weights, ``each`` a direction, are all there is in one memory but for the zeros instead of biases."""
    memory = weights[0].untyped_storage()
    numbers = sum(weight.numel() for weight in weights)
    if not bias:
        numbers += 2 * sum(weight.shape[0] for weight in weights[::each])
    together = all(weight.untyped_storage().data_ptr() == memory.data_ptr() for weight in weights)
    return together and memory.nbytes() == numbers * weights[0].element_size()
