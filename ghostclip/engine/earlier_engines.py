"""Which engine trained a model before, for a warning."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ghostclip.engine.privacy_engine import PrivacyEngine

__all__ = ["how_to_count", "warn_of_earlier"]

log = logging.getLogger("ghostclip")

# The last engine of each model; for a warning only, as when a notebook's cell is run twice. It keeps neither alive.
_last: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PrivacyEngine]] = weakref.WeakKeyDictionary()


def warn_of_earlier(engine: PrivacyEngine, how_to_count: Callable[[PrivacyEngine], str | None]) -> None:
    """Logs a warning where another engine took steps with the engine's model that this one doesn't count.

    Args:
        engine: a new one.
        how_to_count: what makes it count the steps of an earlier one, in words; None where it does.
    """
    last = _last.get(engine.model)
    earlier = None if last is None else last()
    _last[engine.model] = weakref.ref(engine)
    if earlier is None or not earlier.steps_taken:
        return
    if (remedy := how_to_count(earlier)) is not None:
        log.warning(
            "another engine took %d step%s with this model before; epsilon() of the new one doesn't count them. %s so "
            "that they add up, or train a new model",
            earlier.steps_taken, "s" if earlier.steps_taken != 1 else "", remedy,
        )  # fmt: skip


def how_to_count(engine: PrivacyEngine, earlier: PrivacyEngine) -> str | None:
    """What makes an engine count the steps of an earlier one; None where it does, by their common ledger."""
    if engine.ledger is not None and earlier.ledger is not None and engine.ledger.path == earlier.ledger.path:
        return None
    return 'Give both the same ledger="..."'
