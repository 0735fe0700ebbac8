"""torchvision where it doesn't fit torch: its models are Python and run, only its compiled operators don't."""

from __future__ import annotations

import importlib.util
import sys

import torch

__all__ = ["make_torchvision_importable"]

# A library is taken back with its object.
_declared: list[torch.library.Library] = []


def make_torchvision_importable() -> None:
    """Declares the compiled operators that ``import torchvision`` asks for, where they can't be loaded.

    transformers and timm import torchvision wherever it is installed. None of the models here calls its operators.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        _declared.append(library)
