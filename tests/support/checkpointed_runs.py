"""Runs that are saved and restored: engines, steps, and all numbers that training has made."""

from collections.abc import Callable
from typing import Any

import private_runs as runs
import torch
from torch import Tensor, nn

from ghostclip import checkpoint
from ghostclip.engine import PrivacyEngine


def groups(model: nn.Sequential, **changes: Any) -> torch.optim.Optimizer:
    """Two groups with settings of many kinds."""
    first, second = model[0].parameters(), model[2].parameters()
    return torch.optim.AdamW(
        [{"params": [*first], "betas": (0.5, 0.9), "weight_decay": 0.0}, {"params": [*second], **changes}],
        lr=0.01, amsgrad=True, foreach=False,
    )  # fmt: skip


class Wide(torch.optim.Optimizer):
    """Sums up gradients in float64 and counts in an int64 tensor, whatever type the parameters have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            total = state.get("total", torch.zeros_like(parameter, dtype=torch.float64))
            state["total"], state["seen"] = total + parameter.grad, state.get("seen", torch.tensor(0)) + 1
            state["nested"] = {"half": [total.to(torch.float16)], "none": None}
            parameter.sub_(state["total"].to(parameter.dtype), alpha=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "groups": groups,
    "wide": lambda model: Wide(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


def engine_of(optimizer: str = "momentum", dtype: torch.dtype = torch.float32, **changes: Any) -> PrivacyEngine:
    """An engine with repeatable noise over a network with dropout."""
    model = runs.network(dtype)
    model.insert(2, nn.Dropout(0.2)) if optimizer != "groups" else None
    torch.manual_seed(3)
    options = {"noise": "test", "seed": 5, "noise_multiplier": 1.0, "clipping": 1.0, "max_physical_batch_size": 3}
    return runs.engine_for(model, OPTIMIZERS[optimizer](model), runs.data(dtype=dtype), **{**options, **changes})


def private(**changes: Any) -> PrivacyEngine:
    return engine_of(noise="standard", seed=None, **changes)


def go(engine: PrivacyEngine, steps: int, after: Callable[[], Any] = lambda: None) -> PrivacyEngine:
    runs.train(engine, steps, after=after)
    return engine


def state_of(engine: PrivacyEngine) -> list[Any]:
    numbers: dict[str, Tensor] = {}
    rest = checkpoint.packed([engine.model.state_dict(), engine.optimizer.state_dict()], numbers, "state.x")
    return [rest, {name: (tensor.dtype, tensor.tolist()) for name, tensor in numbers.items()}]
