"""What of an engine can't be changed, copied or pickled once it is built, since noise and charges follow from it."""

from __future__ import annotations

from typing import Any, ClassVar

from ghostclip.errors import PrivacyError

__all__ = ["FixedOnceBuilt"]


class FixedOnceBuilt:
    """An engine's attributes of these ``fixed_names`` are set once."""

    fixed_names: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed_names and name in vars(self):
            raise AttributeError(
                f"{name} of a PrivacyEngine can't be changed: noise and charges are made for what it was built with; "
                "call detach() and build a new engine, with the same ledger=... so that both count"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PrivacyError: torch's optimizers lose their hooks in a copy."""
        raise PrivacyError(
            "a PrivacyEngine can't be copied or pickled: its optimizer's copy would train without noise; build a new "
            "engine over copies, with the same ledger=... so that both count, or use save() and restore()"
        )
