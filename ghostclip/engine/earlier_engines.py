"""Which engine trained a model before, for a warning."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ghostclip.engine.privacy_engine import PrivacyEngine

__all__ = ["warn_of_earlier"]

log = logging.getLogger("ghostclip")

# The last engine of each model; for a warning only, as when a notebook's cell is run twice. It keeps neither alive.
_last: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PrivacyEngine]] = weakref.WeakKeyDictionary()


def warn_of_earlier(engine: PrivacyEngine) -> None:
    """Logs a warning where another engine took steps with the engine's model, and they don't share a ledger."""
    last = _last.get(engine.model)
    earlier = None if last is None else last()
    _last[engine.model] = weakref.ref(engine)
    if earlier is None or not earlier.steps_taken:
        return
    if engine.ledger is not None and earlier.ledger is not None and engine.ledger.path == earlier.ledger.path:
        return
    log.warning(
        "another engine took %d step%s with this model before; epsilon() of the new one doesn't count them. Give both "
        'the same ledger="..." so that they add up, or train a new model',
        earlier.steps_taken,
        "s" if earlier.steps_taken != 1 else "",
    )
