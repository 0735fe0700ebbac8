"""Steps by an engine with noise, and the reports it must refuse once parameters moved otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
from torch import nn

from ghostclip import PrivacyError
from ghostclip.engine import PrivacyEngine

MOVED = r"the parameter '.*' was changed outside of this engine's charged steps.*accept_parameters"


def private(model: nn.Module | None = None, optimizer: Any = None, **changes: Any) -> PrivacyEngine:
    options = {"noise_multiplier": 1.0, "clipping": 1.0, "max_physical_batch_size": 4, **changes}
    return runs.engine_for(runs.network() if model is None else model, optimizer, **options)


def steps(engine: PrivacyEngine, count: int = 1) -> PrivacyEngine:
    for _ in range(count):
        engine.step(next(iter(engine.batches())), runs.losses_of)
    return engine


def assert_all_refuse(engine: PrivacyEngine, message: str, folder: Path) -> None:
    """The next batch, twice, and what is said of the privacy that was spent."""
    charged = engine.steps_taken
    calls: list[Callable[[], Any]] = [
        lambda: next(iter(engine.batches())), lambda: next(iter(engine.batches())),
        engine.epsilon, engine.guarantee, lambda: engine.save(folder / "x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PrivacyError, match=message):
            call()
    assert engine.steps_taken == charged
    assert not (folder / "x").exists()
