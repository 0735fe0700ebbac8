"""The same for a training loop of one's own with Fabric."""

from __future__ import annotations

from typing import Any

import lightning
from torch import nn
from torch.optim import Optimizer

from ghostclip.engine import PrivacyEngine
from ghostclip.integrations.lightning.refusals import check_fabric

__all__ = ["setup_fabric"]


def setup_fabric(
    fabric: lightning.Fabric, model: nn.Module, optimizer: Optimizer, data: Any, **options: Any
) -> tuple[Any, Any, PrivacyEngine]:
    """``fabric.setup`` of model and optimizer, and an engine over them.

    Args:
        fabric: launched, on one device or with the strategy "ddp".
        model, optimizer: before ``fabric.setup``.
        data: a map-style data set or a DataLoader, before ``fabric.setup_dataloaders``.
        options: of `PrivacyEngine`, by name.

    Returns:
        The model and the optimizer, as ``fabric.setup`` returns them, and the engine. Its physical batches are where
        the loader puts them: call ``fabric.to_device`` on each.

    Raises:
        PrivacyError: the strategy or the precision can't be kept; and all that `PrivacyEngine` raises.
        TypeError: an option that `PrivacyEngine` doesn't have.
    """
    check_fabric(fabric, options)
    model, optimizer = fabric.setup(model, optimizer)
    # Fabric refuses a backward that isn't its own where that may scale losses; the precisions that do are refused here.
    vars(model)["_register_backward_hook"] = lambda tensor: tensor
    engine = PrivacyEngine(model, optimizer, data, **options)
    return model, optimizer, engine
