"""State dicts that Opacus saved: its names turned into torch's, which the models here have."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

__all__ = ["from_opacus", "load_opacus_names"]

# Opacus's wrapper of a model has it in this attribute.
PREFIX = "_module."
# A cell of a recurrent layer: lstm.l0_reverse.ih.weight is torch's lstm.weight_ih_l0_reverse.
CELL = re.compile(r"(?P<place>(?:.*\.)?)(?P<cell>l\d+(?:_reverse)?)\.(?P<side>ih|hh)\.(?P<kind>weight|bias)")
PROJECTIONS = ("qlinear", "klinear", "vlinear")


def from_opacus(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the entries of a state dict that Opacus saved to torch's names. Other names stay.

    Args:
        state_dict: {name: value} of a model that Opacus wrapped (every name begins with "_module.") or that has its
            layers DPRNN, DPLSTM, DPGRU, DPMultiheadAttention.

    Returns:
        {name: value} without "_module.". Recurrent layers have ``weight_ih_l0`` and the like, each once; attention has
        ``in_proj_weight`` (or ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight`` if their shapes differ),
        ``in_proj_bias``, ``bias_k`` and ``bias_v``.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict {{name: value}}; got {state_dict!r}")
    found = dict(state_dict)
    if found and all(name.startswith(PREFIX) for name in found):
        found = {name.removeprefix(PREFIX): value for name, value in found.items()}
    for name in list(found):
        if cell := CELL.fullmatch(name):
            value = found.pop(name)
            found.setdefault("{place}{kind}_{side}_{cell}".format(**cell.groupdict()), value)
    for place in [name.removesuffix("qlinear.weight") for name in found if name.endswith("qlinear.weight")]:
        _join_projections(found, place)
    return found


def _join_projections(found: dict[str, Any], place: str) -> None:
    """Turns the names of the attention whose names begin with ``place`` into torch's."""
    weights = [found.pop(f"{place}{each}.weight") for each in PROJECTIONS]
    if all(weight.shape == weights[0].shape for weight in weights):
        found[f"{place}in_proj_weight"] = torch.cat(weights)
    else:
        found |= {f"{place}{letter}_proj_weight": weight for letter, weight in zip("qkv", weights, strict=True)}
    if f"{place}qlinear.bias" in found:
        found[f"{place}in_proj_bias"] = torch.cat([found.pop(f"{place}{each}.bias") for each in PROJECTIONS])
    for letter in "kv":
        if (bias := found.pop(f"{place}seq_bias_{letter}.bias", None)) is not None:
            found[f"{place}bias_{letter}"] = bias.reshape(1, 1, -1)


def load_opacus_names(module: nn.Module, state_dict: MutableMapping[str, Any], *_: Any) -> None:
    """A ``load_state_dict`` pre-hook: takes Opacus's names for torch's, in the copy that ``load_state_dict`` made."""
    found = from_opacus(state_dict)
    state_dict.clear()
    state_dict.update(found)
