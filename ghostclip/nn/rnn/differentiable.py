"""A recurrence's backward that can be differentiated again: for losses that contain a gradient (gradient penalties).

cuDNN's kernels have no second derivative, and autograd records nothing of the ways back in kernels.py. So a backward
with ``create_graph=True`` runs the recurrence once more, one time step after another, and lets autograd go back through
that. Weights then enter the graph a second time, in products outside of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.term import to_float32

from .trace import Order

__all__ = ["recorded_gradients"]

Grads = tuple[Tensor | None, ...]


def recorded_gradients(
    mode: str, order: Order | None, tensors: Grads, came: tuple[Tensor | None, ...], needed: tuple[bool, ...]
) -> Grads:
    """Gradients at the inputs of a direction, with a graph of their own.

    Args:
        mode: of torch's recurrent layers.
        order: of the rows of a packed sequence; None for padded ones.
        tensors: W_ih, W_hh, b_ih, b_hh, W_hr, x, h0, c0, as `Recurrence.apply` takes them.
        came: gradients at the output, h_n and c_n; None where nothing came.
        needed: of which ``tensors`` gradients are wanted.

    Returns:
        One for each of ``tensors``, of its shape and type; None where it is not needed or nothing depends on it.
    """
    found: list[Tensor | None] = [None] * len(tensors)
    with torch.enable_grad():
        # Gradients are taken at aliases: what came before x may have used the same weights.
        matrices = [None if t is None else t.t() for t in (tensors[0], tensors[1], tensors[4])]
        aliases = [None if t is None else t.view_as(t) for t in tensors]
        aliases[0], aliases[1], aliases[4] = matrices
        results = _recurrence(mode, order, aliases)
        pairs = [(result, grad) for result, grad in zip(results, came, strict=True) if grad is not None]
        places = [
            n for n, (alias, wanted) in enumerate(zip(aliases, needed, strict=True)) if wanted and alias is not None
        ]
        if pairs and places:
            outputs, grads = zip(*pairs, strict=True)
            wanted = [aliases[place] for place in places]
            gradients = torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
            for place, grad in zip(places, gradients, strict=True):
                found[place] = grad.t() if grad is not None and place in (0, 1, 4) else grad
    return tuple(found)


def _recurrence(mode: str, order: Order | None, tensors: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, h_n and c_n of one direction, by operations for each time step; matrices in ``tensors`` are transposed.

    In the layouts and types of ``x``, ``h`` and ``c``.
    """
    kind = tensors[5].dtype
    widened: list[Any] = [None if t is None else to_float32(t) for t in tensors]
    from_x, from_h, bias_ih, bias_hh, project, x, h, c = widened
    h, c = h[0], None if c is None else c[0]
    steps = x if order is None else order.padded(x)
    states = []
    for t, inputs in enumerate(steps.unbind(0)):
        after = _step(mode, inputs @ from_x, h @ from_h, bias_ih, bias_hh, h, c)
        new_h, new_c = after if project is None else (after[0] @ project, after[1])
        if order is not None:
            ended = order.padding[t].unsqueeze(1)
            new_h = torch.where(ended, h, new_h)
            new_c = None if c is None or new_c is None else torch.where(ended, c, new_c)
        h, c = new_h, new_c
        states.append(h)
    output = torch.stack(states)
    output = output if order is None else order.packed(output)
    return output.to(kind), h.unsqueeze(0).to(kind), None if c is None else c.unsqueeze(0).to(kind)


def _step(
    mode: str, at_x: Tensor, at_h: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Hidden and cell state [B, H] after one step, from both sides' products [B, gates * H] (torch's formulas)."""
    at_x = at_x if bias_ih is None else at_x + bias_ih
    at_h = at_h if bias_hh is None else at_h + bias_hh
    if mode == "GRU":
        (r_x, z_x, n_x), (r_h, z_h, n_h) = at_x.chunk(3, 1), at_h.chunk(3, 1)
        z, n = (z_x + z_h).sigmoid(), (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
        return n + z * (h - n), None
    gates = at_x + at_h
    if mode != "LSTM":
        return gates.relu() if mode == "RNN_RELU" else gates.tanh(), None
    assert c is not None
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c
