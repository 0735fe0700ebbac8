"""Exact per-example gradient clipping for differentially private training."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .started import is_a_command

if TYPE_CHECKING:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals().get("__all__", ()), "__version__"])


def _load() -> None:
    """Imports torch and makes the public names attributes of this package."""
    public = importlib.import_module(f"{__name__}.public")
    # By value: `wrap` is also a module, which its import makes an attribute of this package.
    globals().update({name: getattr(public, name) for name in public.__all__}, __all__=public.__all__)


if not is_a_command():
    _load()
elif not TYPE_CHECKING:  # ``ghostclip --help`` answers without torch

    def __getattr__(name: str) -> Any:
        """The public names, loaded when the first is asked for."""
        if name.startswith("__") or f"{__name__}.public" in sys.modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _load()
        return getattr(sys.modules[__name__], name)
