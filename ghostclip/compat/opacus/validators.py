"""Opacus's ModuleValidator over `ghostclip.check`."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ghostclip.errors import UnsupportedModelError
from ghostclip.nn import GroupNorm
from ghostclip.wrap import check_module, obstacles

__all__ = ["ModuleValidator"]


class ModuleValidator:
    """Checks whether a model can be trained privately, and replaces layers that can't."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModelError]:
        """Lists the obstacles to private training.

        Args:
            module: any model; eval mode is an obstacle too.
            strict: raise the obstacles in place of returning them.

        Returns:
            One error per obstacle; [] if there is none.

        Raises:
            UnsupportedModelError: ``strict`` is set and there is an obstacle; all are listed.
        """
        errors = [UnsupportedModelError(str(finding)) for finding in obstacles(module)]
        if not module.training:
            errors.append(UnsupportedModelError("the model is in eval mode; call model.train()"))
        if strict and errors:
            raise UnsupportedModelError("\n".join(["the model can't be clipped exactly as it is:", *map(str, errors)]))
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether `validate` finds no obstacle."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        """A copy of the model with GroupNorm in place of BatchNorm, and InstanceNorm without running statistics.

        The GroupNorm layers have new parameters, so build the optimizer afterwards. Recurrent layers and attention need
        no replacement.

        Args:
            module: any model; it stays as it is.
            options: ``num_groups``, the groups of each GroupNorm; by default the greatest common divisor of 32 and the
                number of channels.

        Returns:
            The copy.

        Raises:
            TypeError: an option has another name, or ``module`` is no module.
            ValueError: ``num_groups`` doesn't divide the number of channels.
        """
        groups = options.pop("num_groups", None)
        if options:
            raise TypeError(f"fix() takes num_groups as its only option; got {', '.join(options)}")
        check_module(module)
        module = copy.deepcopy(module)
        if isinstance(module, _BatchNorm):
            return _group_norm(module, groups)
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, _BatchNorm):
                    setattr(parent, name, _group_norm(child, groups))
                elif isinstance(child, _InstanceNorm):
                    child.track_running_stats = False
                    child.running_mean = child.running_var = child.num_batches_tracked = None
        return module

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """Calls `fix`, then `validate` with ``strict`` on the copy, which it returns.

        Raises:
            UnsupportedModelError: an obstacle remains.
            TypeError, ValueError: as `fix`.
        """
        fixed = cls.fix(module, **options)
        cls.validate(fixed, strict=True)
        return fixed


def _group_norm(norm: _BatchNorm, groups: int | None) -> nn.Module:
    like = next(norm.parameters(), None)
    place: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
    groups = math.gcd(32, norm.num_features) if groups is None else groups
    return GroupNorm(groups, norm.num_features, affine=norm.affine, **place)
