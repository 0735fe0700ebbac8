"""Opacus's layers by name: torch's own, clipped by this package's rules, that also load what Opacus's saved."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from ghostclip import nn
from ghostclip.compat.opacus.checkpoints import load_opacus_names

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]


class _OpacusNames:
    """Mixin: a state dict with Opacus's names of the layer's parameters is taken, too."""

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], *rest: Any) -> None:
        load_opacus_names(self, state_dict)  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]


class DPRNN(_OpacusNames, nn.RNN):
    """`torch.nn.RNN` with exact per-example clipping; it also loads state dicts of Opacus's layer."""


class DPLSTM(_OpacusNames, nn.LSTM):
    """`torch.nn.LSTM` with exact per-example clipping; it also loads state dicts of Opacus's layer."""


class DPGRU(_OpacusNames, nn.GRU):
    """`torch.nn.GRU` with exact per-example clipping; it also loads state dicts of Opacus's layer."""


class DPMultiheadAttention(_OpacusNames, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with exact per-example clipping; it also loads state dicts of Opacus's layer."""
