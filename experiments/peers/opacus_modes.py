"""Opacus's three modes as contenders: hooks, ghost clipping, functorch. Its clipping; noise and Adam as for the others.

Layers that Opacus replaces by its own (LSTM, attention, and RNN) are replaced by its own functions, and the gradients
of its copies are put back into the shape of torch's for the gate.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.bench.contenders import Batch, Contender, Prepare, Prepared, by_filling_gradients
from ghostclip.bench.losses import Losses

__all__ = ["OPACUS"]


def _absent() -> str | None:
    found = importlib.util.find_spec("opacus")
    return None if found else 'opacus is not installed; run in a checkout: pip install ".[bench]"'


class _PerExample:
    """What Opacus's loss wrapper asks of a criterion: a call, and a ``reduction`` it may set."""

    def __init__(self, losses: Losses) -> None:
        self.losses, self.reduction = losses, "sum"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.losses(outputs, targets)


def _own_layers(model: nn.Module) -> nn.Module:
    """The model with the layers that Opacus can't hook replaced by its own, weights copied."""
    from opacus.layers import DPRNN
    from opacus.validators import ModuleValidator

    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model = ModuleValidator.fix(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.RNN:
            own = DPRNN(module.input_size, module.hidden_size, module.num_layers, batch_first=module.batch_first)
            own.load_state_dict(module.state_dict())
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, own)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model.train()


def _as_torch_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Three separate projections of its attention as torch's joint one."""
    linear_pair = dict(found)
    for name in found:
        place, mark, kind = name.rpartition("qlinear.")
        if mark:
            parts = [linear_pair.pop(f"{place}{letter}linear.{kind}") for letter in "qkv"]
            linear_pair[f"{place}in_proj_{kind}"] = torch.cat(parts)
    return linear_pair


def _by_opacus(attach: Callable[[nn.Module, Losses, float], tuple[nn.Module, Batch]]) -> Prepare:
    """A ``prepare`` from a function that hooks a model up and gives what fills ``p.grad``."""

    def prepare(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _own_layers(model)

            def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
                return _quiet(attach(model, losses, max_norm)[1])

            ready = by_filling_gradients(fill)(model, losses, max_norm)
        clipped_sum = ready.clipped_sum
        assert clipped_sum is not None
        return Prepared(ready.step, lambda inputs, targets: _as_torch_names(clipped_sum(inputs, targets)))

    return prepare


def _quiet(fill: Batch) -> Batch:
    """Without torch's warning about backward hooks on modules whose input needs no gradient."""

    def filled(inputs: Tensor, targets: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fill(inputs, targets)

    return filled


def _materialised(functorch: bool) -> Callable[[nn.Module, Losses, float], tuple[nn.Module, Batch]]:
    """Per-example gradients by hooks, clipped and summed by its optimizer."""

    def attach(model: nn.Module, losses: Losses, max_norm: float) -> tuple[nn.Module, Batch]:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        hooked = GradSampleModule(model, loss_reduction="sum", strict=False, force_functorch=functorch)
        optimizer = DPOptimizer(_unstepped(model), noise_multiplier=0.0, max_grad_norm=max_norm,
                                expected_batch_size=None, loss_reduction="sum")  # fmt: skip

        def fill(inputs: Tensor, targets: Tensor) -> None:
            losses(hooked(inputs), targets).sum().backward()
            optimizer.clip_and_accumulate()
            for parameter in optimizer.params:
                parameter.grad, parameter.summed_grad, parameter.grad_sample = parameter.summed_grad, None, None

        return hooked, fill

    return attach


def _ghost(model: nn.Module, losses: Losses, max_norm: float) -> tuple[nn.Module, Batch]:
    """Ghost clipping: norms by a first backward, the clipped sum by a second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    hooked = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", strict=False, max_grad_norm=max_norm, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        _unstepped(model), noise_multiplier=0.0, max_grad_norm=max_norm, expected_batch_size=None, loss_reduction="sum"
    )
    criterion: Any = DPLossFastGradientClipping(hooked, optimizer, _PerExample(losses), loss_reduction="sum")

    def fill(inputs: Tensor, targets: Tensor) -> None:
        criterion(hooked(inputs), targets).backward()

    return hooked, fill


def _unstepped(model: nn.Module) -> torch.optim.SGD:
    """An optimizer for Opacus to wrap; it never steps."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


OPACUS = (
    Contender("opacus-hooks", "Opacus, per-example gradients by hooks", _by_opacus(_materialised(False)), _absent),
    Contender("opacus-ghost", "Opacus, ghost clipping", _by_opacus(_ghost), _absent),
    Contender("opacus-functorch", "Opacus, per-example gradients by functorch", _by_opacus(_materialised(True)),
              _absent),
)  # fmt: skip
