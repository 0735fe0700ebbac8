"""Recurrent cells, one time step a call: sums over the calls of gate gradient (x) input or hidden state.

A user's own loop over time calls one module once a step, so each use tells its step and the steps are concatenated,
cross terms and all (Lee & Kifer 2020, sections 5.3 and 5.4). torch's one operation for a cell hides the pre-activations
of the gates; the forwards here take the steps it takes on the CPU, with the same kernels in the same order, and so give
the same bits there. Elsewhere torch fuses what comes after the products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.errors import UnsupportedModelError
from ghostclip.nn.base import GhostLayer, LayerCall, is_capturing, place_of
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import Dense, PerExampleGrads

__all__ = ["GRUCell", "LSTMCell", "RNNCell"]

INPUT, HIDDEN = ("weight_ih", "bias_ih"), ("weight_hh", "bias_hh")


class _Cell(GhostLayer):
    """What the three cells share."""

    # What torch's cells have, for the type checker.
    hidden_size: int
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: torch.nn.Parameter
    bias_hh: torch.nn.Parameter

    def _is_torchs(self, input: Tensor, *states: Tensor) -> bool:
        """Whether torch's own forward is to do it all: nothing is trained or recorded, or it will say what is wrong."""
        trained = any(parameter.requires_grad for parameter in self.parameters(recurse=False))
        if not (is_capturing() and trained):
            return True
        if input.dim() == 1:
            raise UnsupportedModelError(
                f"{place_of(self)} got one step of one sequence, of shape {list(input.shape)}; give it a batch "
                "dimension: [B, features]"
            )
        return input.dim() != 2 or any(state.dim() not in (1, 2) for state in states)

    def _zeros(self, input: Tensor) -> Tensor:
        return torch.zeros(input.shape[0], self.hidden_size, dtype=input.dtype, device=input.device)

    def _sides(self, input: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Both products, [B, gates * H] each."""
        return F.linear(input, self.weight_ih, self.bias_ih), F.linear(hidden, self.weight_hh, self.bias_hh)

    def _captured_sum(self, input: Tensor, hidden: Tensor) -> Tensor:
        """The pre-activations, [B, gates * H], captured once: both sides have the same gradient."""
        from_input, from_hidden = self._sides(input, hidden)
        return self.capture(from_hidden.add_(from_input), input, hidden, parameters=(*INPUT, *HIDDEN), batch_dim=0)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        if name.startswith("bias"):
            return Dense(grad)
        seen = inputs[-1] if name == "weight_hh" else inputs[0]
        return OuterProduct(grad.unsqueeze(1), seen.unsqueeze(1), getattr(self, name).shape)

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return (*INPUT, *HIDDEN)


class RNNCell(_Cell, torch.nn.RNNCell, wraps=torch.nn.RNNCell):
    """`torch.nn.RNNCell` that can be clipped; input [B, features], hidden state [B, H], tanh or relu."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """As torch's; raises UnsupportedModelError for an input without a batch dimension while recording gradients."""
        if self.nonlinearity not in ("tanh", "relu") or self._is_torchs(input, *([] if hx is None else [hx])):
            return super().forward(input, hx)
        z = self._captured_sum(input, self._zeros(input) if hx is None else hx)
        return z.tanh() if self.nonlinearity == "tanh" else z.relu()


class LSTMCell(_Cell, torch.nn.LSTMCell, wraps=torch.nn.LSTMCell):
    """`torch.nn.LSTMCell` that can be clipped; input [B, features], hidden and cell state [B, H]."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """As torch's; raises UnsupportedModelError for an input without a batch dimension while recording gradients."""
        if self._is_torchs(input, *(hx or ())):
            return super().forward(input, hx)
        hidden, cell = hx or (self._zeros(input),) * 2
        i, f, g, o = self._captured_sum(input, hidden).unsafe_chunk(4, 1)
        i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
        after = (f * cell).add_(i * g)
        return o * after.tanh(), after


class GRUCell(_Cell, torch.nn.GRUCell, wraps=torch.nn.GRUCell):
    """`torch.nn.GRUCell` that can be clipped; input [B, features], hidden state [B, H]."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """As torch's; raises UnsupportedModelError for an input without a batch dimension while recording gradients."""
        if self._is_torchs(input, *([] if hx is None else [hx])):
            return super().forward(input, hx)
        hidden = self._zeros(input) if hx is None else hx
        from_input, from_hidden = self._sides(input, hidden)
        from_input = self.capture(from_input, input, parameters=INPUT, batch_dim=0)
        from_hidden = self.capture(from_hidden, hidden, parameters=HIDDEN, batch_dim=0)
        r_input, z_input, n_input = from_input.unsafe_chunk(3, 1)
        r_hidden, z_hidden, n_hidden = from_hidden.unsafe_chunk(3, 1)
        r, z = r_hidden.add_(r_input).sigmoid_(), z_hidden.add_(z_input).sigmoid_()
        n = n_input.add(n_hidden.mul_(r)).tanh_()
        return (hidden - n).mul_(z).add_(n)
