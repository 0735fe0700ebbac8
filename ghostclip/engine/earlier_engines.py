"""Which engine trained a model before, for a warning."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ghostclip.engine.privacy_engine import PrivacyEngine

__all__ = ["forget_earlier", "how_to_count", "warn_of_earlier"]

log = logging.getLogger("ghostclip")

# An attribute of each model with its last engine; for a warning only, as when a notebook's cell is run twice.
MARK = "ghostclip_trained"


class _Trained:
    """Knows an engine without keeping it alive; a copy, or what is stored, has plain figures in its place."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self.engine = weakref.ref(engine)

    def __reduce__(self) -> tuple[type, tuple[()], dict[str, Any]]:
        if (engine := self.engine()) is None:
            return SimpleNamespace, (), {"steps_taken": 0, "ledger": None}
        ledger = None if engine.ledger is None else SimpleNamespace(path=engine.ledger.path)
        return SimpleNamespace, (), {"steps_taken": engine.steps_taken, "ledger": ledger}


def warn_of_earlier(engine: PrivacyEngine, how_to_count: Callable[[Any], str | None]) -> None:
    """Logs a warning where another engine took steps with the engine's model, or with one that it is a copy of.

    Not where the new engine counts them.

    Args:
        engine: a new one.
        how_to_count: what makes it count the steps of an earlier one, in words; None where it does.
    """
    last = vars(engine.model).get(MARK)
    earlier = last.engine() if isinstance(last, _Trained) else last
    vars(engine.model)[MARK] = _Trained(engine)
    if earlier is None or not earlier.steps_taken:
        return
    if (remedy := how_to_count(earlier)) is not None:
        log.warning(
            "another engine took %d step%s with this model before; epsilon() of the new one doesn't count them. %s so "
            "that they add up, or train a new model",
            earlier.steps_taken, "s" if earlier.steps_taken != 1 else "", remedy,
        )  # fmt: skip


def forget_earlier(model: nn.Module, counted: PrivacyEngine | None) -> None:
    """Before a new engine of this model takes over what ``counted`` spent: no warning, if that was the last."""
    last = vars(model).get(MARK)
    if isinstance(last, _Trained) and last.engine() is counted:
        del vars(model)[MARK]


def how_to_count(engine: PrivacyEngine, earlier: Any) -> str | None:
    """What makes an engine count the steps of an earlier one; None where it does, by their common ledger.

    ``earlier`` is a `PrivacyEngine`, or has its ``steps_taken`` and ``ledger``.
    """
    if engine.ledger is not None and earlier.ledger is not None and engine.ledger.path == earlier.ledger.path:
        return None
    return 'Give both the same ledger="..."'
