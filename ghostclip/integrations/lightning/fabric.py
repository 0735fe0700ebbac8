"""The same for a training loop of one's own with Fabric."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.fabric.wrappers import _FabricDataLoader as FabricDataLoader
from torch import nn
from torch.optim import Optimizer

from ghostclip.engine import PrivacyEngine
from ghostclip.errors import PrivacyError
from ghostclip.integrations.lightning.refusals import check_fabric

__all__ = ["setup_fabric"]


def setup_fabric(
    fabric: lightning.Fabric, model: nn.Module, optimizer: Optimizer, data: Any, **options: Any
) -> tuple[Any, Any, PrivacyEngine]:
    """Calls ``fabric.setup`` and builds a `PrivacyEngine` over its results.

    Physical batches stay on the loader's device: call ``fabric.to_device`` on each.

    Args:
        fabric: launched, on one device or with the strategy "ddp".
        model, optimizer: as for ``fabric.setup``.
        data: a map-style dataset or a DataLoader, which was not passed to ``fabric.setup_dataloaders``.
        options: keyword arguments of `PrivacyEngine`.

    Returns:
        (model, optimizer, engine), the first two as ``fabric.setup`` returns them.

    Raises:
        PrivacyError: the strategy, the precision or ``data`` can't be private, or `PrivacyEngine` raises it.
        TypeError: an option isn't one of `PrivacyEngine`.
        UnsupportedModelError, ValueError: as `PrivacyEngine`.
    """
    check_fabric(fabric, options)
    if isinstance(data, FabricDataLoader):
        raise PrivacyError(
            "data came from fabric.setup_dataloaders, which chooses examples itself; give the DataLoader that it was "
            "called with, and call fabric.to_device on each physical batch"
        )
    model, optimizer = fabric.setup(model, optimizer)
    # Fabric refuses a backward that isn't its own where that may scale losses; the precisions that do are refused here.
    vars(model)["_register_backward_hook"] = lambda tensor: tensor
    engine = PrivacyEngine(model, optimizer, data, **options)
    return model, optimizer, engine
