"""Weights of a checkpoint that another library loaded into a model before its training was refused.

What they spent isn't known to a next training of the model, which would begin from them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ghostclip.errors import PrivacyError

__all__ = ["accept", "note", "refuse_noted"]

# An attribute of a model with the checkpoint's path.
MARK = "ghostclip_refused_weights"


def note(model: nn.Module, path: Any) -> None:
    """A training that went on from this checkpoint was refused, perhaps after the model had its weights."""
    vars(model)[MARK] = str(path)


def accept(model: nn.Module) -> None:
    """A checkpoint was restored, with what it spent."""
    vars(model).pop(MARK, None)


def refuse_noted(model: nn.Module) -> None:
    """Raises PrivacyError for a model that was noted."""
    if (path := vars(model).get(MARK)) is not None:
        raise PrivacyError(
            f"the weights of the checkpoint {path} may be in this model, since a training that went on from it was "
            "refused after they were loaded, and what they spent isn't counted; resume from a checkpoint that can be "
            "counted, or build the model anew"
        )
