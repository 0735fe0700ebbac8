"""What tests of several files start from."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where there is no ledger yet."""
    return tmp_path / "run.ledger"
