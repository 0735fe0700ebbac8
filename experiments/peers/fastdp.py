"""fastDP's book-keeping (Bu et al. 2023) as a contender; it is not on the package index, so no extra installs it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings

from torch import Tensor, nn

from ghostclip.bench.contenders import Batch, CannotRun, Contender, Prepared, by_filling_gradients
from ghostclip.bench.losses import Losses

__all__ = ["FASTDP"]


def _absent() -> str | None:
    found = importlib.util.find_spec("fastDP")
    return None if found else "fastDP is not installed; it comes from its repository, awslabs/fast-differential-privacy"


def _fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
    """Its MixOpt mode; autograd goes to the first layers only, which is its own advice ("origin parameters")."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    batch_size = 1  # it only divides by this, which loss_reduction="sum" leaves out

    # It announces its settings on stdout.
    with contextlib.redirect_stdout(io.StringIO()):
        from fastDP import PrivacyEngine

        PrivacyEngine(model, batch_size=batch_size, sample_size=batch_size, epochs=1, noise_multiplier=0.0,
                      max_grad_norm=max_norm, clipping_mode="MixOpt", clipping_fn="Abadi", clipping_style="all-layer",
                      loss_reduction="sum", origin_params=_origins(model, trained))  # fmt: skip

    def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses hooks that torch advises against
            losses(model(inputs), targets).sum().backward()
        for name, parameter in trained.items():
            if not hasattr(parameter, "private_grad"):
                raise CannotRun(f"fastDP leaves {name} without a gradient: its layer is not supported")
            parameter.grad = parameter.private_grad
            del parameter.private_grad

    return add_clipped_sum


def _origins(model: nn.Module, trained: dict[str, nn.Parameter]) -> list[str]:
    """The first trained layer's bias, or its weight where it has none, and every embedding, where graphs begin too."""
    layer = next(iter(trained)).rpartition(".")[0]
    first = f"{layer}.bias" if f"{layer}.bias" in trained else next(iter(trained))
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return [first, *(name for name in trained if name in tables and name != first)]


def _prepare(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        raise CannotRun("fastDP has no recurrent layers")
    return by_filling_gradients(_fill)(model, losses, max_norm)


FASTDP = (Contender("fastdp", "fastDP, book-keeping (MixOpt)", _prepare, _absent),)
