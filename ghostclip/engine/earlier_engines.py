"""Which other engines train a model or did before, for warnings."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from ghostclip.accounting import note_charges

if TYPE_CHECKING:
    from ghostclip.engine.privacy_engine import PrivacyEngine

__all__ = ["forget_earlier", "how_to_count", "next_step_of", "warn_of_earlier"]

log = logging.getLogger("ghostclip")

# An attribute of each model with its engines; for warnings only, as when a notebook's cell is run twice.
MARK = "ghostclip_trained"


class _Trained:
    """Knows a model's engines, the last one last, without keeping them alive.

    A copy of the model, or a stored one, has a record of plain figures instead.

    Attributes:
        charges: of the engines that led to the weights, the last one first.
        left: how the last one left the parameters, see `UpdateCheck`.
    """

    engines: list[weakref.ref[PrivacyEngine]]

    def __init__(self, engine: PrivacyEngine, last: Any) -> None:
        before = last.engines if isinstance(last, _Trained) else []
        self.engines = [*(each for each in before if each() is not None), weakref.ref(engine)]
        updates = engine._steps.updates
        went_on = isinstance(last, _Trained) and updates.has_any_as(last.left)
        self.charges: list[Any] = [engine._spending._runs, *(last.charges if went_on else ())]
        self.left: list[tuple[int, int]] = updates.left
        self.warned = False

    def remedy(self, engine: PrivacyEngine) -> str | None:
        """What makes the engine count the further steps of another one; None where it does, or there is none."""
        others = (other for each in self.engines if (other := each()) is not None and other is not engine)
        remedies = (engine._how_to_count(other) for other in others if other._loader is not None)
        return next((remedy for remedy in remedies if remedy is not None), None)

    def __reduce__(self) -> tuple[type, tuple[()], dict[str, Any]]:
        if (engine := self.engines[-1]()) is None:
            return SimpleNamespace, (), {"steps_taken": 0, "ledger": None}
        ledger = None if engine.ledger is None else SimpleNamespace(path=engine.ledger.path)
        return SimpleNamespace, (), {"steps_taken": engine.steps_taken, "ledger": ledger}


def warn_of_earlier(engine: PrivacyEngine) -> None:
    """Logs a warning where another engine took steps with a new one's model, or with one that it is a copy of.

    Not where the new engine counts them. A search in whose ``train`` the engine was built gets to know of it.
    """
    last = vars(engine.model).get(MARK)
    earlier = last.engines[-1]() if isinstance(last, _Trained) else last
    vars(engine.model)[MARK] = mark = _Trained(engine, last)
    note_charges(mark.charges[0], built=True, after=mark.charges[1:])
    if earlier is None or not earlier.steps_taken:
        return
    if (remedy := engine._how_to_count(earlier)) is not None:
        mark.warned = True
        log.warning(
            "another engine took %d step%s with this model before; epsilon() of the new one doesn't count them. %s so "
            "that they add up (docs/training.md says how where the first has none), or train a new model",
            earlier.steps_taken, "s" if earlier.steps_taken != 1 else "", remedy,
        )  # fmt: skip


def next_step_of(engine: PrivacyEngine) -> int:
    """The number of the model's next step, asked when a loop over batches begins.

    Logs a warning, once, where another engine may take steps with the model, too, and this one doesn't count them. Not
    before there is a loop: an engine is often given up only when its variable gets the next one.
    """
    mark = vars(engine.model).get(MARK)
    if isinstance(mark, _Trained) and not mark.warned and engine._ranks.leads and mark.remedy(engine) is not None:
        gc.collect()  # engines are in reference cycles, so one that was given up may still be there
        if (remedy := mark.remedy(engine)) is not None:
            mark.warned = True
            log.warning(
                "another engine may take steps with this model, too; epsilon() of neither counts those of the other. "
                "%s so that they add up, or call detach() of the engine that isn't used",
                remedy,
            )
    return engine._snapshots.model_steps


def forget_earlier(model: nn.Module, counted: PrivacyEngine | None) -> None:
    """Before a new engine of this model takes over what ``counted`` spent: no warning, if that was the last."""
    last = vars(model).get(MARK)
    if isinstance(last, _Trained) and last.engines[-1]() is counted:
        del vars(model)[MARK]


def how_to_count(engine: PrivacyEngine, earlier: Any) -> str | None:
    """What makes an engine count the steps of an earlier one; None where it does, by their common ledger.

    ``earlier`` is a `PrivacyEngine`, or has its ``steps_taken`` and ``ledger``.
    """
    if engine.ledger is not None and earlier.ledger is not None and engine.ledger.path == earlier.ledger.path:
        return None
    return 'Give both the same ledger="..."'
